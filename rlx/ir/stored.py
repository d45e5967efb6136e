"""The numbers that stored bytes stand for: every type of `dtypes.py` as float32, by the definition of its format.

Part of the IR, beside `dtypes.py`: for looking at single tensors, and for the reference device. Blocks of GGUF are read
by the `gguf` package, so that no kernel is judged by code of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rlx.errors import UnsupportedModelError
from rlx.ir.dtypes import BF16, F8_E4M3, F16, F32, DType
from rlx.ir.rounding import from_bf16

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
