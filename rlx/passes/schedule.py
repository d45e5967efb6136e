"""Schedule: the order of work, as parallel regions with a barrier after each.

A node goes into the first region after everything it reads (and, for a state, after everything that wrote it), so
independent nodes such as Q, K and V share one region and its hand-out of work. Regions that do the same work on other
buffers - those of equal layers - have equal signatures, and codegen makes one function for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlx.errors import GraphError
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.passes.program import Program, Region, is_work, root


def schedule(graph: Graph) -> Program:
    """Levels of the data-flow graph, in order."""
    nodes = graph.nodes()
    level: dict[Node, int] = {}
    for node in nodes:
        after = [level[i] for i in node.inputs]
        level[node] = max(after, default=-1) + is_work(node) if after else -1
    depth = max((level[n] for n in nodes), default=-1) + 1
    regions: list[list[Node]] = [[] for _ in range(depth)]
    for node in filter(is_work, nodes):
        regions[level[node]].append(node)
    return Program(graph, tuple(map(tuple, regions)), tuple(n for n in nodes if n.op == "pack"))


def signature(region: Region) -> tuple[Any, ...]:
    """Equal for regions that differ only in which buffers they touch."""
    return tuple((n.op, n.attrs, n.shape, n.dtype, tuple(_operand(i) for i in n.inputs)) for n in region)


def _operand(node: Node) -> tuple[Any, ...]:
    layout = dict(root(node).attrs).get("layout") if root(node).op in ("state", "pack") else None
    return node.shape, node.dtype, layout


def last_use(program: Program) -> dict[Node, int]:
    """Buffer root -> index of the last region that touches it; inputs and outputs are held to the end."""
    last: dict[Node, int] = {}
    for i, region in enumerate(program.regions):
        for node in region:
            for operand in (node, *node.inputs):
                last[root(operand)] = i
    for node in (*program.graph.leaves("input").values(), *program.graph.outputs.values()):
        last[root(node)] = len(program.regions)
    return last


def verify_schedule(regions: Sequence[Region]) -> None:
    """Every operand is made in an earlier region, so the nodes of one are independent. Raises `GraphError`."""
    done: set[Node] = set()
    for region in regions:
        for node in region:
            waiting = [i for i in node.inputs if is_work(_maker(i)) and _maker(i) not in done]
            if waiting:
                raise GraphError(f"runs before its operand {waiting[0]!r}", where=repr(node))
        done.update(region)


def _maker(node: Node) -> Node:
    return node if node.op != "reshape" else _maker(node.inputs[0])
