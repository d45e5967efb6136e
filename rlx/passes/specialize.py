"""Last row: computes only rows whose outputs are needed: the last one of a prefill, the chosen ones of a batch.

The pass starts at the outputs and goes towards the inputs. If only some rows of a row-wise op are read, the op gets
only these rows of its operands. This passes the head, the final norm, and the feed-forward block of the last layer; for
the last row, its attention too. It stops at the residual stream, because the cache writes need all of its rows.

In a batch the rows are those that the input `logit_rows` i32[OUTS] names.

The pass runs before `specialize`, while the number of rows is the symbol SEQ, so no other dim can be mistaken for it.

Then `specialize` replaces a symbol by a constant if its bucket has one value, and gives the others bounds. The value of
a symbol with bounds is an argument of each step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlx.ir import dims, ops
from rlx.ir.dims import OUTS, SEQ, DimLike
from rlx.ir.dtypes import I32
from rlx.ir.graph import Graph
from rlx.ir.node import LEAVES, Node
from rlx.passes.options import Options
from rlx.passes.report import SILENT, Log

ROWS_INPUT = "logit_rows"


@dataclass(frozen=True)
class _Selection:
    """Some of the rows of a call: the last one, or the ones that an input names.

    Attributes:
        rows: the numbers of the rows; None for the last row.
    """

    rows: Node | None

    @property
    def op(self) -> str:
        return "last_row" if self.rows is None else "take_rows"

    @property
    def count(self) -> DimLike:
        return 1 if self.rows is None else OUTS

    def of(self, x: Node) -> Node:
        """These rows of x."""
        return ops.last_row(x) if self.rows is None else ops.take_rows(x, self.rows)

    def is_made_by(self, node: Node) -> bool:
        return self.rows is None and node.op == "last_row"

    def moves(self, node: Node) -> bool:
        """Whether these rows of the result can be computed from the same rows of the operands."""
        if node.op == "reshape":
            return _has_rows(node.inputs[0])
        if self.rows is not None and ops.OPS[node.op].roles:
            return False  # its rows are the last ones of a sequence
        known = all(isinstance(d, int) for i in node.inputs if _has_rows(i) for d in i.shape[1:])
        return node.op not in LEAVES and ops.OPS[node.op].rowwise and known


def last_row(graph: Graph, options: Options, log: Log = SILENT) -> Graph:
    """Reduces every output of SEQ rows to its last row, or in a batch to the rows `logit_rows`.

    Outputs in `Options.whole` keep all rows, and with `Options.all_rows` every output does. Without "last_row" in
    `Options.passes`, only the outputs are reduced, and all ops compute all rows.
    """
    if options.all_rows or options.seq[1] == 1:
        log.remark("all rows are kept" if options.all_rows else "a call has one row")
        return graph
    chosen = _Selection(ops.leaf("input", ROWS_INPUT, (OUTS,), I32) if options.segments else None)
    names = graph.names()
    whole = graph.outputs.keys() & set(options.whole)
    early = "last_row" in options.passes
    narrow = _narrow(graph, {graph.outputs[name] for name in whole}, chosen) if early else set[Node]()
    log.fact("values with one row" if chosen.rows is None else "values with the chosen rows", len(narrow))
    if not early:
        log.remark("left out by the options: only outputs are reduced")
    for name in sorted(whole):
        log.missed("last-row", names[graph.outputs[name]], "every row of this output is needed")

    def select(old: Node, new: Node) -> Node:
        if not _has_rows(old) or old in narrow:
            return new
        log.done("last-row", names[old], f"{chosen.op} of it; other readers need all rows")
        return chosen.of(new)

    def visit(old: Node, inputs: tuple[Node, ...]) -> Node:
        if chosen.is_made_by(old):
            return select(old.inputs[0], inputs[0])
        if old not in narrow:
            return ops.rebuild(old, inputs)
        if not chosen.moves(old):
            return chosen.of(ops.rebuild(old, inputs))
        rows = [select(o, n) for o, n in zip(old.inputs, inputs, strict=True)]
        return ops.rebuild(old, rows, **({"shape": (chosen.count, *old.shape[1:])} if old.op == "reshape" else {}))

    after = graph.map(visit)
    new = after.outputs
    outputs = {name: new[name] if name in whole else select(node, new[name]) for name, node in graph.outputs.items()}
    return after.replace(outputs=outputs)


def _narrow(graph: Graph, whole: set[Node], chosen: _Selection) -> set[Node]:
    """The values of SEQ rows of which only the chosen rows are read. All rows of `whole` are read."""
    nodes, full = graph.nodes(), set(whole)
    for node in reversed(nodes):  # users before their operands
        if not chosen.is_made_by(node) and not (_has_rows(node) and node not in full and chosen.moves(node)):
            full.update(node.inputs)
    return {n for n in nodes if _has_rows(n) and n not in full}


def _has_rows(node: Node) -> bool:
    return node.shape[:1] == (SEQ,)


def specialize(graph: Graph, options: Options, log: Log = SILENT) -> Graph:
    """Binds the symbols whose bounds meet; records the bounds of those that stay."""
    constants = {s: low for s, (low, high) in options.bounds.items() if low == high}

    def visit(old: Node, inputs: tuple[Node, ...]) -> Node:
        changes = {k: bound for k, v in old.attrs if (bound := _bind(v, constants)) != v}
        if old.op in LEAVES:
            changes["shape"] = tuple(dims.bind(d, constants) for d in old.shape)
        return ops.rebuild(old, inputs, **changes)

    used = set(graph.symbols) - constants.keys()
    limits = {s: b for s, b in options.bounds.items() if s in used}
    for symbol in sorted(set(graph.symbols) & constants.keys()):
        log.done("constant", symbol, f"= {constants[symbol]}")
    for symbol, (low, high) in sorted(limits.items()):
        log.done("bounds", symbol, f"{low}..{high}, a value of each call")
    return graph.map(visit, phase=options.phase, bounds=limits)


def _bind(value: Any, constants: Mapping[str, int]) -> Any:
    if isinstance(value, tuple):
        return tuple(_bind(v, constants) for v in value)
    return dims.bind(value, constants) if isinstance(value, dims.Dim) else value
