"""Autotuning: measures candidates for the numbers of a `Tuning`, with the real kernels and workers.

    for number, its candidates and the linears that it matters to:
        for round:
            for the value in force, each candidate, and the value in force once more:
                time each linear once
        ratio of a candidate = median over rounds of the geometric mean over linears of its time / that of the first
        the fastest candidate is taken if it is faster by more than the noise, and in nine of ten rounds

Runs are interleaved, so what else the machine does hits all candidates. What the value in force loses or wins against
itself is noise, in one round and in the median. Each number is measured with those before it as they were chosen.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rlx.codegen.calls import Units
from rlx.codegen.handout import grain
from rlx.codegen.kernels.linear import macro_rows, units
from rlx.codegen.kernels.linear_stream import parts
from rlx.codegen.layouts import BLOCK_ROWS, packed_bytes, q8a_quantize
from rlx.codegen.target import Target
from rlx.codegen.tuning import Tuning
from rlx.env import parse_size
from rlx.errors import RlxError
from rlx.ir.dtypes import BF16, Q4_K, Q6_K, Q8_0, DType
from rlx.runtime.cache import CompileCache
from rlx.runtime.compile import Compiler
from rlx.runtime.memory import AlignedBuffer
from rlx.runtime.threads import WorkerPool

#: A candidate must be faster than the value in force by this share of the time at least.
LEAST_GAIN = 0.03
ROUNDS = (5, 25)  # of a number: at least, at most
_OFTEN = 0.9  # share of the rounds in which it must be faster at all

_K, _PREFILL, _PREFILL_N, _FEW_N = 2048, 512, 2048, 16384  # of the linears that are timed
_DEFAULT_CACHE, _LEAST_BYTES, _MOST_BYTES = 32 << 20, 64 << 20, 512 << 20
# Any bytes between these are numbers of a sane size in all formats: codes, f16 and f32 scales, bf16 weights.
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
    """A number of the tuning, the values that are tried, and the linears that it matters to."""

    name: str
    values: tuple[int, ...]
    cases: tuple[Case, ...]


@dataclass(frozen=True)
class Row:
    """What a value of a number came to.

    Attributes:
        speed: of all linears together, in `unit`: "GB/s" of weights, or "GFLOP/s". Measured of the value in force;
            of the others what their ratio makes of that.
        ratio: time relative to the value in force.
        chosen: whether it is in force from now on.
    """

    name: str
    value: int
    speed: float
    unit: str
    ratio: float
    chosen: bool


@dataclass(frozen=True)
class Outcome:
    """What `tune` found.

    Attributes:
        rows: of every number that was measured, the value that was in force first.
        skipped: the numbers for which no time was left; they stay as they are.
    """

    tuning: Tuning
    rows: tuple[Row, ...]
    skipped: tuple[str, ...]


class Timer(Protocol):
    """Times linears."""

    def prepare(self, tuning: Tuning, case: Case) -> Callable[[], float]:
        """Compiles a linear and runs it once; the function runs it again and returns the seconds that took."""


def stages(target: Target, nbytes: int) -> list[Stage]:
    """What is measured for a target; `nbytes` is room for weights, more than the last cache holds.

    Decode reads all of it, which a model's weights are like: no part is in a cache when it comes again.
    """
    codes = (Q8_0, Q4_K, Q6_K)
    decode = [*((d, "q8a") for d in codes), (BF16, "f32")]
    single = tuple(_case(*d, 1, nbytes, nbytes) for d in decode)
    found = [Stage("prefetch", (1024, 2048, 4096, 8192, 16384), single), Stage("streams", (1, 2, 4), single)]
    plain = [(BF16, "bf16" if target.has_bf16_dots else "f32")]

    def add(name: str, values: Sequence[int], rows: Sequence[int], kinds: Sequence[tuple[DType, str]]) -> None:
        cases = (_case(*kind, count, nbytes) for kind in kinds for count in rows)
        found.append(Stage(name, tuple(values), tuple(cases)))

    integers = [(d, "q8a") for d in codes]
    add("tile_rows_int8", (4, 6, 8), (_PREFILL,), integers)
    add("macro_rows_int8", (24, 48, 96, 192), (_PREFILL,), integers)
    add("unpack_from_int8", (0, 12, 24, 48), (16, 32, 40), integers)
    if target.has_bf16_tiles:
        add("macro_bytes_tiles", (3 << 18, 3 << 19, 3 << 20), (_PREFILL,), [(Q4_K, "bf16"), (BF16, "bf16")])
        return found
    add("tile_rows_float", (2, 4, 6, 8), (_PREFILL,), plain)
    add("macro_rows_float", (72, 144, 288), (_PREFILL,), plain)
    if target.vectors == "avx512":
        add("unpack_from_plain", (0, 16, 32, 64), (16, 32, 48), plain)
    return found


def _case(dtype: DType, act: str, rows: int, nbytes: int, wanted: int | None = None) -> Case:
    """A linear whose weights take at most `nbytes`; `wanted` bytes of them, or as many rows as a prompt suits."""
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
        start: the values in force at first, as a rule the target's defaults.
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
    """A row a value, that in force first."""
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
    """Seconds [rounds, candidates, linears]; every round begins with another candidate."""
    found, (least, most) = list[NDArray[np.float64]](), ROUNDS
    while len(found) < least or (len(found) < most and time.monotonic() < end):
        row = np.zeros((len(runs), len(runs[0])))
        for turn in range(len(runs)):
            i = (turn + len(found)) % len(runs)
            row[i] = [run() for run in runs[i]]
        found.append(row)
    return np.stack(found)


def judge(seconds: NDArray[np.float64]) -> tuple[NDArray[np.float64], int]:
    """-> (time of each candidate relative to the first, number of the one to take).

    Args:
        seconds: [rounds, candidates, linears]; the first and the last candidate are the value in force.
    """
    relative = np.exp(np.log(seconds / seconds[:, :1]).mean(axis=2))
    ratios = np.median(relative, axis=0)
    spread = 3 * np.median(abs(relative[:, -1] - 1)) / np.sqrt(len(relative))
    noise = max(LEAST_GAIN, 2 * abs(ratios[-1] - 1), spread)
    always = np.quantile(relative, _OFTEN, axis=0) < 1
    candidates = np.where(always & (ratios < 1 - noise), ratios, np.inf)[:-1]
    return ratios[:-1], int(np.argmin(candidates)) if np.isfinite(candidates).any() else 0


class Bench:
    """Times linears on synthetic weights, with a pool's workers. Close it, or use it in a `with`.

    Args:
        target: whose kernels are timed.
        pool: who runs them.
        nbytes: room for weights.
    """

    def __init__(self, target: Target, pool: WorkerPool, nbytes: int) -> None:
        self._target, self._pool = target, pool
        self._cache = CompileCache(capacity=1024, policy="off")  # candidates are no use to anyone else
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
            RlxError: the results are not those of the other tunings, bit for bit, or none.
        """
        target = replace(self._target, tuned=tuning)
        single, again = case.rows == 1, macro_rows(case.k, case.act, target)
        code = Compiler(target, self._cache).linear(case.dtype, case.k, case.act, single=single)
        (step,) = code.addresses.values()
        count = units(case.n) * (1 if again is None else -(-case.rows // again))
        out = AlignedBuffer(4 * case.rows * case.n)
        extents = [case.n] if single else [case.rows, case.n]
        x, w = self._input(case).address, self._weights.address
        size = grain(Units(count, together=parts(target, 1) if single else 1), {})
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
        run.__dict__["owners"] = code, out  # what the addresses are of
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

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _activations(act: str, rows: int, k: int) -> NDArray[np.uint8]:
    """Random rows as a kernel reads them."""
    x = np.random.default_rng(1).standard_normal((rows, k)).astype(np.float32)
    if act == "q8a":
        return q8a_quantize(x)
    return (x.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8) if act == "bf16" else x.view(np.uint8)


def weight_bytes(root: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Room for weights that no cache holds: twice the last one's size, from 64 to 512 MiB."""
    return min(_MOST_BYTES, max(_LEAST_BYTES, 2 * max(_caches(root), default=_DEFAULT_CACHE)))


def _caches(root: Path) -> Iterator[int]:
    for path in root.glob("index*/size"):
        with contextlib.suppress(OSError, RlxError):
            yield parse_size(path.read_text(), str(path))
