"""The passes of the device "cuda": the usual ones, two of which it changes."""

from __future__ import annotations

from dataclasses import replace

from rlx.ir import ops
from rlx.ir.dtypes import BF16, F16, F32
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.passes.fuse import fuse
from rlx.passes.options import Options
from rlx.passes.pipeline import Pass, usual_passes
from rlx.passes.quantize import quantize
from rlx.passes.report import SILENT, Log


def passes(phase: str, cards: int) -> tuple[Pass, ...]:
    """Those of a phase, in order.

    Args:
        cards: how many compute together.
    """
    changed: dict[Pass, Pass] = {quantize: round_activations}
    changed |= {fuse: fuse_few} if cards > 1 else {}
    return tuple(changed.get(each, each) for each in usual_passes(phase))


def round_activations(graph: Graph, options: Options, log: Log = SILENT) -> Graph:
    """In place of the pass `quantize`: with precision "auto", linears take activations in bf16.

    Heads with a matrix each keep f32, and so do linears over weights in f32, or in 16 bits if the model does not allow
    it (see `rlx.passes.quantize`).
    """

    def visit(old: Node, inputs: tuple[Node, ...]) -> Node:
        if options.precision == "auto" and _may_round(old):
            return ops.make(old.op, ops.quantize(inputs[0], "bf16"), *inputs[1:], **dict(old.attrs))
        return ops.rebuild(old, inputs)

    return quantize(graph.map(visit), replace(options, precision="exact"), log)


def _may_round(node: Node) -> bool:
    if node.op not in ("linear", "expert_linear"):
        return False
    weight = node.inputs[1 if node.op == "linear" else 2]
    allowed = weight.dtype.is_quantized or (weight.dtype in (BF16, F16) and node["bf16"])
    return allowed and node.inputs[0].dtype is F32 and (node.op == "expert_linear" or len(weight.shape) == 2)


def fuse_few(graph: Graph, options: Options, log: Log = SILENT) -> Graph:
    """In place of the pass `fuse` for several cards: a token is chosen from the logits of all of them."""
    return fuse(graph, replace(options, fusions=tuple(name for name in options.fusions if name != "pick")), log)
