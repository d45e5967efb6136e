"""Attention kernels against softmax in float64: shapes, masks, cache types, targets, and bits that stay the same."""

from __future__ import annotations

from copy import copy
from typing import Any

import numpy as np
import pytest
from levels import LEVELS, name, widest_and_another
from native import aligned, run
from numpy.typing import NDArray

from rlx.backends.cpu.kernel import Kernel
from rlx.backends.cpu.kernels.attention.attention import attention
from rlx.backends.cpu.kernels.attention.shape import units
from rlx.backends.cpu.kernels.attention.split import Split, scratch_bytes
from rlx.backends.cpu.target import Target
from rlx.ir.dtypes import BF16, F16, F32, DType
from rlx.ir.meaning import round_to

Array = NDArray[Any]
targets = pytest.mark.parametrize("target", LEVELS, ids=name)


def label(value: Any) -> str:
    """Part of a test's id."""
    return name(value) if isinstance(value, Target) else str(value)


#: Ceiling of |out - float64| / (largest |v| * (1 + largest |score|)): an error of a score is one of its weight.
ATTENTION_ERROR = 5e-7


def stored(values: Array, dtype: DType) -> tuple[Array, Array]:
    """(the cache's numbers, their values in float64)."""
    if dtype is F32:
        return values.astype(np.float32), values.astype(np.float32).astype(np.float64)
    if dtype is F16:
        return values.astype(np.float16), values.astype(np.float16).astype(np.float64)
    bits = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return bits, (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


class Case:
    """A cache of random keys and values that holds NaN where no position has been written."""

    error = ATTENTION_ERROR
    pages: Array | None = None  # the page table, if the cache is a pool
    sinks: Array | None = None  # a further score of each head

    def __init__(
        self, heads: int, kv_heads: int, head_dim: int, dtype: DType, ctx: int, filled: int, seed: int = 0
    ) -> None:
        rng = np.random.default_rng([seed, heads, head_dim])
        self.shape, self.dtype, self.ctx, self.filled = (heads, kv_heads, head_dim), dtype, ctx, filled
        cache = rng.standard_normal((2, kv_heads, ctx, head_dim)).astype(np.float32)
        (keys, self.k), (values, self.v) = (stored(c, dtype) for c in cache)
        for numbers in (keys, values):
            numbers[:, filled:] = 0x7FC0 if dtype is BF16 else np.nan
        tiles = keys.reshape(kv_heads, ctx // 16, 16, head_dim).transpose(0, 1, 3, 2)
        self.keys, self.values = aligned(tiles), aligned(values)
        self.q = aligned(rng.standard_normal((filled, heads, head_dim)).astype(np.float32))

    def kernel(self, target: Target, **options: Any) -> Kernel:
        return attention(*self.shape, target, **options)

    def units(self, seq: int, rows_static: int | None = None, bf16: bool = False) -> int:
        return units(seq, *self.shape, rows_static, bf16=bf16)

    def native(
        self,
        target: Target,
        past: int,
        seq: int,
        scale: float,
        split: list[tuple[int, int]] | None = None,
        split_by: Split | None = None,
        bf16: bool = False,
        **options: Any,
    ) -> Array:
        """The rows; `split` are the ranges of units of each call, `split_by` the pieces of positions."""
        table = [] if self.pages is None else [self.pages]
        sinks = [] if self.sinks is None else [self.sinks]
        options |= {"paged": bool(table), "split": split_by, "sinks": bool(sinks)}
        kernel = self.kernel(target, kv_dtype=self.dtype, scale=scale, **options)
        numbers = np.uint16 if options.get("out") == "bf16" else np.float32
        out = np.full((seq + 1, *self.q.shape[1:]), 7, numbers)
        count = self.units(seq, options.get("rows_static"), **{"bf16": True} if bf16 else {})
        q = aligned(self.q[past : past + seq])
        for begin, end in split or [(0, count)]:
            sizes = {"seq": seq, "past": past, "ctx": self.ctx}
            run(kernel, target, q, self.keys, self.values, *sinks, *table, out, begin=begin, end=end, **sizes)
        assert (out[seq] == 7).all(), "wrote past its rows"
        return out[:seq]

    def paged(self, table: list[int], pages: int) -> Case:
        """The case in the pages `table` of a pool of `pages`; NaN in all others."""
        other = copy(self)
        other.ctx, other.pages = (
            64 * pages,
            np.array([*table, -1], np.int32),
        )  # a call reads nothing behind its last page
        keys, values = (np.full((c.shape[0], n, *c.shape[2:]), np.nan, c.dtype) for c, n in self._sizes(64 * pages))
        for position in range(self.filled):
            place = 64 * table[position // 64] + position % 64
            keys[:, place // 16, :, place % 16] = self.keys[:, position // 16, :, position % 16]
            values[:, place] = self.values[:, position]
        other.keys, other.values = aligned(keys), aligned(values)
        return other

    def with_sinks(self) -> Case:
        """The case with a sink for each head, of which some are above all scores and some below."""
        other = copy(self)
        other.sinks = aligned(np.resize(np.float32([3, 0, -2, 12]), self.shape[0]))
        return other

    def ring(self, length: int, ctx: int) -> Case:
        """The case as a ring of `ctx` places holds it once `length` positions were written; NaN where none was."""
        other = copy(self)
        other.ctx = ctx
        keys, values = (np.full((c.shape[0], n, *c.shape[2:]), np.nan, c.dtype) for c, n in self._sizes(ctx))
        for position in range(length):
            place = position % ctx
            keys[:, place // 16, :, place % 16] = self.keys[:, position // 16, :, position % 16]
            values[:, place] = self.values[:, position]
        other.keys, other.values = aligned(keys), aligned(values)
        return other

    def _sizes(self, ctx: int) -> list[tuple[Array, int]]:
        return [(self.keys, ctx // 16), (self.values, ctx)]

    def reference(
        self, past: int, seq: int, scale: float, window: int | None = None, softcap: float | None = None
    ) -> tuple[Array, float]:
        """(result, the ceiling of its error)."""
        group = self.shape[0] // self.shape[1]
        k, v = (np.repeat(c[:, : past + seq], group, axis=0) for c in (self.k, self.v))
        scores = np.einsum("rhd,htd->hrt", self.q[past : past + seq].astype(np.float64), k) * float(np.float32(scale))
        scores = softcap * np.tanh(scores / softcap) if softcap else scores
        back = past + np.arange(seq)[:, None] - np.arange(past + seq)[None, :]
        seen = (back >= 0) & (back < (window or past + seq + 1))
        scores = np.where(seen, scores, -np.inf)
        weights, total = np.exp(scores), np.exp(scores).sum(axis=-1, keepdims=True)
        total = total if self.sinks is None else total + np.exp(self.sinks.astype(np.float64))[:, None, None]
        out = np.einsum("hrt,htd->rhd", weights / total, v)
        return out, self.error * np.abs(v).max() * (1 + np.abs(scores[np.isfinite(scores)]).max())

    def check(self, target: Target, past: int, seq: int, scale: float | None = None, **options: Any) -> None:
        scale = self.shape[2] ** -0.5 if scale is None else scale
        got = self.native(target, past, seq, scale, **options)
        options.pop("rows_static", None)
        want, ceiling = self.reference(past, seq, scale, **options)
        assert np.abs(got - want).max() < ceiling, (past, seq, np.abs(got - want).max(), ceiling)


SHAPES = [((4, 2, 64), F32), ((8, 1, 128), F16), ((6, 2, 80), BF16), ((3, 3, 8), F32), ((2, 1, 40), F16)]


@pytest.mark.parametrize(
    ("target", "shape", "dtype"),
    [(target, *row) for i, row in enumerate(SHAPES) for target in widest_and_another(i)],
    ids=label,
)
def test_against_softmax_in_float64(target: Target, shape: tuple[int, int, int], dtype: DType) -> None:
    case = Case(*shape, dtype, ctx=224, filled=211)
    for past, seq in [(0, 1), (15, 1), (16, 2), (63, 1), (64, 3), (130, 33), (0, 211)]:
        case.check(target, past, seq)


@pytest.mark.parametrize(("target", "head_dim"), [(t, (64, 40)[i % 2]) for i, t in enumerate(LEVELS)], ids=label)
def test_results_in_bf16_are_those_of_f32_rounded(target: Target, head_dim: int) -> None:
    case = Case(4, 2, head_dim, F16, ctx=80, filled=70)
    plain, halves = (case.native(target, 20, 50, 0.1, out=out) for out in ("f32", "bf16"))
    np.testing.assert_array_equal((halves.astype(np.uint32) << 16).view(np.float32), round_to(plain, "bf16"))


@targets
@pytest.mark.parametrize(("rows", "window"), [(None, None), (None, 70), (1, None), (1, 70)])
def test_pages_anywhere(target: Target, rows: int | None, window: int | None) -> None:
    """The bits are those over a contiguous cache. The next tests share these kernels."""
    case = Case(4, 2, 32, F16, ctx=208, filled=200)
    pool = case.paged([5, 0, 6, 2], pages=7)
    for past, seq in [(199, 1), (63, 1), (64, 1)] if rows else [(0, 70), (63, 2), (127, 73), (64, 1)]:
        options = {"rows_static": rows, "window": window}
        wanted = case.native(target, past, seq, 32**-0.5, **options)
        np.testing.assert_array_equal(pool.native(target, past, seq, 32**-0.5, **options), wanted)


@targets
@pytest.mark.parametrize("window", [1, 70])
def test_windows(target: Target, window: int) -> None:
    case = Case(4, 2, 32, F16, ctx=208, filled=200)
    for past, seq in [(0, 1), (0, 70), (63, 2), (130, 17), (199, 1)]:
        case.check(target, past, seq, window=window)


@targets
@pytest.mark.parametrize(("rows", "window"), [(None, None), (None, 70), (1, 70)])
def test_sinks(target: Target, rows: int | None, window: int | None) -> None:
    """In pages, too; the bits of a row depend neither on its neighbours nor on the pieces."""
    case = Case(6, 2, 40, F16, ctx=208, filled=200).with_sinks()
    pool = case.paged([5, 0, 6, 2], pages=7)
    for past, seq in [(0, 1), (199, 1)] if rows else [(0, 70), (63, 2), (127, 73)]:
        case.check(target, past, seq, window=window, rows_static=rows)
        options = {"window": window, "rows_static": rows}
        np.testing.assert_array_equal(
            pool.native(target, past, seq, 0.2, **options), case.native(target, past, seq, 0.2, **options)
        )


RINGS = [(1, 64, 64), (20, 64, 45), (64, 128, 65), (70, 128, 59), (70, 192, 123), (200, 256, 50)]


# Where a position lies is told by integers, the same on every level: each ring is on the widest and on another one.
@pytest.mark.parametrize(
    ("target", "window", "ctx", "most"),
    [
        pytest.param(target, *ring, id=f"{name(target)}-{ring}")
        for i, ring in enumerate(RINGS)
        for target in widest_and_another(i)
    ],
)
def test_rings_give_the_bits_of_whole_caches(target: Target, window: int, ctx: int, most: int) -> None:
    """`most` rows at a time, the most that the ring has room for: window + rows - 1 places."""
    assert ctx - 64 < window + most - 1 <= ctx
    scale = 32**-0.5  # as in `test_windows`, which shares these kernels
    case = Case(4, 2, 32, F16 if window % 20 else F32, ctx=720, filled=711)
    for past, seq in [(0, 1), (0, most), (ctx - 1, 1), (ctx - 1, most), (ctx, 2), (333, min(7, most)), (580, most)]:
        whole = case.native(target, past, seq, scale, window=window)
        ring = case.ring(past + seq, ctx)
        np.testing.assert_array_equal(ring.native(target, past, seq, scale, window=window), whole)
    want, ceiling = case.reference(580, most, scale, window=window)
    assert np.abs(whole - want).max() < ceiling
    if target is LEVELS[-1]:
        one = case.ring(700, ctx).native(target, 699, 1, scale, window=window, rows_static=1)
        np.testing.assert_array_equal(one, case.native(target, 699, 1, scale, window=window))


@targets
def test_bits_depend_on_neither_split_nor_neighbours(target: Target) -> None:
    case = Case(4, 2, 64, BF16, ctx=208, filled=201)
    whole = case.native(target, 0, 201, 0.125)
    count = units(201, *case.shape)
    assert count > 20
    split = [(count - 1, count), (0, 1), (1, 7), (7, 7), (7, count - 1)]
    np.testing.assert_array_equal(case.native(target, 0, 201, 0.125, split=split), whole)
    for past, seq in [(0, 1), (1, 2), (3, 60), (63, 100), (200, 1)]:
        np.testing.assert_array_equal(case.native(target, past, seq, 0.125), whole[past : past + seq])
    for past in (0, 14, 15, 16, 31, 47, 48, 63, 64, 200):  # every number of tiles of keys in the last chunk
        alone = case.native(target, past, 1, 0.125, rows_static=1)
        np.testing.assert_array_equal(alone, whole[past : past + 1])


def test_a_number_that_is_not_finite_is_not_hidden() -> None:
    for where in ("q", "keys", "values"):
        case = Case(2, 1, 16, F32, ctx=32, filled=20)
        {"q": case.q[7, 1], "keys": case.keys[0, 0, 3], "values": case.values[0, 7]}[where][7] = np.nan
        out = case.native(LEVELS[-1], 0, 20, 0.25)
        assert np.isnan(out[7, 1, 7])
        # Rows before it keep clean unless they share a tile with a row that weighs that value.
        assert where == "values" or np.isfinite(out[:7]).all()


def check_mask(
    case: Case, target: Target, past: int, seq: int, mask: str, window: int | None = None, ring: Case | None = None,
    **options: Any,
) -> Array:  # fmt: skip
    """A mask of what rows see after their own position, as the same mask as a bias has it, in float64."""
    held, rng, length = ring or case, np.random.default_rng([past, seq]), past + seq
    last = np.full(seq, length - 1)
    extra = []
    if mask == "around":
        last = np.minimum(last, past + np.arange(seq) + (window or 0) - 1)
    if mask == "visible":
        last = past + np.arange(seq)  # a picture in the middle, whose rows see it to its end; a row that looks back
        last[seq // 4 : seq // 2] = past + max(seq // 2 - 1, 0)
        last[-1] -= rng.integers(0, 3) if last[-1] >= 3 else 0
        extra = [aligned(np.where(last == length - 1, length + 5, last).astype(np.int32))]  # as far as there are keys
    scale = case.shape[2] ** -0.5
    kernel = case.kernel(target, kv_dtype=case.dtype, scale=scale, mask=mask, window=window, **options)
    split = options.get("split")
    count = case.shape[1] * split.parts if split else case.units(seq, options.get("rows_static"))
    out = np.zeros((seq, *case.q.shape[1:]), np.float32)
    group = case.shape[0] // case.shape[1]
    scratch = [np.zeros(count * scratch_bytes(group, case.shape[2], split), np.uint8)] if split else []
    arrays = [aligned(case.q[past:length]), held.keys, held.values, *extra, *map(aligned, scratch), out]
    run(kernel, target, *arrays, end=count, seq=seq, past=past, ctx=held.ctx)
    k, v = (np.repeat(c[:, :length], case.shape[0] // case.shape[1], axis=0) for c in (case.k, case.v))
    scores = np.einsum("rhd,htd->hrt", case.q[past:length].astype(np.float64), k) * scale
    keys, own = np.arange(length), past + np.arange(seq)[:, None]
    scores = np.where((keys <= last[:, None]) & (own - keys < (window or length)), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    want = np.einsum("hrt,htd->rhd", weights / weights.sum(axis=-1, keepdims=True), v)
    ceiling = case.error * np.abs(v).max() * (1 + np.abs(scores[np.isfinite(scores)]).max())
    assert np.abs(out - want).max() < ceiling, (past, seq, np.abs(out - want).max(), ceiling)
    return out


@targets
@pytest.mark.parametrize(("mask", "window"), [("none", None), ("visible", None), ("visible", 70), ("around", 70)])
def test_masks(target: Target, mask: str, window: int | None) -> None:
    case = Case(4, 2, 40, F16, ctx=720, filled=711)
    for past, seq in [(0, 1), (0, 70), (63, 2), (130, 41), (0, 211)]:
        check_mask(case, target, past, seq, mask, window)
    if window:
        check_mask(case, target, 333, 50, mask, window, ring=case.ring(383, 128))


def test_a_row_that_sees_nothing_is_nan() -> None:
    """Beside rows that see something, and alone, where positions are divided."""
    case, target, nothing = Case(2, 1, 16, F32, ctx=32, filled=20), LEVELS[-1], np.array([0, -1, 1], np.int32)
    kernel, out = case.kernel(target, kv_dtype=F32, scale=0.25, mask="visible"), np.zeros((3, 2, 16), np.float32)
    run(kernel, target, aligned(case.q[:3]), case.keys, case.values, nothing, out, end=1, seq=3, past=0, ctx=32)
    assert np.isnan(out[1]).all() and np.isfinite(out[[0, 2]]).all()
    options = {"kv_dtype": F32, "scale": 0.25, "mask": "visible", "rows_static": 1, "split": Split(4, 128)}
    scratch = aligned(np.zeros(4 * scratch_bytes(2, 16, Split(4, 128)), np.uint8))
    one = [aligned(case.q[:1]), case.keys, case.values, nothing[1:], scratch, out]
    run(case.kernel(target, **options), target, *one, end=4, seq=1, past=0, ctx=32)
    assert np.isnan(out[0]).all()


def biased(case: Case, past: int, seq: int, heads: int, future: bool) -> Array:
    """A bias [seq, heads, past + seq] that closes about a third of the keys, later ones too unless `future`."""
    rng = np.random.default_rng([7, past, seq, heads])
    bias = (rng.standard_normal((seq, heads, past + seq)) * 2).astype(np.float32)
    bias[rng.random(bias.shape) < 0.3] = -np.inf
    own = past + np.arange(seq)
    if not future:
        bias = np.where(np.arange(past + seq) > own[:, None, None], np.float32(-np.inf), bias)
    bias[np.arange(seq), :, own] = 0.5  # something is open
    return np.ascontiguousarray(bias, np.float32)


def check_bias(
    case: Case, target: Target, past: int, seq: int, bias: Array, window: int | None = None, cap: float | None = None,
    ring: Case | None = None, **options: Any,
) -> None:  # fmt: skip
    """The kernel with a bias against softmax in float64, with NaN behind the bias."""
    held, scale = ring or case, case.shape[2] ** -0.5
    options |= {"window": window, "softcap": cap, "mask": "bias", "bias": bias.shape[1]}
    kernel = case.kernel(target, kv_dtype=case.dtype, scale=scale, **options)
    out, count = np.zeros((seq, *case.q.shape[1:]), np.float32), case.units(seq, options.get("rows_static"))
    arrays = [aligned(case.q[past : past + seq]), held.keys, held.values, bias, out]
    run(kernel, target, *arrays, end=count, seq=seq, past=past, ctx=held.ctx)
    group = case.shape[0] // case.shape[1]
    k, v = (np.repeat(c[:, : past + seq], group, axis=0) for c in (case.k, case.v))
    scores = np.einsum("rhd,htd->hrt", case.q[past : past + seq].astype(np.float64), k) * scale
    scores = cap * np.tanh(scores / cap) if cap else scores
    scores = scores + bias.swapaxes(0, 1)
    back = past + np.arange(seq)[:, None] - np.arange(past + seq)
    scores = np.where(back < (window or past + seq), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    want = np.einsum("hrt,htd->rhd", weights / weights.sum(axis=-1, keepdims=True), v)
    ceiling = case.error * np.abs(v).max() * (1 + np.abs(scores[np.isfinite(scores)]).max())
    assert np.abs(out - want).max() < ceiling, (past, seq, np.abs(out - want).max(), ceiling)


@pytest.mark.parametrize(("target", "heads"), [(LEVELS[-1], 1), *((t, 6) for t in LEVELS)], ids=label)
def test_a_bias_takes_the_place_of_the_causal_mask(target: Target, heads: int) -> None:
    case = Case(6, 2, 40, F16, ctx=224, filled=211)
    for past, seq in [(0, 1), (0, 70), (63, 2), (130, 17), (0, 211)]:
        for future in (False, True):
            check_bias(case, target, past, seq, biased(case, past, seq, heads, future))
