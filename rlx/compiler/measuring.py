"""Measures a step of a program: seconds of each region, how long workers wait at its end, and what each of them did.

Runtime stage, beside `profiling.py`. For reports and traces.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from rlx.backends.program import Observer, Program, StepClocks, StepLog
from rlx.compiler.profiling import region_seconds
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
