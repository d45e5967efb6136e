"""Measured steps: medians are taken of what the workers' clocks say, and an executable reports them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlx.backends.program import Observer, StepClocks, StepLog
from rlx.compiler import measuring
from rlx.compiler.measuring import measure_step


class Logged:
    """A program of two workers and two regions of one call each; the second worker misses the first region."""

    def __init__(self) -> None:
        self.manifest = {"regions": [[[0, "a"]], [[1, "b"]]]}
        self.observers: list[Observer] = []

    def observe(self, observer: Observer) -> None:
        self.observers.append(observer)

    def ignore(self, observer: Observer) -> None:
        self.observers.remove(observer)

    def run(self) -> float:
        """Region 0 is from 1000 to 1100 ns, region 1 to 1400."""
        times = np.array([[[1000, 1100, 1400], [1150, 1160, 1400]]])
        marks = np.zeros((1, 2, 4, 3), np.int64)  # of a region its prologue, then its call
        marks[0, 0, 1], marks[0, 0, 3] = (1000, 1090, 5), (1100, 1250, 3)
        marks[0, 1, 3] = (1160, 1350, 4)
        for observer in self.observers:
            observer.logged(self, StepLog(1, 0, lambda: StepClocks(times, marks)))  # type: ignore[arg-type]
        return 1e-3


def test_medians_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "LEAST_SECONDS", 0.0)
    program: Any = Logged()
    times = measure_step(program, program.run, {"SEQ": 1}, repeat=5)
    assert times.regions == pytest.approx([100e-9, 300e-9])
    assert times.waits[0] == pytest.approx([10e-9, 150e-9])
    assert times.waits[1][0] is None and times.waits[1][1] == pytest.approx(50e-9)
    assert times.units == [[5, 3], [0, 4]]
    assert (times.repeats, times.seconds, times.extents) == (5, 1e-3, {"SEQ": 1})
    assert not program.observers
