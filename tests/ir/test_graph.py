"""Graphs: equal nodes are one object, in every thread; names, order, readers. A node is no array, and says so."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import toy
from hypothesis import given

from ir.random_graphs import graphs
from rlx.errors import GraphError
from rlx.ir import ops
from rlx.ir.dims import SEQ
from rlx.ir.dtypes import Q8_0
from rlx.ir.graph import Graph
from rlx.ir.node import Node


def rows(g: Graph, name: str = "x") -> Node:
    return g.input(name, [SEQ, 64])


def test_equal_nodes_are_one_object() -> None:
    a, b = Graph("a"), Graph("b")
    assert rows(a) is rows(b)
    assert ops.silu(rows(a)) is ops.silu(rows(b))
    assert ops.linear(rows(a), a.weight("w", [32, 64], Q8_0)) is ops.linear(rows(b), b.weight("w", [32, 64], Q8_0))


def test_any_difference_makes_another_node() -> None:
    g = Graph()
    x = rows(g)
    nodes = [x, g.input("y", [SEQ, 64]), g.input("x", [SEQ, 32]), g.weight("x", [SEQ, 64]), ops.silu(x), ops.tanh(x)]
    nodes += [ops.scale(x, 1.0), ops.scale(x, 2.0), ops.add(x, nodes[1]), ops.add(nodes[1], x), ops.add(x, x)]
    assert len(set(map(id, nodes))) == len(nodes)


@pytest.fixture
def hasty_threads() -> Iterator[None]:
    """Threads take turns after almost every instruction."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("hasty_threads")
def test_interning_across_threads() -> None:
    """Threads that make the same nodes at the same time get the same objects."""
    start, chains = threading.Barrier(4), [[] for _ in range(4)]

    def work(chain: list[Node]) -> None:
        node = Graph().input("threads", [SEQ, 64])
        start.wait()
        for i in range(300):
            chain.append(node := ops.scale(node, float(i)))

    threads = [threading.Thread(target=work, args=(chain,)) for chain in chains]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert all(a is b for chain in chains[1:] for a, b in zip(chain, chains[0], strict=True))


def test_nodes_that_nothing_holds_are_freed() -> None:
    node = ops.neg(Graph().input("only here", [7, 7]))
    alive = weakref.ref(node)
    del node
    gc.collect()
    assert alive() is None


def test_only_what_an_output_reaches_is_part_of_the_graph() -> None:
    g = Graph()
    x = rows(g)
    dead = ops.exp(x)
    g.output("y", ops.silu(x))
    assert dead not in g.nodes()
    assert g.leaves("input") == {"x": x} and g.leaves("weight") == {}


def test_nodes_and_texts_follow_changes() -> None:
    g = Graph()
    x = rows(g)
    g.output("out", ops.silu(x))
    g.nodes().clear()
    assert len(g.nodes()) == 2 and "tanh" not in g.canonical() + str(g)
    g.output("more", ops.tanh(x))
    assert len(g.nodes()) == 3 and "tanh" in g.canonical() and "tanh" in str(g)
    g.phase = "decode"
    assert "decode" in g.canonical() and "decode" in str(g)


@given(graphs())
def test_operands_come_before_users_and_each_node_once(g: Graph) -> None:
    nodes = g.nodes()
    place = {n: i for i, n in enumerate(nodes)}
    assert len(place) == len(nodes)
    assert all(place[i] < place[n] for n in nodes for i in n.inputs)
    assert set(g.outputs.values()) <= place.keys()


def test_map_rebuilds_bottom_up_and_keeps_the_rest() -> None:
    g = toy.build(toy.FAMILIES["llama"])
    same = g.map(ops.rebuild, phase="prefill")
    assert same.outputs == g.outputs and same.phase == "prefill" and g.phase == "graph"
    changes = {"rms_norm": {"eps": 1e-3}}
    other = g.map(lambda old, inputs: ops.rebuild(old, inputs, **changes.get(old.op, {})))
    assert {n["eps"] for n in other.nodes() if n.op == "rms_norm"} == {1e-3}
    assert len(other.nodes()) == len(g.nodes())


def test_graphs_differ_by_bounds_and_phase() -> None:
    g = toy.build(toy.FAMILIES["llama"])
    assert g.replace(phase="decode") != g
    assert g.replace(bounds={"SEQ": (1, 2)}) != g
    assert g.replace() == g
    assert g != "graph"


# ----------------------------------------------------------------------------------------------- a node is no array


X = Graph("tiny").input("x", [SEQ, 32])


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (lambda x: np.exp(x), r"np\.exp needs numbers.*Use rlx\.ops\.exp"),
        (lambda x: np.sinh(x), r"np\.sinh needs numbers.*Use a function of rlx\.ops"),
        (lambda x: np.maximum(x, 0), r"np\.maximum needs numbers.*Use rlx\.ops\.maximum"),
        (lambda x: np.add.reduce(x), r"np\.add needs numbers"),
        (lambda x: x > 0, "a comparison needs numbers"),
        (lambda x: x <= x, "a comparison needs numbers"),
        (lambda x: x > 1, "a comparison needs numbers"),
        (lambda x: np.float32(1) < x, "needs numbers"),
    ],
)
def test_what_needs_values_is_refused_by_name(use: Callable[[Any], Any], said: str) -> None:
    with pytest.raises(GraphError, match=said):
        use(X)
