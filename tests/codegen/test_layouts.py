"""The packed layout against the `gguf` package's dequantization, bit for bit, and against the layout's own words."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from rlx.codegen import layouts
from rlx.codegen.layouts import BLOCK_ROWS, PACKED_DTYPES, PACKINGS, pack, packed_bytes, unpack
from rlx.errors import ShapeError
from rlx.ir.dtypes import (
    BF16,
    F16,
    F32,
    IQ4_NL,
    IQ4_XS,
    MXFP4,
    Q2_K,
    Q3_K,
    Q4_0,
    Q4_1,
    Q4_K,
    Q5_0,
    Q5_1,
    Q5_K,
    Q6_K,
    Q8_0,
    DType,
)

SHAPES = [(1, 256), (2, 512), (15, 256), (16, 1024), (17, 768), (33, 256)]


#: Where the f16 numbers of a file's block are.
HALVES_AT: dict[DType, list[int]] = {
    **{t: [0] for t in (Q8_0, Q4_0, Q5_0, IQ4_NL, IQ4_XS)},
    **{t: [0, 2] for t in (Q4_1, Q5_1, Q4_K, Q5_K)},
    Q2_K: [80, 82],
    Q3_K: [108],
    Q6_K: [208],
}


def random_file_bytes(dtype: DType, n: int, k: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Random bytes are a legal weight and exercise every code and scale bit; only the f16 scales are kept finite."""
    raw = rng.integers(0, 256, dtype.size((n, k)), dtype=np.uint8)
    if dtype.is_quantized:
        blocks = raw.reshape(-1, dtype.nbytes)
        for at in HALVES_AT[dtype]:
            blocks[:, at + 1] &= 0xBF  # clears the exponent's top bit
    return raw


def reference(dtype: DType, raw: NDArray[np.uint8], n: int, k: int) -> NDArray[np.float32]:
    assert dtype.ggml is not None
    return gguf.quants.dequantize(raw.reshape(n, -1), gguf.GGMLQuantizationType(dtype.ggml)).reshape(n, k)


@pytest.mark.parametrize("dtype", PACKED_DTYPES, ids=str)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_unpack_of_pack_is_the_reference_bit_for_bit(dtype: DType, n: int, k: int) -> None:
    raw = random_file_bytes(dtype, n, k, np.random.default_rng(n * k))
    packed = pack(dtype, raw, n, k)
    assert packed.nbytes == packed_bytes(dtype, n, k)
    got = unpack(dtype, packed, n, k)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got.view(np.uint32), reference(dtype, raw, n, k).view(np.uint32))


@pytest.mark.parametrize("dtype", [t for t in PACKED_DTYPES if t.is_quantized], ids=str)
@pytest.mark.parametrize("scale", [0x0000, 0x0001, 0x03FF, 0x7BFF, 0xFBFF, 0x8001, 0x7C00])
def test_extreme_scales_keep_their_bits(dtype: DType, scale: int) -> None:
    """Zero, the smallest and largest subnormal, the largest normals of both signs, infinity."""
    raw = random_file_bytes(dtype, 17, 256, np.random.default_rng(scale))
    blocks = raw.reshape(-1, dtype.nbytes)
    for at in HALVES_AT[dtype]:
        blocks[:, at : at + 2] = np.array([scale], np.uint16).view(np.uint8)
    with np.errstate(invalid="ignore"):
        got, want = unpack(dtype, pack(dtype, raw, 17, 256), 17, 256), reference(dtype, raw, 17, 256)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", PACKED_DTYPES, ids=str)
def test_rows_that_pad_the_last_block_are_zero_bytes(dtype: DType) -> None:
    raw = np.full(dtype.size((3, 256)), 0xFF, np.uint8)
    ones = pack(dtype, np.full(dtype.size((16, 256)), 0xFF, np.uint8), 16, 256)
    padded = pack(dtype, raw, 3, 256)
    zeros = pack(dtype, np.zeros(dtype.size((16, 256)), np.uint8), 16, 256)
    # Every byte belongs to one row (planes of bits included), so it equals either the full or the empty packing.
    assert ((padded == ones) | (padded == zeros)).all()
    assert (padded == ones).mean() <= 3 / BLOCK_ROWS + (ones == zeros).mean()


def test_q8_0_bytes_are_where_the_layout_says() -> None:
    n, k = 20, 64
    raw = random_file_bytes(Q8_0, n, k, np.random.default_rng(5))
    file = raw.reshape(n, k // 32, 34)
    packed = pack(Q8_0, raw, n, k).reshape(2, k // 32, 544)
    for row, column in [(0, 0), (3, 7), (15, 31), (16, 33), (19, 63)]:
        block = packed[row // 16, column // 32]
        at = 32 + (column % 32) // 4 * 64 + row % 16 * 4 + column % 4
        assert block[at] == file[row, column // 32, 2 + column % 32] ^ 128
        np.testing.assert_array_equal(block[row % 16 * 2 :][:2], file[row, column // 32, :2])


def test_packed_sizes() -> None:
    assert [PACKINGS[t].nbytes for t in (Q8_0, Q4_0, Q4_K, Q5_K, Q6_K)] == [544, 288, 2368, 2880, 3360]
    assert [PACKINGS[t].nbytes for t in (Q4_1, Q5_0, Q5_1, IQ4_NL)] == [320, 352, 384, 288]
    assert [PACKINGS[t].nbytes for t in (IQ4_XS, Q2_K, Q3_K)] == [2208, 1344, 1824]
    for dtype, packing in PACKINGS.items():
        assert 1 <= packing.nbytes / (BLOCK_ROWS * dtype.row_bytes(packing.superblock)) < 1.04
    assert [packed_bytes(t, 17, 3) for t in (F32, F16, BF16)] == [2 * 3 * 64, 2 * 3 * 32, 2 * 3 * 32]
    assert packed_bytes(Q4_K, 33, 512) == 3 * 2 * 2368


def test_errors_name_the_mistake() -> None:
    with pytest.raises(ShapeError, match="mxfp4 has no packed layout"):
        packed_bytes(MXFP4, 16, 32)
    with pytest.raises(ShapeError, match="k = 128"):
        packed_bytes(Q4_K, 16, 128)
    with pytest.raises(ShapeError, match="expected 34 bytes"):
        pack(Q8_0, np.zeros(33, np.uint8), 1, 32)
    with pytest.raises(ShapeError, match="expected 544 packed bytes"):
        unpack(Q8_0, np.zeros(500, np.uint8), 1, 32)


@given(st.integers(0, 2**32 - 1), st.sampled_from([32, 64, 96, 256]), st.integers(1, 5), st.floats(-30, 30))
def test_q8a_rows(seed: int, k: int, rows: int, magnitude: float) -> None:
    x = (np.random.default_rng(seed).standard_normal((rows, k)) * 10.0**magnitude).astype(np.float32)
    packed = layouts.q8a_quantize(x)
    assert packed.shape == (rows, layouts.q8a_bytes(k)) == (rows, k * 11 // 8)
    error = np.abs(layouts.q8a_dequantize(packed, k).astype(np.float64) - x).reshape(rows, -1, 32)
    largest = np.abs(x).reshape(rows, -1, 32).max(axis=2, keepdims=True).astype(np.float64)
    assert (error <= largest / 127 * 0.5001).all()
    codes = packed[:, :k].view(np.int8).reshape(rows, -1, 16)
    sums = np.ascontiguousarray(packed[:, k + k // 8 :]).view(np.int32)
    np.testing.assert_array_equal(sums, codes.astype(np.int64).sum(axis=2))
    assert np.abs(codes.astype(int)).max() == 127


def test_q8a_of_zeros_ties_and_tiny_numbers() -> None:
    x = np.zeros((4, 32), np.float32)
    x[1, :4] = [127, 0.5, 1.5, -2.5]  # scale 1: halves go to even
    x[2] = np.float32(190) * np.float32(1.4e-45)  # the scale rounds to one subnormal step: codes stay within int8
    x[3, 0] = -1
    packed = layouts.q8a_quantize(x)
    codes, scales = packed[:, :32].view(np.int8), packed[:, 32:36].copy().view(np.float32)[:, 0]
    assert not codes[0].any()
    assert scales[0] == 0
    assert codes[1, :4].tolist() == [127, 0, 2, -2]
    assert set(codes[2].tolist()) == {127}
    assert codes[3, 0] == -127


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_q8a_never_hides_a_number_that_is_not_finite(bad: float) -> None:
    x = np.ones((1, 64), np.float32)
    x[0, 40] = bad
    with np.errstate(invalid="ignore"):
        back = layouts.q8a_dequantize(layouts.q8a_quantize(x), 64)
    assert np.isfinite(back[0, :32]).all()
    assert np.isnan(back[0, 32:]).all()
