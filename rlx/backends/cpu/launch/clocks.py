"""The clocks of steps while they are recorded: a row of memory for each step of a native call, in cycles.

CPU backend, under `native.py`. The rows are given as nanoseconds of the clock of Python's `time.perf_counter_ns`: both
clocks are read before and after a call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx.backends.cpu.context import CONTEXT, MARK, mark_number
from rlx.backends.program import StepClocks, StepLog

_TIMES, _MARKS, _BYTES, _LEFT = (CONTEXT.index(name) for name in ("times", "marks", "log_bytes", "log_left"))


class ClockLog:
    """Logs the clocks of a program.

    Args:
        manifest: the program's.
        times: int64 [workers, regions + 1]; gets the clocks of the last step.
        context: the program's, whose fields are set during a call.
        cycles: reads the cycle counter.

    Attributes:
        last: the clocks of the last call.
    """

    def __init__(
        self, manifest: Mapping[str, Any], times: npt.NDArray[np.int64], context: np.ndarray, cycles: Callable[[], int]
    ) -> None:
        regions = manifest["regions"]
        marks = mark_number(len(regions), sum(map(len, regions)))
        self._times, self._context, self._cycles = times, context, cycles
        self._shape = len(times), marks, len(MARK)
        self.last: StepLog | None = None

    @contextmanager
    def logged(self, steps: int) -> Iterator[None]:
        """Logs at most so many steps in the `with` block; later ones overwrite the last row."""
        first = self._times.size
        rows = np.zeros((steps, first + int(np.prod(self._shape))), np.int64)
        start = rows.ctypes.data
        self._set(start, start + rows.itemsize * first, rows.strides[0], steps - 1)
        before = self._both()
        try:
            yield
        finally:
            used = steps - int(self._context[_LEFT])
            self._set(self._times.ctypes.data, 0, 0, 0)
            after = self._both()
        last = rows[:used, 0].nonzero()[0]  # the row after the last step is empty
        rows = rows[: last[-1] + 1 if last.size else 0]
        if len(rows):
            self._times[...] = rows[-1, :first].reshape(self._times.shape)
        self.last = StepLog(len(rows), rows.nbytes, partial(self._split, rows, before, after))

    def _set(self, times: int, marks: int, log_bytes: int, left: int) -> None:
        self._context[[_TIMES, _MARKS, _BYTES, _LEFT]] = times, marks, log_bytes, left

    def _both(self) -> tuple[int, int]:
        """The two clocks at about the same moment: cycles, nanoseconds."""
        start = time.perf_counter_ns()
        cycles = self._cycles()
        return cycles, (start + time.perf_counter_ns()) // 2

    def _split(self, rows: npt.NDArray[np.int64], before: tuple[int, int], after: tuple[int, int]) -> StepClocks:
        """The clocks in rows of cycles."""
        first = self._times.size
        rate = (after[1] - before[1]) / max(1, after[0] - before[0])

        def nanoseconds(cycles: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
            found = before[1] + np.rint((cycles - before[0]) * rate).astype(np.int64)
            return np.where(cycles == 0, 0, found)

        times = nanoseconds(rows[:, :first]).reshape(-1, *self._times.shape)
        marks = rows[:, first:].reshape(-1, *self._shape).copy()
        marks[..., :2] = nanoseconds(marks[..., :2])
        return StepClocks(times, marks)
