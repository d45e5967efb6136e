"""Instances of every op with all variants of its attributes, and random values for their leaves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ir.references import ENV
from rlx.ir import interp, meaning, ops
from rlx.ir.dims import CTX, PAST_SEQ, SEQ, value
from rlx.ir.dtypes import BF16, F16, F32, I32, Q4_0, Q8_0
from rlx.ir.graph import Graph
from rlx.ir.node import Node

Array = np.ndarray


def case(op: str, *operands: Node, **attrs: Any) -> Any:
    shown = ", ".join(f"{k}={v}" for k, v in attrs.items())
    return pytest.param(ops.make(op, *operands, **attrs), id=f"{op}({shown})")


G = Graph()
X, Y, ROW, ONE = G.input("x", [SEQ, 64]), G.input("y", [SEQ, 64]), G.weight("row", [64]), G.weight("one", [1])
HEADS, ANGLES, WHOLE = G.input("heads", [SEQ, 4, 16]), G.input("angles", [SEQ, 8]), G.input("whole", [SEQ, 16])
PAIR, NORM = G.input("pair", [SEQ, 2, 16]), G.weight("norm", [16])
CACHES = {t.name: G.state(f"cache {t.name}", [2, CTX, 16], t) for t in (F32, F16, BF16)}
IDS = G.input("ids", [SEQ], I32)
W, U, B, C, R = (G.weight(n, s) for n, s in [("w", [8, 64]), ("u", [8, 64]), ("b", [8]), ("c", [8]), ("r", [SEQ, 8])])
EXPRESSIONS = [
    0,
    ("neg", 0),
    ("add", ("scale", ("silu", 0), 0.3), ("mul", 1, 2)),
    ("softcap", ("sub", 0, ("const", 2.0)), 3.0),
]


def linears() -> list[Any]:
    cases = []
    for gated in (None, "silu", "gelu_tanh", "gelu_erf"):
        for bias in (False, True):
            for residual in (False, True):
                operands = [X, W] + [U] * bool(gated) + [B] * bias + [C] * (bias and bool(gated)) + [R] * residual
                cases.append(case("linear", *operands, gated=gated, bias=bias, residual=residual))
    return cases


CASES = [
    *(case(op, X) for op in meaning.UNARY),
    *(case(op, x, y) for op in meaning.BINARY for x, y in ((X, Y), (X, ROW), (X, ONE), (HEADS, NORM))),
    *(case("elementwise", X, Y, ROW, expr=e) for e in EXPRESSIONS),
    case("scale", X, by=-0.75),
    case("softcap", X, cap=0.7),
    case("embedding", G.weight("table", [48, 64], Q8_0), IDS, scale=1.0),
    case("embedding", G.weight("table", [48, 64], Q8_0), IDS, scale=8.0),
    *linears(),
    case("rms_norm", X, eps=1e-6),
    case("rms_norm", X, ROW, eps=0.5),
    case("rms_norm", HEADS, NORM, eps=1e-5),
    case("rms_norm", X, ROW, eps=1e-6, out="q8a"),
    case("quantize", X),
    case("rope_angles", IDS, G.weight("inv_freq", [8]), scale=1.0),
    case("rope_angles", IDS, G.weight("inv_freq", [8]), scale=1.3),
    *(case("rope", HEADS, a, style=s) for a in (ANGLES, WHOLE) for s in ("neox", "interleaved")),
    *(case("rope", HEADS, NORM, ANGLES, style=s, norm_eps=1e-6) for s in ("neox", "interleaved")),
    *(case("kv_write", cache, PAIR, dtype=name) for name, cache in CACHES.items()),
    case("kv_write", CACHES["f32"], PAIR, at=2 * PAST_SEQ + 7),
    case("rope_kv_write", CACHES["f16"], PAIR, ANGLES, style="neox", dtype="f16"),
    case("rope_kv_write", CACHES["bf16"], PAIR, NORM, WHOLE, style="interleaved", norm_eps=1e-6, dtype="bf16"),
    case("attention", HEADS, CACHES["f32"], CACHES["f16"], scale=0.25),
    case("attention", HEADS, CACHES["f32"], CACHES["f16"], scale=0.25, window=1),
    case("attention", HEADS, CACHES["f32"], CACHES["f16"], scale=0.25, window=2, softcap=1.5),
    case("attention", HEADS, CACHES["f32"], CACHES["f16"], scale=-1.0, softcap=2.0, length=SEQ),
    case("attention", PAIR, CACHES["f32"], CACHES["f16"], scale=0.3, length=CTX),
    case("softmax", X),
    case("softmax", HEADS),
    case("argmax", X),
    case("top_k", X, k=1),
    case("top_k", X, k=64),
    case("last_row", HEADS),
    case("reshape", X, shape=(SEQ, 4, 16)),
    case("pack", G.weight("matrix", [48, 32], Q4_0), layout="r16k4"),
]


def arrays(node: Node, seed: int = 0) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    shapes = {i: [value(d, ENV) for d in i.shape] for i in node.inputs}
    return {
        i.name: rng.integers(0, 48, s) if i.dtype is I32 else rng.standard_normal(s) for i, s in shapes.items()
    }  # fmt: skip


def run(node: Node, feeds: dict[str, Array], dtype: Any = np.float64) -> Array:
    return interp.run(Graph(outputs={"y": node}), feeds, ENV, dtype=dtype)[0]["y"]
