"""Measures a step of a program: seconds of each region, how long workers wait at its end, and what each of them did.

Runtime stage, beside `profiling.py`. For reports and traces.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import numpy as np

from rlx.backends.base import Program, WorkerLog
from rlx.report.source import StepTimes

LEAST_SECONDS = 0.05  # that the steps take together, so that the rate of the clock is known well
MOST_STEPS = 2000


def measure_step(program: Program, run: Callable[[], float], extents: Mapping[str, int], repeat: int = 5) -> StepTimes:
    """Runs a step several times and takes medians.

    Args:
        run: runs one step of the program, and returns the seconds of the call.
        extents: symbol values of the step.
        repeat: fewest steps; there are more if they are short.

    Raises:
        ArgumentError: the backend has no workers to follow.
    """
    run()
    seconds, ends, logs = list[float](), list[tuple[float, int]](), list[WorkerLog]()
    with program.worker_log() as log:
        while len(seconds) < repeat or (ends[-1][0] - ends[0][0] < LEAST_SECONDS and len(seconds) < MOST_STEPS):
            log.clear()
            seconds.append(run())
            ends.append((time.perf_counter(), int(log.clock[0, -1])))
            logs.append(WorkerLog(log.clock.copy(), log.arrived.copy(), log.units.copy()))
    ticks = ends[-1][1] - ends[0][1]
    tick = (ends[-1][0] - ends[0][0]) / ticks if ticks > 0 else 0.0
    regions = np.median([np.diff(each.clock[0]) for each in logs], axis=0) * tick
    waits = np.array([_waits(each) for each in logs]) * tick  # [steps, workers, regions]
    return StepTimes(
        dict(extents),
        float(np.median(seconds)),
        regions.tolist(),
        [[_median(waits[:, w, r]) for r in range(waits.shape[2])] for w in range(waits.shape[1])],
        np.median([each.units for each in logs], axis=0).astype(int).tolist(),
        len(seconds),
    )


def _waits(log: WorkerLog) -> np.ndarray:
    """Clock ticks that each worker waited at the end of each region; NaN where it came too late."""
    waited = np.clip(log.clock[0, 1:] - log.arrived, 0, np.diff(log.clock[0])).astype(np.float64)
    return np.where(log.arrived > 0, waited, np.nan)


def _median(values: np.ndarray) -> float | None:
    """The median; None if the worker came too late for the region in most steps."""
    known = values[~np.isnan(values)]
    return float(np.median(known)) if 2 * known.size > values.size else None
