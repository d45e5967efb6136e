"""The sources of a report: texts and tables of a compiled program, measurements, and the error that ended a compile.

First step of the report stage: plain values, so that a program of any backend, from the cache or not, has a report.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlx.passes.options import Options
from rlx.passes.pipeline import Pass
from rlx.passes.report import Report


@dataclass(frozen=True)
class Machine:
    """Limits of the machine, measured with the workers of the program.

    Attributes:
        bandwidth: rate at which they read as many bytes as a step does, in 10^9 bytes a second: from memory, or from
            a cache that holds them.
        peaks: arithmetic rates in 10^9 operations a second, by kind: "f32", "int8", "bf16", "amx-bf16".
        workers: number of worker threads.
    """

    bandwidth: float
    peaks: Mapping[str, float]
    workers: int


@dataclass(frozen=True)
class StepTimes:
    """Medians of several equal steps of a program.

    Attributes:
        extents: symbol values of the step.
        seconds: of the whole call, as its caller sees it.
        regions: seconds of each region, until all of its work is done.
        waits: for each worker and region the seconds from its last work until the region ended; None where it came
            too late for the region.
        units: for each worker and region how many units of work it did.
        repeats: number of steps.
        native: seconds from the begin of its first region to the end of its last one.
        prologues: seconds that a worker computes in the prologue of each region, the mean over the workers.
    """

    extents: Mapping[str, int]
    seconds: float
    regions: Sequence[float]
    waits: Sequence[Sequence[float | None]]
    units: Sequence[Sequence[int]]
    repeats: int
    native: float = 0.0
    prologues: Sequence[float] = ()


@dataclass(frozen=True)
class Problem:
    """An error that ended the compile or the measurement of a program.

    Attributes:
        stage: where: "open", the name of a pass, "kernels", "load" or "measure".
        kind: name of the error's class.
        message: what it says.
    """

    stage: str
    kind: str
    message: str


@dataclass(frozen=True)
class KernelText:
    """The texts of one kernel, region or the step.

    Attributes:
        source: specialized Python, or the outline of a tile kernel; empty for regions and the step.
        llvm: the optimized LLVM module; empty for a backend without one.
        asm: its assembly.
    """

    source: str
    llvm: str
    asm: str


@dataclass(frozen=True)
class Source:
    """One program.

    Attributes:
        name: such as "decode-1-1".
        phase: "decode", "greedy", "prefill", "batch", "tower", ...
        rows: smallest and largest number of rows of a call.
        stages: names and texts after each stage that was reached, "00-graph" first.
        options: it was compiled with.
        target: level of the target, such as "avx512".
        report: what each pass did; None if the compile ended before.
        manifest: of the program; None likewise.
        texts: of its kernels ("kernels/<symbol>"), regions ("regions/<symbol>") and step ("program"), made when called.
        stats: of the compile: seconds by stage, kernels; sizes; digest of the compile key.
        times: of a step, if it was measured.
        problem: what ended it.
        passes: those over a graph, as of `pipeline.stages`.
    """

    name: str
    phase: str
    rows: tuple[int, int]
    stages: Sequence[tuple[str, str]]
    options: Options
    target: str
    report: Report | None = None
    manifest: Mapping[str, Any] | None = None
    texts: Mapping[str, Callable[[], KernelText]] = field(default_factory=dict)
    stats: Mapping[str, Any] = field(default_factory=dict)
    times: StepTimes | None = None
    problem: Problem | None = None
    passes: Sequence[Pass] | None = None


@dataclass(frozen=True)
class Subject:
    """The subject of the page.

    Attributes:
        title: name of the model or graph.
        facts: (name, value) pairs about the model: family, parameters, size, context.
        formats: types of the weights: rows with `dtype`, `tensors`, `bytes`.
        machine: measured limits; None without measurement.
        problem: what kept the whole model from being compiled.
        command: the command that makes the report again, with --measure.
    """

    title: str
    facts: Sequence[tuple[str, str]] = ()
    formats: Sequence[Mapping[str, Any]] = ()
    machine: Machine | None = None
    problem: Problem | None = None
    command: str = ""
