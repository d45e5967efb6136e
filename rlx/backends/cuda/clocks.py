"""The clocks of a card: when each region of a step ended, and the limits that a step is compared with."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from rlx.backends.cuda.driver import MULTIPROCESSORS, Card
from rlx.backends.program import StepClocks, StepLog
from rlx.errors import TargetError

_COPIES, _REPEATS = 8, 5  # of a measurement of the bandwidth

#: Level -> operations of a multiprocessor in a clock, of dense products of bf16 with sums in f32; those of f32 where
#: tensor cores do not multiply bf16. Source: NVIDIA's papers on the architectures.
_BF16_OPERATIONS: Mapping[str, int] = {
    "sm_75": 128, "sm_80": 2048, "sm_86": 512, "sm_87": 1024, "sm_89": 512, "sm_90": 4096, "sm_100": 8192,
    "sm_103": 8192, "sm_120": 512, "sm_121": 512,
}  # fmt: skip
_CLOCK = 13  # CUdevice_attribute, in kHz


#: Begins a piece of a step; it calls the function that it gets with the number of each region, after the region.
Begin = Callable[[Callable[[int], None]], None]


class ClockedStep:
    """A recorded step with an event before it and one after each region.

    A region does not begin before the one before has ended then, so that such a step takes longer than others.

    Args:
        calls: number of kernels of each region, as the manifest has them.
        pieces: of the step, in order; None has no kernels.
    """

    def __init__(self, card: Card, calls: Sequence[int], pieces: Sequence[Begin | None]) -> None:
        self._card, self._calls = card, calls
        self._events = [card.event(timed=True) for _ in range(len(calls) + 1)]

        def recorded(piece: int, begin: Begin) -> None:
            if not piece:
                card.record(self._events[0], in_graph=True)
            begin(lambda region: card.record(self._events[region + 1], in_graph=True))

        some = enumerate(pieces)
        self._records = [None if begin is None else card.recorded(partial(recorded, i, begin)) for i, begin in some]
        self._start = 0

    def begin(self, piece: int = 0) -> None:
        """Begins a piece of the step."""
        if not piece:
            self._start = time.perf_counter_ns()
        if (record := self._records[piece]) is not None:
            self._card.replay(record)
        elif not piece:
            self._card.record(self._events[0])

    def ended(self, region: int) -> None:
        """A region ends here, after what the host has computed."""
        self._card.record(self._events[region + 1])

    def log(self) -> StepLog:
        """The clocks of the step, when it is done."""
        self._card.wait()
        ends = [self._start + round(1e9 * self._card.seconds(self._events[0], event)) for event in self._events]
        clocks = StepClocks(np.array([[ends]], np.int64), self._marks(ends))
        return StepLog(1, clocks.times.nbytes + clocks.marks.nbytes, lambda: clocks)

    def _marks(self, ends: Sequence[int]) -> np.ndarray:
        """A mark for each call: the card does not say which of the kernels of a region took how long."""
        marks = list[tuple[int, int, int]]()
        for count, begin, end in zip(self._calls, ends, ends[1:], strict=False):
            marks += [(0, 0, 0), *[(begin, end, 1)] * count]
        return np.array([[marks]], np.int64).reshape(1, 1, -1, 3)

    def close(self) -> None:
        """Frees it."""
        for record in self._records:
            if record is not None:
                self._card.forget(record)
        for event in self._events:
            self._card.forget_event(event)


def copy_bandwidth(card: Card, nbytes: int) -> float:
    """The rate at which a card copies so many bytes, in 10^9 bytes per second, read and written ones together."""
    source, target = card.allocate(nbytes), card.allocate(nbytes)
    begin, end = card.event(timed=True), card.event(timed=True)
    try:
        found = list[float]()
        for _ in range(_REPEATS):
            card.record(begin)
            for _ in range(_COPIES):
                card.copy(target, source, nbytes)
            card.record(end)
            card.wait()
            found.append(card.seconds(begin, end))
        return 2 * nbytes * _COPIES / min(found) / 1e9
    finally:
        for event in (begin, end):
            card.forget_event(event)
        for place in (source, target):
            card.free(place)


def peaks(card: Card, level: str) -> dict[str, float]:
    """The arithmetic peak by NVIDIA's sheet, in 10^9 operations per second. An f32 number is two bf16 numbers.

    Raises:
        TargetError: the level is not known.
    """
    if (operations := _BF16_OPERATIONS.get(level.removesuffix("a"))) is None:  # "sm_90a" has more instructions
        raise TargetError(f"the peak of {level} is not known", where="device cuda")
    rate = operations * card.attribute(MULTIPROCESSORS) * card.attribute(_CLOCK) / 1e6
    return {"bf16": rate, "f32": rate / 2}
