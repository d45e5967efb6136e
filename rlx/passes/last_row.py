"""Last row: a prefill computes the logits of its last row only.

The pass starts at the outputs and goes towards the inputs. If only the last row of a row-wise op is read, the op gets
only the last rows of its operands. This passes the head, the final norm, and the feed-forward block and attention of
the last layer. It stops at the residual stream, because the cache writes need all of its rows.

The pass runs before `specialize`, while the number of rows is the symbol SEQ, so no other dim can be mistaken for it.
"""

from __future__ import annotations

from rlx.ir import ops
from rlx.ir.dims import SEQ
from rlx.ir.graph import Graph
from rlx.ir.node import LEAVES, Node
from rlx.passes.options import Options
from rlx.passes.report import SILENT, Log


def last_row(graph: Graph, options: Options, log: Log = SILENT) -> Graph:
    """Reduces every output of SEQ rows to its last row. Outputs in `Options.whole` keep all rows, and with
    `Options.all_rows` every output does.

    Without "last_row" in `Options.passes`, only the outputs are reduced, and all ops compute all rows.
    """
    if options.all_rows or options.seq[1] == 1:
        log.remark("all rows are kept" if options.all_rows else "a call has one row")
        return graph
    names = graph.names()
    whole = graph.outputs.keys() & set(options.whole)
    early = "last_row" in options.passes
    narrow = _narrow(graph, {graph.outputs[name] for name in whole}) if early else set[Node]()
    log.fact("values with one row", len(narrow))
    if not early:
        log.remark("left out by the options: only outputs are reduced")
    for name in sorted(whole):
        log.missed("last-row", names[graph.outputs[name]], "every row of this output is needed")

    def row(old: Node, new: Node) -> Node:
        if not _has_rows(old) or old in narrow:
            return new
        log.done("last-row", names[old], "its last row is taken; other readers need all rows")
        return ops.last_row(new)

    def visit(old: Node, inputs: tuple[Node, ...]) -> Node:
        if old.op == "last_row":
            return row(old.inputs[0], inputs[0])
        if old not in narrow:
            return ops.rebuild(old, inputs)
        if not _moves(old):
            return ops.last_row(ops.rebuild(old, inputs))
        rows = [row(o, n) for o, n in zip(old.inputs, inputs, strict=True)]
        return ops.rebuild(old, rows, **({"shape": (1, *old.shape[1:])} if old.op == "reshape" else {}))

    after = graph.map(visit)
    new = after.outputs
    return after.replace(outputs={k: new[k] if k in whole else row(n, new[k]) for k, n in graph.outputs.items()})


def _narrow(graph: Graph, whole: set[Node]) -> set[Node]:
    """The values of SEQ rows of which only the last row is read. All rows of `whole` are read."""
    nodes, full = graph.nodes(), set(whole)
    for node in reversed(nodes):  # users before their operands
        if node.op != "last_row" and not (_has_rows(node) and node not in full and _moves(node)):
            full.update(node.inputs)
    return {n for n in nodes if _has_rows(n) and n not in full}


def _has_rows(node: Node) -> bool:
    return node.shape[:1] == (SEQ,)


def _moves(node: Node) -> bool:
    """Whether the last row of the result can be computed from the last rows of the operands."""
    if node.op == "reshape":
        return _has_rows(node.inputs[0])
    known = all(isinstance(d, int) for i in node.inputs if _has_rows(i) for d in i.shape[1:])
    return node.op not in LEAVES and ops.OPS[node.op].rowwise and known
