"""Profile of a step: time per kind of work from the clocks of its regions, with operations, bytes and the nearest limit
of the machine.

A `Measurement` of a step has the seconds of each region, how long workers wait at its end, and what each of them did,
for reports and traces.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from rlx.backends.program import Observer, Program, StepClocks, StepLog
from rlx.ir.costs import arithmetic, cost, filled, kind_of, peak, stored_bytes
from rlx.ir.graph import Graph
from rlx.report.source import StepTimes

MEMORY_BYTES = 512 << 20  # of a buffer that is read for the bandwidth of memory: several times the last-level cache
LEAST_BYTES = 1 << 20  # below this, distributing the work takes longer than reading
LEAST_SECONDS = 0.4  # that the steps take together, so that medians are steady
MOST_STEPS = 2000


def measure_step(
    program: Program,
    run: Callable[[], float],
    extents: Mapping[str, int],
    repeat: int = 5,
    least_seconds: float | None = None,
) -> StepTimes:
    """Runs a step several times and takes medians.

    The time of the whole call is that of steps whose clocks are not logged, which takes a millisecond; they run before
    and after the others.

    Args:
        run: runs one step of the program, and returns the seconds of the call.
        extents: symbol values of the step.
        repeat: fewest steps, a third of all; there are more until they take `least_seconds`, by default
            `LEAST_SECONDS`.
    """
    run()
    least = LEAST_SECONDS if least_seconds is None else least_seconds
    seconds, steps = _seconds(run, repeat, least), _Steps()
    program.observe(steps)
    try:
        _seconds(run, repeat, least)
    finally:
        program.ignore(steps)
    seconds += _seconds(run, repeat, least)
    found = [log.read() for log in steps.logs_of_steps]
    calls = [len(region) for region in program.manifest["regions"]]
    waits = np.array([_waits(each, calls) for each in found])  # [steps, workers, regions]
    regions = np.median([np.diff(each.bounds()[0]) for each in found], axis=0) / 1e9
    return StepTimes(
        dict(extents),
        max(float(np.median(seconds)), float(regions.sum())),  # medians of regions need not add up to that of steps
        regions.tolist(),
        [[_median(waits[:, w, r]) for r in range(waits.shape[2])] for w in range(waits.shape[1])],
        np.median([_of_regions(each.marks[0, :, :, 2], calls, np.add) for each in found], axis=0).astype(int).tolist(),
        len(found),
        float(np.median([np.ptp(each.bounds()[0]) for each in found])) / 1e9,
        np.median([_prologues(each.marks[0], calls) for each in found], axis=0).tolist(),
    )


def clocked(program: Program, run: Callable[[], float], repeat: int) -> np.ndarray:
    """Runs a step several times: seconds of each region, float64 [repeat, regions]."""
    steps = _Steps()
    program.observe(steps)
    try:
        _seconds(run, repeat, 0.0)
    finally:
        program.ignore(steps)
    return np.concatenate([region_seconds(log) for log in steps.logs_of_steps])


def _seconds(run: Callable[[], float], repeat: int, least: float) -> list[float]:
    """The seconds of several steps."""
    found = list[float]()
    while len(found) < repeat or (sum(found) < least and len(found) < MOST_STEPS):
        found.append(run())
    return found


class _Steps(Observer):
    """Keeps the clocks of steps."""

    logs = True

    def __init__(self) -> None:
        self.logs_of_steps: list[StepLog] = []

    def after(self, program: Program, seconds: float, steps: int) -> None:
        return

    def logged(self, program: Program, log: StepLog) -> None:
        self.logs_of_steps.append(log)


def _of_regions(marks: np.ndarray, calls: Sequence[int], how: np.ufunc) -> np.ndarray:
    """Reduces what was noted of calls, [workers, marks], to regions, [workers, regions]; prologues are left out."""
    ends = np.cumsum([1 + count for count in calls])
    return np.stack(
        [how.reduce(marks[:, end - count : end], axis=1) for end, count in zip(ends, calls, strict=True)], 1
    )


def _prologues(marks: np.ndarray, calls: Sequence[int]) -> np.ndarray:
    """Seconds in the prologue of each region, [regions]: the mean over the workers."""
    firsts = np.cumsum([0, *(1 + count for count in calls)])[:-1]
    spent: np.ndarray = (marks[:, firsts, 1] - marks[:, firsts, 0]).mean(0) / 1e9
    return spent


def _waits(clocks: StepClocks, calls: Sequence[int]) -> np.ndarray:
    """Seconds that each worker waited at the end of each region, [workers, regions]; NaN where it came too late."""
    bounds, times = clocks.bounds()[0], clocks.times[0]
    done = _of_regions(clocks.marks[0, :, :, 1], calls, np.maximum)
    came = np.where(times[:, :-1] < bounds[1:], times[:, :-1], 0)  # with no work in a region, it waits from its start
    since = np.where(done > 0, done, came)
    waited = np.clip(bounds[1:] - since, 0, np.diff(bounds)) / 1e9
    return np.where(since > 0, waited, np.nan)


def _median(values: np.ndarray) -> float | None:
    """The median; None if the worker came too late for the region in most steps."""
    known = values[~np.isnan(values)]
    return float(np.median(known)) if 2 * known.size > values.size else None


BARRIER_SECONDS = 4e-6  # shorter regions mostly wait: for the distribution of work, for workers, for the first loads
BARRIER_SHARE = 0.05  # so do regions whose work needs less than this share of their time by the machine's other limits


@dataclass
class OpTime:
    """Totals of one kind of work over a step.

    Attributes:
        label: the ops of the region's units; for linears with the weights' types. Prologues are included, counted once.
        seconds: wall time of its regions, barrier included, measured on worker 0.
        bytes: of weights and states, which come from memory; other values stay in caches.
        operations: additions, multiplications and the like, by arithmetic: "int8", "bf16" or "f32".
        range: the least and the most seconds of several steps, if `seconds` is their median.
        waits: seconds that a worker waits for the end of its regions, the mean over the workers; 0 if not measured.
        prologues: seconds that a worker spends in their prologues, likewise.
    """

    label: str
    seconds: float = 0.0
    bytes: int = 0
    regions: int = 0
    operations: Counter[str] = field(default_factory=Counter)
    range: tuple[float, float] = (0.0, 0.0)
    waits: float = 0.0
    prologues: float = 0.0

    @property
    def flops(self) -> int:
        """Operations of all kinds."""
        return self.operations.total()

    def limit(self, bandwidth: float, peaks: Mapping[str, float]) -> Limit:
        """The nearest limit, as in a roofline plot.

        Args:
            bandwidth: read bandwidth of all workers, in 10^9 bytes per second.
            peaks: their peak rates, in 10^9 operations per second, by kind (see `peak.kinds`).
        """
        least, name = self.bound(bandwidth, peaks)
        share = least / max(self.seconds, 1e-12)
        if self.seconds < self.regions * BARRIER_SECONDS or share < BARRIER_SHARE:
            name, share = "barrier", min(share, 1.0)  # the clock does not resolve so short a time
        return Limit("cache" if name == "memory" and share > 1 else name, share)

    def bound(self, bandwidth: float, peaks: Mapping[str, float]) -> tuple[float, str]:
        """The seconds that the work takes at least, and what takes them: "memory" or "arithmetic"; see `limit`."""
        computing = sum(n / peak(kind, peaks) for kind, n in self.operations.items())
        least, name = max((self.bytes / bandwidth, "memory"), (computing, "arithmetic"))
        return least / 1e9, name


@dataclass(frozen=True)
class Limit:
    """The limit of a kind of work.

    Attributes:
        name: "memory", "arithmetic", "barrier" if there is too little work to reach either, or "cache" if the data come
            faster than the bandwidth: a cache held them, or other programs slowed the measurement of the bandwidth.
        share: the time that memory or arithmetic alone would take, divided by the measured time.
    """

    name: str
    share: float

    def __str__(self) -> str:
        """ "memory 87%"; without a share where there is no limit to compare with."""
        return self.name if self.name in ("barrier", "cache") else f"{self.name} {self.share:.0%}"


def region_seconds(log: StepLog) -> np.ndarray:
    """The time of each region in each step of a call, float64 [steps, regions]."""
    spent: np.ndarray = np.diff(log.read().bounds()) / 1e9
    return spent


def op_times(
    program: Program,
    graph: Graph,
    env: Mapping[str, int],
    seconds: np.ndarray,
    waits: np.ndarray | None = None,
    prologues: np.ndarray | None = None,
) -> list[OpTime]:
    """The time of each kind of work, longest first.

    Args:
        graph: the program's final graph, whose node numbers the manifest uses.
        env: symbol values of the step; the cost of attention is that of PAST_SEQ + SEQ positions.
        seconds: time of each region.
        waits, prologues: of it what a worker waits, and spends in the prologue, if they were measured.
    """
    nodes, totals = graph.nodes(), dict[str, OpTime]()
    sizes = filled(env)
    regions, before = ([[nodes[i] for i, _ in row] for row in program.manifest[k]] for k in ("regions", "prologues"))
    nothing = np.zeros_like(seconds)
    spent = (nothing if each is None else each for each in (seconds, waits, prologues))
    for work, own, times in zip(regions, before, np.stack([*spent], 1).tolist(), strict=True):
        label = " ".join(sorted({kind_of(n) for n in work if n not in own}))
        total = totals.setdefault(label, OpTime(label))
        total.seconds += times[0]
        total.waits += times[1]
        total.prologues += times[2]
        total.regions += 1
        for node in {*work, *own}:
            total.operations[arithmetic(node)] += cost(node, sizes)[0]
            total.bytes += stored_bytes(node, sizes)
    return sorted(totals.values(), key=lambda t: -t.seconds)


def step_bytes(graph: Graph, env: Mapping[str, int]) -> int:
    """Bytes of weights and states that one step accesses: each weight once, caches up to the current position."""
    sizes = filled(env)
    return sum(stored_bytes(node, sizes) for node in graph.nodes())


def step_flops(graph: Graph, env: Mapping[str, int]) -> int:
    """Operations of one step."""
    sizes = filled(env)
    return sum(cost(n, sizes)[0] for n in graph.nodes())
