"""Random graphs over the whole op table, for hypothesis, and random values for their leaves.

`STEPS` has one entry an op: a function that draws operands from the graph built so far and adds a node. A test compares
its keys with the op table, so a new op without a step fails.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st

from rlx.ir import ops
from rlx.ir.dims import CTX, PAST_SEQ, SEQ, DimLike, Shape, value
from rlx.ir.dtypes import BF16, F16, F32, I32, Q4_0, Q8_0, Q8A, DType
from rlx.ir.graph import Graph
from rlx.ir.node import LEAVES, Node

Draw = Callable[[st.SearchStrategy], object]
WIDTHS = (32, 64)
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
WEIGHT_DTYPES = (F32, F16, BF16, Q8_0, Q4_0)
FACTORS = st.sampled_from([0.5, -1.5, 0.1, 1.0, 2.0])
ENV = {"SEQ": 3, "PAST_SEQ": 2, "CTX": 16}


@dataclass
class Builder:
    """A graph under construction and the values that later steps may read."""

    draw: Draw
    graph: Graph
    pool: list[Node] = field(default_factory=list)
    serves: dict[Node, str] = field(default_factory=dict)  # a cache's state -> keys or values: no state is both

    def leaf(self, kind: str, shape: Shape, dtype: DType = F32) -> Node:
        prefix = self.draw(st.sampled_from(["x", "with space", "ü", "\n", '"', "\\"]))
        return self.add(getattr(self.graph, kind)(f"{prefix}{len(self.pool)}", shape, dtype))

    def add(self, node: Node) -> Node:
        self.pool.append(node)
        return node

    def value(self, shape: Shape, dtype: DType = F32) -> Node:
        """A value of this shape: one that exists, or a new input."""
        found = [n for n in self.pool if (n.shape, n.dtype) == (shape, dtype) and n.op not in ("weight", "state")]
        return (
            self.draw(st.sampled_from(found))
            if found and self.draw(st.booleans())
            else self.leaf("input", shape, dtype)
        )

    def rows(self, dtype: DType = F32) -> Node:
        """[SEQ, width]."""
        return self.value((SEQ, self.draw(st.sampled_from(WIDTHS))), dtype)

    def heads(self, heads: int = HEADS) -> Node:
        """[SEQ, heads, head_dim]."""
        return self.value((SEQ, heads, HEAD_DIM))

    def some(self) -> Node:
        return self.rows() if self.draw(st.booleans()) else self.heads()

    def matrix(self, n: int, k: DimLike) -> Node:
        return self.leaf("weight", (n, k), self.draw(st.sampled_from(WEIGHT_DTYPES)))

    def row(self, x: Node) -> Node:
        return self.leaf("weight", x.shape[-1:])

    def state(self) -> Node:
        return self.leaf("state", (KV_HEADS, CTX, HEAD_DIM), self.draw(st.sampled_from([F32, F16, BF16])))

    def cache(self, role: str) -> Node:
        """A cache of keys or of values: one that was written, or one that nothing writes."""
        written = [n for n in self.pool if n.op in ("kv_write", "rope_kv_write")]
        fitting = [n for n in written if self.serves.get(n.inputs[0], role) == role]
        found = self.draw(st.sampled_from(fitting)) if fitting and self.draw(st.booleans()) else self.state()
        self.serves[found if found.op == "state" else found.inputs[0]] = role
        return found

    def choice(self, count: int) -> Node:
        """[SEQ, count] indices."""
        return self.value((SEQ, count), I32)

    def angles(self) -> Node:
        return self.value((SEQ, self.draw(st.sampled_from([8, HEAD_DIM]))))


def _linear(b: Builder) -> Node:
    gated = b.draw(st.sampled_from([None, "silu", "gelu_tanh", "gelu_erf"]))
    bias, residual = b.draw(st.booleans()), b.draw(st.booleans())
    x, n = b.rows(b.draw(st.sampled_from([F32, F32, Q8A, BF16]))), b.draw(st.sampled_from(WIDTHS))
    parts = 2 if gated else 1
    operands = [x, *(b.matrix(n, x.shape[1]) for _ in range(parts))]
    operands += [b.leaf("weight", (n,)) for _ in range(parts * bias)] + [b.value((SEQ, n)) for _ in range(residual)]
    bf16 = b.draw(st.booleans())
    return ops.make("linear", *operands, gated=gated, bias=bias, residual=residual, bf16=bf16)


def _rms_norm(b: Builder) -> Node:
    x = b.some()
    weight = [b.row(x)] if b.draw(st.booleans()) else []
    out = b.draw(st.sampled_from(["f32", "q8a", "bf16"])) if len(x.shape) == 2 else "f32"
    return ops.make("rms_norm", x, *weight, eps=b.draw(st.sampled_from([1e-6, 1e-5])), out=out)


def _layer_norm(b: Builder) -> Node:
    x = b.some()
    weights = [b.row(x) for _ in range(b.draw(st.integers(0, 2)))]
    out = b.draw(st.sampled_from(["f32", "q8a", "bf16"])) if len(x.shape) == 2 else "f32"
    return ops.make("layer_norm", x, *weights, eps=b.draw(st.sampled_from([1e-6, 1e-5])), out=out)


def _rope_angles(b: Builder) -> Node:
    sections = b.draw(st.sampled_from([None, (4, 2, 2), (4, 4)]))
    positions = b.value((SEQ, *([] if sections is None else [len(sections)])), I32)
    turns = b.draw(st.booleans())
    frequencies, factor = b.leaf("weight", (8,)), b.draw(FACTORS)
    return ops.rope_angles(positions, frequencies, scale=factor, sections=sections, interleaved=turns)


def _rope_operands(b: Builder, heads: int) -> tuple[list[Node], dict[str, object]]:
    normed = b.draw(st.booleans())
    x = b.heads(heads)
    operands = [x, *([b.row(x)] if normed else []), b.angles()]
    style = b.draw(st.sampled_from(["neox", "interleaved"]))
    return operands, {"style": style, "norm_eps": 1e-6 if normed else None}


def _rope(b: Builder) -> Node:
    operands, attrs = _rope_operands(b, HEADS)
    return ops.make("rope", *operands, **attrs)


def _rope_kv_write(b: Builder) -> Node:
    state = b.state()
    operands, attrs = _rope_operands(b, KV_HEADS)
    return ops.make("rope_kv_write", state, *operands, **attrs, at=b.draw(POSITIONS), dtype=state.dtype.name)


POSITIONS = st.sampled_from([PAST_SEQ, 0, 2 * PAST_SEQ + 1])


def _attention(b: Builder) -> Node:
    if plain := b.draw(st.booleans()):
        keys, values = b.heads(KV_HEADS), b.heads(KV_HEADS)
    else:
        keys, values = b.cache("keys"), b.cache("values")
    mask = b.draw(st.sampled_from(["causal", "none", "visible"]))
    return ops.attention(
        b.heads(),
        keys,
        values,
        scale=b.draw(FACTORS),
        window=None if mask == "visible" else b.draw(st.sampled_from([None, 1, 3])),  # each row sees a key
        softcap=b.draw(st.sampled_from([None, 5.0])),
        length=None if plain else b.draw(st.sampled_from([PAST_SEQ + SEQ, SEQ, CTX])),
        causal=mask != "none",
        visible=b.value((SEQ,), I32) if mask == "visible" else None,
    )


def _reshape(b: Builder) -> Node:
    x = b.some()
    return ops.reshape(x, (SEQ, HEADS, x.shape[1] // HEADS) if len(x.shape) == 2 else (SEQ, HEADS * HEAD_DIM))


def _expr(b: Builder, count: int, depth: int) -> object:
    if depth == 0:
        return b.draw(st.integers(0, count - 1))
    numbered = {"scale": [2.5], "softcap": [2.5], "clamp": [-0.5, 2.5]}
    kind = b.draw(st.sampled_from(["operand", "add", "mul", "sub", "tanh", "silu", "neg", "relu", *numbered]))
    if kind == "operand":
        return _expr(b, count, 0)
    if kind in ("add", "mul", "sub"):
        other = ("const", b.draw(FACTORS)) if b.draw(st.booleans()) else _expr(b, count, depth - 1)
        return (kind, _expr(b, count, depth - 1), other)
    return (kind, _expr(b, count, depth - 1), *numbered.get(kind, []))


def _elementwise(b: Builder) -> Node:
    x = b.some()
    operands = [x, *(_second(b, x) for _ in range(b.draw(st.integers(0, 2))))]
    return ops.make("elementwise", *operands, expr=_expr(b, len(operands), 2))


def _second(b: Builder, x: Node) -> Node:
    shape = b.draw(st.sampled_from(["same", "row", "column", "scalar"]))
    if shape in ("same", "column"):
        return b.value(x.shape if shape == "same" else (*x.shape[:-1], 1))
    return b.leaf("weight", x.shape[-1:] if shape == "row" else (1,))


def _binary(op: str) -> Callable[[Builder], Node]:
    def step(b: Builder) -> Node:
        x = b.some()
        return ops.make(op, x, _second(b, x))

    return step


def _div(b: Builder) -> Node:
    x = b.some()
    return ops.div(x, b.row(x))  # by a weight: not by what may cancel to nothing


def _exp(b: Builder) -> Node:
    return ops.exp(ops.tanh(b.some()))  # bounded, so that no graph overflows


def _quantize(b: Builder) -> Node:
    x = b.rows() if b.draw(st.booleans()) else b.value((SEQ, 2, 32))
    return ops.quantize(x, b.draw(st.sampled_from(["q8a", "bf16"])))


def _call(b: Builder) -> Node:
    x = b.rows()
    body = Graph('a <body> of "\\\n')  # IR text quotes it
    y = ops.reshape(body.input("in0", x.shape), [SEQ, 2, int(x.shape[1]) // 2])
    body.output("out", ops.scale(y, b.draw(FACTORS)))
    return ops.make("call", x, body=body.canonical(), width=y.shape[1:])


def _expert_linear(b: Builder) -> Node:
    gated = b.draw(st.sampled_from([None, "silu", "gelu_tanh", "gelu_erf"]))
    shape = (SEQ, 32) if b.draw(st.booleans()) else (SEQ, 2, 32)
    x, dtype = b.value(shape, b.draw(st.sampled_from([F32, F32, Q8A, BF16]))), b.draw(st.sampled_from(WEIGHT_DTYPES))
    weights = [b.leaf("weight", (4, 32, 32), dtype) for _ in range(2 if gated else 1)]
    return ops.expert_linear(x, b.choice(2), *weights, gated=gated, bf16=b.draw(st.booleans()))


def _kv_write(b: Builder) -> Node:
    return ops.kv_write(b.state(), b.heads(KV_HEADS), at=b.draw(POSITIONS), wrap=b.draw(st.booleans()))


def _causal_conv(b: Builder) -> Node:
    x, taps = b.rows(), b.draw(st.sampled_from([2, 4]))
    state = b.leaf("state", (taps - 1, x.shape[1]))
    return ops.causal_conv(state, x, b.leaf("weight", (x.shape[1], taps)))


def _gated_delta(b: Builder) -> Node:
    """With short keys, decay and beta in 0..1, as models have them, so that no state grows."""
    q, k = (ops.softmax(b.heads(KV_HEADS)) for _ in range(2))
    g, beta = ops.neg(ops.softplus(b.value((SEQ, HEADS)))), ops.sigmoid(b.value((SEQ, HEADS)))
    state = b.leaf("state", (HEADS, HEAD_DIM, HEAD_DIM))
    style = b.draw(st.sampled_from(["tiled", "grouped"]))
    how = {"scale": b.draw(FACTORS), "heads": style, "corrects": b.draw(st.booleans())}
    return ops.gated_delta(state, q, k, b.heads(), g, beta, **how)


def _take(b: Builder) -> Node:
    x = b.rows() if b.draw(st.booleans()) else b.leaf("weight", (32,))
    return ops.take(x, b.choice(b.draw(st.sampled_from([1, 2]))))


def _mix(b: Builder) -> Node:
    return ops.mix(b.heads(), b.value((SEQ, b.draw(st.sampled_from([1, KV_HEADS, HEADS])), HEADS)))


def _slice(b: Builder) -> Node:
    x = b.some()
    axis = b.draw(st.integers(1, len(x.shape) - 1))
    start, stop = b.draw(st.sampled_from([(0, 1), (1, 3), (x.shape[axis] // 2, x.shape[axis])]))
    return ops.slice(x, start, stop, axis=axis)


def _concat(b: Builder) -> Node:
    x = b.some()
    axis = b.draw(st.integers(1, len(x.shape) - 1))
    return ops.concat(x, *(b.value(x.shape) for _ in range(b.draw(st.integers(1, 2)))), axis=axis)


def _linear_pick(b: Builder) -> Node:
    x = ops.last_row(b.rows())
    cap = b.draw(st.sampled_from([None, 2.0]))
    return ops.make("linear_pick", x, b.matrix(48, x.shape[-1]), cap=cap)


STEPS: dict[str, Callable[[Builder], Node]] = {
    "input": lambda b: b.leaf("input", (SEQ, 32)),
    "weight": lambda b: b.matrix(32, 32),
    "state": lambda b: b.state(),
    "embedding": lambda b: ops.embedding(b.matrix(48, 32), b.value((SEQ,), I32), scale=b.draw(FACTORS)),
    "linear": _linear,
    "overlay_rows": lambda b: ops.overlay_rows(b.value((SEQ, 32)), b.value((48, 32)), b.value((SEQ,), I32)),
    "rms_norm": _rms_norm,
    "layer_norm": _layer_norm,
    "expert_linear": _expert_linear,
    "call": _call,
    "quantize": _quantize,
    "rope_angles": _rope_angles,
    "rope": _rope,
    "kv_write": _kv_write,
    "rope_kv_write": _rope_kv_write,
    "as_cache": lambda b: ops.as_cache(b.heads(KV_HEADS)),
    "attention": _attention,
    "causal_conv": _causal_conv,
    "gated_delta": _gated_delta,
    "softmax": lambda b: ops.softmax(b.some()),
    "argmax": lambda b: ops.argmax(b.rows()),
    "pick": lambda b: ops.pick(b.rows()),
    "linear_pick": _linear_pick,
    "top_k": lambda b: ops.top_k(b.rows(), b.draw(st.integers(1, 4))),
    "take": _take,
    "relabel": lambda b: ops.relabel(b.leaf("input", (SEQ,), I32), b.leaf("weight", (48,))),
    "mix": _mix,
    "reduce_mean": lambda b: ops.reduce_mean(b.some()),
    "reduce_sum": lambda b: ops.reduce_sum(b.some()),
    "slice": _slice,
    "concat": _concat,
    "take_rows": lambda b: ops.take_rows(b.leaf("input", (48, 32)), b.value((SEQ,), I32)),
    "last_row": lambda b: ops.last_row(b.some()),
    "reshape": _reshape,
    "pack": lambda b: ops.make("pack", b.matrix(32, 64), layout=b.draw(st.sampled_from(["r16k4", "file"]))),
    "elementwise": _elementwise,
    "div": _div,
    "exp": _exp,
    "scale": lambda b: ops.scale(b.some(), b.draw(FACTORS)),
    "softcap": lambda b: ops.softcap(b.some(), b.draw(st.sampled_from([0.5, 30.0]))),
    "clamp": lambda b: ops.clamp(b.some(), *b.draw(st.sampled_from([(0.0, None), (None, 0.5), (-0.5, 0.5)]))),
    "sqrt": lambda b: ops.sqrt(ops.clamp(b.some(), 0.1)),  # not where it is steep
    **{op: _binary(op) for op in ("add", "sub", "mul", "maximum")},
    **{
        op: (lambda b, op=op: ops.make(op, b.some()))
        for op in ("silu", "gelu_tanh", "gelu_erf", "sigmoid", "tanh", "neg", "softplus", "relu")
    },
}
INDICES = (
    "argmax",
    "pick",
    "linear_pick",
    "top_k",
)  # near ties they jump, so they are no outputs where values are compared


@st.composite
def graphs(draw: Draw, *, max_steps: int = 12, skip: tuple[str, ...] = ()) -> Graph:
    """A graph of up to `max_steps` ops; every value that nothing reads is an output."""
    b = Builder(draw, Graph(draw(st.sampled_from(["random", 'a "name" \\ of\nlines']))))
    for op in draw(st.lists(st.sampled_from([s for s in STEPS if s not in skip]), min_size=1, max_size=max_steps)):
        b.add(STEPS[op](b))
    read = {i for n in b.pool for i in n.inputs}
    results = [n for n in dict.fromkeys(b.pool) if n not in read and n.op not in LEAVES] or b.pool[-1:]
    for i, node in enumerate(results):
        b.graph.output(f"out {i}", node)
    return b.graph


def feeds(graph: Graph, env: dict[str, int] = ENV, seed: int = 0) -> dict[str, np.ndarray]:
    """Values for every leaf: weights in [0.5, 1.5] (so that nothing divides by zero), indices that are in range for
    every reader, the rest standard normal.
    """
    rng = np.random.default_rng(seed)
    arrays = {}
    users = graph.users()
    for node in graph.nodes():
        if node.op in LEAVES:
            shape = [value(d, env) for d in node.shape]
            if node.dtype is I32:
                arrays[node.name] = rng.integers(0, min(map(_choices, users[node]), default=48), shape)
            else:
                arrays[node.name] = rng.uniform(0.5, 1.5, shape) if node.op == "weight" else rng.standard_normal(shape)
    return arrays


def _choices(reader: Node) -> int:
    """How many things an index of this reader chooses from."""
    match reader.op:
        case "embedding":
            return int(str(reader.inputs[0].shape[0]))
        case "take":
            return int(str(reader.inputs[0].shape[-1]))
        case "expert_linear":
            return int(str(reader.inputs[2].shape[0]))
        case "relabel":
            return int(str(reader.inputs[1].shape[0]))
    return 48
