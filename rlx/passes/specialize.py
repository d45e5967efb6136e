"""Specialize: replaces a symbol by a constant if its bucket has one value, and gives the others bounds.

The value of a symbol with bounds is an argument of each step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlx.ir import dims, ops
from rlx.ir.graph import Graph
from rlx.ir.node import LEAVES, Node
from rlx.passes.options import Options
from rlx.passes.report import SILENT, Log


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
