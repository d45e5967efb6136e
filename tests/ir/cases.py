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
KEYS = PAST_SEQ + SEQ
PLAIN = [G.input(f"plain {name}", [KEYS, 2, 16]) for name in "kv"]
EXTRA, INDEX = G.input("extra", [5, 64]), G.input("index", [SEQ], I32)
VISIBLE, SINKS = G.input("visible", [SEQ], I32), G.weight("sinks", [4])
BIAS, BIASES = (G.input(f"bias {heads}", [SEQ, heads, PAST_SEQ + SEQ]) for heads in (1, 4))
W, U, B, C = (G.weight(n, s) for n, s in [("w", [8, 64]), ("u", [8, 64]), ("b", [8]), ("c", [8])])
R = G.input("r", [SEQ, 8])
COLUMN, HEAD_COLUMN, CHOICE = (
    G.input("column", [SEQ, 1]),
    G.input("column 3", [SEQ, 4, 1]),
    G.input("choice", [SEQ, 2], I32),
)
BLOCKS, EXPERTS = G.input("blocks", [SEQ, 2, 64]), [G.weight(f"experts {i}", [48, 5, 64], Q8_0) for i in range(2)]
HEAD_BLOCKS = G.weight("head blocks", [2, 5, 64], Q8_0)
KEY_HEADS, DECAY, BETA = [G.input(n, [SEQ, 2, 8]) for n in "qk"], G.input("decay", [SEQ, 4]), G.input("beta", [SEQ, 4])
DELTA = (G.state("delta", [4, 8, 16]), *KEY_HEADS, HEADS, DECAY, BETA)
#: Of a graph over leaves that are called as operands are: (in0 + in1) in2^T.
BODY = Graph("body")
BODY.output("out", ops.linear(BODY.input("in0", [SEQ, 64]) + BODY.input("in1", [SEQ, 64]), BODY.weight("in2", [8, 64])))
EXPRESSIONS = [
    0,
    ("neg", 0),
    ("add", ("scale", ("silu", 0), 0.3), ("mul", 1, 2)),
    ("softcap", ("sub", 0, ("const", 2.0)), 3.0),
    ("clamp", ("add", ("relu", 1), ("mul", 3, ("softplus", 0))), 0.25, None),
    ("sub", ("clamp", 0, -0.5, 0.75), ("clamp", 1, None, 0.1)),
]


def linears() -> list[Any]:
    cases = []
    for gated in (None, "silu", "gelu_tanh", "gelu_erf"):
        for bias in (False, True):
            for residual in (False, True):
                operands = [X, W] + [U] * bool(gated) + [B] * bias + [C] * (bias and bool(gated)) + [R] * residual
                cases.append(case("linear", *operands, gated=gated, bias=bias, residual=residual))
    heads = (case("linear", HEADS, G.weight("matrices", [4, 6, 16])), case("linear", BLOCKS, HEAD_BLOCKS))
    return [*cases, *heads, case("linear", X, W, U, gated="silu", out="bf16")]


BINARY_OPERANDS = ((X, Y), (X, ROW), (X, ONE), (HEADS, NORM), (X, COLUMN), (HEADS, HEAD_COLUMN))
CASES = [
    *(case(op, X) for op in meaning.UNARY),
    *(case(op, x, y) for op in meaning.BINARY for x, y in BINARY_OPERANDS),
    *(case("elementwise", X, Y, ROW, COLUMN, expr=e) for e in EXPRESSIONS),
    case("elementwise", X, Y, expr=("gelu_tanh", ("add", 0, 1)), out="bf16"),
    case("scale", X, by=-0.75),
    case("softcap", X, cap=0.7),
    *(case("clamp", X, low=low, high=high) for low, high in ((0.0, None), (None, -0.3), (-0.5, 0.25))),
    case("overlay_rows", X, EXTRA, INDEX),
    case("embedding", G.weight("table", [48, 64], Q8_0), IDS, scale=1.0),
    case("embedding", G.weight("table", [48, 64], Q8_0), CHOICE, scale=0.5),
    case("embedding", G.weight("table", [48, 64], Q8_0), IDS, scale=8.0),
    *linears(),
    case("rms_norm", X, eps=1e-6),
    case("rms_norm", X, ROW, eps=0.5),
    case("rms_norm", HEADS, NORM, eps=1e-5),
    case("rms_norm", X, ROW, eps=1e-6, out="q8a"),
    case("rms_norm", X, ROW, eps=1e-6, out="bf16"),
    case("layer_norm", X, eps=1e-6),
    case("layer_norm", X, ROW, eps=0.5),
    case("layer_norm", HEADS, NORM, G.weight("shift", [16]), eps=1e-5),
    case("layer_norm", X, ROW, G.weight("wide shift", [64]), eps=1e-6, out="bf16"),
    case("layer_norm", X, ROW, eps=1e-6, out="q8a"),
    case("quantize", X),
    case("quantize", X, out="bf16"),
    case("quantize", HEADS, out="bf16"),
    case("quantize", BLOCKS),
    case("rms_norm", BLOCKS, ROW, eps=1e-6, out="q8a"),
    case("rope_angles", IDS, G.weight("inv_freq", [8]), scale=1.0),
    case("rope_angles", IDS, G.weight("inv_freq", [8]), scale=1.3),
    *(
        case(
            "rope_angles",
            G.input(f"{len(s)} parts", [SEQ, len(s)], I32),
            G.weight("inv_freq", [8]),
            sections=s,
            interleaved=turns,
            scale=0.9,
        )
        for s in ((3, 3, 2), (5, 3), (8,), (2, 3, 2, 1))
        for turns in (False, True)
    ),
    *(case("rope", HEADS, a, style=s) for a in (ANGLES, WHOLE) for s in ("neox", "interleaved")),
    *(case("rope", HEADS, NORM, ANGLES, style=s, norm_eps=1e-6) for s in ("neox", "interleaved")),
    *(case("kv_write", cache, PAIR, dtype=name) for name, cache in CACHES.items()),
    case("kv_write", CACHES["f32"], PAIR, at=2 * PAST_SEQ + 7),
    *(case("kv_write", CACHES["f16"], PAIR, at=at, dtype="f16", wrap=True) for at in (3, 13, 2 * PAST_SEQ + 26, 32)),
    case("rope_kv_write", CACHES["f16"], PAIR, ANGLES, style="neox", dtype="f16"),
    case("rope_kv_write", CACHES["f32"], PAIR, ANGLES, style="neox", at=15, wrap=True),
    case("rope_kv_write", CACHES["bf16"], PAIR, NORM, WHOLE, style="interleaved", norm_eps=1e-6, dtype="bf16"),
    case("attention", HEADS, CACHES["f32"], CACHES["f16"], scale=0.25),
    case("attention", HEADS, CACHES["f32"], CACHES["f16"], scale=0.25, window=1),
    case("attention", HEADS, CACHES["f32"], CACHES["f16"], scale=0.25, window=2, softcap=1.5),
    case("attention", HEADS, CACHES["f32"], CACHES["f16"], scale=-1.0, softcap=2.0, length=SEQ),
    case("attention", PAIR, CACHES["f32"], CACHES["f16"], scale=0.3, length=CTX),
    *(case("attention", HEADS, CACHES["f32"], CACHES["f16"], scale=0.3, window=w, length=CTX + 5) for w in (1, 4, 14)),
    case("attention", HEADS, CACHES["f32"], CACHES["f16"], scale=0.25, bf16=True),
    case("attention", HEADS, CACHES["f32"], CACHES["f16"], scale=0.25, out="bf16"),
    case("attention", HEADS, CACHES["f32"], CACHES["f16"], SINKS, scale=0.25, window=2, sinks=True),
    case("attention", HEADS, CACHES["f32"], CACHES["f16"], SINKS, BIAS, scale=0.25, mask="bias", sinks=True),
    case("attention", HEADS, CACHES["f32"], CACHES["f16"], BIAS, scale=0.25, mask="bias"),
    case("attention", HEADS, CACHES["f32"], CACHES["f16"], BIASES, scale=0.25, window=2, softcap=1.5, mask="bias"),
    *(case("attention", HEADS, CACHES["f32"], CACHES["f16"], scale=0.25, mask="none", window=w) for w in (None, 2)),
    *(
        case("attention", HEADS, CACHES["f32"], CACHES["f16"], VISIBLE, scale=0.25, mask="visible", window=w)
        for w in (None, 4)
    ),
    *(
        case("attention", HEADS, *(ops.as_cache(x) for x in PLAIN), scale=0.3, length=KEYS, mask=mask)
        for mask in ("causal", "none")
    ),
    *(
        case("attention", HEADS, *(ops.as_cache(x) for x in PLAIN), scale=0.3, length=KEYS, mask="around", window=w)
        for w in (1, 3)
    ),
    *(case("as_cache", x, dtype=t, room=15) for x, t in ((PAIR, "f32"), (HEADS, "bf16"))),
    case("as_cache", G.input("heads first", [2, SEQ, 16]), order="heads"),
    case("softmax", X),
    case("softmax", HEADS),
    case("argmax", X),
    case("pick", X),
    case("linear_pick", G.input("one row", [1, 64]), W),
    case("linear_pick", G.input("one row", [1, 64]), W, cap=1.5),
    case("top_k", X, k=1),
    case("top_k", X, k=64),
    *(case("top_k", X, k=k, groups=g, kept=n) for k, g, n in ((5, 8, 3), (2, 32, 4), (64, 4, 4))),
    *(case("expert_linear", x, CHOICE, EXPERTS[0]) for x in (X, BLOCKS)),
    *(case("expert_linear", X, CHOICE, *EXPERTS, gated=g) for g in ("silu", "gelu_tanh", "gelu_erf")),
    case("expert_linear", BLOCKS, CHOICE, *EXPERTS, gated="silu"),
    case("call", X, Y, W, body=str(BODY), width=(8,)),
    *(
        case("causal_conv", G.state(f"{n} rows", [n, 8]), ANGLES, G.weight(f"{n + 1} taps", [8, n + 1]))
        for n in (1, 3, 5)
    ),
    case(
        "causal_conv", G.state("3 rows", [3, 8]), ANGLES, G.weight("4 taps", [8, 4]), G.state("n", [3, 8]), aside=True
    ),
    *(case("gated_delta", *DELTA, scale=0.25, heads=heads) for heads in ("tiled", "grouped")),
    case("gated_delta", *DELTA, scale=1.0, heads="grouped", corrects=False),
    case("gated_delta", *DELTA, G.state("new delta", [4, 8, 16]), scale=0.25, aside=True),
    case("mix", HEADS, G.input("square", [SEQ, 4, 4])),
    case("mix", PAIR, G.input("wide", [SEQ, 5, 2])),
    case("relabel", INDEX, G.input("labels", [5])),
    case("take", X, CHOICE),
    case("take", ROW, CHOICE),
    *(case(op, x) for op in ("reduce_mean", "reduce_sum") for x in (X, HEADS)),
    *(case(op, HEADS, axis=1) for op in ("reduce_mean", "reduce_sum")),
    case("slice", X, start=5, stop=64),
    case("slice", HEADS, start=1, stop=3),
    case("slice", HEADS, axis=2, start=0, stop=1),
    case("concat", X, COLUMN, Y),
    case("concat", HEADS, PAIR, HEADS),
    case("concat", HEADS, HEAD_COLUMN, axis=2),
    case("last_row", HEADS),
    *(case("take_rows", G.input(f"long {shape}", [64, *shape]), IDS) for shape in ([], [8], [2, 4])),
    case("reshape", X, shape=(SEQ, 4, 16)),
    case("pack", G.weight("matrix", [48, 32], Q4_0), layout="r16k4"),
]


#: Values of inputs that do not mean any number: a mask shows a key before the row's own, a later one, and its own.
_CHOSEN = {"index": np.array([-1, 4, 0]), "visible": np.array([1, 4, 4]), "labels": np.array([7.0, 0, 5, 9, 99_999])}


def arrays(node: Node, seed: int = 0) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    leaves = (i.inputs[0] if i.op == "as_cache" else i for i in node.inputs)
    shapes = {i: [value(d, ENV) for d in i.shape] for i in leaves}
    found = {i.name: rng.integers(0, 48, s) if i.dtype is I32 else rng.standard_normal(s) for i, s in shapes.items()}
    found |= {n: a for n, a in _CHOSEN.items() if n in found}
    return {n: np.abs(a) for n, a in found.items()} if node.op == "sqrt" else found


def run(node: Node, feeds: dict[str, Array], dtype: Any = np.float64) -> Array:
    return interp.run(Graph(outputs={"y": node}), feeds, ENV, dtype=dtype)[0]["y"]


def new_state(node: Node, feeds: dict[str, Array], dtype: Any = np.float64) -> Array:
    """What an op leaves in the state that is its first operand."""
    (state,) = interp.run(Graph(outputs={"y": node}), feeds, ENV, dtype=dtype)[1].values()
    return state
