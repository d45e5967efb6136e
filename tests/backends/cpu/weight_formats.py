"""File bytes of every weight type, and what they mean by an independent reader."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from rlx.ir.dtypes import (
    F8_E4M3,
    IQ1_M,
    IQ1_S,
    IQ2_S,
    IQ2_XS,
    IQ2_XXS,
    IQ3_S,
    IQ3_XXS,
    IQ4_NL,
    IQ4_XS,
    MXFP4,
    NVFP4,
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
    TQ1_0,
    TQ2_0,
    DType,
)

Bytes = NDArray[np.uint8]

#: Where the f16 numbers of a file's block are. IQ1_M has its one in the top nibbles of four words, from byte 48.
HALVES_AT: dict[DType, list[int]] = {
    **{t: [0] for t in (Q8_0, Q4_0, Q5_0, IQ4_NL, IQ4_XS)},
    **{t: [0, 2] for t in (Q4_1, Q5_1, Q4_K, Q5_K)},
    **{t: [0] for t in (IQ1_S, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S)},
    Q2_K: [80, 82],
    Q3_K: [108],
    Q6_K: [208],
    TQ1_0: [52],
    TQ2_0: [64],
    **{t: [] for t in (IQ1_M, MXFP4, NVFP4, F8_E4M3)},
}

#: Bits a weight takes in memory.
PACKED_BITS: dict[DType, float] = {
    Q8_0: 8.5,
    Q4_0: 4.5,
    Q4_1: 5.0,
    Q5_0: 5.5,
    Q5_1: 6.0,
    IQ4_NL: 4.5,
    IQ4_XS: 4.3125,
    Q2_K: 2.625,
    Q3_K: 3.5625,
    Q4_K: 4.625,
    Q5_K: 5.625,
    Q6_K: 6.5625,
    TQ1_0: 2.0625,
    TQ2_0: 2.0625,
    IQ1_S: 3.3125,
    IQ1_M: 3.5625,
    IQ2_XXS: 3.3125,
    IQ2_XS: 3.5625,
    IQ2_S: 3.5625,
    IQ3_XXS: 4.3125,
    IQ3_S: 4.3125,
    MXFP4: 4.25,
    NVFP4: 4.5,
    F8_E4M3: 9.0,
}


def set_halves(dtype: DType, blocks: Bytes, bits: NDArray[np.uint16]) -> None:
    """Gives every f16 number of each block the bits [blocks] or []."""
    bits = np.broadcast_to(np.asarray(bits, np.uint16), len(blocks))
    for at in HALVES_AT[dtype]:
        blocks[:, at : at + 2] = bits[:, None].copy().view(np.uint8)
    if dtype is IQ1_M:
        for i in range(4):
            nibble = ((bits >> np.uint16(4 * i)) & np.uint16(15)).astype(np.uint8)
            blocks[:, 49 + 2 * i] = (blocks[:, 49 + 2 * i] & 0x0F) | (nibble << 4)


def random_file_bytes(dtype: DType, n: int, k: int, rng: np.random.Generator) -> Bytes:
    """Random bytes are a legal weight and exercise every code and scale bit; only float scales are kept finite."""
    raw = rng.integers(0, 256, dtype.size((n, k)), dtype=np.uint8)
    if dtype.is_quantized:
        blocks = raw.reshape(-1, dtype.nbytes)
        for at in HALVES_AT[dtype]:
            blocks[:, at + 1] &= 0xBF  # clears the exponent's top bit
        if dtype is IQ1_M:
            blocks[:, 55] &= 0xBF
        if dtype is F8_E4M3:
            blocks[:, 3] &= 0xBF
        if dtype is MXFP4:
            blocks[:, 0] = np.minimum(blocks[:, 0], 250)  # 12 times more is infinity
    return raw


def tame_file_bytes(dtype: DType, n: int, k: int, rng: np.random.Generator) -> Bytes:
    """Random codes, scales of both signs around 0.01 (powers of two there for MXFP4), no NaN: for sums of products."""
    raw = rng.integers(0, 256, dtype.size((n, k)), dtype=np.uint8)
    blocks = raw.reshape(-1, dtype.nbytes)
    scales = rng.standard_normal(len(blocks)) * 0.01
    set_halves(dtype, blocks, scales.astype(np.float16).view(np.uint16))
    if dtype is MXFP4:
        blocks[:, 0] = rng.integers(117, 124, len(blocks))
    if dtype is F8_E4M3:
        blocks[:, :4] = scales.astype(np.float32)[:, None].view(np.uint8)
        blocks[:, 4:][blocks[:, 4:] & 127 == 127] ^= 1
    return raw


def e4m3fn(byte: int) -> float:
    """The definition of the Open Compute Project's 8-bit floating point specification, table 1."""
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = byte >> 3 & 15, byte & 7
    if byte & 0x7F == 0x7F:
        return float("nan")
    return sign * (2.0**-6 * mantissa / 8 if exponent == 0 else 2.0 ** (exponent - 7) * (1 + mantissa / 8))


E4M3FN = np.array([e4m3fn(byte) for byte in range(256)]).astype(np.float32)


def reference(dtype: DType, raw: Bytes, n: int, k: int) -> NDArray[np.float32]:
    """The values, float32[n, k]: by the `gguf` package, or by the table above."""
    if dtype is F8_E4M3:
        blocks = raw.reshape(n, k // 32, 36)
        with np.errstate(over="ignore", invalid="ignore"):
            return (E4M3FN[blocks[..., 4:]] * blocks[..., :4].copy().view(np.float32)).reshape(n, k)
    assert dtype.ggml is not None
    return gguf.quants.dequantize(raw.reshape(n, -1), gguf.GGMLQuantizationType(dtype.ggml)).reshape(n, k)


def assert_same_bits(got: NDArray[Any], want: NDArray[Any]) -> None:
    """Equal bit for bit, -0 and +0 told apart; a NaN of one kind is as good as another."""
    nan = np.isnan(want)
    np.testing.assert_array_equal(np.isnan(got), nan)
    np.testing.assert_array_equal(np.where(nan, 0, got.view(np.uint32)), np.where(nan, 0, want.view(np.uint32)))
