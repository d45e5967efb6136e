"""The verifier: whole graphs pass, and each kind of broken graph is named. Broken nodes are forged with `intern`."""

from __future__ import annotations

import re
from typing import Any

import pytest
import toy
from hypothesis import given

from ir.random_graphs import graphs
from rlx.errors import GraphError
from rlx.ir import ops
from rlx.ir.dims import CTX, SEQ, symbol
from rlx.ir.dtypes import F16, F32, Q4_K, Q8_0, DType
from rlx.ir.graph import Graph
from rlx.ir.node import Node, intern
from rlx.ir.verify import verify

X = Graph().input("x", [SEQ, 64])
W = Graph().weight("w", [32, 64], Q8_0)


def forge(op: str, *inputs: Node, shape: Any = (SEQ, 64), dtype: DType = F32, **attrs: Any) -> Node:
    return intern(op, inputs, tuple(attrs.items()), shape, dtype)


def refused(graph: Graph, message: str) -> None:
    with pytest.raises(GraphError, match=re.escape(message)):
        verify(graph)


@given(graphs())
def test_graphs_that_the_builders_make_pass(graph: Graph) -> None:
    verify(graph)


@pytest.mark.parametrize("family", toy.FAMILIES)
def test_models_pass(family: str) -> None:
    verify(toy.build(toy.FAMILIES[family]))


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (forge("silu", X, shape=(SEQ, 32)), "<silu f32[SEQ, 32]>: its shape rule gives <silu f32[SEQ, 64]>"),
        (forge("silu", X, dtype=F16), "<silu f16[SEQ, 64]>: its shape rule gives <silu f32[SEQ, 64]>"),
        (forge("silu", X, W), "<silu f32[SEQ, 64]>: does not verify: silu: found operands"),
        (forge("silu"), "does not verify: silu: found operands none"),
        (forge("sillu", X), "does not verify: no op is called 'sillu'"),
        (forge("scale", X), "does not verify: scale: attribute by is missing"),
        (forge("neg", X, by=2.0), "does not verify: neg: unknown attribute by"),
        (forge("linear", X, W, shape=(SEQ, 32)), "its shape rule gives <linear f32[SEQ, 32]>"),  # defaults left out
        (forge("elementwise", X, expr=("neg", 1)), "1 is no expression over 1 operands"),
        (forge("reshape", X, shape=(SEQ, 4, 16)), "does not verify: reshape: attribute shape is missing"),
        (forge("input", name="n", shape=(SEQ, -1)), "dims must be positive"),
        (forge("weight", name="n", shape=(4, 64), dtype=Q4_K), "multiple of the 256-element blocks"),
        (forge("state", name="n"), "its shape rule gives"),  # the layout is missing
    ],
)
def test_a_forged_node_is_named(node: Node, message: str) -> None:
    refused(Graph(outputs={"y": node}), message)
    if node.shape == (SEQ, 64) and node.dtype is F32 and node.op not in ("input", "weight", "state"):
        refused(Graph(outputs={"y": ops.tanh(node)}), message)  # also where it is not the output itself


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Graph().input("n", [SEQ, 64]), Graph().weight("n", [64])),
        (Graph().weight("n", [64]), Graph().weight("n", [64, 64])),
        (Graph().weight("n", [64, 64], F16), Graph().weight("n", [64, 64])),
        (Graph().state("n", [64]), Graph().input("n", [64])),
    ],
)
def test_two_leaves_of_one_name(first: Node, second: Node) -> None:
    refused(Graph(outputs={"a": first, "b": second}), "n: two leaves share this name")


def cache(name: str = "cache") -> Node:
    return Graph().state(name, [2, CTX, 16], F16)


def heads(name: str) -> Node:
    return Graph().input(name, [SEQ, 2, 16])


Q = Graph().input("q", [SEQ, 4, 16])


def test_a_state_is_written_once() -> None:
    once = ops.kv_write(cache(), heads("a"))
    twice = ops.kv_write(cache(), heads("b"))
    verify(Graph(outputs={"a": once}))
    refused(Graph(outputs={"a": once, "b": twice}), '<state "cache" f16[2, CTX, 16]>: 2 readers, 2 of them writes')
    angles = Graph().input("angles", [SEQ, 16])
    turned = ops.make("rope_kv_write", cache(), heads("b"), angles, style="neox", dtype="f16")
    refused(Graph(outputs={"a": once, "b": turned}), "2 of them writes. A state is updated in place: write it once")


def test_the_old_value_of_a_state_is_not_read_beside_its_write() -> None:
    written = ops.kv_write(cache(), heads("a"))
    new = ops.attention(Q, written, written, scale=1.0)
    old = ops.attention(Q, cache(), cache("values"), scale=1.0)
    verify(Graph(outputs={"new": new}))
    verify(Graph(outputs={"old": old}))
    refused(Graph(outputs={"new": new, "old": old}), "2 readers, 1 of them writes")
    refused(Graph(outputs={"new": new, "cache": cache()}), "2 readers, 1 of them writes")


def steps_with_effect() -> list[Node]:
    """Nodes that update a state of their own in place."""
    g = Graph()
    x = g.input("x", [SEQ, 8])
    conv = ops.causal_conv(g.state("rows", [3, 8]), x, g.weight("taps", [8, 4]))
    q, v, gate = g.input("key", [SEQ, 2, 8]), g.input("v", [SEQ, 4, 16]), g.input("gate", [SEQ, 4])
    return [conv, ops.gated_delta(g.state("delta", [4, 8, 16]), q, q, v, gate, gate, scale=1.0)]


@pytest.mark.parametrize("node", steps_with_effect(), ids=lambda node: node.op)
def test_a_state_that_an_op_updates_has_no_other_reader(node: Node) -> None:
    state = node.inputs[0]
    verify(Graph(outputs={"y": node}))
    verify(Graph(outputs={"y": node, "z": ops.neg(node)}))  # its result has as many as there are
    refused(Graph(outputs={"y": node, "state": state}), f"{state!r}: 2 readers, 1 of them writes")
    after = Graph().state("after", state.shape)
    aside = ops.rebuild(node, (*node.inputs, after), aside=True)
    verify(Graph(outputs={"y": aside, "old": ops.neg(state)}))
    refused(Graph(outputs={"y": aside, "old": ops.neg(after)}), f"{after!r}: 2 readers, 1 of them writes")
    refused(
        Graph(outputs={"y": node, "old": ops.neg(state)}), "2 readers, 1 of them writes. A state is updated in place"
    )
    inputs = (state, *(Graph().input(f"other {i.name}", i.shape) for i in node.inputs[1:]))
    refused(Graph(outputs={"y": node, "z": ops.rebuild(node, inputs)}), "2 readers, 2 of them writes")


def test_once_specialized_every_symbol_has_bounds() -> None:
    batch = symbol("BATCH")
    node = ops.silu(Graph().input("x", [SEQ, batch]))
    bounds = {"SEQ": (1, 4), "BATCH": (1, 2)}
    verify(Graph(outputs={"y": node}))
    verify(Graph(outputs={"y": node}, phase="prefill", bounds=bounds))
    refused(Graph(outputs={"y": node}, phase="prefill", bounds={"SEQ": (1, 4)}), "no bounds for BATCH. Name them")
    refused(Graph(outputs={"y": node}, phase="decode"), "no bounds for SEQ")
