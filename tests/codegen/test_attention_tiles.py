"""Attention on tile registers against softmax in float64: emulated tiles everywhere, real ones where there are some."""

from __future__ import annotations

from typing import Any

import emulated
import numpy as np
import pytest
from levels import TILE_TARGETS, name
from test_attention import ATTENTION_ERROR, Case

from rlx.codegen.kernel import Kernel
from rlx.codegen.kernels.attention import attention
from rlx.codegen.kernels.attention_shape import units
from rlx.codegen.kernels.attention_tiles import TiledAttention, fits
from rlx.codegen.target import Target
from rlx.errors import CompileError
from rlx.ir.dtypes import BF16, F16, F32, Q8_0
from rlx.ir.meaning import round_to

#: Ceiling of |out - float64| / (largest |v| * (1 + largest |score|)): all factors have eight bits.
TILED_ERROR = 2.0**-8


@pytest.fixture(params=[*emulated.TARGETS, *TILE_TARGETS], ids=name)
def target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Target:
    if request.param.level != "amx":
        emulated.use(monkeypatch)
    found: Target = request.param
    return found


class TiledCase(Case):
    def kernel(self, target: Target, **options: Any) -> Kernel:
        return attention(*self.shape, target, writer=TiledAttention, **options)

    def units(self, seq: int, rows_static: int | None = None) -> int:
        return units(seq, *self.shape, tiled=True)

    def reference(self, *arguments: Any, **options: Any) -> tuple[Any, float]:
        out, ceiling = super().reference(*arguments, **options)
        return out, ceiling / ATTENTION_ERROR * TILED_ERROR


@pytest.mark.parametrize(
    ("shape", "dtype"), [((4, 2, 64), F16), ((8, 1, 128), F16), ((6, 2, 32), BF16), ((3, 3, 96), BF16)], ids=str
)
def test_against_softmax_in_float64(target: Target, shape: tuple[int, int, int], dtype: Any) -> None:
    case = TiledCase(*shape, dtype, ctx=224, filled=211)
    for past, seq in [(0, 1), (15, 1), (16, 2), (63, 1), (64, 3), (130, 33), (0, 211)]:
        case.check(target, past, seq)


@pytest.mark.parametrize("options", [{"window": 7}, {"window": 64}, {"softcap": 5.0}, {"window": 100, "softcap": 20.0}])
def test_windows_and_caps(target: Target, options: dict[str, Any]) -> None:
    case = TiledCase(4, 2, 32, F16, ctx=224, filled=211)
    for past, seq in [(0, 70), (100, 1), (140, 71)]:
        case.check(target, past, seq, **options)


def test_rings(target: Target) -> None:
    """Positions lie at themselves modulo the ring's size, and those before the window were overwritten."""
    case = TiledCase(4, 2, 32, F16, ctx=400, filled=391)
    for past, seq in [(0, 40), (100, 60), (320, 71)]:
        ring = case.ring(past + seq, 192)
        got = ring.native(target, past, seq, 0.2, window=50)
        want, ceiling = case.reference(past, seq, 0.2, window=50)
        assert np.abs(got - want).max() < ceiling


def test_bits_depend_on_nothing_but_the_row(target: Target) -> None:
    case = TiledCase(4, 2, 64, F16, ctx=224, filled=211)
    whole = case.native(target, 0, 211, 0.125)
    count = case.units(211)
    split = case.native(target, 0, 211, 0.125, split=[(unit, unit + 1) for unit in reversed(range(count))])
    np.testing.assert_array_equal(split, whole)
    for past, seq in [(0, 5), (64, 33), (100, 111)]:
        np.testing.assert_array_equal(case.native(target, past, seq, 0.125), whole[past : past + seq])


@pytest.mark.parametrize("options", [{}, {"window": 70}], ids=str)
def test_groups_of_chunks(target: Target, options: dict[str, Any]) -> None:
    case = TiledCase(2, 1, 32, F16, ctx=640, filled=600)
    whole = case.native(target, 0, 600, 0.2, **options)
    for past, seq in [(250, 9), (300, 70), (511, 2)]:
        case.check(target, past, seq, **options)
        np.testing.assert_array_equal(case.native(target, past, seq, 0.2, **options), whole[past : past + seq])


def test_results_in_bf16_are_those_of_f32_rounded(target: Target) -> None:
    case = TiledCase(4, 2, 32, F16, ctx=80, filled=70)
    plain, halves = (case.native(target, 20, 50, 0.1, out=out) for out in ("f32", "bf16"))
    np.testing.assert_array_equal((halves.astype(np.uint32) << 16).view(np.float32), round_to(plain, "bf16"))


def test_what_does_not_fit(target: Target) -> None:
    assert fits(128, F16)
    for head_dim, dtype in [(80, F16), (128, F32), (128, Q8_0)]:
        assert not fits(head_dim, dtype)
        with pytest.raises(CompileError, match="do not fit tiles"):
            attention(4, 2, head_dim, target, kv_dtype=dtype, scale=1.0, writer=TiledAttention)


def test_units_have_more_queries() -> None:
    assert [units(seq, 16, 8, 128, tiled=True) for seq in (1, 64, 65)] == [8, 8, 16]
