"""Graphs: equal nodes are one object, in every thread; names, order, readers."""

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
from rlx.errors import GraphError, ShapeError
from rlx.ir import ops
from rlx.ir.dims import CTX, PAST_SEQ, SEQ
from rlx.ir.dtypes import F32, Q8_0
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


def test_two_builds_of_one_model_are_equal_and_share_every_node() -> None:
    first, second = (toy.build(toy.FAMILIES["gemma"]) for _ in range(2))
    assert first == second
    assert [*map(id, first.nodes())] == [*map(id, second.nodes())]
    assert first != toy.build(toy.FAMILIES["gemma"].but(softcap=21.0))


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


@given(graphs())
def test_operands_come_before_users_and_each_node_once(g: Graph) -> None:
    nodes = g.nodes()
    place = {n: i for i, n in enumerate(nodes)}
    assert len(place) == len(nodes)
    assert all(place[i] < place[n] for n in nodes for i in n.inputs)
    assert set(g.outputs.values()) <= place.keys()


@given(graphs())
def test_readers_and_users_agree(g: Graph) -> None:
    users, readers = g.users(), g.readers()
    assert users.keys() == readers.keys() == set(g.nodes())
    for node, count in readers.items():
        assert count == len(users[node]) + list(g.outputs.values()).count(node)
        assert len(users[node]) == sum(u.inputs.count(node) for u in set(users[node]))


def test_order_needs_no_recursion() -> None:
    g = Graph()
    x = rows(g)
    for i in range(5000):
        x = ops.scale(x, float(i))
    g.output("y", x)
    assert len(g.nodes()) == 5001


def test_map_rebuilds_bottom_up_and_keeps_the_rest() -> None:
    g = toy.build(toy.FAMILIES["llama"])
    same = g.map(ops.rebuild, phase="prefill")
    assert same.outputs == g.outputs and same.phase == "prefill" and g.phase == "graph"
    changes = {"rms_norm": {"eps": 1e-3}}
    other = g.map(lambda old, inputs: ops.rebuild(old, inputs, **changes.get(old.op, {})))
    assert {n["eps"] for n in other.nodes() if n.op == "rms_norm"} == {1e-3}
    assert len(other.nodes()) == len(g.nodes())


def test_symbols_of_shapes_and_attributes() -> None:
    g = toy.build(toy.FAMILIES["llama"])
    assert g.symbols == ["CTX", "PAST_SEQ", "SEQ"]
    h = Graph()
    h.output("y", ops.kv_write(h.state("s", [2, 16, 8]), h.input("x", [1, 2, 8]), at=PAST_SEQ))
    assert h.symbols == ["PAST_SEQ"]


def test_constants_are_float32_weights() -> None:
    g = Graph()
    node = g.constant("c", np.arange(4))
    assert (node.op, node.shape, node.dtype) == ("weight", (4,), F32)
    assert g.constants["c"].dtype == np.float32
    assert g.constant("c", np.arange(4)) is node
    with pytest.raises(GraphError, match="constant 'c': two different constants have this name"):
        g.constant("c", np.zeros(4))


def test_output_names_are_unique() -> None:
    g = Graph()
    g.output("y", rows(g))
    with pytest.raises(GraphError, match=r"output 'y': an output of this name exists\. Choose another name"):
        g.output("y", rows(g))


def test_nodes_print_what_they_are() -> None:
    g = Graph()
    w = g.weight("w", [32, 64], Q8_0)
    assert repr(w) == '<weight "w" q8_0[32, 64]>'
    y = ops.linear(rows(g), w)
    assert repr(y) == "<linear f32[SEQ, 32]>"
    with pytest.raises(KeyError, match="linear has no attribute eps"):
        y["eps"]


def test_operators_are_the_builders() -> None:
    g = Graph()
    x, y = rows(g), rows(g, "y")
    assert (x + y, x * y, x - y) == (ops.add(x, y), ops.mul(x, y), ops.sub(x, y))


def test_graphs_differ_by_bounds_and_phase() -> None:
    g = toy.build(toy.FAMILIES["llama"])
    assert g.replace(phase="decode") != g
    assert g.replace(bounds={"SEQ": (1, 2)}) != g
    assert g.replace() == g
    assert g != "graph"


def test_a_state_keeps_its_layout_when_rebuilt() -> None:
    tiled = ops.rebuild(Graph().state("k", [2, CTX, 16]), (), layout="tiles")
    assert tiled["layout"] == "tiles"
    assert ops.rebuild(tiled, (), shape=(2, 32, 16))["layout"] == "tiles"


@pytest.mark.parametrize("dim", [1.5, "2 SEQ", "", True, None, 0, -1])
def test_what_is_no_dim_is_refused(dim: Any) -> None:
    with pytest.raises(ShapeError, match="input 'x': "):
        Graph().input("x", [dim, 64])


def test_integers_of_numpy_are_dims() -> None:
    assert Graph().weight("w", [np.int64(32), 64]) is Graph().weight("w", [32, 64])


@pytest.mark.parametrize("dtype", ["f33", np.complex64, int, None])
def test_what_is_no_dtype_is_refused(dtype: Any) -> None:
    with pytest.raises(ShapeError, match=r"weight 'w': .* is not a dtype\. Give one of rlx\.dtypes"):
        Graph().weight("w", [64], dtype)


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x + np.zeros(64),
        lambda x: np.zeros(64) - x,
        lambda x: ops.linear(x, np.zeros((32, 64), np.float32)),
        lambda x: ops.silu(2),
    ],
)
def test_operands_that_are_no_nodes_are_refused(use: Callable[[Any], Node]) -> None:
    with pytest.raises(ShapeError, match=r"expected nodes of a graph, found (int|ndarray)\. Graph\.weight and"):
        use(rows(Graph()))


def test_an_output_that_is_no_node_is_refused() -> None:
    with pytest.raises(GraphError, match="output 'y': expected a node, found ndarray"):
        Graph().output("y", np.zeros(3))  # type: ignore[arg-type]


def test_a_graph_says_what_it_is() -> None:
    g = Graph("mlp")
    assert repr(g) == "<Graph mlp: graph, outputs none>"
    g.output("y", rows(g))
    assert repr(g) == "<Graph mlp: graph, outputs y>"
