"""Steps in a trace: every step, its regions, and what each worker did, under the names of the report."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import trace_format

import rlx

PROMPT = [5, 9, 2, 7, 5, 9, 2, 7, 5, 9]
SMALL: dict[str, Any] = {"max_seq": 64, "profile": {"buckets": {"seq": [1, 32]}}, "compile_ahead": False, "threads": 2}
STEPS = 6


def traced(path: Path, runner: Any, detail: Any = "kernels") -> tuple[list[int], trace_format.Read]:
    with rlx.trace(path, detail=detail):
        tokens = list(runner.generate(PROMPT, STEPS, stop_at_eog=False))
    return tokens, trace_format.read(path)


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_every_step_with_its_regions_and_kernels(goldens: Path, tmp_path: Path, device: str) -> None:
    with rlx.auto_runner(goldens / "llama-k256" / "model-Q4_K_M.gguf", device=device, **SMALL) as runner:
        tokens, found = traced(tmp_path / "trace.json", runner)
        assert tokens == list(runner.generate(PROMPT, STEPS, stop_at_eog=False))
        names = {event.rule for program in runner.programs for event in program.explain().kernels}
    steps = found.of("step")
    assert [each.name.split("/")[1] for each in steps] == ["prefill"] + ["decode"] * (STEPS - 1)
    assert [each.args["PAST_SEQ"] for each in steps] == [0, *range(len(PROMPT), len(PROMPT) + STEPS - 1)]
    for step in steps:
        regions = [each for each in found.of("region") if step.start <= each.start < step.end]
        assert [each.args["region"] for each in regions] == list(range(len(regions)))
        assert sum(each.seconds for each in regions) == pytest.approx(step.seconds, rel=1e-3, abs=1e-6)
    kernels = [each for each in found.on("workers") if each.kind not in ("wait", "prologue")]
    assert {each.name for each in kernels} <= names
    values = {name for each in found.of("region") for name in each.args["values"]}
    assert {each.args["value"] for each in kernels} == values


def test_the_units_of_a_call_are_done_once(goldens: Path, tmp_path: Path) -> None:
    """Whichever workers take them, the units of a call are those of the same call in another step."""
    with rlx.auto_runner(goldens / "llama-k256" / "model-Q4_K_M.gguf", **SMALL) as runner:
        _, found = traced(tmp_path / "trace.json", runner)
    steps = found.of("step")[1:]
    units: dict[str, list[int]] = defaultdict(lambda: [0] * len(steps))
    for each in found.on("workers"):
        step = sum(step.start <= each.start for step in steps) - 1
        if step >= 0 and each.kind not in ("wait", "prologue"):
            units[each.args["value"]][step] += each.args["units"]
    linears = {value: counts for value, counts in units.items() if value.endswith(("attn_q", "ffn_down.add"))}
    assert linears and all(len(set(counts)) == 1 and counts[0] > 0 for counts in linears.values()), linears


def test_a_request_is_a_slice_with_its_phases(goldens: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with rlx.auto_runner(goldens / "llama-k256" / "model-Q4_K_M.gguf", **SMALL, slots=1) as runner, rlx.trace(path):
        runner.generate_batch([PROMPT, PROMPT[:3]], 3, stop_at_eog=False)
    found = trace_format.read(path)
    requests = [each for each in found.on("requests") if each.depth == 0]
    assert [each.name.split()[0] for each in requests] == ["request", "request"]
    assert sorted(each.args["prompt"] for each in requests) == [3, len(PROMPT)]
    for request in requests:
        own = [each for each in found.on("requests") if each.track == request.track and each.depth == 1]
        assert [each.name for each in own] == ["queue", "prompt", "decode"]
        assert sum(each.seconds for each in own) == pytest.approx(request.seconds, rel=0.05)
