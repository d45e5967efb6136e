"""How workers get units: each unit once, a worker's own share first and as one stream."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import emulated
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlx.backends.cpu import link, work_stealing
from rlx.backends.cpu.kernel import Units
from rlx.backends.cpu.kernels.linear.linear import together
from rlx.backends.cpu.launch.code import NativeCode
from rlx.backends.cpu.llvm import compile_module
from rlx.backends.cpu.llvm_text import Text
from rlx.backends.cpu.target import Target
from rlx.backends.cpu.work_stealing import (
    SHARES,
    TAKE,
    WorkStealing,
    counter_bytes,
    grain,
    stride,
)
from rlx.compiler.executable import compile
from rlx.ir import ops
from rlx.ir.dims import SEQ
from rlx.ir.dtypes import Q8_0
from rlx.ir.graph import Graph
from rlx.store.cache import CompileCache

# Two calls, so that the counters of one are not those of the other; each notes the ranges it gets behind `%log`.
MODULE = """
declare i64 @llvm.umin.i64(i64, i64)

define internal void @note(ptr %log, i64 %start, i64 %end) {{
  %count = load i64, ptr %log
  %after = add i64 %count, 2
  store i64 %after, ptr %log
  %from = getelementptr i64, ptr %log, i64 %count
  %at = getelementptr i64, ptr %from, i64 1
  store i64 %start, ptr %at
  %next = getelementptr i64, ptr %from, i64 2
  store i64 %end, ptr %next
  ret void
}}

define void @work(ptr %log0, ptr %log1, ptr %counters, i64 %stream, i64 %streams, i64 %units) {{
  %empty0 = alloca i64
  %empty1 = alloca i64
{body}
  ret void
}}
"""
CEILING = 2e-6  # of f32 against float64, as a share of the largest result
_WORK = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 3, *[ctypes.c_int64] * 3)


@cache
def worker(size: int) -> tuple[NativeCode, Callable[..., None]]:
    """A function that takes what is left of two calls with ranges of `size` units."""
    t = Text()
    for c in range(2):
        handout = WorkStealing(c, "%units", str(size), stride(2))
        start, end = handout.begin(t)
        t.lines.append(f"  call void @note(ptr %log{c}, i64 {start}, i64 {end})")
        handout.end(t)
    module = compile_module(MODULE.format(body="\n".join(t.lines)) + TAKE, Target.host())
    code = NativeCode([module.code], ["work"])
    return code, _WORK(code.addresses["work"])


class Step:
    """The counters of a step, and who got what."""

    def __init__(self, units: int, size: int, streams: int) -> None:
        self.units, self.size, self.streams = units, size, streams
        self.counters = np.zeros(counter_bytes({"regions": [[0, 1]]}) // 8, np.int64)

    def run(self, stream: int) -> list[list[tuple[int, int]]]:
        """The ranges that a worker gets of each call, in order."""
        logs = np.zeros((2, 2 * self.units + 3), np.int64)
        work = worker(self.size)[1]
        work(*(log.ctypes.data for log in logs), self.counters.ctypes.data, stream, self.streams, self.units)
        return [[(int(a), int(b)) for a, b in log[1 : 1 + log[0]].reshape(-1, 2)] for log in logs]

    def take(self, share: int, count: int) -> None:
        """Another worker has taken the first ranges of a share, of both calls."""
        self.counters[share * stride(2) // 8 :][:2] = count


def share_of(step: Step, share: int) -> list[int]:
    """The ranges of a share, by number."""
    ranges = -(-step.units // step.size)
    each = -(-ranges // step.streams)
    return list(range(min(share * each, ranges), min((share + 1) * each, ranges)))


@given(
    units=st.integers(0, 150), size=st.integers(1, 7), streams=st.integers(1, SHARES), seed=st.integers(0, 2**32 - 1)
)
def test_a_worker_streams_through_its_share_and_then_helps(units: int, size: int, streams: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    step, stream = Step(units, size, streams), int(rng.integers(streams))
    expected = []
    for share in [*range(stream, streams), *range(stream)]:
        ranges = share_of(step, share)
        taken = 0 if share == stream else int(rng.integers(len(ranges) + 3))  # who comes too late still counts up
        step.take(share, taken)
        expected += [(r * size, min((r + 1) * size, units)) for r in ranges[taken:]]
    assert step.run(stream) == [expected, expected]
    assert step.run(int(rng.integers(streams))) == [[], []]


@given(units=st.integers(1, 100), workers=st.lists(st.integers(0, SHARES - 1), min_size=1, max_size=4))
def test_every_unit_is_done_once(units: int, workers: list[int]) -> None:
    step = Step(units, 3, SHARES)
    done = [r for w in workers for r in step.run(w)[0]]
    assert sorted(u for start, end in done for u in range(start, end)) == list(range(units))


@pytest.mark.parametrize(("threads", "shares"), [(1, SHARES), (2, SHARES), (11, SHARES), (11, 8)])
def test_any_number_of_workers_finds_the_same_bits(threads: int, shares: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regions of linears in a step of one row, also with more workers than shares."""
    for module in (link, work_stealing):
        monkeypatch.setattr(module, "SHARES", shares)
    rng, graph = np.random.default_rng(0), Graph("chain")
    x = graph.input("x", [SEQ, 64])
    weights = {f"w{i}": rng.standard_normal((640, 64 if i < 2 else 640)).astype(np.float32) for i in range(4)}
    y = sum_ = ops.linear(x, graph.weight("w0", (640, 64))) + ops.linear(x, graph.weight("w1", (640, 64)))
    for name in ("w2", "w3"):
        y = ops.linear(y, graph.weight(name, (640, 640))) + sum_
    graph.output("y", y)
    with compile(graph, {"SEQ": 1}, threads=threads, cache=CompileCache(policy="off")) as exe:
        exe.bind(**weights)
        row = rng.standard_normal((1, 64)).astype(np.float32)
        first = exe(x=row)["y"].copy()
        wide = {name: w.astype(np.float64) for name, w in weights.items()}
        both = row.astype(np.float64) @ (wide["w0"] + wide["w1"]).T
        expected = (both @ wide["w2"].T + both) @ wide["w3"].T + both
        assert np.abs(first - expected).max() <= CEILING * np.abs(expected).max()
        assert all(np.array_equal(exe(x=row)["y"], first) for _ in range(50))


@pytest.mark.parametrize("n", (16, 256, 384, 4096))
@pytest.mark.parametrize("act", ("f32", "q8a"))
def test_ranges_of_several_rows_are_whole_groups_of_units(act: str, n: int) -> None:
    """A group that a range cuts is computed twice: results of 384 took as long as 768."""
    size = together(act, 512, n, 1, Target.host())
    assert grain(Units(n, 16, together=size), {}) % size == 0


def test_few_rows_have_ranges_of_single_units_rather_than_few_ranges() -> None:
    def size(n: int, rows: int) -> int:
        return grain(Units(SEQ, 512, n // 16, together=2, ranges=128, few=64), {"SEQ": (1, rows)})

    assert [size(n, 512) for n in (1024, 2048, 4096, 32768)] == [2, 2, 2, 16]
    assert [size(n, 64) for n in (1024, 2048, 4096, 32768)] == [1, 2, 2, 16]


def test_ranges_follow_the_rows_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program for many rows has the ranges of few where a call has few."""
    emulated.use(monkeypatch)
    rng, graph = np.random.default_rng(0), Graph("linear")
    graph.output("y", ops.linear(graph.input("x", [SEQ, 64]), graph.weight("w", (1536, 64), Q8_0)))
    codes, rows = rng.integers(-127, 128, (3072, 32), np.int8), rng.standard_normal((200, 64)).astype(np.float32)
    blocks = np.concatenate([np.full((3072, 1), 0.01, np.float16).view(np.uint8), codes.view(np.uint8)], axis=1)
    w = codes.reshape(1536, 64) * float(np.float16(0.01))
    cache, options = CompileCache(policy="off"), {"precision": "auto", "target": emulated.TARGETS[-1], "threads": 2}
    with compile(graph, {"SEQ": (9, 2048), "w": blocks.reshape(-1)}, cache=cache, **options) as exe:
        assert "i64 1, i64 4" in exe.llvm("region")  # units per range: one of two numbers
        for count in (10, 64, 65, 200):
            expected = rows[:count].astype(np.float64) @ w.T
            found = exe(x=rows[:count])["y"]
            assert np.abs(found - expected).max() < 0.02 * np.abs(expected).max()


def test_one_row_is_read_in_several_streams_if_enough_ranges_remain() -> None:
    target = Target.host()
    few, many = (together("q8a", 512, n, 1, target, single=True) for n in (256, 1 << 16))
    assert few == 1 or target.has_bf16_tiles
    assert many >= few
