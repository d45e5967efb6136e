"""Ops whose rows belong to several sequences, and ops over pages: as one sequence alone over a contiguous cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ir.cases import G
from rlx.errors import GraphError, ShapeError
from rlx.ir import interp, ops, text
from rlx.ir.costs import cost
from rlx.ir.dims import CTX, PAGES, PAST_SEQ, SEGMENTS, SEQ, SLOTS, value
from rlx.ir.dtypes import F16, F32, I32, Q8_0
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.ir.verify import verify
from rlx.passes.options import Options
from rlx.passes.segments import segments

Array = np.ndarray[Any, Any]

# Six of seven rows: a chunk, nothing, a single row, and rows of drafts. The last column: where a new state goes.
SEGMENTS_OF_CALL = np.array([[4, 3, 130, 4, 6], [0, 0, 9, 9, 9], [0, 1, 0, 0, 5], [1, 2, 63, 2, 3]])
TABLES = np.array([[7, 2, 9], [-1, -1, -1], [4, -1, -1], [0, 8, -1]])  # pages in any order, -1: not used
ENV = {"SEQ": 7, "SEGMENTS": 4, "PAGES": 3, "CTX": 640, "SLOTS": 7}

PAGE = 64
Q, K, ANGLES = G.input("q", [SEQ, 4, 32]), G.input("k", [SEQ, 2, 32]), G.input("angles", [SEQ, 8])
NORM, TAPS, SINKS = G.weight("norm", [32]), G.weight("taps", [8, 4]), G.weight("sinks", [4])
GATES = [G.input(name, [SEQ, 4]) for name in ("g", "beta")]
KEYS = [G.input(name, [SEQ, 2, 8]) for name in ("dq", "dk")]
VISIBLE, LAST = G.input("visible", [SEQ], I32), np.array([0, 64, 64, 0, 132, 132, 131])  # in each row's sequence
LENGTH = {"scale": 0.2, "length": PAST_SEQ + SEQ}


def state(name: str, *shape: Any, dtype: Any = F32) -> Node:
    return G.state(f"{name} {dtype}", shape, dtype)


def cache(name: str, dtype: Any = F32) -> Node:
    return state(name, 2, CTX, 32, dtype=dtype)


#: Every op over a state, for a single sequence over a contiguous cache.
CASES = [
    *(("kv_write", (cache("k", t), K), {"dtype": t.name}) for t in (F32, F16, Q8_0)),
    ("kv_write", (cache("k"), K), {"wrap": True, "at": PAST_SEQ + 600}),
    ("rope_kv_write", (cache("k"), K, ANGLES), {"style": "neox"}),
    ("rope_kv_write", (cache("k"), K, NORM, ANGLES), {"style": "interleaved", "norm_eps": 1e-5}),
    ("attention", (Q, cache("k"), cache("v")), LENGTH),
    ("attention", (Q, cache("k"), cache("v")), {**LENGTH, "window": 4, "softcap": 3.0}),
    ("attention", (Q, cache("k"), cache("v")), {**LENGTH, "bf16": True, "out": "bf16"}),
    ("attention", (Q, cache("k"), cache("v"), VISIBLE), {**LENGTH, "mask": "visible"}),
    ("attention", (Q, cache("k"), cache("v"), SINKS, VISIBLE), {**LENGTH, "mask": "visible", "sinks": True}),
    ("causal_conv", (state("rows", 3, 8), ANGLES, TAPS), {}),
    ("causal_conv", (state("rows", 3, 8), ANGLES, TAPS, state("new rows", 3, 8)), {"aside": True}),
    ("gated_delta", (state("delta", 4, 8, 32), *KEYS, Q, *GATES), {"scale": 0.3}),
    (
        "gated_delta",
        (state("delta", 4, 8, 32), *KEYS, Q, *GATES, state("new", 4, 8, 32)),
        {"scale": 0.3, "aside": True},
    ),
]
PAGED = [(op, operands, attrs) for op, operands, attrs in CASES if op in ("attention", "rope_kv_write", "kv_write")]
PAGED = [case for case in PAGED if not case[2].get("wrap")]
WAYS = [*((*case, False) for case in CASES), *((*case, True) for case in PAGED)]

Case = tuple[str, tuple[Node, ...], dict[str, Any]]


def segmented(op: str, operands: tuple[Node, ...], attrs: dict[str, Any], paged: bool) -> Node:
    """The same op of several sequences, with slots in front of states or over pages."""
    table = G.input("segments", [SEGMENTS, 5], I32)
    if paged:
        return ops.make(
            op, *operands, G.input("pages", [SEGMENTS, PAGES], I32), table, **attrs, page=PAGE, segments=True
        )
    slots = [ops.rebuild(n, (), shape=(SLOTS, *n.shape)) if n.op == "state" else n for n in operands]
    return ops.make(op, *slots, table, **attrs, segments=True)


def feeds(node: Node) -> dict[str, Array]:
    rng = np.random.default_rng(5)
    leaves = {n.name: n for n in node.inputs if n.dtype is not I32}
    arrays = {name: rng.standard_normal([value(d, ENV) for d in n.shape]) for name, n in leaves.items()}
    arrays = {name: -np.abs(a) if name == "g" else a for name, a in arrays.items()}
    return {**arrays, "segments": SEGMENTS_OF_CALL, "pages": TABLES, "visible": LAST}


def places(table: Array) -> Array:
    """The places of a page table's positions in the pool."""
    return (table[:, None] * PAGE + np.arange(PAGE)).reshape(-1)


def alone(case: Case, arrays: dict[str, Array], number: int, paged: bool) -> tuple[Array, dict[str, Array]]:
    """Result and new states of one segment, computed by the op without attributes over contiguous states."""
    op, operands, attrs = case
    first, rows, past, slot, written = SEGMENTS_OF_CALL[number]
    own = {}
    for n in operands:
        found = arrays[n.name]
        if n.op == "input":
            found = found[first : first + rows]
        elif n.op == "state" and paged:
            found = found[:, places(TABLES[number])]
        elif n.op == "state":
            found = found[written if n.name.startswith("new") else slot]
        own[n.name] = found
    env = {**ENV, "SEQ": rows, "PAST_SEQ": past, "CTX": own[operands[1].name].shape[1] if paged else ENV["CTX"]}
    if paged and op != "attention":
        env["CTX"] = own[operands[0].name].shape[1]
    outputs, left = interp.run(Graph(outputs={"y": ops.make(op, *operands, **attrs)}), own, env, dtype=np.float64)
    return outputs["y"], left


def test_every_op_over_a_state_has_a_case() -> None:
    assert {op for op, *_ in CASES} | {"as_cache"} == {name for name, row in ops.OPS.items() if row.roles}


@pytest.mark.parametrize(("op", "operands", "attrs", "paged"), WAYS)
def test_each_segment_is_computed_alone(
    op: str, operands: tuple[Node, ...], attrs: dict[str, Any], paged: bool
) -> None:
    node = segmented(op, operands, attrs, paged)
    arrays = feeds(node)
    outputs, states = interp.run(Graph(outputs={"y": node}), arrays, ENV, dtype=np.float64)
    expected = {name: arrays[name].copy() for name in states}
    for number, (first, rows, past, slot, written) in enumerate(SEGMENTS_OF_CALL):
        if not rows:
            continue
        want, left = alone((op, operands, attrs), arrays, number, paged)
        if not op.endswith("kv_write"):
            np.testing.assert_array_equal(outputs["y"][first : first + rows], want)
        for name, new in left.items():
            if paged:
                used = slice(past, past + rows)  # of the others, pages that are not used are not written
                expected[name][:, places(TABLES[number])[used]] = new[:, used]
            else:
                expected[name][written if name.startswith("new") else slot] = new
    assert states.keys() == ({operands[-1].name} if attrs.get("aside") else {operands[0].name} - {"q"})
    for name, want in expected.items():
        np.testing.assert_array_equal(states[name], want)


@pytest.mark.parametrize(("op", "operands", "attrs"), PAGED)
def test_one_sequence_over_pages(op: str, operands: tuple[Node, ...], attrs: dict[str, Any]) -> None:
    """Without segments the page table has one axis; the values are those over a contiguous cache."""
    rows, past, table = 7, 125, np.array([3, 9, 0])
    node = ops.make(op, *operands, G.input("pages", [PAGES], I32), **attrs, page=PAGE)
    arrays = feeds(node)
    env = {**ENV, "PAST_SEQ": past}
    outputs, states = interp.run(Graph(outputs={"y": node}), {**arrays, "pages": table}, env, dtype=np.float64)
    own = {n.name: arrays[n.name][:, places(table)] if n.op == "state" else arrays[n.name] for n in operands}
    one = Graph(outputs={"y": ops.make(op, *operands, **attrs)})
    want, left = interp.run(one, own, {**env, "CTX": 3 * PAGE}, dtype=np.float64)
    if not op.endswith("kv_write"):
        np.testing.assert_array_equal(outputs["y"], want["y"])
    for name, new in left.items():
        arrays[name][:, places(table)[past : past + rows]] = new[:, past : past + rows]
        np.testing.assert_array_equal(states[name], arrays[name])
    for wrong in ([3, 9, -1], [3, 9, 10], [3, 9]):  # not a page, not one of this pool, too few
        with pytest.raises(GraphError, match="pages"):
            interp.run(Graph(outputs={"y": node}), {**arrays, "pages": np.array(wrong)}, {**env, "PAGES": len(wrong)})


@pytest.mark.parametrize(("op", "operands", "attrs", "paged"), WAYS)
def test_text_cost_and_verifier(op: str, operands: tuple[Node, ...], attrs: dict[str, Any], paged: bool) -> None:
    node = segmented(op, operands, attrs, paged)
    graph = Graph(outputs={"y": node})
    verify(graph)
    assert text.loads(str(graph)) == graph
    even = {**ENV, "SEQ": 8, "PAST_SEQ": 5}
    each = cost(ops.of_segment(node, 2), even)
    assert cost(node, even) == (4 * each[0], 4 * each[1])
    assert each[1] > 0


def test_what_does_not_fit() -> None:
    k, v = (G.state(n, [SLOTS, 2, CTX, 32]) for n in ("k", "v"))
    good, table = {**LENGTH, "segments": True}, G.input("segments", [SEGMENTS, 4], I32)
    for operands in (
        (Q, k, v),  # no segments
        (Q, k, v, G.input("three", [SEGMENTS, 3], I32)),
        (Q, k, v, G.input("floats", [SEGMENTS, 4])),
        (Q, k, G.state("few", [3, 2, CTX, 32]), table),  # caches of different slots
        (Q, G.state("a", [2, CTX, 32]), G.state("b", [2, CTX, 32]), table),  # without slots
        (Q, k, v, G.input("bias", [SEQ, 1, PAST_SEQ + SEQ]), table),
    ):
        with pytest.raises(ShapeError):
            ops.make("attention", *operands, **good)
    with pytest.raises(ShapeError):  # segments, but not said what for
        ops.make("attention", Q, k, v, table, scale=1.0)
    plain = Q, G.state("a", [2, CTX, 32]), G.state("b", [2, CTX, 32])
    for pages in (G.input("floats", [PAGES]), G.input("tables", [SEGMENTS, PAGES], I32), Q):
        with pytest.raises(ShapeError, match="page table"):
            ops.make("attention", *plain, pages, **LENGTH, page=PAGE)
    with pytest.raises(ShapeError, match="ring"):
        ops.make("kv_write", plain[1], K, G.input("pages", [PAGES], I32), wrap=True, page=PAGE)
    with pytest.raises(ShapeError, match="5"):  # where the new state goes
        after = G.state("new", [SLOTS, 3, 8])
        ops.make("causal_conv", G.state("rows", [SLOTS, 3, 8]), ANGLES, TAPS, after, table, aside=True, segments=True)


@pytest.mark.parametrize("mask", [{"causal": False}, {"around": True, "window": 2}, {}])
def test_plain_keys_and_values_of_segments_are_those_of_each_alone(mask: dict[str, Any]) -> None:
    """A segment's column `slot` says where its first key lies in the place that all of them share."""
    graph = Graph()
    q, k, v = (graph.input(name, [SEQ, heads, 16]) for name, heads in (("q", 4), ("k", 2), ("v", 2)))
    graph.output("y", ops.attention(q, k, v, scale=0.3, **mask))
    table = np.array([[4, 3, 0, 32], [0, 0, 0, 0], [0, 1, 0, 16], [1, 3, 0, 0]])
    rng = np.random.default_rng(3)
    given = {name: rng.standard_normal((7, heads, 16)) for name, heads in (("q", 4), ("k", 2), ("v", 2))}
    batched = segments(graph, Options(seq=(1, 8), segments=True))
    env = {"SEQ": 7, "SEGMENTS": 4, "CTX": 48, "SLOTS": 1, "PAST_SEQ": 0}
    found = interp.run(batched, {**given, "segments": table}, env, dtype=np.float64)[0]["y"]
    for first, rows, *_ in table:
        if rows:
            own = {name: array[first : first + rows] for name, array in given.items()}
            alone = interp.run(graph, own, {"SEQ": int(rows), "PAST_SEQ": 0}, dtype=np.float64)[0]["y"]
            np.testing.assert_array_equal(found[first : first + rows], alone)
