"""`rlx bench --compare`: old beside new, what is noise, what differs, and the exit code."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from rlx.cli import bench
from rlx.cli.main import cli
from rlx.engine.engine import Engine

QUICK = ["bench", "--prompt", "8", "--generate", "2", "--repeat", "2", "--threads", "1"]


def kernels(**times: float) -> list[dict[str, Any]]:
    return [{"kernel": name, "ms": ms, "ms_range": [ms * 0.9, ms * 1.1]} for name, ms in times.items()]


def measured(prefill: list[float], decode: list[float], **times: float) -> dict[str, Any]:
    return {
        "prefill": {"tokens_per_s": prefill[1], "runs": prefill},
        "decode": {"tokens_per_s": decode[1], "runs": decode},
        "greedy": {"tokens_per_s": decode[1], "runs": decode},
        "prefill_kernels": kernels(**times), "decode_kernels": kernels(**times),
        "model": {"name": "a.gguf"}, "conditions": {"threads": 2}, "machine": {"cpu": "A"}, "versions": {"rlx": "1"},
    }  # fmt: skip


OLD = measured([90, 100, 110], [9, 10, 11], linear=2.0, attention=1.0, gone=1.0)
NEW = measured([199, 200, 201], [10, 10.5, 12], linear=1.0, attention=1.05)


def test_ratios_and_noise() -> None:
    found = {each["name"]: each for each in bench.figures(OLD, NEW)}
    assert found["prefill"]["times_as_fast"] == pytest.approx(2) and not found["prefill"]["noise"]
    assert found["decode"]["times_as_fast"] == pytest.approx(1.05) and found["decode"]["noise"]
    assert found["decode: linear"]["times_as_fast"] == pytest.approx(2) and not found["decode: linear"]["noise"]
    assert (
        found["decode: attention"]["times_as_fast"] == pytest.approx(1 / 1.05) and found["decode: attention"]["noise"]
    )
    assert "decode: gone" not in found


@pytest.mark.parametrize(("old", "new", "least", "slow"), [
    (OLD, NEW, 1.0, []), (NEW, OLD, 0.95, ["prefill"]), (NEW, OLD, 0.4, []), (NEW, OLD, 10.0, ["prefill"]),
])  # fmt: skip
def test_only_tasks_beyond_noise_are_too_slow(old: Any, new: Any, least: float, slow: list[str]) -> None:
    assert [each["name"] for each in bench.too_slow(old, new, least)] == slow


def test_a_prompt_longer_than_a_call(demo_model: Path) -> None:
    with closing(Engine.open(demo_model, max_seq=128, profile={"buckets": {"seq": [1, 32]}}, threads=1)) as engine:
        found = bench.measure(engine, 70, 2, 1)
    short = sum(row["gflop_per_s"] * row["ms"] for row in found["prefill_kernels"]) / 1e3  # of its first 32 tokens
    whole = found["prefill"]["gflop_per_s"] * 70 / found["prefill"]["tokens_per_s"]
    assert 2 < whole / short < 2.5


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A measurement beside itself; then beside one that claims to have been far faster."""
    before = tmp_path / "before.json"
    monkeypatch.setattr("rlx.cli.bench.disturbances", lambda result: ["another program computes"])
    first = CliRunner().invoke(cli, [*QUICK, "--json"])
    assert first.exit_code == 0, first.output
    assert first.stderr.count("Warning: the machine is busy: another program computes") == 1
    before.write_text(first.stdout)
    faster = json.loads(first.stdout)
    for phase in ("prefill", "decode", "greedy"):
        assert json.loads(first.stdout)[phase]["tokens_per_s"] > 0
        faster[phase]["tokens_per_s"] *= 1e6
        faster[phase]["runs"] = [run * 1e6 for run in faster[phase]["runs"]]
    faster["versions"]["rlx"] = "0.0.1"
    (tmp_path / "faster.json").write_text(json.dumps(faster))
    found = CliRunner().invoke(cli, [*QUICK, "--compare", str(tmp_path / "faster.json"), "--at-least", "0.5"])
    assert found.exit_code == bench.SLOWER
    assert "Warning: versions rlx: 0.0.1, now " in found.stderr and "slower: decode, 0.00 times" in found.stderr
    assert "beside the earlier measurement:" in found.stdout and "prefill" in found.stdout
    same = CliRunner().invoke(cli, [*QUICK, "--compare", str(before), "--json"])
    assert same.exit_code == 0 and json.loads(same.stdout)["compared"]["differences"] == []
