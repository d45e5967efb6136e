"""Where a step's time goes: cycle counts that every step records, beside each op's arithmetic and traffic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rlx.ir import ops
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.runtime.native import NativeProgram

_READERS = ("linear", "expert_linear", "attention", "embedding", *ops.EFFECTS)


@dataclass
class OpTime:
    """Totals of one kind of work over a step.

    Attributes:
        label: the ops of the region; for linears with the weights' types.
        seconds: wall time of its regions, barrier included, as worker 0 saw them.
        flops, bytes: floating-point operations; bytes of operands read and results written.
    """

    label: str
    seconds: float = 0.0
    flops: int = 0
    bytes: int = 0
    regions: int = 0


def op_times(program: NativeProgram, graph: Graph, env: Mapping[str, int], seconds: float) -> list[OpTime]:
    """Splits the last step's `seconds` over its regions, by kind, longest first.

    Args:
        graph: the program's final graph, whose node numbers the manifest uses.
        env: the step's extents; attention's cost is that of PAST_SEQ + SEQ positions.
    """
    marks = program.times[0].astype(np.float64)
    scale = seconds / max(1.0, marks[-1] - marks[0])
    nodes, totals = graph.nodes(), dict[str, OpTime]()
    sizes = _filled(env)
    for i, region in enumerate(program.manifest["regions"]):
        work = [nodes[number] for number, _ in region]
        total = totals.setdefault(label := " ".join(sorted({_label(n) for n in work})), OpTime(label))
        total.seconds += (marks[i + 1] - marks[i]) * scale
        total.regions += 1
        for node in work:
            flops, moved = ops.cost(node, sizes)
            total.flops, total.bytes = total.flops + flops, total.bytes + moved
    return sorted(totals.values(), key=lambda t: -t.seconds)


def _filled(env: Mapping[str, int]) -> dict[str, int]:
    """The extents of a step, and caches that are full of what it sees."""
    length = env.get("PAST_SEQ", 0) + env.get("SEQ", 1)
    return dict(env) | {"CTX": length, "WINDOW_CTX": length}


def _label(node: Node) -> str:
    if node.op != "linear":
        return node.op
    extras = [name for name in ("gated", "bias", "residual") if node[name]]
    return "-".join(["linear", node.inputs[1].dtype.name, *extras])


def step_bytes(graph: Graph, env: Mapping[str, int]) -> int:
    """Bytes of weights and states that one step must read: each weight once, caches as far as they are seen."""
    sizes = _filled(env)
    return sum(ops.cost(n, sizes)[1] for n in graph.nodes() if n.op in _READERS)
