"""Measured steps, and which of the machine's limits a kind of work is near: `rlx bench` says so of every kernel."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from rlx.backends.cpu.target import Target
from rlx.backends.program import Observer, StepClocks, StepLog
from rlx.cli.main import cli
from rlx.compiler import profiling
from rlx.compiler.profiling import Limit, OpTime, measure_step
from rlx.engine.engine import Engine
from rlx.engine.programs.reporting import batch_steps, profile_step

PEAKS = {"int8": 800.0, "amx-int8": 2000.0, "bf16-dots": 400.0, "amx-bf16": 1000.0, "bf16": 1000.0, "f32": 200.0}


def work(seconds: float, nbytes: int = 0, regions: int = 1, **operations: int) -> OpTime:
    return OpTime("work", seconds, nbytes, regions, Counter(operations))


def near(found: Limit, name: str, share: float) -> bool:
    return found.name == name and found.share == pytest.approx(share)


def test_what_computes_much_is_near_the_peak_of_its_arithmetic() -> None:
    for kind, peak in (("int8", 800), ("bf16", 1000), ("f32", 200)):
        busy = work(1e-3, nbytes=1000, **{kind: peak * 10**6 // 2})
        assert near(busy.limit(25.0, PEAKS), "arithmetic", 0.5)
    both = work(1e-3, int8=4 * 10**8, f32=5 * 10**7)
    assert near(both.limit(25.0, PEAKS), "arithmetic", 0.75) and both.flops == 45 * 10**7


def test_operations_are_those_of_the_activations_type(demo_model: Path) -> None:
    """The demo's linears are Q8_0 with 8-bit activations; attention of one row multiplies bf16 as that of many does."""
    target = Target.host()
    engine = Engine.open(demo_model, threads=1, max_seq=32)
    found = {row.label: row for row in profile_step(engine, [1], repeat=1)}
    engine.close()
    linears = sum((row.operations for label, row in found.items() if label.startswith("linear-q8_0")), Counter())
    assert linears["int8"] > 1_000_000 and linears["bf16"] == 0
    bf16 = target.has_bf16_dots and not target.has_bf16_tiles
    assert found["attention"].operations.keys() == {"bf16" if bf16 else "f32"}


def test_steps_alone_and_in_a_run_are_of_the_same_depths(demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine.open(demo_model, threads=1, max_seq=96)
    alone, in_run = list[int](), list[tuple[int, int]]()
    compute, run = engine.compute, engine.run
    monkeypatch.setattr(
        engine, "compute", lambda segments: (alone.append(len(segments[0].sequence)), compute(segments))[1]
    )
    monkeypatch.setattr(
        engine, "run", lambda rows: (in_run.append((len(rows[0].sequence), rows[0].count)), run(rows))[1]
    )
    alone.clear()
    steps = list(batch_steps(engine, [1, 3], 16))
    engine.close()
    assert [step.in_run is not None for step in steps] == [True, True]
    alone = [depth for depth in alone if depth >= 16]  # the first step reads the prompt
    first = alone[: len(alone) // 2]
    assert alone == first * 2 and first == list(range(16, 16 + len(first)))
    assert in_run == [(16, len(first) - 2)] * 2  # two steps more warm up


def test_bench_names_the_limit_of_every_kernel(demo_model: Path) -> None:
    command = ["bench", str(demo_model), "--prompt", "8", "--generate", "2", "--repeat", "1"]
    result = CliRunner().invoke(cli, [*command, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert 4e6 < found["read_bytes"] < 8e6, "the bandwidth is that of what a step of this model reads"
    assert {"int8", "f32"} <= found["peak_gop_per_s"].keys() and found["read_gb_per_s"] > 0
    for row in found["decode_kernels"] + found["prefill_kernels"]:
        assert row["limit"] in ("memory", "cache", "arithmetic", "barrier") and row["share_of_limit"] >= 0
    shown = CliRunner().invoke(cli, command)
    assert shown.exit_code == 0 and "near" in shown.output and "one decode step" in shown.output


# --------------------------------------------------------------------------------------------------- measured steps


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
    monkeypatch.setattr(profiling, "LEAST_SECONDS", 0.0)
    program: Any = Logged()
    times = measure_step(program, program.run, {"SEQ": 1}, repeat=5)
    assert times.regions == pytest.approx([100e-9, 300e-9])
    assert times.waits[0] == pytest.approx([10e-9, 150e-9])
    assert times.waits[1][0] is None and times.waits[1][1] == pytest.approx(50e-9)
    assert times.units == [[5, 3], [0, 4]]
    assert (times.repeats, times.seconds, times.extents) == (5, 1e-3, {"SEQ": 1})
    assert not program.observers
