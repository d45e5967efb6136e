"""RLX_VERIFY, and RLX_DEBUG from level 2 on: the time of steps by kind of work, and the compiler's output for programs.

Compiler, beside `compile.py`, which imports it only where one of them is set.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rlx import debug_output, env
from rlx.backends.device import Target
from rlx.backends.program import Observer, Program, StepLog
from rlx.backends.verify import Verifier
from rlx.compiler.inspection import Inspectable
from rlx.compiler.profiling import OpTime, op_times, region_seconds
from rlx.ir import text
from rlx.ir.graph import Graph
from rlx.passes import pipeline

if TYPE_CHECKING:
    from rlx.compiler.compile import CompiledProgram


class _View(Inspectable):
    def __init__(self, compiled: CompiledProgram, target: Target) -> None:
        self._compiled, self._target = compiled, target


def show_program(compiled: CompiledProgram, target: Target) -> None:
    """Writes the output of levels 3 to 7 for a program that was compiled or loaded."""
    view, title = _View(compiled, target), compiled.key.title
    debug_output.show_whole(debug_output.PASSES, f"passes of {title}", str(view.explain()))
    if debug_output.shows(debug_output.SOURCE):
        debug_output.show_whole(debug_output.SOURCE, f"kernels of {title}", view.source())
    for stage in view.stages if debug_output.shows(debug_output.IR) else ():
        debug_output.show_whole(debug_output.IR, f"IR after {stage} of {title}", view.ir(stage))
    if debug_output.shows(debug_output.LLVM):
        debug_output.show_whole(debug_output.LLVM, f"LLVM modules of {title}", view.llvm())
    if debug_output.shows(debug_output.ASM):
        debug_output.show_whole(debug_output.ASM, f"assembly of {title}", view.asm())


def watch(program: Program, compiled: CompiledProgram) -> None:
    """Observes the steps of a program.

    With RLX_VERIFY their values are compared. From level 2 on their times are added up, and written when it is closed.
    """
    graph = text.loads(compiled.final)
    if debug_output.shows(debug_output.KERNELS):
        times = StepTimes(program.name, graph)
        program.observe(times)
        times.end = weakref.finalize(program, times.show)  # at the end of the process at the latest
    if env.verify():
        placed, manifest = pipeline.place(graph, compiled.options), compiled.manifest
        program.observe(Verifier(placed, manifest, compiled.formats(manifest)))


@dataclass
class StepTimes(Observer):
    """Totals over the steps of a program.

    Attributes:
        graph: its final graph.
        kinds: totals of each kind of work.
        end: writes the table, once.
    """

    name: str
    graph: Graph
    steps: int = 0
    seconds: float = 0.0
    kinds: dict[str, OpTime] = field(default_factory=dict)
    end: Callable[[], object] = field(default=lambda: None, init=False)
    logs: bool = field(default=True, init=False)

    def after(self, program: Program, seconds: float, steps: int) -> None:
        """Adds steps that took `seconds` together."""
        self.steps, self.seconds = self.steps + steps, self.seconds + seconds

    def logged(self, program: Program, log: StepLog) -> None:
        """Adds the kinds of work of the steps of a call."""
        extents, steps = program.extents, log.steps
        env = {**extents, "PAST_SEQ": extents.get("PAST_SEQ", 0) + steps // 2}  # the middle step
        for kind in op_times(program, self.graph, env, region_seconds(log).sum(0)):
            total = self.kinds.setdefault(kind.label, OpTime(kind.label))
            total.seconds += kind.seconds
            total.bytes += kind.bytes * steps
            total.regions += kind.regions * steps
            for name, count in kind.operations.items():
                total.operations[name] += count * steps

    def closed(self, program: Program) -> None:
        """Writes the table."""
        self.end()

    def show(self) -> None:
        """Writes the table, the longest first; writes nothing if there was no step."""
        if self.steps:
            debug_output.show(debug_output.KERNELS, str(self))

    def __str__(self) -> str:
        each = self.seconds / self.steps
        steps = f"{self.steps} step{'s' * (self.steps != 1)}"
        head = f"kernels of {self.name}: {steps}, {self.seconds * 1e3:.2f} ms, {each * 1e3:.3f} ms a step"
        kinds = sorted(self.kinds.values(), key=lambda kind: -kind.seconds)
        width = max(len(kind.label) for kind in kinds)
        return "\n".join([head, *(self._row(kind, width) for kind in kinds)])

    def _row(self, kind: OpTime, width: int) -> str:
        seconds = max(kind.seconds, 1e-12)
        rates = f"{kind.bytes / seconds / 1e9:8.2f} GB/s {kind.flops / seconds / 1e9:9.2f} GFLOP/s"
        share = kind.seconds / max(self.seconds, 1e-12)
        return f"  {kind.label:{width}} {kind.seconds * 1e3:9.3f} ms {share:4.0%} {rates} {kind.regions:7} regions"
