"""Linear kernels: every weight type, activation type and target, against float64 products of the same operands."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import gguf
import numpy as np
import pytest
from levels import BF16_TARGETS, DOT_TARGETS, LEVELS, name, widest_and_another
from native import aligned, run
from numpy.typing import NDArray
from test_layouts import every_e4m3, every_scale
from weight_formats import reference, tame_file_bytes

from rlx.backends.blocks import BLOCKS
from rlx.backends.cpu import grids, layouts
from rlx.backends.cpu.kernel import Kernel
from rlx.backends.cpu.kernels.linear.linear import linear, units
from rlx.backends.cpu.kernels.linear.multiply import Multiplier
from rlx.backends.cpu.target import Target
from rlx.ir.dtypes import (
    BF16,
    F8_E4M3,
    F16,
    F32,
    IQ2_S,
    IQ3_XXS,
    MXFP4,
    NVFP4,
    Q2_K,
    Q4_K,
    Q5_1,
    Q5_K,
    Q6_K,
    Q8_0,
    DType,
)
from rlx.ir.meaning import round_to

Array = NDArray[Any]

# Ceilings of |out - float64| relative to the sum of |x| |w|: what rounding may cost, in units of about 6e-8.
#: Integer dots are exact; scaling and adding up sub-blocks of 32 is not.
Q8A_ERROR = 2e-7
#: The rows are bf16 numbers: what is left are the f32 sums, of at most 64 pairs in one chain, rounded twice a pair.
BF16_ERROR = 4e-7
#: Every product is rounded; at most 128 of them are in one chain.
F32_ERROR = 4e-7
ERROR = {"q8a": Q8A_ERROR, "bf16": BF16_ERROR, "f32": F32_ERROR}

ROWS = (1, 2, 3, 5, 8, 17, 33, 49)
INTEGER = [t for t in layouts.PACKED_DTYPES if t.has_integer_codes]
#: Types that are tested on every level: one of every kind of scale and of codes that cross bytes.
COMMON = (F32, F16, BF16, Q8_0, Q4_K, Q5_1, Q6_K)


def weights(dtype: DType, n: int, k: int, seed: int = 0, target: Target | None = None) -> tuple[Array, Array]:
    """(packed bytes, values in float64): random codes, scales of both signs around 0.01.

    Codes of 8 bits are signed if the target takes such, and unsigned without one.
    """
    return _weights(dtype, n, k, seed, signed=target is not None and target.isa.signed_codes)


@cache
def _weights(dtype: DType, n: int, k: int, seed: int, *, signed: bool) -> tuple[Array, Array]:
    rng = np.random.default_rng([seed, n, k])
    if dtype.is_quantized:
        raw = tame_file_bytes(dtype, n, k, rng)
    else:
        values = rng.standard_normal((n, k)).astype(np.float32)
        raw = {
            F32: lambda: values.view(np.uint8),
            F16: lambda: values.astype(np.float16).view(np.uint8),
            BF16: lambda: (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8),
        }[dtype]().reshape(-1)
    packed = layouts.pack(dtype, raw, n, k, signed=signed)
    return aligned(packed), layouts.unpack(dtype, packed, n, k, signed=signed).astype(np.float64)


@cache
def activations(act: str, rows: int, k: int) -> tuple[Array, Array]:
    """(what the kernel reads, the same in float64). Rows differ in size, and one of them is zero."""
    rng = np.random.default_rng([rows, k])
    x = (rng.standard_normal((rows, k)) * 10.0 ** rng.integers(-2, 3, (rows, 1))).astype(np.float32)
    x[rows // 2] *= rows == 1
    return prepared(act, x)


def prepared(act: str, x: Array) -> tuple[Array, Array]:
    """f32 [rows, k] -> (what the kernel reads, the same in float64)."""
    if act == "f32":
        return aligned(x), x.astype(np.float64)
    if act == "bf16":
        return bf16(x)
    packed = layouts.q8a_quantize(x)
    return aligned(packed), layouts.q8a_dequantize(packed, x.shape[1]).astype(np.float64)


def bf16(x: Array) -> tuple[Array, Array]:
    """(bf16 numbers, the same in float64)."""
    bits = gguf.quants.quantize(x, gguf.GGMLQuantizationType.BF16).view(np.uint16)
    return aligned(bits), (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def check(dtype: DType, n: int, k: int, act: str, target: Target, rows_list: tuple[int, ...] = ROWS) -> None:
    packed, w = weights(dtype, n, k, target=target)
    w = round_to(w, "bf16") if act == "bf16" else w
    kernel = linear(dtype, n, k, act, target)
    for rows in rows_list:
        x, values = activations(act, rows, k)
        out = np.full((rows + 1, n), 7, np.float32)
        run(kernel, target, x, packed, out, end=units(n), rows=rows, n=n)
        size = np.abs(values) @ np.abs(w).T
        error = np.abs(out[:rows] - values @ w.T) / np.where(size > 0, size, 1)
        assert error.max() < ERROR[act], (rows, error.max())
        assert (out[:rows][size == 0] == 0).all()
        assert (out[rows] == 7).all(), f"wrote past {rows} rows"


def sizes(dtype: DType, turn: int) -> tuple[int, int]:
    """n and k, odd and small ones in turn."""
    ks = {1: [33, 64, 7, 300], 2: [34, 64, 6, 300], 32: [32, 96, 320, 64], 64: [64, 320, 192], 256: [256, 512]}[
        layouts.PACKINGS[dtype].superblock
    ]
    return [17, 33, 40][turn % 3], ks[turn % len(ks)]


def in_turn(dtypes: Sequence[DType], first: int = 0) -> list[Any]:
    """(type, target): common types on every level; others on one of them, in turn from the `first` on."""
    found = []
    for i, dtype in enumerate(dtypes, first):
        for target in LEVELS if dtype in COMMON else [LEVELS[i % len(LEVELS)]]:
            found.append(pytest.param(dtype, target, id=f"{dtype}-{name(target)}"))
    return found


# How a type is unpacked is one thing for both kinds of activations, which take other levels.


@pytest.mark.parametrize(("dtype", "target"), in_turn(INTEGER, first=1))
def test_int8_activations(dtype: DType, target: Target) -> None:
    turn = LEVELS.index(target) + INTEGER.index(dtype)
    check(dtype, *sizes(dtype, turn), "q8a", target)


@pytest.mark.parametrize("target", [t for t in DOT_TARGETS if t not in LEVELS], ids=name)
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
def test_int8_activations_without_the_dot_instruction(bits: int, target: Target) -> None:
    """Which steps may share a widening depends on the width of codes: a type of each."""
    dtype = next(t for t in reversed(INTEGER) if BLOCKS[t].bits == bits)
    check(dtype, *sizes(dtype, bits), "q8a", target)


@pytest.mark.parametrize(("dtype", "target"), in_turn(layouts.PACKED_DTYPES))
def test_f32_activations(dtype: DType, target: Target) -> None:
    turn = LEVELS.index(target) + layouts.PACKED_DTYPES.index(dtype)
    check(dtype, *sizes(dtype, turn), "f32", target)


@pytest.mark.parametrize("target", BF16_TARGETS, ids=name)
@pytest.mark.parametrize(("n", "k"), [(33, 2), (17, 6), (40, 300), (16, 512), (31, 1120)])
def test_bf16_activations(n: int, k: int, target: Target) -> None:
    check(BF16, n, k, "bf16", target, (*ROWS, 31, 32, 150))


@pytest.mark.parametrize("target", BF16_TARGETS, ids=name)
@pytest.mark.parametrize(("n", "k"), [(33, 6), (40, 300)])
def test_f16_weights_are_rounded_to_bf16_activations(n: int, k: int, target: Target) -> None:
    """Streamed and unpacked once for many rows alike."""
    check(F16, n, k, "bf16", target, (1, 7, 150))


@pytest.mark.parametrize("target", LEVELS, ids=name)
def test_more_rows_than_a_macro_tile_of_floats(target: Target) -> None:
    check(F16, 33, 66, "f32", target, (143, 145, 300))


SUMS = (Q8_0, Q4_K, Q6_K, IQ2_S, NVFP4)
WIDE = [t for t in DOT_TARGETS if t.vectors in ("avx2", "avx512")]


@pytest.mark.parametrize(
    ("dtype", "target"),
    [
        (dtype, target)
        for i, dtype in enumerate(SUMS)
        for target in (WIDE if dtype is Q4_K else (WIDE * len(SUMS))[i : i + 1])
    ],
    ids=lambda v: name(v) if isinstance(v, Target) else str(v),
)
def test_sums_in_the_bits_of_floats_round_like_converted_ones(
    dtype: DType, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Q4_K on every target, the others on one in turn."""
    found, rows, n, k = [], 7, 33, 256
    x, _ = activations("q8a", rows, k)
    packed, _ = weights(dtype, n, k, target=target)
    for _ in ("from the origin", "converted"):
        kernel = linear.__wrapped__(dtype, n, k, "q8a", target)  # type: ignore[attr-defined]
        out = np.zeros((rows, n), np.float32)
        run(kernel, target, x, packed, out, end=units(n), rows=rows, n=n)
        found.append((kernel.symbol, out))
        monkeypatch.setattr(Multiplier, "origin", 0)
    (symbol, mine), (other, theirs) = found
    assert symbol != other
    assert theirs.any()
    np.testing.assert_array_equal(mine.view(np.uint32), theirs.view(np.uint32))


@pytest.mark.parametrize("target", DOT_TARGETS, ids=name)
@pytest.mark.parametrize("dtype", [IQ3_XXS, MXFP4], ids=str)
def test_largest_levels_meet_largest_activations(dtype: DType, target: Target) -> None:
    """All weights at either end of the levels that are widest for their number of bits."""
    n, k = 16, 256
    raw = np.zeros((n, dtype.row_bytes(k)), np.uint8)
    if dtype is MXFP4:
        blocks = raw.reshape(-1, dtype.nbytes)
        blocks[:, 0], blocks[: len(blocks) // 2, 1:], blocks[len(blocks) // 2 :, 1:] = 128, 0x77, 0xFF
    else:
        raw[:, :2] = np.array([4.0], np.float16).view(np.uint8)
        raw[:, 2:66] = largest_entry()
        raw[8:, 66:] = 0xFF
        raw[8:, 69::4] = 0x0F
    packed = layouts.pack(dtype, raw.reshape(-1), n, k)
    w = layouts.unpack(dtype, packed, n, k).astype(np.float64)
    x = np.ones((2, k), np.float32)
    x[1] = -1
    rows = aligned(layouts.q8a_quantize(x * 127))
    out = np.empty((2, n), np.float32)
    run(linear(dtype, n, k, "q8a", target), target, rows, aligned(packed), out, end=1, rows=2, n=n)
    want = w.sum(axis=1) * 127
    assert np.abs(w).mean() >= 12  # the test has what it speaks of
    np.testing.assert_array_equal(out, [want, -want])


def largest_entry() -> int:
    """Number of the codebook's entry with the greatest sum."""
    return int(grids.codes("iq3_xxs").sum(axis=1).argmax())


@pytest.mark.parametrize("target", LEVELS, ids=name)
@pytest.mark.parametrize("dtype", [MXFP4, NVFP4, F8_E4M3], ids=str)
def test_float_scales_and_numbers_at_the_ends_of_their_range(dtype: DType, target: Target) -> None:
    """One element at a time reaches the result: each is the reference's product, rounded once."""
    raw, n, k = every_e4m3() if dtype is F8_E4M3 else every_scale(dtype)
    n = min(n, 9) if dtype is F8_E4M3 else n
    raw = raw[: dtype.size((n, k))]
    with np.errstate(over="ignore", invalid="ignore"):
        packed = aligned(layouts.pack(dtype, raw, n, k))
        values = reference(dtype, raw, n, k)
    kernel, bad = linear(dtype, n, k, "f32", target, single=True), ~np.isfinite(values).all(axis=1)
    for column in range(0, k, 5):
        x, out = np.zeros((1, k), np.float32), np.empty((1, n), np.float32)
        x[0, column] = 0.5
        run(kernel, target, aligned(x), packed, out, end=units(n), n=n)
        np.testing.assert_array_equal(out[0][~bad], values[~bad, column] * np.float32(0.5))
        assert not np.isfinite(out[0][bad]).any()  # 0 times infinity or NaN is NaN: nothing is hidden


def gelu_tanh(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


GATES: dict[str, Any] = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu_tanh": gelu_tanh,
    "gelu_erf": lambda x: 0.5 * x * np.vectorize(math.erfc, otypes=[np.float64])(-x / math.sqrt(2)),
}


GATED = [(t, "q8a") for t in (Q4_K, Q8_0, Q2_K, Q5_1, IQ2_S)] + [(BF16, "f32"), (BF16, "bf16")]


@pytest.mark.parametrize(
    ("dtype", "act", "target"),
    [(*row, target) for i, row in enumerate(GATED) for target in widest_and_another(i)],
    ids=lambda v: name(v) if isinstance(v, Target) else str(v),
)
def test_gates(dtype: DType, act: str, target: Target) -> None:
    if act == "bf16" and not target.has_bf16_dots:
        pytest.skip("this target has no dot products of bf16")
    gate = list(GATES)[(GATED.index((dtype, act)) + LEVELS.index(target)) % len(GATES)]
    matrices = [weights(dtype, 33, 256, seed, target) for seed in range(2)]
    check_gate(linear(dtype, 33, 256, act, target, gated=gate), act, target, gate, matrices, (1, 2, 7, 50))


def check_gate(
    kernel: Kernel, act: str, target: Target, gate: str, matrices: list[tuple[Array, Array]], counts: tuple[int, ...],
    error: float = 1e-6,
) -> None:  # fmt: skip
    """Of 33 columns and 256 elements a row; the error is relative to the product of the sums of |x| |w|."""
    (packed, w), (packed_up, up) = matrices
    assert kernel.buffers == ("x", "w", "w_up", "out")
    for rows in counts:
        _, values = activations(act, rows, 256)
        small = (values / np.abs(values).max()).astype(np.float32)  # gates bend around zero
        scaled, values = prepared(act, small)
        out = np.full((rows + 1, 33), 7, np.float32)
        run(kernel, target, scaled, packed, packed_up, out, end=units(33), rows=rows, n=33)
        want = GATES[gate](values @ w.T) * (values @ up.T)
        size = (np.abs(values) @ np.abs(w).T) * (np.abs(values) @ np.abs(up).T)
        assert (np.abs(out[:rows] - want) <= error * size + 1e-30).all()
        assert (out[rows] == 7).all()


@pytest.mark.parametrize("target", LEVELS, ids=name)
@pytest.mark.parametrize("gated", [None, "silu"])
def test_bias_and_residual_which_may_be_the_result_itself(gated: str | None, target: Target) -> None:
    kernel = linear(F32, 33, 64, "f32", target, residual=True, bias=True, gated=gated)
    check_bias(kernel, "f32", target, gated is not None, [weights(F32, 33, 64, seed) for seed in range(2)], (1, 3, 20))


def check_bias(
    kernel: Kernel, act: str, target: Target, gated: bool, matrices: list[tuple[Array, Array]], counts: tuple[int, ...]
) -> None:
    """Of 33 columns and 64 elements a row, gated by SiLU or not."""
    (packed, w), (packed_up, up) = matrices
    n, rng = 33, np.random.default_rng(5)
    bias, bias_up = (rng.standard_normal(n).astype(np.float32) for _ in range(2))
    given = [packed, packed_up, bias, bias_up] if gated else [packed, bias]
    for rows in counts:
        x, values = prepared(act, rng.standard_normal((rows, 64)).astype(np.float32))
        residual = rng.standard_normal((rows, n)).astype(np.float32)
        product = values @ w.T + bias
        want = (GATES["silu"](product) * (values @ up.T + bias_up) if gated else product) + residual
        out = np.empty((rows, n), np.float32)
        run(kernel, target, x, *given, residual, out, end=units(n), rows=rows, n=n)
        np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-4)
        run(kernel, target, x, *given, residual, residual, end=units(n), rows=rows, n=n)
        np.testing.assert_array_equal(residual, out)


@pytest.mark.parametrize(
    ("dtype", "act", "gated", "target"),
    [(Q4_K, "q8a", None, t) for t in DOT_TARGETS]
    + [(dtype, "q8a", gate, t) for dtype, gate in ((Q6_K, None), (Q5_K, "silu")) for t in widest_and_another(1)]
    + [(F16, "f32", gate, t) for t in LEVELS for gate in (None, "silu")]
    + [(BF16, "bf16", gate, t) for t in BF16_TARGETS for gate in (None, "silu")],
    ids=lambda v: name(v) if isinstance(v, Target) else str(v),
)
def test_bits_depend_on_neither_split_nor_row_count(dtype: DType, act: str, gated: str | None, target: Target) -> None:
    """Also of the rows of a batch, and those of a few drafts."""
    check_bits(dtype, act, gated, target, (1, 2, 3, 8, 33, 5), range(2, 17))


def check_bits(
    dtype: DType, act: str, gated: str | None, target: Target, parts: tuple[int, ...], counts: Iterable[int] = ()
) -> None:
    """The bits of all rows, of parts that follow each other, and of the first `counts` rows; in ranges of units in any
    order; and by the kernel for a single row.
    """
    n, k, rows = 7 * 16 - 3, 512, sum(parts)
    matrices = [weights(dtype, n, k, seed, target)[0] for seed in range(2 if gated else 1)]
    x, _ = activations(act, rows, k)
    kernel, whole, split = linear(dtype, n, k, act, target, gated=gated), *np.zeros((2, rows, n), np.float32)
    run(kernel, target, x, *matrices, whole, end=units(n), rows=rows, n=n)
    for begin, end in [(6, 7), (0, 1), (1, 4), (4, 4), (4, 6)]:
        run(kernel, target, x, *matrices, split, begin=begin, end=end, rows=rows, n=n)
    np.testing.assert_array_equal(split, whole)
    starts = np.cumsum([0, *parts]).tolist()
    for first, count in (*zip(starts, parts, strict=False), *((0, count) for count in counts)):
        part, some = aligned(x[first : first + count]), np.empty((count, n), np.float32)
        run(kernel, target, part, *matrices, some, end=units(n), rows=count, n=n)
        np.testing.assert_array_equal(some, whole[first : first + count], f"{count} rows from {first}")
    single, one = linear(dtype, n, k, act, target, gated=gated, single=True), np.empty((1, n), np.float32)
    assert single.extents == ("n",)
    for row in (0, 7, rows - 1):
        run(single, target, aligned(x[row : row + 1]), *matrices, one, end=units(n), n=n)
        np.testing.assert_array_equal(one[0], whole[row])


def test_a_number_that_is_not_finite_is_not_hidden() -> None:
    target, n, k = LEVELS[-1], 16, 64
    packed, _ = weights(Q8_0, n, k, target=target)
    for act, bad in [(act, bad) for act in ("f32", "q8a") for bad in (np.nan, np.inf)]:
        x = np.ones((9, k), np.float32)
        x[4, 40] = bad
        with np.errstate(invalid="ignore"):
            rows = aligned(layouts.q8a_quantize(x) if act == "q8a" else x)
        out = np.empty((9, n), np.float32)
        run(linear(Q8_0, n, k, act, target), target, rows, packed, out, end=1, rows=9, n=n)
        assert not np.isfinite(out[4]).any()
        assert np.isfinite(np.delete(out, 4, axis=0)).all()
