"""The packed layout against the `gguf` package's dequantization, bit for bit, and against the layout's own words."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from weight_formats import PACKED_BITS, assert_same_bits, random_file_bytes, reference, set_halves

from rlx.backends.blocks import BLOCKS
from rlx.backends.cpu import grids, layouts
from rlx.backends.cpu.layouts import BLOCK_ROWS, PACKED_DTYPES, PACKINGS, pack, packed_bytes, unpack
from rlx.ir import dtypes
from rlx.ir.dtypes import BF16, F8_E4M3, F16, F32, MXFP4, NVFP4, Q4_K, Q8_0, DType

SHAPES = [(1, 256), (2, 512), (15, 256), (16, 1024), (17, 768), (33, 256)]
QUANTIZED = [t for t in PACKED_DTYPES if t.is_quantized]

quantized = pytest.mark.parametrize("dtype", QUANTIZED, ids=str)


@pytest.mark.parametrize("dtype", PACKED_DTYPES, ids=str)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_unpack_of_pack_is_the_reference_bit_for_bit(dtype: DType, n: int, k: int) -> None:
    raw = random_file_bytes(dtype, n, k, np.random.default_rng(n * k))
    packed = pack(dtype, raw, n, k)
    assert packed.nbytes == packed_bytes(dtype, n, k)
    got = unpack(dtype, packed, n, k)
    assert got.dtype == np.float32
    assert_same_bits(got, reference(dtype, raw, n, k))


@quantized
@settings(max_examples=20, deadline=None)
@given(st.data())
def test_any_bytes_are_read_as_the_reference_reads_them(dtype: DType, data: st.DataObject) -> None:
    k = 256
    raw = np.frombuffer(data.draw(st.binary(min_size=dtype.row_bytes(k), max_size=dtype.row_bytes(k))), np.uint8)
    with np.errstate(all="ignore"):
        assert_same_bits(unpack(dtype, pack(dtype, raw, 1, k), 1, k), reference(dtype, raw, 1, k))


@quantized
@pytest.mark.parametrize("scale", [0x0000, 0x0001, 0x03FF, 0x7BFF, 0xFBFF, 0x8001, 0x7C00, 0xFC00, 0x7E00])
def test_extreme_scales_keep_their_bits(dtype: DType, scale: int) -> None:
    """Zero, the smallest and largest subnormal, the largest normals of both signs, infinities, NaN."""
    raw = random_file_bytes(dtype, 17, 256, np.random.default_rng(scale))
    set_halves(dtype, raw.reshape(-1, dtype.nbytes), np.uint16(scale))
    with np.errstate(invalid="ignore", over="ignore"):
        assert_same_bits(unpack(dtype, pack(dtype, raw, 17, 256), 17, 256), reference(dtype, raw, 17, 256))


def every_scale(dtype: DType) -> tuple[np.ndarray, int, int]:
    """All 256 scales of a type with one-byte scales, a block of them with all codes; (raw, n, k)."""
    blocks = np.random.default_rng(1).integers(0, 256, (256, dtype.nbytes), dtype=np.uint8)
    scales = dtype.nbytes - dtype.block // 2
    blocks[:, :scales] = np.arange(256)[:, None] + np.arange(scales)
    blocks[:, scales : scales + 8] = np.arange(0, 16, 2) * 16 + np.arange(1, 16, 2)
    return blocks.reshape(-1), 256, dtype.block


@pytest.mark.parametrize("dtype", [MXFP4, NVFP4], ids=str)
def test_every_scale_of_one_byte(dtype: DType) -> None:
    raw, n, k = every_scale(dtype)
    with np.errstate(over="ignore"):
        assert_same_bits(unpack(dtype, pack(dtype, raw, n, k), n, k), reference(dtype, raw, n, k))


def every_e4m3() -> tuple[np.ndarray, int, int]:
    """All numbers of eight bits under scales from the ends of f32's range; (raw, n, k)."""
    scales = np.array([1, -1, 0, 0.1, 1e-45, -1e-38, 7.5e35, 3.4e38, np.inf, -np.inf, np.nan], np.float32)
    blocks = np.zeros((len(scales), 8, 36), np.uint8)
    blocks[..., :4] = scales.view(np.uint8).reshape(-1, 1, 4)
    blocks[..., 4:] = np.arange(256).reshape(8, 32)
    return blocks.reshape(-1), len(scales), 256


def test_every_number_of_eight_bits() -> None:
    raw, n, k = every_e4m3()
    want = reference(F8_E4M3, raw, n, k)
    assert (want[0, 0x7E], want[0, 0x01]) == (448, 2.0**-9)  # the largest and the smallest number, by the specification
    assert np.isnan(want[0, [0x7F, 0xFF]]).all()
    with np.errstate(over="ignore", invalid="ignore"):
        assert_same_bits(unpack(F8_E4M3, pack(F8_E4M3, raw, n, k), n, k), want)


@pytest.mark.parametrize("name", ["IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"])
def test_levels_are_those_of_the_codebooks(name: str) -> None:
    """A code without its top bit stands for the codebook's number (for IQ1, for that and an eighth)."""
    kind = getattr(gguf.quants, name)
    row = BLOCKS[dtypes.DTYPES[name.lower()]]
    assert row.levels is not None
    levels = np.array(row.levels) - row.zero
    half = len(levels) // 2
    numbers = levels[: len(kind.grid_map)]
    if name.startswith("IQ1"):
        np.testing.assert_array_equal(numbers / 8, np.array(kind.grid_map) + kind.delta)
        np.testing.assert_array_equal(levels[half : half + 3] / 8, np.array(kind.grid_map) - kind.delta)
    else:
        np.testing.assert_array_equal(numbers, kind.grid_map)
        np.testing.assert_array_equal(levels[half:], -levels[:half])
    if name != "IQ1_M":
        kind.init_grid()
        np.testing.assert_array_equal(np.array(kind.grid_map)[grids.codes(name.lower())], kind.grid[0, 0])


@pytest.mark.parametrize("dtype", PACKED_DTYPES, ids=str)
def test_rows_that_pad_the_last_block_are_zero_bytes(dtype: DType) -> None:
    raw = np.full(dtype.size((3, 256)), 0xFF, np.uint8)
    ones = pack(dtype, np.full(dtype.size((16, 256)), 0xFF, np.uint8), 16, 256)
    padded = pack(dtype, raw, 3, 256)
    zeros = pack(dtype, np.zeros(dtype.size((16, 256)), np.uint8), 16, 256)
    # Every byte belongs to one row (planes of bits included), so it equals either the full or the empty packing.
    assert ((padded == ones) | (padded == zeros)).all()
    assert (padded == ones).mean() <= 3 / BLOCK_ROWS + (ones == zeros).mean()


def test_packed_sizes() -> None:
    assert [PACKINGS[t].nbytes for t in (Q8_0, Q4_K, MXFP4, NVFP4, F8_E4M3)] == [544, 2368, 272, 576, 576]
    found = {t: PACKINGS[t].nbytes * 8 / (BLOCK_ROWS * PACKINGS[t].superblock) for t in QUANTIZED}
    assert found == PACKED_BITS
    assert [packed_bytes(t, 17, 6) for t in (F32, F16, BF16)] == [2 * 6 * 64, 2 * 6 * 32, 2 * 6 * 32]
    assert packed_bytes(Q4_K, 33, 512) == 3 * 2 * 2368


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
