"""Quantize: chooses, per linear, between float32 and int8 activations, and makes the preparation a node of its own.

Linears over the same input then share one preparation (equal nodes are one node), which fusion can merge with the norm
that feeds it.
"""

from __future__ import annotations

from rlx.ir import ops
from rlx.ir.dtypes import F32
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.passes.options import Options

_WEIGHT = {"linear": 1, "expert_linear": 2}  # number of the weight among an op's operands


def quantize(graph: Graph, options: Options) -> Graph:
    """With precision "auto", linears over weights of integer codes take int8 activation rows."""
    if options.precision == "exact":
        return graph

    def visit(old: Node, inputs: tuple[Node, ...]) -> Node:
        weight = _WEIGHT.get(old.op)
        if weight and inputs[weight].dtype.has_integer_codes and inputs[0].dtype is F32:
            inputs = (ops.quantize(inputs[0]), *inputs[1:])
        return ops.rebuild(old, inputs)

    return graph.map(visit)
