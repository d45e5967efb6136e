"""A model's configuration: sizes and switches of the whole and of each layer, independent of the file format.

Part of the models stage: `reader.py` reads it from an open file, the builders use it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

import numpy as np
import numpy.typing as npt

from rlx.errors import ConfigError
from rlx.models.rope import Rope


@dataclass(frozen=True)
class Layer:
    """Settings of one layer.

    Attributes:
        kv_heads, head_dim: sizes of attention; without attention there are no kv_heads.
        ffn: width of the dense feed-forward block, 0 if there is none.
        window: number of positions that a query sees, itself included; None for all.
        has_rope: whether its queries and keys have rope.
        recurrent: whether a recurrence or a short convolution replaces attention.
        sparse: whether experts replace the dense feed-forward block, or stand beside it.
        source: the layer whose keys and values it reads: its own number, unless it shares those of an earlier layer.
        keys_as_values: whether the projection of the keys also gives the values.
        sparsity: the gate keeps only values this many standard deviations above its mean; None keeps everything.
    """

    kv_heads: int
    head_dim: int
    ffn: int
    source: int
    window: int | None = None
    has_rope: bool = True
    recurrent: bool = False
    sparse: bool = False
    keys_as_values: bool = False
    sparsity: float | None = None


@dataclass(frozen=True)
class Experts:
    """A mixture of experts.

    Attributes:
        count, used: experts per layer, and how many of them a token uses.
        ffn: width of one expert.
        shared: width of the shared expert, which every token uses; 0 for none.
        shared_gate: whether the sigmoid of a projection weighs it.
        normalize: whether the weights of the chosen experts are scaled to sum to 1.
        scale: factor of those weights.
        router: what makes scores of the router's logits: "softmax" or "sigmoid".
        in_turns: in a tensor with gate and up of all experts, their rows take turns.
        groups, kept: experts form groups, of which a token searches the best ones.
    """

    count: int
    used: int
    ffn: int
    shared: int = 0
    shared_gate: bool = False
    normalize: bool = True
    scale: float = 1.0
    router: str = "softmax"
    in_turns: bool = False
    groups: int = 1
    kept: int = 1


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (arXiv 2405.04434): all heads share one short vector for a position.

    Attributes:
        keys: width of that vector, from which keys and values of all heads are made.
        rope: elements of a head with rope; their key is shared by all heads.
        plain: elements of a head's query without.
        values: width of a head's values.
        queries: width of the vector that queries are made from; 0 if they are made from the hidden state.
    """

    keys: int
    rope: int
    plain: int
    values: int
    queries: int

    @property
    def width(self) -> int:
        """Elements that a cache holds of a position."""
        return self.rope + self.keys


@dataclass(frozen=True)
class Recurrence:
    """The recurrent layers of a hybrid model: a gated delta rule, or Mamba-2.

    Attributes:
        key_heads, value_heads, key_dim, value_dim: heads and their sizes; in Mamba-2 these are groups, heads, the size
            of the state, and the size of a head.
        taps: taps of the causal convolution before the recurrence.
        heads: how value heads share key heads, "tiled" or "grouped": see the op `gated_delta`.
        log_decay: whether the file stores the logarithm of the (positive) decay rate.
        corrects: whether it is the delta rule, see the op `gated_delta`.
        steps: the shortest and the longest time step of Mamba-2.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    heads: str
    log_decay: bool
    corrects: bool = True
    steps: tuple[float, float] = (0.0, inf)

    @property
    def keys(self) -> int:
        """Width of all keys of a token."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Width of all values of a token."""
        return self.value_heads * self.value_dim


@dataclass(frozen=True)
class ModelConfig:
    """The configuration of one model.

    Attributes:
        arch: a key of `registry.ARCHITECTURES`.
        family: the runner family: "llama32", "qwen3", "qwen35" or "gemma".
        vocab_size, hidden, heads: sizes.
        each: the layers.
        context: tokens the model was trained for.
        eps: of every norm.
        activation: of the feed-forward blocks, a key of `blocks.ACTIVATIONS`.
        rope_style: "interleaved" or "neox".
        rope: of the layers without window, and of all where `local_rope` is None.
        local_rope: of the layers with a window, or None.
        attention_scale: factor of q k^T.
        attention_softcap, logit_softcap: c in c * tanh(x / c) on scores and on logits, or None.
        tied: the head is the embedding table.
        embedding_scale: factor of the embeddings.
        norm: as in `Architecture`.
        norm_offset: what must be added to the norm weights of the file.
        plain_norms: names of norms to whose weights nothing is added.
        biases: linear layers that must have a bias; others use one if the file has it.
        experts: of the sparse layers, or None.
        recurrence: of the recurrent layers, or None.
        latent: of attention whose heads share what is in the cache, or None.
        per_layer: width of the per-layer embeddings, 0 for none.
        streams: copies of the residual stream.
        bf16: linears may take activations rounded to bf16 where precision is "auto".
        stream_scale: what the others learn from the first is scaled element by element.
        two_way: in which layers the rows of an image see each other, also later ones: "none", "all", or "sliding",
            those with a window, which still applies.
        fused_ffn: gate and up of the dense block are one tensor.
        gated_ffn: the feed-forward blocks have a gate.
        own: settings that only this architecture has, by the names in its row.
    """

    arch: str
    family: str
    vocab_size: int
    hidden: int
    heads: int
    each: tuple[Layer, ...]
    context: int
    eps: float
    activation: str
    rope_style: str
    rope: Rope
    local_rope: Rope | None
    attention_scale: float
    attention_softcap: float | None
    logit_softcap: float | None
    tied: bool
    embedding_scale: float
    norm_offset: float
    biases: tuple[str, ...]
    norm: str = "rms"
    plain_norms: tuple[str, ...] = ()
    experts: Experts | None = None
    recurrence: Recurrence | None = None
    latent: Latent | None = None
    per_layer: int = 0
    streams: int = 1
    bf16: bool = False
    stream_scale: bool = True
    two_way: str = "none"
    fused_ffn: bool = False
    gated_ffn: bool = True
    own: Mapping[str, float] = field(default_factory=dict, hash=False)

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.each)

    @property
    def deepstack(self) -> int:
        """How many of the first layers add further features of an image to its rows (arXiv 2406.04334)."""
        return int(self.own.get("deepstack", 0))

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Window of each layer in positions; None for all positions."""
        return tuple(layer.window for layer in self.each)

    @property
    def predictor(self) -> ModelConfig:
        """The model with one more layer: the MTP block of hybrid models, which is like their attention layers."""
        like = next((layer for layer in reversed(self.each) if not layer.recurrent), self.each[-1])
        return replace(self, each=(*self.each, replace(like, source=self.layers)))

    def at_length(self, positions: int) -> ModelConfig:
        """The model for sequences of up to `positions`: some have other frequencies for long ones."""
        return replace(self, rope=self.rope.at_length(positions), context=max(self.context, positions))

    def value(self, name: str, stored: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Converts stored values to those that the graph uses, by canonical name.

        They are equal except for some norms and decay rates, and the factor by which a head of Mamba-2 adds its input,
        which is repeated for each element.
        """
        if name.endswith("norm.weight") and name.split(".")[-2] not in self.plain_norms:
            return stored + np.float32(self.norm_offset)
        if name.endswith(".ssm_a") and self.recurrence is not None and self.recurrence.log_decay:
            return -np.exp(stored)
        if name.endswith(".ssm_d") and self.recurrence is not None:
            return np.repeat(stored, self.recurrence.value_dim)
        return stored

    def rope_of(self, layer: int) -> Rope:
        """The rope of one layer."""
        return self.rope if self.each[layer].window is None or self.local_rope is None else self.local_rope


def sources(windows: Sequence[int | None], shared: int, where: object) -> list[int]:
    """For each layer the one whose keys and values it reads.

    The last `shared` layers read those of the last earlier layer of their kind, with or without a window.

    Raises:
        ConfigError: there is no such layer.
    """
    first = len(windows) - shared
    found = list(range(len(windows)))
    for layer in range(first, len(windows)):
        alike = [i for i in range(first) if (windows[i] is None) == (windows[layer] is None)]
        if not alike:
            what = f"layer {layer} shares the keys and values of an earlier layer of its kind, but there is none"
            raise ConfigError(what, where=where)
        found[layer] = alike[-1]
    return found
