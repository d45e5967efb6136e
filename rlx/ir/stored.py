"""The numbers that stored bytes stand for: every type of `dtypes.py` as float32, by the definition of its format.

Part of the IR, beside `dtypes.py`: for looking at single tensors, and for the reference device. Blocks of GGUF are read
by the `gguf` package, so that no kernel is judged by code of its own.

The first part rounds: the values that f16, bf16, q8_0 and q4_0 can represent, and the bits of bf16, which NumPy lacks.
The formulas of blocks are those of the GGUF registry's reference encoders, in f32; a test compares them with the `gguf`
package.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx.errors import UnsupportedModelError
from rlx.ir.dtypes import BF16, F8_E4M3, F16, F32, DType

Array = np.ndarray[Any, Any]


def round_to(x: Array, dtype: str) -> Array:
    """The values rounded to f16 or bf16, to nearest even."""
    if dtype == "bf16":
        return from_bf16(to_bf16(x.astype(np.float32))).astype(x.dtype)
    return x.astype(np.float16 if dtype == "f16" else np.float32).astype(x.dtype)


def to_bf16(values: Array) -> Array:
    """float32 numbers -> the bits of the nearest bf16 numbers, uint16: the upper halves, ties to even."""
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)  # rounding would carry some NaNs to zero


def from_bf16(bits: Array) -> Array:
    """The bits of bf16 numbers, uint16 -> float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _q8_0(blocks: Array) -> tuple[Array, Array]:
    """Blocks f32[..., 32] -> (scales [..., 1], codes); codes are rounded to nearest, halves away from zero."""
    scales = np.abs(blocks).max(-1, keepdims=True) / np.float32(127)
    scaled = blocks * _inverse(scales)
    size = np.abs(scaled)
    whole = np.floor(size)
    return scales, np.sign(scaled) * (whole + (size - whole >= 0.5))


def _q4_0(blocks: Array) -> tuple[Array, Array]:
    """The first element of the largest magnitude gets code -8; the largest code is 7."""
    first = np.abs(blocks).argmax(-1)[..., None]
    scales = np.take_along_axis(blocks, first, -1) / np.float32(-8)
    codes = np.floor(blocks * _inverse(scales) + np.float32(8.5))
    return scales, np.minimum(codes, np.float32(15)) - np.float32(8)


def _inverse(scales: Array) -> Array:
    inverse = np.float32(1) / scales
    return np.where(np.isfinite(inverse), inverse, np.float32(0))


#: Elements per block, and the function for scales and codes.
BLOCKS: dict[str, tuple[int, Callable[[Array], tuple[Array, Array]]]] = {"q8_0": (32, _q8_0), "q4_0": (32, _q4_0)}


def round_blocks(x: Array, dtype: str) -> Array:
    """The values of x, rounded to blocks along the last axis; a block with a non-finite value becomes NaN."""
    size, codes_of = BLOCKS[dtype]
    blocks = x.astype(np.float32).reshape(*x.shape[:-1], -1, size)
    with np.errstate(all="ignore"):
        scales, codes = codes_of(blocks)
        values = codes * scales.astype(np.float16).astype(np.float32)
    finite = np.isfinite(blocks).all(-1, keepdims=True)
    return np.where(finite, values, np.float32(np.nan)).reshape(x.shape).astype(x.dtype)


Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

FLOATS = (F32, F16, BF16)


def to_float32(raw: Bytes, dtype: DType) -> Floats:
    """Converts the bytes of f32, f16 or bf16 elements to float32, in new memory."""
    if dtype == BF16:
        return from_bf16(raw.view("<u2"))
    return raw.view("<f4" if dtype == F32 else "<f2").astype(np.float32)


def dequantize(raw: Bytes, dtype: DType, shape: Sequence[int]) -> Floats:
    """Decodes the bytes of a tensor into a new float32 array of `shape`.

    Args:
        raw: 1-D uint8, dense and row-major.

    Raises:
        UnsupportedModelError: a type that holds no weights, or that the `gguf` package cannot dequantize.
    """
    if dtype in FLOATS:
        return to_float32(raw, dtype).reshape(shape)
    if dtype is F8_E4M3:  # of checkpoints: GGUF has no such type
        return _scaled_e4m3(raw.reshape(-1, dtype.nbytes)).reshape(shape)
    return _by_gguf(raw, dtype, shape)


def _scaled_e4m3(blocks: Bytes) -> Floats:
    """A float32 scale, then 32 numbers of 8 bits: sign, four bits of exponent, three of mantissa; 0x7f is NaN."""
    bits = blocks[:, 4:]
    exponent, mantissa = (bits >> 3 & 15).astype(np.int32), (bits & 7).astype(np.float32)
    size = np.where(exponent > 0, np.ldexp(mantissa + 8, exponent - 10), np.ldexp(mantissa, -9)).astype(np.float32)
    size = np.where(bits & 127 == 127, np.float32(np.nan), size)
    scales = np.ascontiguousarray(blocks[:, :4]).view(np.float32)
    found: Floats = np.where(bits & 128, -size, size) * scales
    return found


def _by_gguf(raw: Bytes, dtype: DType, shape: Sequence[int]) -> Floats:
    from gguf import GGMLQuantizationType, quants

    try:
        rows = raw.reshape(*shape[:-1], dtype.row_bytes(shape[-1]))
        kind = GGMLQuantizationType(-1 if dtype.ggml is None else dtype.ggml)  # no type has the number -1
        return np.asarray(quants.dequantize(rows, kind), np.float32).reshape(shape)
    except (NotImplementedError, ValueError) as error:
        raise UnsupportedModelError(f"values of type {dtype} cannot be read as numbers ({error})") from error
