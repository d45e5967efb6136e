"""Attention with products of bf16 against softmax in float64: on emulated tiles everywhere, on real ones and by dot
products where there are some.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import emulated
import numpy as np
import pytest
from levels import BF16_TARGETS, PLAIN_BF16_TARGETS, TILE_TARGETS, name
from test_attention import Case, biased, check_bias, check_mask

from rlx.backends.cpu.kernel import Kernel
from rlx.backends.cpu.kernels.attention.attention import attention
from rlx.backends.cpu.kernels.attention.bf16 import DottedAttention, RoundedAttention, TiledAttention
from rlx.backends.cpu.kernels.attention.shape import units
from rlx.backends.cpu.target import Target
from rlx.backends.cpu.vmath import FEW_BITS_ERROR
from rlx.errors import CompileError
from rlx.ir.dtypes import BF16, F16
from rlx.ir.meaning import round_to

#: Ceiling of |out - float64| / (largest |v| * (1 + largest |score|)): all factors have eight bits.
ROUNDED_ERROR = 2.0**-8


class Way(NamedTuple):
    """What writes the products, and for which machine."""

    writer: type[RoundedAttention]
    target: Target


TILES = [Way(TiledAttention, target) for target in (*emulated.TARGETS, *TILE_TARGETS)]
DOTS = [Way(DottedAttention, target) for target in (*BF16_TARGETS, *TILE_TARGETS)]


WAYS = [*TILES, *DOTS]


def label(value: Any) -> str:
    """Part of a test's id."""
    return f"{value.writer.__name__}-{name(value.target)}" if isinstance(value, Way) else str(value)


@pytest.fixture(params=WAYS, ids=label)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Way:
    found: Way = request.param
    if found in TILES and found.target not in TILE_TARGETS:
        emulated.use(monkeypatch)
    return found


class RoundedCase(Case):
    error = ROUNDED_ERROR

    def __init__(self, way: Way, *shape: Any, **options: Any) -> None:
        super().__init__(*shape, **options)
        self.writer = way.writer

    def kernel(self, target: Target, **options: Any) -> Kernel:
        return attention(*self.shape, target, writer=self.writer, **options)

    def units(self, seq: int, rows_static: int | None = None) -> int:
        return units(seq, *self.shape, bf16=True)


def in_turn(cases: Sequence[Any]) -> Any:
    """Each case on the last way, and every third one on another, in turn."""
    ways = [[WAYS[i // 3 % len(WAYS)], WAYS[-1]] if i % 3 == 0 else [WAYS[-1]] for i in range(len(cases))]
    pairs = [(way, case) for each, case in zip(ways, cases, strict=True) for way in dict.fromkeys(each)]
    return pytest.mark.parametrize(("way", "case"), pairs, ids=label, indirect=["way"])


SHAPES = [
    ((4, 2, 64), F16),
    ((8, 1, 128), F16),
    ((6, 2, 32), BF16),
    ((3, 3, 96), BF16),
    ((4, 2, 72), BF16),
    ((2, 2, 80), F16),
    ((2, 1, 40), BF16),
]


@in_turn(SHAPES)
def test_against_softmax_in_float64(way: Way, case: tuple[tuple[int, int, int], Any]) -> None:
    shape, dtype = case
    held = RoundedCase(way, *shape, dtype, ctx=224, filled=211)
    for past, seq in [(0, 1), (15, 1), (16, 2), (63, 1), (64, 3), (130, 33), (0, 211)]:
        held.check(way.target, past, seq)


def test_sinks(way: Way) -> None:
    held = RoundedCase(way, 4, 2, 32, F16, ctx=224, filled=211).with_sinks()
    for past, seq in [(0, 70), (100, 1), (140, 71)]:
        held.check(way.target, past, seq, window=64)


def test_rings(way: Way) -> None:
    """Positions lie at themselves modulo the ring's size, and those before the window were overwritten."""
    case = RoundedCase(way, 4, 2, 32, F16, ctx=400, filled=391)
    for past, seq in [(0, 40), (100, 60), (320, 71)]:
        ring = case.ring(past + seq, 192)
        got = ring.native(way.target, past, seq, 0.2, window=50)
        want, ceiling = case.reference(past, seq, 0.2, window=50)
        assert np.abs(got - want).max() < ceiling


def test_pages_anywhere(way: Way) -> None:
    case = RoundedCase(way, 4, 2, 32, F16, ctx=400, filled=391)
    pool = case.paged([9, 3, 4, 0, 7, 1, 8], pages=10)
    for past, seq in [(0, 70), (250, 141), (320, 1)]:
        wanted = case.native(way.target, past, seq, 0.2)
        np.testing.assert_array_equal(pool.native(way.target, past, seq, 0.2), wanted)


def test_bits_depend_on_nothing_but_the_row(way: Way) -> None:
    case = RoundedCase(way, 4, 2, 64, F16, ctx=224, filled=211)
    whole = case.native(way.target, 0, 211, 0.125)
    count = case.units(211)
    split = case.native(way.target, 0, 211, 0.125, split=[(unit, unit + 1) for unit in reversed(range(count))])
    np.testing.assert_array_equal(split, whole)
    for past, seq in [(0, 5), (64, 33), (100, 111)]:
        np.testing.assert_array_equal(case.native(way.target, past, seq, 0.125), whole[past : past + seq])


def test_results_in_bf16_are_those_of_f32_rounded(way: Way) -> None:
    case = RoundedCase(way, 4, 2, 32, F16, ctx=80, filled=70)
    plain, halves = (case.native(way.target, 20, 50, 0.1, out=out) for out in ("f32", "bf16"))
    np.testing.assert_array_equal((halves.astype(np.uint32) << 16).view(np.float32), round_to(plain, "bf16"))


def test_what_is_rounded(way: Way) -> None:
    """Up to 256 positions have one largest score, so NumPy can round the weights, too; few come out as neighbours."""
    case = RoundedCase(way, 4, 2, 64, F16, ctx=256, filled=256)
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


def test_a_bias(way: Way) -> None:
    case = RoundedCase(way, 6, 2, 32, F16, ctx=224, filled=211)
    for past, seq in [(0, 70), (130, 17)]:
        check_bias(case, way.target, past, seq, biased(case, past, seq, 6, future=True))


@in_turn([{"mask": "none"}, {"mask": "visible"}, {"mask": "visible", "window": 60}])
def test_masks(way: Way, case: dict[str, Any]) -> None:
    held = RoundedCase(way, 4, 2, 72, BF16, ctx=400, filled=391)
    for past, seq in [(0, 70), (130, 41), (0, 391)]:
        check_mask(held, way.target, past, seq, **case)


@pytest.mark.parametrize("target", PLAIN_BF16_TARGETS, ids=name)
def test_dot_products_need_a_target_that_has_them(target: Target) -> None:
    with pytest.raises(CompileError, match="no dot products of bf16"):
        attention(4, 2, 64, target, kv_dtype=F16, scale=1.0, writer=DottedAttention)
