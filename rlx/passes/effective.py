"""The options that make a difference to the program of a graph: what its key in the cache is made of.

Passes stage. A program that is in the cache needs this, and runs no pass.
"""

from __future__ import annotations

from dataclasses import replace

from rlx import ir
from rlx.ir import dims
from rlx.ir.graph import Graph
from rlx.ir.op_table import CUSTOM
from rlx.passes.capabilities import Capabilities
from rlx.passes.options import FUSIONS, PASSES, Options
from rlx.passes.simplify import would_change

_PAST = "PAST_SEQ"


def effective(options: Options, graph: Graph, capabilities: Capabilities) -> Options:
    """The options of a graph's program, with the usual value of each that has no effect on it.

    The pass `simplify` counts as chosen if none of its rules matches, and so does the group `custom` of fusions if no
    custom op can replace anything. Bounds of PAST_SEQ are left out, unless they make
    it a constant or the size of an input depends on them: attention walks over the positions that there are, in units
    whose number follows from the length of the call, so a bound changes nothing in its code. Names of outputs and
    weights that the graph does not have are left out.
    """
    options = options.effective(capabilities)
    idle = set() if would_change(graph) else {"simplify"}
    fused = bool(CUSTOM and ir.custom.fused_in(graph.nodes()))
    leaves, outputs = graph.leaves("weight"), graph.outputs
    return replace(
        options,
        fusions=tuple(name for name in FUSIONS if name in options.fusions or (name == "custom" and not fused)),
        passes=tuple(name for name in PASSES if name in {*options.passes, *idle}),
        symbols=_symbols(options, graph),
        whole=tuple(name for name in options.whole if name in outputs and not options.all_rows),
        packed=tuple(name for name in options.packed if name in leaves),
    )


def _symbols(options: Options, graph: Graph) -> tuple[tuple[str, tuple[int, int]], ...]:
    low, high = options.bounds[_PAST]
    sized = any(_PAST in dims.symbols(dim) for leaf in graph.leaves("input").values() for dim in leaf.shape)
    if low == high or sized:
        return options.symbols
    return tuple(row for row in options.symbols if row[0] != _PAST)
