"""Autotuning: what is chosen from given times, that candidates are run in turn, and that real kernels are timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from rlx.backends.cpu.autotune import Bench, Case, Stage, judge, tune
from rlx.backends.cpu.launch.native import WorkerPool
from rlx.backends.cpu.steps import worker_loop
from rlx.backends.cpu.target import Target
from rlx.backends.cpu.tuning import Tuning
from rlx.compiler.compile import Compiler
from rlx.errors import RlxError
from rlx.ir.dtypes import BF16, Q4_K, Q8_0

CASES = (Case(Q8_0, "q8a", 1, 16), Case(Q4_K, "q8a", 1, 16))
PLAN = (Stage("prefetch", (1024, 4096, 8192), CASES), Stage("macro_rows_int8", (24, 48), CASES[:1]))


class Fake:
    """Times that a function of tuning and case gives, and what was run in which order."""

    def __init__(self, seconds: Callable[[Tuning, Case], float]) -> None:
        self.seconds, self.log = seconds, list[tuple[Tuning, Case]]()

    def prepare(self, tuning: Tuning, case: Case) -> Callable[[], float]:
        def run() -> float:
            self.log.append((tuning, case))
            return self.seconds(tuning, case)

        return run


def noisy(rng: np.random.Generator, ratios: list[float], spread: float, rounds: int = 25) -> np.ndarray:
    """Seconds of candidates that are `ratios` of the first, whose machine changes pace by a factor of up to 3."""
    pace = rng.uniform(1, 3, (rounds, 1, 1))
    return pace * np.array(ratios)[:, None] * np.exp(spread * rng.standard_normal((rounds, len(ratios), 2)))


@pytest.mark.parametrize(
    ("ratios", "spread", "best"),
    [
        ([1, 0.9, 0.8, 1], 0.005, 2),
        ([1, 1.1, 0.98, 1], 0.005, 0),  # faster, but not by 3 percent
        ([1, 0.9, 1.2, 1], 0.3, 0),  # lost in the noise
        ([1, 0.9, 1.2, 1.1], 0.005, 0),  # the value in force differs from itself by as much
        ([1, 1], 0.01, 0),
    ],
)
def test_only_what_is_faster_than_the_noise_is_taken(ratios: list[float], spread: float, best: int) -> None:
    for seed in range(20):
        seconds = noisy(np.random.default_rng(seed), ratios, spread)
        found, chosen = judge(seconds)
        assert chosen == best
        assert len(found) == len(ratios) - 1
        assert found[0] == 1


def test_each_number_is_measured_with_those_before_it() -> None:
    def seconds(tuning: Tuning, case: Case) -> float:
        good_pair = tuning.macro_rows_int8 == 24 and tuning.prefetch == 8192
        return (0.5 if good_pair else 1.0) * (0.9 if tuning.prefetch == 8192 else 1.0)

    outcome = tune(PLAN, Tuning(), Fake(seconds), 60)
    assert outcome.tuning == replace(Tuning(), prefetch=8192, macro_rows_int8=24)
    assert [(r.name, r.value, r.chosen) for r in outcome.rows] == [
        ("prefetch", 4096, False),
        ("prefetch", 1024, False),
        ("prefetch", 8192, True),
        ("macro_rows_int8", 48, False),
        ("macro_rows_int8", 24, True),
    ]
    assert [round(r.ratio, 3) for r in outcome.rows] == [1, 1, 0.9, 1, 0.5]
    nbytes = sum(case.nbytes for case in CASES)
    assert outcome.rows[0].unit == "GB/s"
    assert outcome.rows[0].speed == pytest.approx(nbytes / 2 / 1e9)
    assert outcome.rows[2].speed == pytest.approx(nbytes / 2 / 0.9 / 1e9)


def test_real_kernels_are_timed_and_checked() -> None:
    target, cases = Target.host(), [Case(Q8_0, "q8a", 1, 64, 256), Case(BF16, "f32", 3, 32, 256)]
    with WorkerPool(2, worker_loop(Compiler(target))) as pool, Bench(target, pool, 1 << 16, Compiler) as bench:
        for case in cases:
            for tuning in (target.tuning, replace(target.tuning, prefetch=64, macro_rows_float=2)):
                assert bench.prepare(tuning, case)() > 0
        bench._results[cases[0]][0, 5] ^= 1  # a kernel whose results are others is not believed
        with pytest.raises(RlxError, match="wrong results"):
            bench.prepare(target.tuning, cases[0])
