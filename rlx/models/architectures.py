"""What one architecture differs in: the row of a family file.

Part of the models stage, read by `reader.py`. Sources of the rows: llama.cpp for defaults that GGUF files omit; the
configuration classes of transformers for defaults that published `config.json` files omit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlx.models.keys import Keys
from rlx.models.names import Table

if TYPE_CHECKING:
    from rlx.ir.dtypes import DType
    from rlx.ir.graph import Graph
    from rlx.models.builder import Weights
    from rlx.models.config import ModelConfig
    from rlx.models.settings import Key

    Build = Callable[[ModelConfig, Weights, DType], Graph]

Sliding = Callable[[Keys, int], list[bool]]
RopeLayers = Callable[[Keys, Sequence[int | None]], list[bool]]


QKV, FFN = ("attn_q", "attn_k", "attn_v"), ("ffn_gate", "ffn_up", "ffn_down")
QKVO = (*QKV, "attn_output")


def none_slides(keys: Keys, layers: int) -> list[bool]:
    """No layer has a window."""
    return [False] * layers


def all_slide(keys: Keys, layers: int) -> list[bool]:
    """Mistral: every layer has a window if the file has the key, and does not turn it off."""
    return [keys.flag("use_sliding_window", True) and "sliding_window" in keys] * layers


def every_nth_is_full(n: int) -> Sliding:
    """Gemma: every `n`-th layer has no window, unless the file has another period."""

    def slides(keys: Keys, layers: int) -> list[bool]:
        key = "sliding_window_pattern" if "sliding_window_pattern" in keys else "_sliding_window_pattern"
        return by_period(keys.integer(key, (1, 1 << 31), n), layers)

    return slides


def by_period(period: int, layers: int) -> list[bool]:
    """False for every `period`-th layer, True for the others."""
    return [(layer + 1) % period != 0 for layer in range(layers)]


def none_has_rope(keys: Keys, windows: Sequence[int | None]) -> list[bool]:
    """No layer has rope."""
    return [False] * len(windows)


def all_have_rope(keys: Keys, windows: Sequence[int | None]) -> list[bool]:
    """Every layer has rope."""
    return [True] * len(windows)


@dataclass(frozen=True)
class Architecture:
    """How one architecture differs from the others.

    Attributes:
        build: its equations.
        names: its tensors in both kinds of file.
        model_types: `model_type` in `config.json`, of the text part and of models that contain it.
        hf_variants: further model types, each with the fields of this row that differ.
        runner: the runner family, whose profiles fit.
        wrappers: those of `model_types` whose text part may also be of another architecture, each with the text part's
            model type where the file does not say it.
        keys: settings that no other architecture has; the equations read them by `ModelConfig.own`.
        hf_keys: common settings (`settings.SETTINGS`) -> keys of `config.json` that replace the usual ones.
        gguf_rope, hf_rope: rope style of its GGUF files and of its safetensors.
        rope_layers: which layers have rope, from the keys and the windows.
        gguf_period: in GGUF every n-th layer has no window; None: no layer has one.
        gguf_window: default window of its GGUF files, 0 for none.
        gguf_caps: (attention, logits): default softcaps of its GGUF files, 0 for none. Without one on attention
            it never has any.
        gguf_local_heads: GGUF has separate keys for the head sizes of sliding layers.
        shares_kv: the last layers may read keys and values of earlier ones.
        partial_rope: default for the rotated part of a head if `config.json` does not have it; None: always all of it.
        rope_sections: the usual sections of positions with three components (M-RoPE); (): positions have one.
        two_way: as in `ModelConfig`, for its models that see images.
        attention_scale: factor of q k^T; None: 1/sqrt(head size), or the file's value.
        hf_sliding: which layers slide if `config.json` has no `layer_types`.
        hf_layer_types: whether that key counts; transformers does not read it for some model types.
        hf_ends_full: its last layer never slides, even if `config.json` lists it as sliding.
        local_base: default base of the separate rope of sliding layers; None if they share the model's.
        hf_base: default of `rope_theta`.
        hf_activation_names: names of activations that its files use differently from others.
        activation: the activation for GGUF, which has no key for it.
        norm: "rms", or "layer" for norms that also subtract the mean and may have a bias.
        norm_offset: number to add to the norm weights of its safetensors.
        plain_norms: norms without that offset.
        experts: "none", "may", or "must": whether its layers have experts.
        router: what makes scores of the router's logits: "softmax", "sigmoid", or "either": the file says which, and
            sigmoids have a bias.
        in_turns: as in `Experts`.
        shared_expert: an additional expert for every token: "none", "may", or "gated": there is one, which the sigmoid
            of a projection weighs.
        hybrid: what replaces attention in most of its layers: "delta rule", "mamba", "convolution", or "" for none.
        gguf_heads: how value heads of its GGUF files share key heads, see `Recurrence`.
        single_blocks: a layer is a recurrence, attention or a feed-forward block, not two of them.
        hf_only: key of `config.json` -> the only value that is supported, and why no other.
        hf_spelling: usual keys of `config.json`, computed from its own.
        latent: its heads share keys and values, see `Latent`.
        predicts: its files may have blocks for multi-token prediction behind the layers.
        streams: it has several copies of the residual stream.
        fused_ffn: gate and up of the dense block are one tensor, which GGUF calls `ffn_up`.
        gated_ffn: feed-forward blocks have a gate.
        bf16: its linears tolerate activations rounded to bf16. Measured as the cosine with the exact logits of its
            golden checkpoints: at least 0.9998. The other architectures fall to 0.985 to 0.999.
        scales_embedding: embeddings are multiplied by sqrt(hidden).
        biases: linear layers that must have a bias; others may.
        hf_biases: switches of `config.json` -> linear layers that must have a bias if they are on.
        wide_scale_layers: layer count of the one model whose attention scale is 1/sqrt(hidden/heads), which GGUF does
            not store.
        hf_defaults: values of keys that published files omit; a null does not count as omitted.
        gguf_defaults: values of keys that its GGUF files omit, behind the architecture's name.
    """

    build: Build
    names: Table
    model_types: tuple[str, ...]
    hf_variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    runner: str = "llama32"
    wrappers: Mapping[str, str] = field(default_factory=dict)
    keys: Mapping[str, Key] = field(default_factory=dict)
    hf_keys: Mapping[str, str] = field(default_factory=dict)
    gguf_rope: str = "neox"
    hf_rope: str = "neox"
    rope_layers: RopeLayers = all_have_rope
    gguf_period: int | None = None
    gguf_window: int = 0
    gguf_caps: tuple[float, float] = (0.0, 0.0)
    gguf_local_heads: bool = False
    shares_kv: bool = False
    partial_rope: float | None = None
    rope_sections: tuple[int, ...] = ()
    two_way: str = "none"
    attention_scale: float | None = None
    hf_sliding: Sliding = none_slides
    hf_layer_types: bool = True
    hf_ends_full: bool = False
    local_base: float | None = None
    hf_base: float = 10_000.0
    hf_activation_names: Mapping[str, str] = field(default_factory=dict)
    activation: str = "silu"
    norm: str = "rms"
    norm_offset: float = 0.0
    plain_norms: tuple[str, ...] = ()
    experts: str = "none"
    router: str = "softmax"
    in_turns: bool = False
    shared_expert: str = "none"
    hybrid: str = ""
    gguf_heads: str = "grouped"
    single_blocks: bool = False
    hf_only: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    hf_spelling: Callable[[Keys], Mapping[str, Any]] | None = None
    latent: bool = False
    predicts: bool = False
    streams: bool = False
    fused_ffn: bool = False
    gated_ffn: bool = True
    bf16: bool = False
    scales_embedding: bool = False
    biases: tuple[str, ...] = ()
    hf_biases: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: {"attention_bias": QKVO, "mlp_bias": FFN})
    wide_scale_layers: int | None = None
    hf_defaults: Mapping[str, Any] = field(default_factory=dict)
    gguf_defaults: Mapping[str, Any] = field(default_factory=dict)
