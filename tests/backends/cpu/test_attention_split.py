"""Attention in pieces of positions: against softmax in float64, and the same bits among other rows and whoever does
which piece.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from attention_case import Case, label
from levels import LEVELS, name, widest_and_another
from native import aligned, run
from numpy.typing import NDArray

from rlx.backends.cpu.kernels.attention.attention import attention
from rlx.backends.cpu.kernels.attention.bf16 import DottedAttention, DottedRow
from rlx.backends.cpu.kernels.attention.split import Pieces, Split, scratch_bytes
from rlx.backends.cpu.target import Target
from rlx.backends.cpu.tiles import I64, Emitter
from rlx.ir.dtypes import BF16, F16, F32, DType

Array = NDArray[Any]
targets = pytest.mark.parametrize("target", LEVELS, ids=name)


class Ranges:
    """A case's kernel for the row after `past` positions, and the memory that its calls share."""

    def __init__(self, case: Case, target: Target, how: Split, scale: float = 0.2, **options: Any) -> None:
        heads, kv_heads, head_dim = case.shape
        self.case, self.target = case, target
        options["sinks"] = case.sinks is not None
        self.kernel = attention(
            *case.shape, target, kv_dtype=case.dtype, scale=scale, rows_static=1, split=how, **options
        )
        self.units, self.unit_bytes = kv_heads * how.parts, scratch_bytes(heads // kv_heads, head_dim, how)
        self.scratch = aligned(np.zeros(self.units * self.unit_bytes, np.uint8))
        self.scratch[64 * kv_heads :] = 0xFF  # only the counts need zeros

    def __call__(self, past: int, order: list[tuple[int, int]] | None = None, workers: int = 1) -> Array:
        case = self.case
        out = np.full((2, *case.q.shape[1:]), 7, np.float32)
        sinks = [] if case.sinks is None else [case.sinks]
        arrays = [aligned(case.q[past : past + 1]), case.keys, case.values, *sinks, self.scratch, out]

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
    ((6, 2, 96), F16, Split(1, 64)),
    ((2, 1, 256), F32, Split(3, 64)),
    ((7, 1, 8), F16, Split(32, 64)),
]


@pytest.mark.parametrize(
    ("target", "shape", "dtype", "how"),
    [(target, *row) for i, row in enumerate(SHAPES) for target in widest_and_another(i)],
    ids=label,
)
def test_against_softmax_in_float64(target: Target, shape: tuple[int, int, int], dtype: DType, how: Split) -> None:
    """Lengths around the borders of pieces; among other rows, each has the same bits; in one piece, those without."""
    case = Case(*shape, dtype, ctx=528, filled=520)
    ranges = Ranges(case, target, how)
    for past in (0, 62, 63, 64, 99, 100, 127, 128, 191, 192, 255, 256, 320, 511, 519):
        got = ranges(past)
        want, ceiling = case.reference(past, 1, 0.2)
        assert np.abs(got - want).max() < ceiling, past
        if past < how.least:
            np.testing.assert_array_equal(got, case.native(target, past, 1, 0.2, rows_static=1))
        before = min(past, 40)
        rows = case.native(target, past - before, min(before + 3, 520 - past + before), 0.2, split=how)
        np.testing.assert_array_equal(got[0], rows[before], str(past))


@targets
def test_sinks(target: Target) -> None:
    """In one piece and in several; of the row alone and among others."""
    case, how = Case(4, 2, 40, F16, ctx=272, filled=260).with_sinks(), Split(3, 64)
    ranges = Ranges(case, target, how)
    for past in (0, 63, 64, 259):
        got = ranges(past)
        want, ceiling = case.reference(past, 1, 0.2)
        assert np.abs(got - want).max() < ceiling, past
        among = case.native(target, max(past - 5, 0), past - max(past - 5, 0) + 1, 0.2, split=how)
        np.testing.assert_array_equal(among[-1:], got)


def cyclic(window: int | None) -> Split:
    """Pieces of 64 positions, as many as a window may touch."""
    return Split(4, 64) if window is None else Split(-(-window // 64) + 1, 64, doubles=False)


@targets
def test_rings_give_the_bits_of_whole_caches(target: Target) -> None:
    case = Case(4, 2, 32, F16, ctx=720, filled=711)
    whole = Ranges(case, target, cyclic(150), window=150)
    for past in (0, 150, 255, 256, 257, 500, 703):
        ring = case.ring(past + 1, 256)
        np.testing.assert_array_equal(Ranges(ring, target, cyclic(150), window=150)(past), whole(past))


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


@pytest.mark.parametrize("window", [None, 150])
def test_a_length_needs_the_memory_of_its_own_units(window: int | None) -> None:
    """A program for short lengths has no memory for the others."""
    case, how = Case(4, 2, 32, F32, ctx=400, filled=400), cyclic(window) if window else Split(6, 64)
    for past in (0, 63, 64, 127, 200, 383):
        ranges = Ranges(case, LEVELS[-1], how, window=window)
        ranges(past)
        units = min(-(-(past + 1) // how.least), how.parts) * 2
        assert (ranges.scratch[units * ranges.unit_bytes :] == 0xFF).all(), past


@targets
def test_one_row_of_bf16_products_has_the_bits_of_many(target: Target) -> None:
    """A row alone, in pieces, beside the same row among others, whose keys and values are converted together."""
    if not target.has_bf16_dots:
        pytest.skip("the target has no dot products of bf16")
    for shape, dtype, options in (
        ((8, 2, 64), F16, {}),
        ((3, 1, 72), BF16, {"softcap": 4.0}),
        ((4, 2, 32), F16, {"window": 150}),
    ):
        case, how = Case(*shape, dtype, ctx=720, filled=711), cyclic(options.get("window"))
        alone = Ranges(case, target, how, writer=DottedRow, **options)
        many = case.native(target, 0, 711, 0.2, split=how, writer=DottedAttention, bf16=True, **options)
        for past in (0, 1, 15, 16, 32, 47, 48, 62, 63, 64, 200, 255, 256, 447, 600, 709, 710):
            np.testing.assert_array_equal(alone(past)[0], many[past], f"{shape} {past}")


@pytest.mark.parametrize("how", [Split(4, 1024), Split(32, 256), Split(3, 320), Split(5, 64, doubles=False)], ids=str)
def test_piece_numbers(how: Split) -> None:
    """Against a list of pieces, up to a million positions: each `parts` are twice as long; the last one never ends."""
    lengths = [how.least << (i // how.parts if how.doubles else 0) for i in range(how.slots)]
    starts = np.cumsum([0, *lengths])
    far = [p for p in (300_000, 1_000_000) if how.doubles or p < starts[-1]]
    at = np.array(sorted({*starts[:-1], *(starts[1:] - 1), *range(0, int(starts[-1]), 1237), *far}), np.int64)
    e = Emitter(LEVELS[0], ["at", "out"], [])
    pieces = Pieces(e, how)
    with e.loop(e.args["begin"], e.args["end"]) as i:
        number = pieces.number(e.load(I64, e.at(e.args["at"], (i.i, 8)), 8))
        for j, value in enumerate((number, pieces.first(number), pieces.end(number))):
            e.store(value, e.at(e.args["out"], (i.i, 24), 8 * j), 8)
    out = np.zeros((len(at), 3), np.int64)
    run(e.finish("pieces", ""), LEVELS[0], at, out, end=len(at))
    want = np.minimum(np.searchsorted(starts, at, "right") - 1, how.slots - 1)
    np.testing.assert_array_equal(out[:, 0], want)
    np.testing.assert_array_equal(out[:, 1], starts[want])
    ends = np.where(want == how.slots - 1, 1 << 62, starts[want + 1]) if how.doubles else starts[want + 1]
    np.testing.assert_array_equal(out[:, 2], ends)
