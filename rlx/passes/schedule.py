"""Schedule: orders the nodes into parallel regions, with a barrier after each.

A node goes into the first region after those of its operands. So independent nodes, such as Q, K and V, share a region,
and workers share its units. Regions that do the same work on other buffers, as in equal layers, have equal signatures.
Codegen makes one function for all of them.

Small ops between two linears, such as norms and activation quantization, have no region of their own. With one row,
one worker would compute them and all others would wait. With a few rows, sharing them costs more than it saves. They
are the prologue of the region that reads them: every worker computes them for itself before its first units. A value
that later regions read too is also computed once, as a unit of that region.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlx.errors import GraphError
from rlx.ir.costs import cost
from rlx.ir.dims import Bounds, symbols
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.ir.op_table import OPS
from rlx.ir.segments import is_segmented
from rlx.passes.capabilities import Capabilities
from rlx.passes.options import Options
from rlx.passes.program import Program, Region, is_work, maker, root
from rlx.passes.report import SILENT, Log


def schedule(graph: Graph, options: Options | None = None, log: Log = SILENT) -> Program:
    """The program whose regions are the levels of the data-flow graph, in order."""
    options = options or Options()
    nodes, names = graph.nodes(), graph.names()
    prologues = "prologue" in options.fusions
    able = options.capabilities
    refusals = {n: shared_because(n, graph.bounds, able) for n in nodes if OPS[n.op].in_prologue or _own_row(n, able)}
    replicated = {n for n, reason in refusals.items() if prologues and not reason}
    for node, reason in refusals.items():
        if node not in replicated:
            log.missed("prologue", names[node], reason or 'the group "prologue" is off')
    level = _levels(nodes, replicated)
    shared, private = _places(graph, level, replicated)
    depth = max((level[n] for n in shared), default=-1) + 1
    regions, before = ([[n for n in some if level[n] == i] for i in range(depth)] for some in (shared, private))
    load = tuple(n for n in nodes if n.op == "pack")
    for node in private:
        log.done("prologue", names[node], "each worker computes it" + (", and a region" if node in shared else ""))
    parallel, own = (tuple(map(tuple, some)) for some in (regions, before))
    exact = options.precision == "exact"
    program = Program(graph, parallel, own, load, deterministic=options.deterministic, exact=exact)
    log.fact("regions", depth)
    log.fact(
        "distinct regions", len({*zip(*(map(signature, p) for p in (program.prologues, program.regions)), strict=True)})
    )
    return program


def shared_because(node: Node, limits: Bounds, capabilities: Capabilities) -> str:
    """Why a node that may be in a prologue is not computed by every worker; empty if it may be."""
    if OPS[node.op].writes:
        return ""
    if node.op == "embedding" and not capabilities.own_tables:
        return "each part of the table is read in its place"
    used = {s for n in (node, *node.inputs) for d in n.shape for s in symbols(d)}
    if not used <= limits.keys():
        return f"{', '.join(sorted(used - limits.keys()))} has no bounds"
    most = sum(cost(node, {s: limits[s][1] for s in used}))
    limit = capabilities.own_cost_rows if used else capabilities.own_cost
    return "" if most <= limit else f"costs up to {most:,}, the limit is {limit:,}"


def _own_row(node: Node, capabilities: Capabilities) -> bool:
    """Whether every worker that reads a cache may write the one row of a step into it."""
    return capabilities.own_writes and OPS[node.op].writes and node.inputs[1].shape[0] == 1 and not is_segmented(node)


def _levels(nodes: Sequence[Node], replicated: set[Node]) -> dict[Node, int]:
    """The region of each node that a step computes. A node of a prologue can be read in its own region."""
    ready: dict[Node, int] = {}  # the first region that can read a value
    level: dict[Node, int] = {}
    for node in nodes:
        away = OPS[node.op].elsewhere  # it reads what is in memory before its region
        at = max((ready[i] + (away and maker(i) in replicated) for i in node.inputs), default=0)
        if is_work(node):
            level[node] = at
        ready[node] = at + (is_work(node) and node not in replicated)
    return level


def _places(graph: Graph, level: dict[Node, int], replicated: set[Node]) -> tuple[list[Node], list[Node]]:
    """The nodes of regions, and the nodes of prologues. A node that its own and later regions read is both."""
    shared = {maker(n) for n in graph.outputs.values()} | (level.keys() - replicated)
    private: set[Node] = set()
    for node in reversed(level):  # readers before what they read
        if OPS[node.op].writes and node not in private:
            shared.add(node)
        if node in shared or node in private:
            for operand in map(maker, node.inputs):
                if operand in replicated:
                    (private if level[operand] == level[node] else shared).add(operand)
    return [n for n in level if n in shared], [n for n in level if n in private]


def signature(region: Region) -> tuple[Any, ...]:
    """Equal for regions that differ only in which buffers they touch."""
    return tuple((n.op, n.attrs, n.shape, n.dtype, tuple(_operand(i) for i in n.inputs)) for n in region)


def _operand(node: Node) -> tuple[Any, ...]:
    layout = dict(root(node).attrs).get("layout") if root(node).op in ("state", "pack") else None
    return node.shape, node.dtype, layout


def last_use(program: Program) -> dict[Node, int]:
    """Root of a buffer -> the last region that uses it. Inputs and outputs are kept to the end of the step."""
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
    """Checks that every operand is computed in an earlier region or in the prologue of its own.

    Raises:
        GraphError: a node would run before an operand.
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
    waiting = [i for i in node.inputs if is_work(maker(i)) and maker(i) not in done]
    if waiting:
        raise GraphError(f"runs before its operand {waiting[0]!r}", where=repr(node))
