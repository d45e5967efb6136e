"""Where a step's time goes: cycle counts that every step records, beside each op's arithmetic and traffic; and which of
the machine's limits that is near.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from rlx.ir.costs import cost
from rlx.ir.dtypes import BF16, Q8A
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.ir.ops import EFFECTS
from rlx.runtime.native import NativeProgram

BARRIER_SECONDS = 4e-6  # a region that takes less mostly waits: for the hand-out of work, its workers, its first loads
BARRIER_SHARE = 0.05  # so does one that the machine's other limits would let take less than this of its time
_UNITS = {"int8": ("int8", "f32"), "bf16": ("amx-bf16", "bf16", "f32"), "f32": ("f32",)}  # the first that there is
_READERS = ("linear", "expert_linear", "linear_pick", "attention", "embedding", *EFFECTS)


@dataclass
class OpTime:
    """Totals of one kind of work over a step.

    Attributes:
        label: the ops of the region's units; for linears with the weights' types. What goes before them counts with
            them, as done once.
        seconds: wall time of its regions, barrier included, as worker 0 saw them.
        bytes: of operands read and results written.
        operations: multiplications, additions and the like, by the arithmetic that does them: "int8", "bf16" or "f32".
    """

    label: str
    seconds: float = 0.0
    bytes: int = 0
    regions: int = 0
    operations: Counter[str] = field(default_factory=Counter)

    @property
    def flops(self) -> int:
        """Operations of every kind."""
        return self.operations.total()

    def limit(self, bandwidth: float, peaks: Mapping[str, float]) -> Limit:
        """The limit that this work is nearest to, as in a roofline plot.

        Args:
            bandwidth: bytes that all workers read a second, in 10^9.
            peaks: operations that they do a second, in 10^9, by kind (`rlx.codegen.kernels.peak.kinds`).
        """
        arithmetic = sum(n / _peak(kind, peaks) for kind, n in self.operations.items())
        least, name = max((self.bytes / bandwidth, "memory"), (arithmetic, "arithmetic"))
        share = least / 1e9 / max(self.seconds, 1e-12)
        waits = self.seconds < self.regions * BARRIER_SECONDS or share < BARRIER_SHARE
        return Limit("barrier" if waits else name, share)


@dataclass(frozen=True)
class Limit:
    """What bounds a kind of work.

    Attributes:
        name: "memory", "arithmetic", or "barrier" where the work itself is too little to bound anything.
        share: of the time, what memory or arithmetic alone would take; above 1 where data come from a cache instead.
    """

    name: str
    share: float


def _peak(kind: str, peaks: Mapping[str, float]) -> float:
    """That of the units which do an arithmetic: AMX tiles multiply bf16 only."""
    return next(peaks[unit] for unit in _UNITS[kind] if unit in peaks)


def region_seconds(program: NativeProgram, seconds: float) -> np.ndarray:
    """Splits the last step's `seconds` over its regions, float64 [regions]."""
    marks = program.times[0].astype(np.float64)
    spent: np.ndarray = np.diff(marks) * (seconds / max(1.0, marks[-1] - marks[0]))
    return spent


def op_times(program: NativeProgram, graph: Graph, env: Mapping[str, int], seconds: np.ndarray) -> list[OpTime]:
    """The time of each kind of work, longest first.

    Args:
        graph: the program's final graph, whose node numbers the manifest uses.
        env: the step's extents; attention's cost is that of PAST_SEQ + SEQ positions.
        seconds: of each region.
    """
    nodes, totals = graph.nodes(), dict[str, OpTime]()
    sizes = _filled(env)
    regions, prologues = ([[nodes[i] for i, _ in row] for row in program.manifest[k]] for k in ("regions", "prologues"))
    for work, own, spent in zip(regions, prologues, seconds.tolist(), strict=True):
        label = " ".join(sorted({_label(n) for n in work if n not in own}))
        total = totals.setdefault(label, OpTime(label))
        total.seconds += spent
        total.regions += 1
        for node in {*work, *own}:
            flops, moved = cost(node, sizes)
            total.operations[_arithmetic(node)] += flops
            total.bytes += moved
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


def _arithmetic(node: Node) -> str:
    """What multiplies in it: the type of a linear's activations decides, attention may take bf16, all else is f32."""
    if node.op in ("linear", "expert_linear", "linear_pick"):
        return {Q8A: "int8", BF16: "bf16"}.get(node.inputs[0].dtype, "f32")
    return "bf16" if node.op == "attention" and node["bf16"] else "f32"


def step_bytes(graph: Graph, env: Mapping[str, int]) -> int:
    """Bytes of weights and states that one step must read: each weight once, caches as far as they are seen."""
    sizes = _filled(env)
    return sum(cost(n, sizes)[1] for n in graph.nodes() if n.op in _READERS)


def step_flops(graph: Graph, env: Mapping[str, int]) -> int:
    """Operations of one step."""
    sizes = _filled(env)
    return sum(cost(n, sizes)[0] for n in graph.nodes())
