"""Decodes stored tensors to float32 with NumPy: for looking at single tensors. Models compute on packed weights."""

from __future__ import annotations

from math import prod

import numpy as np
import numpy.typing as npt

from rlx.backends.cpu import layouts
from rlx.errors import UnsupportedModelError
from rlx.ir.dtypes import F8_E4M3, DType
from rlx.weights.composed import FLOATS, to_float32
from rlx.weights.mapped import Bytes


def dequantize(raw: Bytes, dtype: DType, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """Decodes the bytes of a tensor into a new float32 array of `shape`.

    Args:
        raw: 1-D uint8, dense and row-major.

    Raises:
        UnsupportedModelError: a type that holds no weights, or that the `gguf` package cannot dequantize.
    """
    if dtype in FLOATS:
        return to_float32(raw, dtype).reshape(shape)
    if dtype is F8_E4M3:  # of checkpoints: GGUF has no such type
        n, k = prod(shape[:-1]), shape[-1]
        return layouts.unpack(dtype, layouts.pack(dtype, raw, n, k), n, k).reshape(shape)
    return _by_gguf(raw, dtype, shape)


def _by_gguf(raw: Bytes, dtype: DType, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    from gguf import GGMLQuantizationType, quants

    try:
        rows = raw.reshape(*shape[:-1], dtype.row_bytes(shape[-1]))
        kind = GGMLQuantizationType(-1 if dtype.ggml is None else dtype.ggml)  # no type has the number -1
        return np.asarray(quants.dequantize(rows, kind), np.float32).reshape(shape)
    except (NotImplementedError, ValueError) as error:
        raise UnsupportedModelError(f"values of type {dtype} cannot be read as numbers ({error})") from error
