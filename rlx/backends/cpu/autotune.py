"""Autotuning: measures candidate values for each number of a `Tuning`, with the real kernels and workers.

    for number, its candidates and the linears that it affects:
        for round:
            for the current value, each candidate, and the current value once more:
                time each linear once
        ratio of a candidate = median over rounds of the geometric mean over linears of its time / that of the first
        the fastest candidate is chosen if it is faster by more than the noise, and in nine of ten rounds

Runs are interleaved, so that other load on the machine affects all candidates. The noise is the difference between the
two measurements of the current value, per round and in the median. Numbers are measured one after the other, each with
the values chosen before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rlx import platform
from rlx.backends.cpu import steps
from rlx.backends.cpu.kernel import Units
from rlx.backends.cpu.kernels.linear.linear import macro_rows, together, units
from rlx.backends.cpu.launch.native import WorkerPool
from rlx.backends.cpu.layouts import BLOCK_ROWS, packed_bytes, q8a_quantize
from rlx.backends.cpu.target import Target
from rlx.backends.cpu.tuning import Tuning
from rlx.backends.cpu.work_stealing import grain
from rlx.backends.device import Builder, Outcome, Row
from rlx.backends.host import AlignedBuffer
from rlx.closing import Closing
from rlx.errors import RlxError
from rlx.ir.dtypes import BF16, Q4_K, Q6_K, Q8_0, DType

#: Minimum improvement of a candidate over the current value, as a share of the time.
LEAST_GAIN = 0.03
ROUNDS = (5, 25)  # per number: minimum, maximum
_OFTEN = 0.9  # minimum share of the rounds in which a candidate must be faster

_K, _PREFILL, _PREFILL_N, _FEW_N = 2048, 512, 2048, 16384  # sizes of the timed linears
_DEFAULT_CACHE, _LEAST_BYTES, _MOST_BYTES = 32 << 20, 64 << 20, 512 << 20
# Random bytes in this range give numbers of a normal size in all formats: codes, f16 and f32 scales, bf16 weights.
_BYTES = (0x18, 0x20)


@dataclass(frozen=True)
class Case:
    """A linear that is timed: `rows` of activations of type `act` times weights [n, k]."""

    dtype: DType
    act: str
    rows: int
    n: int
    k: int = _K

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return packed_bytes(self.dtype, self.n, self.k)

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * self.rows * self.n * self.k


@dataclass(frozen=True)
class Stage:
    """A number of the tuning, its candidate values, and the linears that it affects."""

    name: str
    values: tuple[int, ...]
    cases: tuple[Case, ...]


class Timer(Protocol):
    """Times linears."""

    def prepare(self, tuning: Tuning, case: Case) -> Callable[[], float]:
        """Compiles a linear and runs it once; the returned function runs it again and returns its seconds."""


def stages(target: Target, nbytes: int) -> list[Stage]:
    """The measurements for a target; `nbytes` of weights must exceed the last-level cache.

    Decode reads all of them, as with a real model: no part is still cached when it is read again.
    """
    codes = (Q8_0, Q4_K, Q6_K)
    decode = [*((d, "q8a") for d in codes), (BF16, "f32")]
    single = tuple(_case(*d, 1, nbytes, nbytes) for d in decode)
    found = [Stage("prefetch", (1024, 2048, 4096, 8192, 16384), single), Stage("streams", (1, 2, 4), single)]
    found.insert(1, Stage("prefetch_level", (0, 1, 2), single))
    plain = [(BF16, "bf16" if target.has_bf16_dots else "f32")]

    def add(name: str, values: Sequence[int], rows: Sequence[int], kinds: Sequence[tuple[DType, str]]) -> None:
        cases = (_case(*kind, count, nbytes) for kind in kinds for count in rows)
        found.append(Stage(name, tuple(values), tuple(cases)))

    integers = [(d, "q8a") for d in codes]
    add("tile_rows_int8", (4, 6, 8), (_PREFILL,), integers)
    add("macro_rows_int8", (24, 48, 96, 192), (_PREFILL,), integers)
    add("unpack_from_int8", (0, 12, 24, 48, 512), (16, 40, _PREFILL), integers)
    if target.has_bf16_tiles:
        add("macro_bytes_tiles", (1 << 19, 1 << 20, 1 << 21), (_PREFILL,), [(Q4_K, "bf16"), (BF16, "bf16")])
        return found
    add("tile_rows_float", (4, 6, 8, 12), (_PREFILL,), plain)
    add("macro_rows_float", (72, 144, 288), (_PREFILL,), plain)
    if target.vectors == "avx512":
        add("unpack_from_plain", (8, 16, 32, 64), (8, 16, 32), plain)
    return found


def _case(dtype: DType, act: str, rows: int, nbytes: int, wanted: int | None = None) -> Case:
    """A linear with at most `nbytes` of weights: about `wanted` bytes, or a size typical for prompts if None."""
    most = nbytes // packed_bytes(dtype, BLOCK_ROWS, _K) * BLOCK_ROWS
    usual = _PREFILL_N if rows == _PREFILL else _FEW_N
    return Case(dtype, act, rows, most if wanted else min(most, usual))


def tune(
    plan: Sequence[Stage],
    start: Tuning,
    timer: Timer,
    seconds: float,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> Outcome:
    """Measures stage after stage, for about `seconds` together.

    Args:
        start: the initial values, usually the target's defaults.
        progress: called with (stages done, stages).
    """
    tuning, rows, skipped, end = start, list[Row](), list[str](), time.monotonic() + seconds
    for done, stage in enumerate(plan):
        progress(done, len(plan))
        left = end - time.monotonic()
        if left <= 0:
            skipped.append(stage.name)
            continue
        measured = _measure(stage, tuning, timer, time.monotonic() + left / (len(plan) - done))
        rows += measured
        tuning = replace(tuning, **{stage.name: next(row.value for row in measured if row.chosen)})
    return Outcome(tuning, tuple(rows), tuple(skipped))


def _measure(stage: Stage, tuning: Tuning, timer: Timer, end: float) -> list[Row]:
    """One row per value, the current one first."""
    now = getattr(tuning, stage.name)
    values = [now, *(v for v in stage.values if v != now)]
    runs = [[timer.prepare(replace(tuning, **{stage.name: v}), case) for case in stage.cases] for v in values]
    seconds = _interleaved([*runs, runs[0]], end)
    ratios, best = judge(seconds)
    single = stage.cases[0].rows == 1
    work = sum(case.nbytes if single else case.flops for case in stage.cases) / 1e9
    speeds = work / np.median(seconds[:, 0], axis=0).sum() / ratios
    unit = "GB/s" if single else "GFLOP/s"
    return [
        Row(stage.name, value, float(speeds[i]), unit, float(ratios[i]), chosen=i == best)
        for i, value in enumerate(values)
    ]


def _interleaved(runs: Sequence[Sequence[Callable[[], float]]], end: float) -> NDArray[np.float64]:
    """Seconds [rounds, candidates, linears]; every round starts with another candidate."""
    found, (least, most) = list[NDArray[np.float64]](), ROUNDS
    while len(found) < least or (len(found) < most and time.monotonic() < end):
        row = np.zeros((len(runs), len(runs[0])))
        for turn in range(len(runs)):
            i = (turn + len(found)) % len(runs)
            row[i] = [run() for run in runs[i]]
        found.append(row)
    return np.stack(found)


def judge(seconds: NDArray[np.float64]) -> tuple[NDArray[np.float64], int]:
    """-> (time of each candidate relative to the first, index of the chosen one).

    Args:
        seconds: [rounds, candidates, linears]; the first and the last candidate are the current value.
    """
    relative = np.exp(np.log(seconds / seconds[:, :1]).mean(axis=2))
    ratios = np.median(relative, axis=0)
    spread = 3 * np.median(abs(relative[:, -1] - 1)) / np.sqrt(len(relative))
    noise = max(LEAST_GAIN, 2 * abs(ratios[-1] - 1), spread)
    always = np.quantile(relative, _OFTEN, axis=0) < 1
    candidates = np.where(always & (ratios < 1 - noise), ratios, np.inf)[:-1]
    return ratios[:-1], int(np.argmin(candidates)) if np.isfinite(candidates).any() else 0


class Bench(Closing):
    """Times linears on synthetic weights, with a pool's workers. Close it, or use it in a `with`.

    Args:
        target: the target of the kernels.
        pool: the workers.
        nbytes: size of the weights in bytes.
        builders: makes a builder for a target with a candidate, whose code nobody else uses.
    """

    def __init__(self, target: Target, pool: WorkerPool, nbytes: int, builders: Callable[[Target], Builder]) -> None:
        self._target, self._pool, self._builders = target, pool, builders
        self._weights = AlignedBuffer(nbytes, huge=True)
        piece = np.random.default_rng(0).integers(*_BYTES, min(nbytes, 1 << 20), dtype=np.uint8)
        room = self._weights.view(np.uint8, nbytes)
        for at in range(0, nbytes, piece.size):
            room[at : at + piece.size] = piece[: nbytes - at]
        self._inputs: dict[tuple[str, int, int], AlignedBuffer] = {}
        self._results: dict[Case, NDArray[Any]] = {}

    def prepare(self, tuning: Tuning, case: Case) -> Callable[[], float]:
        """See `Timer`.

        Raises:
            RlxError: the results are missing, or differ in any bit from those of the other tunings.
        """
        target = replace(self._target, tuned=tuning)
        single, again = case.rows == 1, macro_rows(case.k, case.act, target)
        code = steps.linear(self._builders(target), case.dtype, case.k, case.act, single=single)
        (step,) = code.addresses.values()
        count = units(case.n) * (1 if again is None else -(-case.rows // again))
        out = AlignedBuffer(4 * case.rows * case.n)
        extents = [case.n] if single else [case.rows, case.n]
        x, w = self._input(case).address, self._weights.address
        at_once = together(case.act, case.k, case.n, 1, target, single=single)
        size = grain(Units(count, together=at_once), {})
        words = np.array([x, w, out.address, *extents, count, size, 0], np.int64)

        def run() -> float:
            words[-1] = 0
            start = time.perf_counter()
            self._pool.share(step, words.ctypes.data)
            return time.perf_counter() - start

        result = out.view(np.uint32, (case.rows, case.n))
        result.fill(0xFFFFFFFF)  # NaN
        run()
        self._check(case, result)
        run.__dict__["owners"] = code, out  # keeps the memory at these addresses alive
        return run

    def _check(self, case: Case, result: NDArray[Any]) -> None:
        known = self._results.setdefault(case, result.copy())
        if not (np.isfinite(known.view(np.float32)).all() and known.any() and np.array_equal(known, result)):
            raise RlxError(f"wrong results of {case}", where="rlx tune", hint="Please report it.")

    def _input(self, case: Case) -> AlignedBuffer:
        name = case.act, case.rows, case.k
        if name not in self._inputs:
            data = _activations(*name)
            self._inputs[name] = AlignedBuffer(data.nbytes)
            self._inputs[name].view(np.uint8, data.shape)[...] = data
        return self._inputs[name]

    def close(self) -> None:
        for buffer in (self._weights, *self._inputs.values()):
            buffer.close()


def _activations(act: str, rows: int, k: int) -> NDArray[np.uint8]:
    """Random rows in a kernel's input format."""
    x = np.random.default_rng(1).standard_normal((rows, k)).astype(np.float32)
    if act == "q8a":
        return q8a_quantize(x)
    return (x.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8) if act == "bf16" else x.view(np.uint8)


def weight_bytes() -> int:
    """Size of weights that exceeds every cache: twice the last-level cache, from 64 to 512 MiB."""
    return min(_MOST_BYTES, max(_LEAST_BYTES, 2 * max(platform.current().cache_bytes(), default=_DEFAULT_CACHE)))
