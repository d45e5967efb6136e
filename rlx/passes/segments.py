"""Pages and segments: what a program over a pool of caches lacks yet, see `rlx.ir.segments`.

Full caches become pools of pages that many sequences share. The ops over them get the page table as a further operand.
It is a new input of the program, `pages` i32[PAGES]. Rings and recurrent states have a fixed size for each sequence,
and no pages.

In a batch the rows of a call are cut into segments, each of one sequence. States get an axis of slots in front; those
with pages do not. Ops over states get the operand `segments`, a new input of the program, and page tables become one
row a segment. All other ops work row by row anyway.

These are the last passes over the graph, so that no rewrite rule has to know about it.
"""

from __future__ import annotations

from rlx.errors import GraphError
from rlx.ir import dims, ops
from rlx.ir.dims import CTX, PAGES, SEGMENTS, SEQ, SLOTS
from rlx.ir.dtypes import I32
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.ir.op_table import OPS
from rlx.ir.segments import SLOT, SLOT_WRITTEN
from rlx.passes.options import Options
from rlx.passes.program import root
from rlx.passes.report import SILENT, Log

PAGES_INPUT = "pages"


def pages(graph: Graph, options: Options, log: Log = SILENT) -> Graph:
    """The paged form of a graph, if `Options.paged` is set."""
    if not options.paged:
        log.remark("caches are contiguous")
        return graph
    paged, names = full_caches(graph), graph.names()
    table = ops.leaf("input", PAGES_INPUT, (PAGES,), I32)

    def visit(old: Node, inputs: tuple[Node, ...]) -> Node:
        if ("page", 0) not in old.attrs or not all(root(i) in paged for i in _caches(old)):
            return ops.rebuild(old, inputs)
        log.done("pages", names[old], "positions are found by the sequence's page table")
        return ops.rebuild(old, (*inputs, table), page=options.capabilities.layouts.page)

    bounds = {**graph.bounds, **({"PAGES": options.bounds["PAGES"]} if paged else {})}
    return graph.map(visit, bounds=bounds)


def full_caches(graph: Graph) -> set[Node]:
    """The states that hold every position of a sequence: those that are written without `wrap`.

    Of caches that are only read, which another graph writes, those with CTX positions.
    """
    nodes = graph.nodes()
    written = {root(n): n["wrap"] for n in nodes if OPS[n.op].writes}
    read = {root(i) for n in nodes if n.op == "attention" for i in n.inputs[1:3]} - written.keys()
    only_read = {state for state in read if state.op == "state" and state.shape[1] == CTX}
    return {state for state, wraps in written.items() if not wraps} | only_read


def _caches(node: Node) -> tuple[Node, ...]:
    return node.inputs[1:3] if node.op == "attention" else node.inputs[:1]


SEGMENTS_INPUT = "segments"


def segments(graph: Graph, options: Options, log: Log = SILENT) -> Graph:
    """The batched form of a graph whose rows are the symbol SEQ.

    Raises:
        GraphError: a node needs to know where its row stands in a sequence, and is none of the ops that can.
    """
    nodes, names = graph.nodes(), graph.names()
    aside = any(ops.OPS[node.op].effect and node["aside"] for node in nodes)
    columns = 1 + (SLOT_WRITTEN if aside else SLOT)
    table = ops.leaf("input", SEGMENTS_INPUT, (SEGMENTS, columns), I32)
    pooled = {root(node) for node in nodes if ops.OPS[node.op].writes and node["page"]}

    def visit(old: Node, inputs: tuple[Node, ...]) -> Node:
        if old.op == "state" and old not in pooled and not _has_rows(old):
            log.done("slots", names[old], "a state for each sequence")
            return ops.rebuild(old, (), shape=(SLOTS, *old.shape))
        if old.op == "input" and old.name == PAGES_INPUT and pooled:
            return ops.rebuild(old, (), shape=(SEGMENTS, PAGES))
        if ops.OPS[old.op].roles:
            room = {"room": CTX - SEQ} if old.op == "as_cache" else {}  # the place of all segments' keys
            log.done("segments", names[old], "each segment works on the states of its own sequence")
            return ops.make(old.op, *inputs, table, **{**dict(old.attrs), **room, "segments": True})
        _check(old)
        return ops.rebuild(old, inputs)

    names_used = {"SEGMENTS", "SLOTS", "PAST_SEQ", "CTX"}
    bounds = {**graph.bounds, **{symbol: options.bounds[symbol] for symbol in names_used}}
    return graph.map(visit, bounds=bounds)


def _check(node: Node) -> None:
    depends = any("PAST_SEQ" in dims.symbols(value) for _, value in node.attrs if isinstance(value, dims.Dim))
    reads = any(i.op == "state" and not _has_rows(i) for i in node.inputs)
    if depends or reads or node.op == "last_row":
        known = ", ".join(name for name, row in ops.OPS.items() if row.roles)
        hint = f"Rows of a batch belong to several sequences for {known} only."
        raise GraphError("mixes the rows of a sequence", where=repr(node), hint=hint)


def _has_rows(state: Node) -> bool:
    """Whether a state keeps values of a call's rows between two calls, which belong to no slot."""
    return state.shape[:1] == (SEQ,)
