"""Figures of a step: bytes and operations are those of the ops, times are divided without loss, budgets add up."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import toy

from rlx.backends.device import manifest_of
from rlx.compiler.profiling import step_bytes
from rlx.ir import ops
from rlx.ir.graph import Graph
from rlx.passes import pipeline
from rlx.passes.options import Options
from rlx.passes.program import Program
from rlx.report import work
from rlx.report.source import Machine, StepTimes
from rlx.report.work import (
    RegionWork,
    budget,
    kernel_rows,
    mean_wait,
    memory_rows,
    region_work,
    step_extents,
)

DECODE = Options(seq=(1, 1))


def lowered(family: str, options: Options = DECODE) -> tuple[Program, dict[str, Any]]:
    program = pipeline.lower(toy.build(toy.FAMILIES[family]), options)
    return program, manifest_of(program, lambda node: f"{node.op}_kernel")


def two_regions() -> tuple[Program, dict[str, Any]]:
    """y = (x a) b for 4 rows: x [4, 64], a [128, 64], b [32, 128], all float32."""
    graph = Graph("two")
    x = graph.input("x", [4, 64])
    hidden = ops.linear(x, graph.weight("a.weight", [128, 64]))
    graph.output("y", ops.linear(hidden, graph.weight("b.weight", [32, 128])))
    program = pipeline.lower(graph, Options(seq=(4, 4), precision="exact", all_rows=True))
    return program, manifest_of(program, lambda node: node.op)


def test_bytes_and_operations_by_hand() -> None:
    program, manifest = two_regions()
    work = region_work(program, {})
    assert [region.bytes for region in work] == [4 * (4 * 64 + 128 * 64 + 4 * 128), 4 * (4 * 128 + 32 * 128 + 4 * 32)]
    assert [dict(region.operations) for region in work] == [{"f32": 2 * 4 * 64 * 128}, {"f32": 2 * 4 * 128 * 32}]
    (kernel,) = kernel_rows(program, manifest, {}, [3.0, 1.0])
    assert (kernel["calls"], kernel["regions"], kernel["seconds"]) == (2, 2, 4.0)
    assert kernel["bytes"] == sum(region.bytes for region in work)


@pytest.mark.parametrize("family", list(toy.FAMILIES))
def test_a_decode_step_moves_at_least_what_it_must_read(family: str) -> None:
    program, _ = lowered(family)
    env = step_extents(program.graph, (1, 1), {"SEQ": 1, "PAST_SEQ": 100})
    moved = sum(region.bytes for region in region_work(program, env))
    assert moved >= step_bytes(program.graph, {"SEQ": 1, "PAST_SEQ": 100}) > 0


@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_the_time_of_regions_is_divided_between_kernels(family: str) -> None:
    program, manifest = lowered(family)
    seconds = np.random.default_rng(0).random(len(program.regions)).tolist()
    rows = kernel_rows(program, manifest, step_extents(program.graph, (1, 1)), seconds)
    assert abs(sum(row["seconds"] for row in rows) - sum(seconds)) < 1e-9
    calls = sum(len(some) for some in (*manifest["regions"], *manifest["prologues"]))
    assert sum(row["calls"] + row["own"] for row in rows) == calls


def test_memory_is_that_of_the_plan() -> None:
    program, manifest = lowered("qwen3")
    rows = memory_rows(program, manifest)
    assert max(at + size for _, at, size, _, _ in rows["values"]) <= rows["values_end"] == program.arena
    for region in range(len(program.regions)):
        live = sorted((at, at + size) for _, at, size, first, last in rows["values"] if first <= region <= last)
        assert all(a[1] <= b[0] for a, b in pairwise(live))


MACHINE = Machine(10.0, {"f32": 100.0}, 2)


def test_a_budget_by_hand() -> None:
    """10 GB/s and 100 GOP/s: 1 GB takes 0.1 s, 20 G operations 0.2 s."""
    work = [RegionWork((), (), stored=size) for size in (10**9, 10**6, 0)]
    work[2].operations["f32"] = 20 * 10**9
    waits = [[0.0, 0.004, 0.0], [0.02, None, 0.0]]
    times = StepTimes({}, 0.5, [0.15, 0.014, 0.25], waits, [[1, 1, 1], [1, 0, 1]], 3)
    parts = {part.kind: part for part in budget(work, ["big", "small", "busy"], times, MACHINE)}
    assert [mean_wait(times, i) for i in range(3)] == pytest.approx([0.01, 0.004, 0.0])
    found = {kind: part.seconds for kind, part in parts.items()}
    expected = {"memory": 0.1 + 1e-4, "arithmetic": 0.2, "beyond": 0.04 + 0.05, "short": 0.01 - 1e-4, "waits": 0.014}
    assert found == pytest.approx({**expected, "outside": 0.5 - 0.414})
    assert parts["beyond"].of == pytest.approx({"big": 0.04, "busy": 0.05})


def test_what_a_group_of_fusions_saves_is_what_a_compile_without_it_has() -> None:
    graph = toy.build(toy.FAMILIES["llama"])
    stages = dict(pipeline.stages(graph, DECODE))
    names = [name for name in stages if isinstance(stages[name], Graph)]
    before = next(a for a, b in pairwise(names) if b.endswith("-fuse"))
    last = list(stages.values())[-1]
    assert isinstance(last, Program) and isinstance(stages[before], Graph)
    env = step_extents(last.graph, (1, 1))
    used = {"prologue", "gated-silu", "residual"}
    again = partial(pipeline.resume, stages[before], after=before.split("-", 1)[1])
    rows = work.groups(again, last, DECODE, env, used)
    assert [row["group"] for row in rows] == ["gated", "residual", "prologue"]
    for row in rows:
        others = tuple(name for name in DECODE.fusions if name != row["group"])
        without = pipeline.lower(graph, Options(seq=(1, 1), fusions=others))
        assert row["without"] == vars(work.Totals.of(without, env))
        assert row["with"] == vars(work.Totals.of(last, env)) and row["on"]
