"""Toy model graphs: every difference between the families as a knob, sizes small enough to interpret."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from rlx.ir import ops
from rlx.ir.dims import CTX, SEQ, value
from rlx.ir.dtypes import F16, F32, I32, Q8_0, DType
from rlx.ir.graph import Graph
from rlx.ir.node import Node

Array = np.ndarray
EPS = 1e-6


@dataclass(frozen=True)
class Toy:
    """The knobs. `windows` is repeated over the layers; `rotated` elements of a head get rope; None: all of them."""

    layers: int = 2
    width: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    hidden: int = 96
    vocab: int = 128
    dtype: DType = Q8_0
    cache: DType = F16
    activation: Callable[[Node], Node] = ops.silu
    rope_style: str = "neox"
    rotated: int | None = None
    head_norms: bool = False
    post_norms: bool = False
    biases: bool = False
    windows: tuple[int | None, ...] = (None,)
    softcap: float | None = None
    final_softcap: float | None = None
    embedding_scale: float | None = None
    tied: bool = True

    def but(self, **changes: object) -> Toy:
        return replace(self, **changes)  # type: ignore[arg-type]


FAMILIES = {
    "llama": Toy(rope_style="interleaved", rotated=16, tied=False),
    "qwen2": Toy(biases=True),
    "qwen3": Toy(head_norms=True),
    "gemma": Toy(
        layers=3,
        activation=ops.gelu_tanh,
        head_norms=True,
        post_norms=True,
        windows=(3, None),
        softcap=20.0,
        final_softcap=10.0,
        embedding_scale=8.0,
    ),
}


def build(toy: Toy, name: str = "toy") -> Graph:
    """tokens, positions i32[SEQ] -> logits f32[SEQ, vocab], with a K and a V cache a layer."""
    g = Graph(name)
    table = g.weight("embedding", [toy.vocab, toy.width], toy.dtype)
    x = ops.embedding(table, g.input("tokens", [SEQ], I32))
    if toy.embedding_scale is not None:
        x = ops.scale(x, toy.embedding_scale)
    rotated = toy.rotated or toy.head_dim
    inv_freq = g.constant("inv_freq", 1e4 ** (-np.arange(0, rotated, 2) / rotated))
    angles = ops.rope_angles(g.input("positions", [SEQ], I32), inv_freq)
    for i in range(toy.layers):
        x = _attend(g, toy, i, x, angles)
        x = _feed_forward(g, toy, i, x)
    head = table if toy.tied else g.weight("head", [toy.vocab, toy.width], toy.dtype)
    logits = ops.linear(_norm(g, "norm", x), head, bf16=True)
    g.output("logits", logits if toy.final_softcap is None else ops.softcap(logits, toy.final_softcap))
    return g


def _attend(g: Graph, toy: Toy, i: int, x: Node, angles: Node) -> Node:
    h = _norm(g, f"{i}.attention_norm", x)
    q = ops.rope(_heads(g, toy, f"{i}.q", h, toy.heads, normed=toy.head_norms), angles, style=toy.rope_style)
    k = ops.rope(_heads(g, toy, f"{i}.k", h, toy.kv_heads, normed=toy.head_norms), angles, style=toy.rope_style)
    v = _heads(g, toy, f"{i}.v", h, toy.kv_heads, normed=False)
    cache = [toy.kv_heads, CTX, toy.head_dim]
    keys = ops.kv_write(g.state(f"{i}.keys", cache, toy.cache), k)
    values = ops.kv_write(g.state(f"{i}.values", cache, toy.cache), v)
    window = toy.windows[i % len(toy.windows)]
    o = ops.attention(q, keys, values, scale=toy.head_dim**-0.5, window=window, softcap=toy.softcap)
    o = ops.linear(o, g.weight(f"{i}.o", [toy.width, toy.heads * toy.head_dim], toy.dtype), bf16=True)
    return x + (_norm(g, f"{i}.attention_post_norm", o) if toy.post_norms else o)


def _feed_forward(g: Graph, toy: Toy, i: int, x: Node) -> Node:
    h = _norm(g, f"{i}.ffn_norm", x)
    gate = ops.linear(h, g.weight(f"{i}.gate", [toy.hidden, toy.width], toy.dtype), bf16=True)
    up = ops.linear(h, g.weight(f"{i}.up", [toy.hidden, toy.width], toy.dtype), bf16=True)
    y = ops.linear(toy.activation(gate) * up, g.weight(f"{i}.down", [toy.width, toy.hidden], toy.dtype), bf16=True)
    return x + (_norm(g, f"{i}.ffn_post_norm", y) if toy.post_norms else y)


def _norm(g: Graph, name: str, x: Node) -> Node:
    return ops.rms_norm(x, g.weight(name, x.shape[-1:], F32), eps=EPS)


def _heads(g: Graph, toy: Toy, name: str, h: Node, heads: int, *, normed: bool) -> Node:
    width = heads * toy.head_dim
    bias = g.weight(f"{name}_bias", [width], F32) if toy.biases else None
    y = ops.linear(h, g.weight(name, [width, toy.width], toy.dtype), bias, bf16=True)
    y = ops.reshape(y, [SEQ, heads, toy.head_dim])
    return _norm(g, f"{name}_norm", y) if normed else y


def feeds(graph: Graph, *, seq: int, past: int = 0, ctx: int = 16, seed: int = 0) -> tuple[dict[str, Array], dict]:
    """Random values for every leaf of a toy that the graph does not supply, and the values of the symbols.

    Matrices keep the variance of what they multiply, as in a trained model.
    """
    env = {"SEQ": seq, "PAST_SEQ": past, "CTX": ctx}
    rng = np.random.default_rng(seed)
    arrays: dict[str, Array] = {}
    for kind in ("weight", "state"):
        for name, leaf in graph.leaves(kind).items():
            shape = [value(d, env) for d in leaf.shape]
            if name not in graph.constants:
                scale = shape[-1] ** -0.5 if kind == "weight" and len(shape) == 2 and name != "embedding" else 0.3
                arrays[name] = rng.standard_normal(shape) * scale + ("norm" in name)
    vocab = graph.leaves("weight")["embedding"].shape[0]
    arrays["tokens"] = rng.integers(0, vocab, seq).astype(np.int32)
    arrays["positions"] = np.arange(past, past + seq, dtype=np.int32)
    return arrays, env
