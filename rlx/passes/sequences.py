"""Sequences: makes every row of a batch the one new token of its own sequence.

States get an axis of slots in front. Ops over states get the attribute `sequences`: row r uses slot `slots[r]`, after
`past[r]` tokens. Both are new inputs of the program. All other ops work row by row anyway. This is the last pass over
the graph, so that no rewrite rule has to know about it.
"""

from __future__ import annotations

from typing import Any

from rlx.errors import GraphError
from rlx.ir import dims, ops
from rlx.ir.dims import SEQ, SLOTS
from rlx.ir.dtypes import I32
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.ir.sequences import OPS
from rlx.passes.options import Options
from rlx.passes.report import SILENT, Log

SLOT_INPUT, PAST_INPUT = "slots", "past"


def sequences(graph: Graph, options: Options, log: Log = SILENT) -> Graph:
    """The batched form of a graph whose rows are the symbol SEQ.

    Raises:
        GraphError: a node needs to know where its row stands in a sequence, and is none of the ops that can.
    """
    where = [ops.leaf("input", name, (SEQ,), I32) for name in (SLOT_INPUT, PAST_INPUT)]

    names = graph.names()

    def visit(old: Node, inputs: tuple[Node, ...]) -> Node:
        if old.op == "state":
            log.done("slots", names[old], "a state for each sequence")
            return ops.rebuild(old, (), shape=(SLOTS, *old.shape))
        if old.op in OPS:
            log.done("sequences", names[old], "each row works on the state of its own sequence")
            own = {name: _of_one(value) for name, value in old.attrs}
            return ops.make(old.op, *inputs, *where, **{**own, "sequences": True})
        _check(old)
        return ops.rebuild(old, inputs)

    bounds = {**graph.bounds, "SLOTS": options.bounds["SLOTS"]}
    return graph.map(visit, bounds=bounds)


def _of_one(value: Any) -> Any:
    """An attribute as a call of one row has it."""
    return dims.bind(value, {"SEQ": 1}) if isinstance(value, dims.Dim) else value


def _check(node: Node) -> None:
    depends = any("PAST_SEQ" in dims.symbols(value) for _, value in node.attrs if isinstance(value, dims.Dim))
    if depends or node.op == "last_row" or any(i.op == "state" for i in node.inputs):
        hint = f"Rows of a batch are sequences of their own for {', '.join(OPS)} only."
        raise GraphError("mixes the rows of a sequence", where=repr(node), hint=hint)
