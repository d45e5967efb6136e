"""Ops whose rows are sequences of their own: each row as the op alone computes it, and what does not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ir.cases import G
from rlx.errors import GraphError, ShapeError
from rlx.ir import interp, ops, text
from rlx.ir.costs import cost
from rlx.ir.dims import CTX, PAST_SEQ, SEQ, SLOTS, value
from rlx.ir.dtypes import F16, F32, I32, Q8_0
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.ir.sequences import OPS
from rlx.ir.verify import verify

ENV = {"SEQ": 3, "PAST_SEQ": 0, "CTX": 16, "SLOTS": 5}
PLACES = {"slots": np.array([4, 0, 2]), "past": np.array([7, 0, 15])}
SLOT, PAST = G.input("slots", [SEQ], I32), G.input("past", [SEQ], I32)

Q, K, ANGLES = G.input("q", [SEQ, 4, 32]), G.input("k", [SEQ, 2, 32]), G.input("angles", [SEQ, 8])
NORM, TAPS = G.weight("norm", [32]), G.weight("taps", [8, 4])
GATES = [G.input(name, [SEQ, 4]) for name in ("g", "beta")]
KEYS = [G.input(name, [SEQ, 2, 8]) for name in ("dq", "dk")]


def state(name: str, *shape: Any, dtype: Any = F32) -> Node:
    return G.state(name, [SLOTS, *shape], dtype)


def cache(name: str, dtype: Any = F32) -> Node:
    return state(f"{name} {dtype}", 2, CTX, 32, dtype=dtype)


CASES = [
    *(("kv_write", (cache("k", t), K), {"dtype": t.name}) for t in (F32, F16, Q8_0)),
    ("kv_write", (cache("k"), K), {"wrap": True, "at": PAST_SEQ + 9}),
    ("rope_kv_write", (cache("k"), K, ANGLES), {"style": "neox"}),
    ("rope_kv_write", (cache("k"), K, NORM, ANGLES), {"style": "interleaved", "norm_eps": 1e-5}),
    ("attention", (Q, cache("k"), cache("v")), {"scale": 0.2, "length": PAST_SEQ + 1}),
    ("attention", (Q, cache("k"), cache("v")), {"scale": 0.2, "length": PAST_SEQ + 1, "window": 4, "softcap": 3.0}),
    ("causal_conv", (state("rows", 3, 8), ANGLES, TAPS), {}),
    ("gated_delta", (state("delta", 4, 8, 32), *KEYS, Q, *GATES), {"scale": 0.3}),
]


def sequences(op: str, operands: tuple[Node, ...], attrs: dict[str, Any]) -> Node:
    return ops.make(op, *operands, SLOT, PAST, **attrs, sequences=True)


def feeds(node: Node) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    leaves = {n.name: n for n in node.inputs if n.dtype is not I32}
    arrays = {name: rng.standard_normal([value(d, ENV) for d in n.shape]) for name, n in leaves.items()}
    return {name: -np.abs(a) if name == "g" else a for name, a in arrays.items()}


def test_every_op_over_a_state_has_a_case() -> None:
    assert {op for op, *_ in CASES} == set(OPS)


@pytest.mark.parametrize(("op", "operands", "attrs"), CASES)
def test_each_row_is_computed_alone_over_its_slot(op: str, operands: tuple[Node, ...], attrs: dict[str, Any]) -> None:
    node = sequences(op, operands, attrs)
    arrays = feeds(node)
    outputs, states = interp.run(Graph(outputs={"y": node}), {**arrays, **PLACES}, ENV, dtype=np.float64)
    updated = {n.name for n in operands if n.op == "state"} if op != "attention" else set()
    assert states.keys() == updated
    for r, (slot, past) in enumerate(zip(*PLACES.values(), strict=True)):
        alone, own = [], {}
        for n in operands:
            shape = n.shape[1:] if n.op == "state" else n.shape if n.op == "weight" else (1, *n.shape[1:])
            alone.append(ops.leaf(n.op, n.name, shape, n.dtype))
            own[n.name] = arrays[n.name] if n.op == "weight" else arrays[n.name][slot if n.op == "state" else [r]]
        one = Graph(outputs={"y": ops.make(op, *alone, **attrs)})
        want, left = interp.run(one, own, {**ENV, "SEQ": 1, "PAST_SEQ": int(past)}, dtype=np.float64)
        found = outputs["y"][slot] if op.endswith("kv_write") else outputs["y"][r : r + 1]
        np.testing.assert_array_equal(found, want["y"])
        for name, new in left.items():
            np.testing.assert_array_equal(states[name][slot], new)
    for name in updated:
        others = [s for s in range(ENV["SLOTS"]) if s not in PLACES["slots"]]
        np.testing.assert_array_equal(states[name][others], arrays[name][others])


@pytest.mark.parametrize(("op", "operands", "attrs"), CASES)
def test_text_cost_and_verifier(op: str, operands: tuple[Node, ...], attrs: dict[str, Any]) -> None:
    node = sequences(op, operands, attrs)
    graph = Graph(outputs={"y": node})
    verify(graph)
    assert text.loads(str(graph)) == graph
    three, two = cost(node, ENV), cost(node, {**ENV, "SEQ": 2})
    assert [3 * b for b in two] == [2 * a for a in three]
    assert three[1] > 0


def test_what_does_not_fit() -> None:
    k, v = cache("k"), cache("v")
    good = {"scale": 1.0, "length": PAST_SEQ + 1, "sequences": True}
    for operands in (
        (Q, k, v),  # neither slots nor past
        (Q, k, v, SLOT),
        (Q, k, v, SLOT, G.input("others", [2], I32)),  # of another number of rows
        (Q, k, v, SLOT, G.input("floats", [SEQ])),
        (Q, k, G.state("few", [3, 2, CTX, 32]), SLOT, PAST),  # caches of different slots
        (Q, G.state("k", [2, CTX, 32]), G.state("v", [2, CTX, 32]), SLOT, PAST),  # without slots
    ):
        with pytest.raises(ShapeError):
            ops.make("attention", *operands, **good)
    with pytest.raises(ShapeError):  # slots, but not said what for
        ops.make("attention", Q, k, v, SLOT, PAST, scale=1.0)
    node = sequences("causal_conv", (state("rows", 3, 8), ANGLES, TAPS), {})
    shared = {**feeds(node), "slots": np.array([1, 2, 1]), "past": np.zeros(3, int)}
    with pytest.raises(GraphError, match="share a slot"):
        interp.run(Graph(outputs={"y": node}), shared, ENV)
