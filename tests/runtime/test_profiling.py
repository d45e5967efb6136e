"""Which of the machine's limits a kind of work is near, and that `rlx bench` says so of every kernel."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner

from rlx.backends.cpu.target import Target
from rlx.cli.main import cli
from rlx.compiler.profiling import Limit, OpTime
from rlx.engine.engine import Engine
from rlx.engine.programs.reporting import profile_step

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
