"""Linear kernels on tile registers, emulated on every machine and real where it has them, against float64 products."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import emulated
import numpy as np
import pytest
from levels import TILE_TARGETS, machine, name
from native import aligned, run
from test_linear import GATES, activations, bf16, check_bias, check_bits, check_gate, weights

from rlx.backends.cpu import layouts
from rlx.backends.cpu.kernels.linear.linear import linear, macro_rows, units
from rlx.backends.cpu.llvm import assembly
from rlx.backends.cpu.target import Target
from rlx.ir.dtypes import BF16, F8_E4M3, F16, MXFP4, NVFP4, Q4_K, Q6_K, Q8_0, DType
from rlx.ir.meaning import round_to

# Ceilings of |out - float64| relative to the sum of |x| |w|, both rounded to bf16 before.
#: What is left are f32 sums; the longest chain here has 4,128 products.
TILE_ERROR = 6e-7
#: Weights that lie near the middle of two bf16 numbers may go either way: up to one in ten.
WEIGHT_ERROR = 3e-3

TYPES = [t for t in layouts.PACKED_DTYPES if t in (BF16, F16) or t.is_quantized]
ROWS = (1, 2, 15, 16, 17, 31, 32, 33, 49, 64)
#: Where a test runs: on the tiles of this machine, if there are any, and on emulated ones.
WIDEST = [emulated.TARGETS[-1], *TILE_TARGETS]


@pytest.fixture
def target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Target:
    chosen: Target = request.param
    if chosen not in TILE_TARGETS:
        emulated.use(monkeypatch)
    return chosen


def on(targets: list[Target]) -> Any:
    return pytest.mark.parametrize(
        "target", targets, ids=lambda t: "tiles" if t in TILE_TARGETS else name(t), indirect=True
    )


def count(n: int, k: int, rows: int, target: Target) -> int:
    """Work units."""
    again = macro_rows(k, "bf16", target)
    assert again is not None
    return -(-rows // again) * units(n)


def ceiling(dtype: DType) -> float:
    return TILE_ERROR if dtype is BF16 else WEIGHT_ERROR


def rounded(dtype: DType, n: int, k: int, target: Target, seed: int = 0) -> tuple[Any, Any]:
    """(packed bytes, values as the kernel rounds them to bf16, in float64): the test of each weight says how well."""
    packed, w = weights(dtype, n, k, seed, target)
    return packed, unpacked(dtype, n, k, packed, target) if dtype.is_quantized else nearest(dtype, w)


def unpacked(dtype: DType, n: int, k: int, packed: Any, target: Target) -> Any:
    """The weights of a kernel: row i of the activations picks weight i of each row."""
    x, _ = bf16(np.eye(k, dtype=np.float32))
    out = np.zeros((k, n), np.float32)
    run(linear(dtype, n, k, "bf16", target), target, x, packed, out, end=count(n, k, k, target), rows=k, n=n)
    return out.T.astype(np.float64)


def nearest(dtype: DType, w: Any) -> Any:
    """Values rounded to bf16: to nearest even if they are unpacked to f32 first, else what is in the middle goes up."""
    if dtype in (BF16, F16) or dtype in (F8_E4M3, MXFP4, NVFP4):
        return round_to(w, "bf16").astype(np.float64)
    bits = np.asarray(w, np.float32).view(np.uint32) + np.uint32(1 << 15)
    return (bits & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)


def check(dtype: DType, n: int, k: int, target: Target, rows_list: tuple[int, ...] = ROWS) -> None:
    packed, w = rounded(dtype, n, k, target)
    kernel = linear(dtype, n, k, "bf16", target)
    for rows in rows_list:
        x, values = activations("bf16", rows, k)
        out = np.full((rows + 1, n), 7, np.float32)
        run(kernel, target, x, packed, out, end=count(n, k, rows, target), rows=rows, n=n)
        size = np.abs(values) @ np.abs(w).T
        error = np.abs(out[:rows] - values @ w.T) / np.where(size > 0, size, 1)
        assert error.max() < TILE_ERROR, (rows, error.max())
        assert (out[:rows][size == 0] == 0).all()
        assert (out[rows] == 7).all(), f"wrote past {rows} rows"


#: How a type is unpacked is also tested without tiles.
EVERY = [pytest.param(each, marks=() if TYPES.index(each) % 3 == 0 else pytest.mark.slow) for each in TYPES]


@on(WIDEST)
@pytest.mark.parametrize("dtype", EVERY, ids=str)
def test_every_type(dtype: DType, target: Target) -> None:
    k = 512 if layouts.PACKINGS[dtype].superblock == 256 else 320
    check(dtype, (33, 16, 40)[TYPES.index(dtype) % 3], k, target, (1, 33))


@on([*WIDEST, *(t.without("avx512fp16") for t in TILE_TARGETS if t.has("avx512fp16"))])
@pytest.mark.parametrize("dtype", EVERY, ids=str)
def test_each_weight_is_rounded_to_the_nearest(dtype: DType, target: Target) -> None:
    """What rounded scales add is little beside the row's largest weight; in the mean a tenth of the error at most."""
    n, k = 32, 256
    packed, w = weights(dtype, n, k, 5, target)
    found = unpacked(dtype, n, k, packed, target)
    half = np.ldexp(1.0, np.frexp(w)[1] - 9)  # of the last bit's unit
    assert (np.abs(found - w) <= half + 2.0**-10 * np.abs(w).max(axis=1, keepdims=True)).all()
    best = np.square(nearest(dtype, w) - w).mean()
    assert np.square(found - w).mean() <= 1.21 * best


@on(WIDEST)
@pytest.mark.parametrize(("n", "k"), [(1, 32), (16, 64), (48, 96), (31, 288), (17, 1120), (16, 4128)])
def test_sizes(n: int, k: int, target: Target) -> None:
    """A lone unit, a last tile of few columns, a short chunk, and more than one panel."""
    check(BF16, n, k, target)


@on(WIDEST)
@pytest.mark.parametrize(("n", "k", "dtype"), [(33, 6, BF16), (17, 62, F16), (16, 588, F16), (31, 4304, BF16)])
def test_k_that_fills_no_tile(n: int, k: int, dtype: DType, target: Target) -> None:
    """Only a short step, one that is short by one pair, and one in the second panel."""
    check(dtype, n, k, target, (1, 17, 64))


@on(WIDEST)
def test_no_row_reads_the_beginning_of_the_next(target: Target) -> None:
    """The row after the last one, and the one after any other, are not finite."""
    n, k, rows = 16, 48, 40
    packed, w = rounded(BF16, n, k, target)
    x, values = bf16(np.random.default_rng(3).standard_normal((rows, k)).astype(np.float32))
    x = aligned(np.concatenate([x, x[:1]]))
    x[1::2] = 0x7FC0  # NaN
    out = np.zeros((rows, n), np.float32)
    run(linear(BF16, n, k, "bf16", target), target, x, packed, out, end=count(n, k, rows, target), rows=rows, n=n)
    np.testing.assert_allclose(out[::2], (values @ w.T)[::2], rtol=1e-4, atol=1e-4)
    assert np.isnan(out[1::2]).all()


@on(WIDEST)
def test_more_rows_than_a_macro_tile(target: Target) -> None:
    """Ranges of units may begin in one and end in another."""
    check(Q8_0, 33, 64, target, (513, 544))
    n, k, rows = 33, 64, 1100
    packed, _ = weights(Q8_0, n, k, target=target)
    x, _ = activations("bf16", rows, k)
    kernel, whole, split = linear(Q8_0, n, k, "bf16", target), *np.zeros((2, rows, n), np.float32)
    assert count(n, k, rows, target) == 3 * units(n)
    run(kernel, target, x, packed, whole, end=9, rows=rows, n=n)
    for begin, end in ((5, 9), (0, 2), (2, 5)):
        run(kernel, target, x, packed, split, begin=begin, end=end, rows=rows, n=n)
    np.testing.assert_array_equal(split, whole)


@on(WIDEST)
@pytest.mark.parametrize("gate", GATES)
def test_gates(gate: str, target: Target) -> None:
    kernel, matrices = linear(Q4_K, 33, 256, "bf16", target, gated=gate), [*pair(Q4_K, 256, target)]
    check_gate(kernel, "bf16", target, gate, matrices, (1, 18, 50), error=2 * WEIGHT_ERROR)


@on(WIDEST)
@pytest.mark.parametrize("gated", [None, "silu"])
def test_bias_and_residual_which_may_be_the_result_itself(gated: str | None, target: Target) -> None:
    kernel = linear(BF16, 33, 64, "bf16", target, residual=True, bias=True, gated=gated)
    check_bias(kernel, "bf16", target, gated is not None, [*pair(BF16, 64, target)], (3, 40))


def pair(dtype: DType, k: int, target: Target) -> Iterator[tuple[Any, Any]]:
    yield from (rounded(dtype, 33, k, target, seed) for seed in range(2))


@on(WIDEST)
@pytest.mark.parametrize("act", ["bf16", "q8a"])
def test_results_in_bf16_are_those_of_f32_rounded(act: str, target: Target) -> None:
    """With either writer of linears, in columns that do and do not fill a vector."""
    n, k, rows = 33, 256, 40
    matrices = [weights(Q4_K, n, k, seed, target)[0] for seed in range(2)]
    x, _ = activations(act, rows, k)
    plain, halves = np.empty((rows, n), np.float32), np.full((rows + 1, n), 7, np.uint16)
    run(linear(Q4_K, n, k, act, target, gated="silu"), target, x, *matrices, plain, end=units(n), rows=rows, n=n)
    kernel = linear(Q4_K, n, k, act, target, gated="silu", out="bf16")
    run(kernel, target, x, *matrices, halves, end=units(n), rows=rows, n=n)
    np.testing.assert_array_equal((halves[:rows].astype(np.uint32) << 16).view(np.float32), round_to(plain, "bf16"))
    assert (halves[rows] == 7).all()


@on(WIDEST)
@pytest.mark.parametrize(("dtype", "gated"), [(Q6_K, None), (BF16, "silu")], ids=str)
def test_bits_depend_on_neither_split_nor_row_count(dtype: DType, gated: str | None, target: Target) -> None:
    check_bits(dtype, "bf16", gated, target, (1, 16, 17, 36))


def test_instructions_on_tiles_stand_apart() -> None:
    """LLVM leaves what is between them where it is, also in the loop that only multiplies."""
    target = machine("amx")
    text = assembly(linear(Q8_0, 64, 64, "bf16", target).llvm, target)
    lines = [line.split()[0] for line in text.splitlines() if line.split()]
    at = [i for i, word in enumerate(lines) if word in ("tileloadd", "tdpbf16ps")]
    apart = [i for i in at if lines[i + 1 : i + 12].count("nop") == 8]
    assert {lines[i] for i in apart} == {"tileloadd", "tdpbf16ps"} and len(apart) >= 24
