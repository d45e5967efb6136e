"""The verifier: recomputes every shape and checks what is legal in each phase. It runs after every pass."""

from __future__ import annotations

from weakref import WeakSet

from rlx.errors import GraphError, RlxError
from rlx.ir import ops
from rlx.ir.dims import symbols
from rlx.ir.dtypes import F32
from rlx.ir.graph import Graph
from rlx.ir.infer import is_cache
from rlx.ir.node import LEAVES, Node

_verified: WeakSet[Node] = WeakSet()  # nodes are immutable, so each is checked once


def verify(graph: Graph) -> None:
    """Raises `GraphError` naming the first node that breaks a rule.

    Rules: there are outputs; leaf names are unique; every node's shape, dtype and attributes agree with the op table;
    attention reads caches; constants are f32 weights with the value's shape; a state is written at most once, and its
    old value is not read beside the write; after specialization every symbol has bounds.
    """
    if not graph.outputs:
        raise GraphError("the graph has no outputs", where=f"graph {graph.name!r}", hint="Name one with Graph.output.")
    nodes = graph.nodes()
    _check_leaves(graph, nodes)
    for node in nodes:
        _check_node(node)
    _check_states(graph)
    if graph.phase != "graph":
        _check_bounds(graph, nodes)


def _check_leaves(graph: Graph, nodes: list[Node]) -> None:
    seen: dict[str, Node] = {}
    for node in nodes:
        if node.op in LEAVES and seen.setdefault(node.name, node) is not node:
            raise GraphError(f"two leaves share this name: {seen[node.name]!r} and {node!r}", where=node.name)
    for name, value in graph.constants.items():
        if name in seen and (seen[name].op, seen[name].shape, seen[name].dtype) != ("weight", value.shape, F32):
            raise GraphError(f"the constant is f32{list(value.shape)}, its leaf is {seen[name]!r}", where=name)


def _check_node(node: Node) -> None:
    if node in _verified:
        return
    try:
        again = ops.derive(node)
    except RlxError as error:
        raise GraphError(f"does not verify: {error}", where=repr(node)) from error
    if again is not node:
        raise GraphError(f"its shape rule gives {again!r}", where=repr(node))
    if node.op == "attention" and not all(is_cache(n) for n in node.inputs[1:3]):
        hint = "ops.attention brings plain keys and values into the form of a cache: see ops.as_cache."
        raise GraphError("its keys or values are no cache", where=repr(node), hint=hint)
    _verified.add(node)


def _check_states(graph: Graph) -> None:
    readers = graph.readers()
    for node, users in graph.users().items():
        if node.op == "state":
            writes = [u for u in users if ops.OPS[u.op].writes]
            writes += [u for u in users if ops.OPS[u.op].effect and ops.updated(u) is node]
            if writes and readers[node] > 1:
                raise GraphError(
                    f"{readers[node]} readers, {len(writes)} of them writes", where=repr(node),
                    hint="A state is updated in place: write it once and read the result of the write.",
                )  # fmt: skip


def _check_bounds(graph: Graph, nodes: list[Node]) -> None:
    for node in nodes:
        for dim in (*node.shape, *(v for _, v in node.attrs)):
            unbound = ", ".join(sorted(symbols(dim) - graph.bounds.keys()))
            if unbound:
                raise GraphError(f"no bounds for {unbound}", where=repr(node), hint="Name them in Options.symbols.")
