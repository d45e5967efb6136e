"""Pages: full caches become pools of pages that many sequences share, see `rlx.ir.pages`.

The ops over full caches get the page table as a further operand. It is a new input of the program, `pages` i32[PAGES].
Rings and recurrent states have a fixed size for each sequence, and no pages. This is one of the last passes over the
graph, so that no rewrite rule has to know about it.
"""

from __future__ import annotations

from rlx.ir import ops
from rlx.ir.dims import PAGES
from rlx.ir.dtypes import I32
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.ir.op_table import OPS
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
    """The states that hold every position of a sequence: those that are written without `wrap`."""
    written = {root(n): n["wrap"] for n in graph.nodes() if OPS[n.op].writes}
    return {state for state, wraps in written.items() if not wraps}


def _caches(node: Node) -> tuple[Node, ...]:
    return node.inputs[1:3] if node.op == "attention" else node.inputs[:1]
