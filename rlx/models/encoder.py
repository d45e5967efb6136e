"""Encoders: graphs of texts whose tokens see the whole text, over blocks that families share, and their configurations.

Part of the models stage; `bert.py` and `modernbert.py` are the families, rows of `ENCODER_FILES` in `registry.py`.
Rows are tokens of several texts, packed one behind the other: programs are compiled for segments (`rlx.ir.segments`),
and no state is left after a call. An encoder has up to two graphs:

- the body: inputs "tokens", "positions" and, where the model has them, "types" i32 [SEQ] -> "hidden" f32 [SEQ, hidden];
- the head: "x" f32 [SEQ, hidden], the pooled row of each text -> "y" f32 [SEQ, width]: a classifier or dense layers.

`encoding` makes the body of a decoder that serves as an encoder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rlx.errors import UnsupportedModelError, WeightError
from rlx.ir import ops
from rlx.ir.dims import SEQ
from rlx.ir.dtypes import I32
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.models.builder import GraphOfLayers, Weights
from rlx.models.config import ModelConfig
from rlx.models.gguf_config import vocab_size
from rlx.models.keys import HEADS, WIDTH, Keys
from rlx.models.names import Table
from rlx.models.registry import ENCODER_TYPES, ENCODERS
from rlx.models.rope import Rope, inv_freq
from rlx.models.views import View

ACTIVATIONS: dict[str, Callable[[Node], Node]] = {
    "gelu_erf": ops.gelu_erf,
    "gelu_tanh": ops.gelu_tanh,
    "relu": ops.relu,
    "silu": ops.silu,
    "tanh": ops.tanh,
}
HIDDEN, POOLED, RESULT = "hidden", "x", "y"
LAYERS, NORM_EPS = (1, 1024), (1e-15, 1.0)  # what files may say


@dataclass(frozen=True)
class EncoderConfig:
    """The configuration of one encoder.

    Attributes:
        arch: as `general.architecture` calls it.
        vocab_size, hidden, heads, layers, ffn: sizes.
        context: tokens of the longest text.
        eps: of every norm.
        activation: of the feed-forward blocks, a key of `ACTIVATIONS`.
        windows: for each layer how far a token sees to each side; None: the whole text.
        bases: for each layer the base of its rope; None: positions come from a table.
        types: rows of the table of token types; 0: there is none.
        first_position: of a text.
        classifier: the activation of the head's first layer, which `pooling` feeds.
        pooling: "cls", "mean" or "last": what a classifier reads.
    """

    arch: str
    vocab_size: int
    hidden: int
    heads: int
    layers: int
    ffn: int
    context: int
    eps: float
    activation: str
    windows: tuple[int | None, ...]
    bases: tuple[float | None, ...]
    types: int = 0
    first_position: int = 0
    classifier: str = "tanh"
    pooling: str = "cls"

    @property
    def head_dim(self) -> int:
        """Size of a head."""
        return self.hidden // self.heads


def hf_sizes(keys: Keys) -> dict[str, Any]:
    """Fields of `EncoderConfig` that `config.json` files have under their usual names."""
    return {
        "vocab_size": keys.integer("vocab_size", WIDTH),
        "hidden": keys.integer("hidden_size", WIDTH),
        "heads": keys.integer("num_attention_heads", HEADS),
        "layers": keys.integer("num_hidden_layers", LAYERS),
        "ffn": keys.integer("intermediate_size", WIDTH),
    }


def gguf_sizes(keys: Keys) -> dict[str, Any]:
    """Fields of `EncoderConfig` that GGUF files have; the vocabulary is counted elsewhere."""
    return {
        "hidden": keys.integer("embedding_length", WIDTH),
        "heads": keys.integer("attention.head_count", HEADS),
        "layers": keys.integer("block_count", LAYERS),
        "ffn": keys.integer("feed_forward_length", WIDTH),
        "context": keys.integer("context_length", (1, 1 << 20)),
        "eps": keys.number("attention.layer_norm_epsilon", NORM_EPS),
    }


class EncoderModel(GraphOfLayers[EncoderConfig]):
    """The graph of an encoder under construction."""

    def looked_up(self, table: str, rows: int, numbers: str) -> Node:
        """Rows of a table, by the input `numbers` i32 [SEQ]."""
        return ops.embedding(self.weight(table, rows, self.config.hidden), self.graph.input(numbers, [SEQ], I32))


def width(x: Node) -> int:
    """Size of the last axis."""
    size = x.shape[-1]
    assert isinstance(size, int)
    return size


def linear(model: EncoderModel, x: Node, name: str, size: int) -> Node:
    """x [SEQ, k] -> [SEQ, size] by the weight `name` [size, k], plus its bias if the file has one."""
    y = ops.linear(x, model.weight(f"{name}.weight", size, width(x)), bf16=True)
    return y + model.weight(f"{name}.bias", size) if model.has(f"{name}.bias") else y


def layer_norm(model: EncoderModel, x: Node, name: str) -> Node:
    """Layer norm with the weight `name` [width], and its bias if the file has one."""
    bias = model.weight(f"{name}.bias", width(x)) if model.has(f"{name}.bias") else None
    return ops.layer_norm(x, model.weight(f"{name}.weight", width(x)), bias, eps=model.config.eps)


def rope_angles(model: EncoderModel) -> dict[float | None, Node | None]:
    """Input "positions" i32 [SEQ] -> cosines and sines for each base of the model's ropes; None where there is none."""
    found: dict[float | None, Node | None] = {None: None}
    for base in dict.fromkeys(base for base in model.config.bases if base is not None):
        frequencies = inv_freq(Rope(base=base, dims=model.config.head_dim))
        constant = model.graph.constant(f"rope.{len(found)}.inv_freq", frequencies)
        found[base] = ops.rope_angles(model.graph.input("positions", [SEQ], I32), constant)
    return found


def attention(model: EncoderModel, x: Node, angles: dict[float | None, Node | None]) -> Node:
    """Attention of one layer over the whole text, or over what its window admits, and the projection of the result."""
    config, rope = model.config, angles[model.config.bases[model.layer]]
    q, k, v = (_heads(model, x, name) for name in ("attn_q", "attn_k", "attn_v"))
    if rope is not None:
        q, k = (ops.rope(each, rope, style="neox") for each in (q, k))
    window = config.windows[model.layer]  # to each side
    mask: dict[str, Any] = {"causal": False} if window is None else {"around": True, "window": window + 1}
    y = ops.attention(q, k, v, scale=config.head_dim**-0.5, **mask)
    return linear(model, y, "attn_output", config.hidden)


def _heads(model: EncoderModel, x: Node, name: str) -> Node:
    config = model.config
    return ops.reshape(linear(model, x, name, config.hidden), [SEQ, config.heads, config.head_dim])


def mlp(model: EncoderModel, x: Node) -> Node:
    """down(activation(up(x))), or with a gate down(activation(gate(x)) * up(x))."""
    config = model.config
    gate = "ffn_gate" if model.has("ffn_gate.weight") else "ffn_up"
    y = ACTIVATIONS[config.activation](linear(model, x, gate, config.ffn))
    if gate == "ffn_gate":
        y = y * linear(model, x, "ffn_mul" if model.has("ffn_mul.weight") else "ffn_up", config.ffn)
    return linear(model, y, "ffn_down", config.hidden)


def classifier(config: EncoderConfig, weights: Weights) -> Graph | None:
    """The head of a cross-encoder: a layer with its activation, perhaps a norm, and the logits; None without one.

    Raises:
        WeightError: the file has the last layer only.
    """
    if not weights.has("cls.output.weight"):
        return None
    model = EncoderModel(Graph(f"{config.arch}-head"), config, weights)
    first = "cls" if model.has("cls.weight") else "pooler"
    if not model.has(f"{first}.weight"):
        hint = "use the safetensors checkpoint: the conversion dropped the layer"
        raise WeightError("the classifier lacks its first layer", where="cls.weight", hint=hint)
    x = model.graph.input(POOLED, [SEQ, config.hidden])
    x = ACTIVATIONS[config.classifier](linear(model, x, first, config.hidden))
    if model.has("cls.norm.weight"):
        x = layer_norm(model, x, "cls.norm")
    model.graph.output(RESULT, linear(model, x, "cls.output", weights.info("cls.output.weight").shape[0]))
    return model.graph


def dense_layers(config: EncoderConfig, weights: Weights, layers: Sequence[tuple[str, str | None]]) -> Graph | None:
    """Linear layers over a pooled row, each with its name and activation; None if there are none."""
    if not layers:
        return None
    model = EncoderModel(Graph(f"{config.arch}-head"), config, weights)
    x = model.graph.input(POOLED, [SEQ, config.hidden])
    for name, activation in layers:
        x = linear(model, x, name, weights.info(f"{name}.weight").shape[0])
        x = x if activation is None else ACTIVATIONS[activation](x)
    model.graph.output(RESULT, x)
    return model.graph


def encoding(graph: Graph, *, two_way: bool) -> Graph:
    """The graph of a decoder, output "hidden", as the body of an encoder: it keeps no keys and values.

    Args:
        two_way: every token sees the whole text, or half of the window to each side, in place of what is before it.
    """

    def visit(old: Node, inputs: tuple[Node, ...]) -> Node:
        if old.op == "kv_write":
            return ops.as_cache(inputs[1])
        if old.op != "attention":
            return ops.rebuild(old, inputs)
        if not two_way:
            return ops.rebuild(old, inputs, length=SEQ)
        window = old["window"]
        size = None if window is None else window // 2 + 1
        return ops.rebuild(old, inputs, length=SEQ, mask="around" if size else "none", window=size)

    return graph.replace(outputs={HIDDEN: graph.outputs[HIDDEN]}).map(visit)


class EncoderFamily(NamedTuple):
    """The equations of an architecture, the names of its tensors, and the reader of its GGUF metadata."""

    build: Callable[[EncoderConfig, Weights], Graph]
    names: Table
    from_gguf: Callable[[Keys, int, int], EncoderConfig]


def encoder_config(format: str, metadata: Mapping[str, Any], where: object) -> EncoderConfig | None:
    """The configuration of an encoder; None if the file is of another kind of model.

    Raises:
        ConfigError: a key is missing, of the wrong type or out of range.
        UnsupportedModelError: a feature that rlx does not support.
    """
    plain = Keys(metadata, where)
    if format != "gguf":
        read = ENCODER_TYPES.get(str(metadata.get("model_type")))
        return None if read is None else _checked(read(plain), plain)
    arch = str(metadata.get("general.architecture"))
    if arch not in ENCODERS:
        return None
    types = plain.integer("tokenizer.ggml.token_type_count", (0, 1 << 10), 0)
    keys = Keys(metadata, where, f"{arch}.")
    return _checked(ENCODERS[arch].from_gguf(keys, vocab_size(keys), types), keys)


def _checked(config: EncoderConfig, keys: Keys) -> EncoderConfig:
    if config.hidden % (2 * config.heads):
        what = f"{config.hidden} elements are no even heads, of which there are {config.heads}"
        raise UnsupportedModelError(what, where=keys.where)
    return config


def encoder_views(config: EncoderConfig) -> Iterator[View]:
    """The parts of tensors that files may store as one."""
    for layer in range(config.layers):
        name, size = f"blk.{layer}", config.hidden
        for end in ("weight", "bias"):
            for i, part in enumerate("qkv"):
                yield View(f"{name}.attn_{part}.{end}", f"{name}.attn_qkv.{end}", i * size, size, 3 * size)
            if config.arch == "modern-bert":
                for i, part in enumerate(("gate", "mul")):
                    whole = f"{name}.ffn_up.{end}"
                    yield View(f"{name}.ffn_{part}.{end}", whole, i * config.ffn, config.ffn, 2 * config.ffn)


def of_decoder(config: ModelConfig) -> EncoderConfig:
    """What is asked of the configuration of an encoder, for a decoder that serves as one."""
    return EncoderConfig(
        arch=config.arch,
        vocab_size=config.vocab_size,
        hidden=config.hidden,
        heads=config.heads,
        layers=config.layers,
        ffn=config.each[0].ffn,
        context=config.context,
        eps=config.eps,
        activation=config.activation,
        windows=config.windows,
        bases=(),
        pooling="last",
    )
