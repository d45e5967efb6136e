"""The verifier: re-derives every shape and checks what is legal in each phase. It runs after every pass."""

from __future__ import annotations

from rlx.errors import GraphError, RlxError
from rlx.ir import ops
from rlx.ir.dims import symbols
from rlx.ir.graph import LEAVES, Graph, Node

WRITES = ("kv_write", "rope_kv_write")


def verify(graph: Graph) -> None:
    """Raises `GraphError` naming the first node that breaks a rule.

    Rules: there are outputs; leaf names are unique; every node's shape, dtype and attributes are what the op table
    derives; constants are weights with the value's shape; a state is written at most once and its old value is not
    read beside the write; once bounds are set every symbol has them.
    """
    if not graph.outputs:
        raise GraphError("the graph has no outputs", where=f"graph {graph.name!r}", hint="Name one with Graph.output.")
    nodes = graph.nodes()
    _check_leaves(graph, nodes)
    for node in nodes:
        _check_node(node)
    _check_states(graph)
    if graph.bounds:
        _check_bounds(graph, nodes)


def _check_leaves(graph: Graph, nodes: list[Node]) -> None:
    seen: dict[str, Node] = {}
    for node in nodes:
        if node.op in LEAVES and seen.setdefault(node.name, node) is not node:
            raise GraphError(f"two leaves share this name: {seen[node.name]!r} and {node!r}", where=node.name)
    for name, value in graph.constants.items():
        if name in seen and seen[name].shape != value.shape:
            raise GraphError(
                f"the value has shape {list(value.shape)}, the weight {list(seen[name].shape)}", where=name
            )


def _check_node(node: Node) -> None:
    try:
        again = ops.rebuild(node, node.inputs)
    except RlxError as error:
        raise GraphError(f"does not verify: {error}", where=repr(node)) from error
    if again is not node:
        raise GraphError(f"its shape rule gives {again!r}", where=repr(node))


def _check_states(graph: Graph) -> None:
    for node, users in graph.users().items():
        if node.op == "state":
            writes = [u for u in users if u.op in WRITES]
            if len(writes) > 1 or (writes and len(users) > 1):
                raise GraphError(
                    f"{len(users)} readers, {len(writes)} of them writes", where=repr(node),
                    hint="A state is updated in place: write it once and read the result of the write.",
                )  # fmt: skip


def _check_bounds(graph: Graph, nodes: list[Node]) -> None:
    for node in nodes:
        for dim in node.shape:
            unbound = symbols(dim) - graph.bounds.keys()
            if unbound:
                raise GraphError(f"no bounds for {', '.join(sorted(unbound))}", where=repr(node))
