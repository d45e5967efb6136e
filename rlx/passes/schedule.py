"""Schedule: the order of work, as parallel regions with a barrier after each.

A node goes into the first region after everything it reads (and, for a state, after everything that wrote it), so
independent nodes such as Q, K and V share one region and its hand-out of work. Regions that do the same work on other
buffers - those of equal layers - have equal signatures, and codegen makes one function for all of them.

The little that lies between two linears, such as norms and prepared activations, has no region of its own. In decode it
would keep one worker busy and all others waiting; of a few rows it is so little that sharing it out costs more than it
saves. Instead it is the prologue of the region that reads it: every worker computes it for itself before its first
units there. What later regions read too is also one of that region's units of work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlx.errors import GraphError
from rlx.ir.costs import cost
from rlx.ir.dims import Bounds, symbols
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.passes.options import Options
from rlx.passes.program import Program, Region, is_work, root
from rlx.passes.report import SILENT, Log

#: Ops that may be in a prologue: free of effects, and of one row a single unit of work or a few small ones.
OWN = frozenset(
    "embedding rms_norm quantize rope elementwise softmax top_k take mix reduce_mean reduce_sum slice concat".split()
)
#: Floating-point operations and bytes moved, added up, of a node that every worker may compute for itself. A core does
#: so much in a few microseconds, and what it reads stays in its own cache.
OWN_COST = 1 << 18
#: The same for the most rows of a program of several. Workers could share them, so what it costs to repeat them must be
#: less than what a region costs.
OWN_COST_ROWS = 1 << 17


def schedule(graph: Graph, options: Options | None = None, log: Log = SILENT) -> Program:
    """Levels of the data-flow graph, in order."""
    nodes, names = graph.nodes(), graph.names()
    prologues = "prologue" in (options or Options()).fusions
    refusals = {n: _shared_because(n, graph.bounds) for n in nodes if n.op in OWN}
    own = {n for n, reason in refusals.items() if prologues and not reason}
    for node, reason in refusals.items():
        if node not in own:
            log.missed("prologue", names[node], reason or 'the group "prologue" is off')
    level = _levels(nodes, own)
    shared, private = _places(graph, level, own)
    depth = max((level[n] for n in shared), default=-1) + 1
    regions, before = ([[n for n in some if level[n] == i] for i in range(depth)] for some in (shared, private))
    load = tuple(n for n in nodes if n.op == "pack")
    for node in private:
        log.done("prologue", names[node], "each worker computes it" + (", and a region" if node in shared else ""))
    program = Program(graph, tuple(map(tuple, regions)), tuple(map(tuple, before)), load)
    log.fact("regions", depth)
    log.fact(
        "distinct regions", len({*zip(*(map(signature, p) for p in (program.prologues, program.regions)), strict=True)})
    )
    return program


def is_own(node: Node, limits: Bounds) -> bool:
    """Whether every worker may compute the node for itself, whatever values within their limits the symbols have."""
    return node.op in OWN and not _shared_because(node, limits)


def _shared_because(node: Node, limits: Bounds) -> str:
    """Why the workers share the work of a node of `OWN`; empty if each may do all of it."""
    used = {s for n in (node, *node.inputs) for d in n.shape for s in symbols(d)}
    if not used <= limits.keys():
        return f"{', '.join(sorted(used - limits.keys()))} has no bounds"
    most, limit = sum(cost(node, {s: limits[s][1] for s in used})), OWN_COST_ROWS if used else OWN_COST
    return "" if most <= limit else f"costs up to {most:,}, the limit is {limit:,}"


def _levels(nodes: Sequence[Node], own: set[Node]) -> dict[Node, int]:
    """Region of each node that is work: prologues do not push their readers into the next one."""
    ready: dict[Node, int] = {}  # the first region that can read a value
    level: dict[Node, int] = {}
    for node in nodes:
        at = max((ready[i] for i in node.inputs), default=0)
        if is_work(node):
            level[node] = at
        ready[node] = at + (is_work(node) and node not in own)
    return level


def _places(graph: Graph, level: dict[Node, int], own: set[Node]) -> tuple[list[Node], list[Node]]:
    """The nodes that are units of work, and those of prologues; a node that regions read now and later is both."""
    shared = {_maker(n) for n in graph.outputs.values()} | (level.keys() - own)
    private: set[Node] = set()
    for node in reversed(level):  # readers before what they read
        if node in shared or node in private:
            for operand in map(_maker, node.inputs):
                if operand in own:
                    (private if level[operand] == level[node] else shared).add(operand)
    return [n for n in level if n in shared], [n for n in level if n in private]


def signature(region: Region) -> tuple[Any, ...]:
    """Equal for regions that differ only in which buffers they touch."""
    return tuple((n.op, n.attrs, n.shape, n.dtype, tuple(_operand(i) for i in n.inputs)) for n in region)


def _operand(node: Node) -> tuple[Any, ...]:
    layout = dict(root(node).attrs).get("layout") if root(node).op in ("state", "pack") else None
    return node.shape, node.dtype, layout


def last_use(program: Program) -> dict[Node, int]:
    """Buffer root -> index of the last region that touches it; inputs and outputs are held to the end."""
    last: dict[Node, int] = {}
    for i, (prologue, region) in enumerate(zip(program.prologues, program.regions, strict=True)):
        for node in (*prologue, *region):
            for operand in node.inputs:
                if root(operand) not in prologue:
                    last[root(operand)] = i
        for node in region:
            last[root(node)] = i
    for node in (*program.graph.leaves("input").values(), *program.graph.outputs.values()):
        last[root(node)] = len(program.regions)
    return last


def verify_schedule(program: Program) -> None:
    """Every operand is made in an earlier region or before the units of this one, so the nodes of a region are
    independent. Raises `GraphError`.
    """
    done: set[Node] = set()
    for prologue, region in zip(program.prologues, program.regions, strict=True):
        here = set(done)
        for node in prologue:
            _check_operands(node, here)
            here.add(node)
        for node in region:
            _check_operands(node, here)
        done.update(region)


def _check_operands(node: Node, done: set[Node]) -> None:
    waiting = [i for i in node.inputs if is_work(_maker(i)) and _maker(i) not in done]
    if waiting:
        raise GraphError(f"runs before its operand {waiting[0]!r}", where=repr(node))


def _maker(node: Node) -> Node:
    return node if node.op != "reshape" else _maker(node.inputs[0])
