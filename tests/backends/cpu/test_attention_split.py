"""Attention of one row in ranges of positions: against softmax in float64, and the same bits whoever does which."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from levels import LEVELS, name, widest_and_another
from native import aligned, run
from numpy.typing import NDArray
from test_attention import Case, label

from rlx.backends.cpu.kernels.attention.attention import attention
from rlx.backends.cpu.kernels.attention.split import UNITS, WORTH, Split, scratch_bytes, split
from rlx.backends.cpu.target import Target
from rlx.errors import CompileError
from rlx.ir.dtypes import BF16, F16, F32, DType

Array = NDArray[Any]
targets = pytest.mark.parametrize("target", LEVELS, ids=name)


class Ranges:
    """A case's kernel for the row behind `past` positions, and the memory that its calls share."""

    def __init__(self, case: Case, target: Target, how: Split, scale: float = 0.2, **options: Any) -> None:
        heads, kv_heads, head_dim = case.shape
        self.case, self.target = case, target
        self.kernel = attention(
            *case.shape, target, kv_dtype=case.dtype, scale=scale, rows_static=1, split=how, **options
        )
        self.units, self.unit_bytes = kv_heads * how.parts, scratch_bytes(heads // kv_heads, head_dim)
        self.scratch = aligned(np.zeros(self.units * self.unit_bytes, np.uint8))
        self.scratch[64 * kv_heads :] = 0xFF  # only the counts need zeros

    def __call__(self, past: int, order: list[tuple[int, int]] | None = None, workers: int = 1) -> Array:
        case = self.case
        out = np.full((2, *case.q.shape[1:]), 7, np.float32)
        arrays = [aligned(case.q[past : past + 1]), case.keys, case.values, self.scratch, out]

        def work(part: tuple[int, int]) -> None:
            begin, end = part
            run(self.kernel, self.target, *arrays, begin=begin, end=end, seq=1, past=past, ctx=case.ctx)

        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(work, order or [(0, self.units)]))
        assert (out[1] == 7).all(), "wrote past its row"
        return out[:1]


SHAPES = [
    ((4, 2, 64), F32, Split(4, 64)),
    ((8, 1, 128), F16, Split(5, 128)),
    ((5, 5, 80), BF16, Split(2, 64)),
    ((6, 2, 96), F16, Split(16, 100)),
    ((2, 1, 256), F32, Split(3, 64)),
    ((7, 1, 8), F16, Split(32, 64)),
]


@pytest.mark.parametrize(
    ("target", "shape", "dtype", "how"),
    [(target, *row) for i, row in enumerate(SHAPES) for target in widest_and_another(i)],
    ids=label,
)
def test_against_softmax_in_float64(target: Target, shape: tuple[int, int, int], dtype: DType, how: Split) -> None:
    """Lengths around the borders of ranges; as one range the bits of attention that is not cut."""
    case = Case(*shape, dtype, ctx=528, filled=520)
    ranges = Ranges(case, target, how)
    for past in (0, 62, 63, 64, 99, 100, 127, 128, 191, 192, 255, 256, 320, 511, 519):
        got = ranges(past)
        want, ceiling = case.reference(past, 1, 0.2)
        assert np.abs(got - want).max() < ceiling, past
        if past < how.least:
            np.testing.assert_array_equal(got, case.native(target, past, 1, 0.2, rows_static=1))


OPTIONS = [{"window": 1}, {"window": 200}, {"softcap": 3.0, "window": 130}, {"softcap": 5.0}]


@pytest.mark.parametrize(
    ("target", "options"),
    [(target, options) for i, options in enumerate(OPTIONS) for target in widest_and_another(i)],
    ids=label,
)
def test_windows_and_softcap(target: Target, options: dict[str, Any]) -> None:
    case = Case(4, 2, 48, F16, ctx=400, filled=390)
    ranges = Ranges(case, target, Split(4, 64), **options)
    for past in (0, 129, 200, 263, 264, 389):
        want, ceiling = case.reference(past, 1, 0.2, **options)
        assert np.abs(ranges(past) - want).max() < ceiling, past


@targets
def test_rings_give_the_bits_of_whole_caches(target: Target) -> None:
    case = Case(4, 2, 32, F16, ctx=720, filled=711)
    whole = Ranges(case, target, Split(3, 64), window=150)
    for past in (0, 150, 255, 256, 257, 500, 703):
        ring = case.ring(past + 1, 256)
        np.testing.assert_array_equal(Ranges(ring, target, Split(3, 64), window=150)(past), whole(past))


@targets
def test_bits_depend_neither_on_the_order_nor_on_the_workers(target: Target) -> None:
    """Units one by one, backwards, shuffled, and by several threads at once, over and over in the same memory."""
    case = Case(6, 2, 64, BF16, ctx=640, filled=640)
    ranges = Ranges(case, target, Split(8, 64))
    rng = np.random.default_rng(1)
    for past in (639, 300, 63):
        want = ranges(past)
        ones = [(u, u + 1) for u in range(ranges.units)]
        np.testing.assert_array_equal(ranges(past, ones[::-1]), want)
        for _ in range(10):
            order = [ones[i] for i in rng.permutation(len(ones))]
            np.testing.assert_array_equal(ranges(past, order), want)
            np.testing.assert_array_equal(ranges(past, order, workers=4), want)
    behind = [(0, 5), (5, 6), (6, 40)]  # units behind the last do nothing
    np.testing.assert_array_equal(ranges(639, behind), ranges(639))


def test_a_number_that_is_not_finite_is_not_hidden() -> None:
    for where in ("q", "keys", "values"):
        case = Case(2, 1, 16, F32, ctx=400, filled=400)
        {"q": case.q[399, 1], "keys": case.keys[0, 10, 3], "values": case.values[0, 300]}[where][7] = np.nan
        assert np.isnan(Ranges(case, LEVELS[-1], Split(4, 64))(399)[0, 1, 7])


@pytest.mark.parametrize("window", [None, 150])
def test_a_length_needs_the_memory_of_its_own_units(window: int | None) -> None:
    """A program for short lengths has no memory for the others."""
    case, how = Case(4, 2, 32, F32, ctx=400, filled=400), Split(6, 64)
    for past in (0, 63, 64, 127, 200, 383):
        ranges = Ranges(case, LEVELS[-1], how, window=window)
        ranges(past)
        units = -(-(past + 1) // how.least) * 2
        assert (ranges.scratch[units * ranges.unit_bytes :] == 0xFF).all(), past


def test_how_heads_are_cut() -> None:
    assert split(1, None) == Split(32, WORTH)
    assert split(8, None) == Split(4, 8 * WORTH)
    assert split(UNITS, None) is None
    assert split(1, 512) == Split(5, WORTH)  # a window of 512 may touch 575 positions in groups of 64
    assert split(8, 512) is None
    with pytest.raises(CompileError, match="single rows"):
        attention(4, 2, 64, LEVELS[0], kv_dtype=F16, scale=1.0, split=Split(4, 64))
