"""Attention kernels against softmax in float64: shapes, masks, cache types, targets, and bits that stay the same; with
products of bf16 by dot products where there are some, on real tiles, and on emulated ones everywhere.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attention_case import PLAIN, ROUNDED, Case, Way, label, ready, units
from levels import LEVELS, PLAIN_BF16_TARGETS, name, widest_and_another

from rlx.backends.cpu.kernels.attention.attention import attention
from rlx.backends.cpu.kernels.attention.bf16 import DottedAttention
from rlx.backends.cpu.kernels.attention.split import Split
from rlx.backends.cpu.target import Target
from rlx.backends.cpu.vmath import FEW_BITS_ERROR
from rlx.errors import CompileError
from rlx.ir.dtypes import BF16, F16, F32
from rlx.ir.meaning import round_to

plain = pytest.mark.parametrize("target", LEVELS, ids=name)


@pytest.fixture(params=[*PLAIN, *ROUNDED], ids=label)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Way:
    ready(request.param, monkeypatch)
    found: Way = request.param
    return found


rounded = pytest.mark.parametrize("way", ROUNDED, ids=label, indirect=True)


def in_turn(cases: list[Any], rounded_cases: list[Any]) -> Any:
    """Each case on two levels; those for products of bf16 on the last way, and every third one on another, in turn."""
    pairs = [(Way(target), case) for i, case in enumerate(cases) for target in widest_and_another(i)]
    for i, case in enumerate(rounded_cases):
        ways = [*([ROUNDED[i // 3 % len(ROUNDED)]] if i % 3 == 0 else []), ROUNDED[-1]]
        pairs += [(way, case) for way in dict.fromkeys(ways)]
    return pytest.mark.parametrize(("way", "case"), pairs, ids=label, indirect=["way"])


SHAPES = [(4, 2, 64, F32), (8, 1, 128, F16), (6, 2, 80, BF16), (3, 3, 8, F32), (2, 1, 40, F16)]
ROUNDED_SHAPES = [
    (4, 2, 64, F16), (8, 1, 128, F16), (6, 2, 32, BF16), (3, 3, 96, BF16), (4, 2, 72, BF16), (2, 2, 80, F16),
    (2, 1, 40, BF16),
]  # fmt: skip


@in_turn(SHAPES, ROUNDED_SHAPES)
def test_against_softmax_in_float64(way: Way, case: tuple[Any, ...]) -> None:
    held = way.case(*case, ctx=224, filled=211)
    for past, seq in [(0, 1), (15, 1), (16, 2), (63, 1), (64, 3), (130, 33), (0, 211)]:
        held.check(way.target, past, seq)


@pytest.mark.parametrize("head_dim", [64, 40])
def test_results_in_bf16_are_those_of_f32_rounded(way: Way, head_dim: int) -> None:
    case = way.case(4, 2, head_dim, F16, ctx=80, filled=70)
    whole, halves = (case.native(way.target, 20, 50, 0.1, out=out) for out in ("f32", "bf16"))
    np.testing.assert_array_equal((halves.astype(np.uint32) << 16).view(np.float32), round_to(whole, "bf16"))


@pytest.mark.parametrize(("rows", "window"), [(None, None), (None, 70), (1, None), (1, 70)])
def test_pages_anywhere(way: Way, rows: int | None, window: int | None) -> None:
    """The bits are those over a contiguous cache. The next tests share these kernels."""
    if rows and way.writer:
        return  # kernels of one row have other writers
    case = way.case(4, 2, 32, F16, ctx=400, filled=391)
    pool = case.paged([9, 3, 4, 0, 7, 1, 8], pages=10)
    for past, seq in [(199, 1), (63, 1), (64, 1)] if rows else [(0, 70), (63, 2), (127, 73), (64, 1), (250, 141)]:
        options = {"rows_static": rows, "window": window}
        wanted = case.native(way.target, past, seq, 32**-0.5, **options)
        np.testing.assert_array_equal(pool.native(way.target, past, seq, 32**-0.5, **options), wanted)


@plain
@pytest.mark.parametrize("window", [1, 70])
def test_windows(target: Target, window: int) -> None:
    case = Case(4, 2, 32, F16, ctx=208, filled=200)
    for past, seq in [(0, 1), (0, 70), (63, 2), (130, 17), (199, 1)]:
        case.check(target, past, seq, window=window)


@pytest.mark.parametrize(("rows", "window"), [(None, None), (None, 64), (1, 64)])
def test_sinks(way: Way, rows: int | None, window: int | None) -> None:
    """In pages, too."""
    if rows and way.writer:
        return  # kernels of one row have other writers
    case = way.case(6, 2, 40, F16, ctx=208, filled=200).with_sinks()
    pool = case.paged([5, 0, 6, 2], pages=7)
    for past, seq in [(0, 1), (199, 1)] if rows else [(0, 70), (63, 2), (127, 73)]:
        options = {"window": window, "rows_static": rows}
        case.check(way.target, past, seq, **options)
        found = (each.native(way.target, past, seq, 0.2, **options) for each in (pool, case))
        np.testing.assert_array_equal(*found)


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


@rounded
def test_rings_of_rounded_products(way: Way) -> None:
    """Positions before the window were overwritten."""
    case = way.case(4, 2, 32, F16, ctx=400, filled=391)
    for past, seq in [(0, 40), (100, 60), (320, 71)]:
        case.ring(past + seq, 192).check(way.target, past, seq, window=50)


def test_bits_depend_on_neither_split_nor_neighbours(way: Way) -> None:
    case = way.case(4, 2, 64, F16 if way.writer else BF16, ctx=224, filled=211)
    whole = case.native(way.target, 0, 211, 0.125)
    count = units(211, *case.shape[:2], bf16=way.writer is not None)
    assert count > 3
    for ranges in ([(unit, unit + 1) for unit in reversed(range(count))], [(count - 1, count), (2, 2), (0, count - 1)]):
        np.testing.assert_array_equal(case.native(way.target, 0, 211, 0.125, ranges=ranges), whole)
    for past, seq in [(0, 1), (1, 2), (0, 5), (3, 60), (64, 33), (63, 100), (100, 111), (200, 1)]:
        np.testing.assert_array_equal(case.native(way.target, past, seq, 0.125), whole[past : past + seq])
    for past in () if way.writer else (0, 14, 15, 16, 31, 47, 48, 63, 64, 200):  # every number of tiles of keys
        alone = case.native(way.target, past, 1, 0.125, rows_static=1)
        np.testing.assert_array_equal(alone, whole[past : past + 1])


def test_a_number_that_is_not_finite_is_not_hidden() -> None:
    for where in ("q", "keys", "values"):
        case = Case(2, 1, 16, F32, ctx=32, filled=20)
        {"q": case.q[7, 1], "keys": case.keys[0, 0, 3], "values": case.values[0, 7]}[where][7] = np.nan
        out = case.native(LEVELS[-1], 0, 20, 0.25)
        assert np.isnan(out[7, 1, 7])
        # Rows before it keep clean unless they share a tile with a row that weighs that value.
        assert where == "values" or np.isfinite(out[:7]).all()


MASKS: list[dict[str, Any]] = [
    {"mask": "none"}, {"mask": "visible"}, {"mask": "visible", "window": 70}, {"mask": "around", "window": 70},
]  # fmt: skip


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_masks(way: Way, mask: dict[str, Any]) -> None:
    if way.writer and mask["mask"] == "around":
        return  # only plain products have it
    case = way.case(4, 2, 72 if way.writer else 40, BF16 if way.writer else F16, ctx=720, filled=711)
    for past, seq in [(0, 1), (0, 70), (63, 2), (130, 41), (0, 211)]:
        case.check(way.target, past, seq, **mask)
    if "window" in mask:
        case.ring(383, 128).check(way.target, 333, 50, **mask)


def test_a_row_that_sees_nothing_is_nan() -> None:
    """Beside rows that see something, and alone, where positions are divided."""
    case, target, nothing = Case(2, 1, 16, F32, ctx=32, filled=20), LEVELS[-1], np.array([0, -1, 1], np.int32)
    out = case.native(target, 0, 3, 0.25, mask="visible", marks=nothing)
    assert np.isnan(out[1]).all() and np.isfinite(out[[0, 2]]).all()
    options = {"mask": "visible", "rows_static": 1, "split": Split(4, 128)}
    assert np.isnan(case.native(target, 0, 1, 0.25, marks=nothing[1:], **options)).all()


@pytest.mark.parametrize("heads", [1, 6])
def test_a_bias_takes_the_place_of_the_causal_mask(way: Way, heads: int) -> None:
    case = way.case(6, 2, 32 if way.writer else 40, F16, ctx=224, filled=211)
    for past, seq in [(0, 1), (0, 70), (63, 2), (130, 17), (0, 211)]:
        for future in (False, True):
            case.check(way.target, past, seq, bias=case.bias(past, seq, heads, future))


# ---------------------------------------------------------------------------------------------------- bf16 only


@rounded
def test_what_is_rounded(way: Way) -> None:
    """Up to 256 positions have one largest score, so NumPy can round the weights, too; few come out as neighbours."""
    case = way.case(4, 2, 64, F16, ctx=256, filled=256)
    q, k, v = (round_to(x.astype(np.float32), "bf16").astype(np.float64) for x in (case.q, case.k, case.v))
    k, v = (np.repeat(x, 2, axis=0) for x in (k, v))
    scores = np.einsum("rhd,htd->hrt", q, k) * 0.125
    scores = np.where(np.tri(256, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    rounded = round_to(weights.astype(np.float32), "bf16").astype(np.float64)
    want = np.einsum("hrt,htd->rhd", rounded / weights.sum(axis=-1, keepdims=True), v)
    got = case.native(way.target, 0, 256, 0.125)
    assert np.abs(got - want).max() < 2.0**-13 * np.abs(v).max()
    assert np.median(np.abs(got - want)) < FEW_BITS_ERROR


@pytest.mark.parametrize("target", PLAIN_BF16_TARGETS, ids=name)
def test_dot_products_need_a_target_that_has_them(target: Target) -> None:
    with pytest.raises(CompileError, match="no dot products of bf16"):
        attention(4, 2, 64, target, kv_dtype=F16, scale=1.0, writer=DottedAttention)
