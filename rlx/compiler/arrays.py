"""Conversion of a caller's values to arrays of the type and shape that native code expects.

Runtime: input checks of `rlx.compiler.executable`. Lossless conversions, and those that only lose precision, are made;
others are errors.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rlx.errors import ArgumentError
from rlx.ir.dtypes import BF16, F16, F32, DType
from rlx.ir.rounding import to_bf16


def of_kind(where: str, value: Any, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """`value` as an array of `dtype`: numbers for a float type, whole numbers in range for an integer type.

    Raises:
        ArgumentError: it has another kind of values.
    """
    target, found = np.dtype(dtype), _array(where, value)
    allowed = "fiub" if target.kind == "f" else "iu"
    if found.dtype.kind not in allowed and found.size:
        raise ArgumentError(f"expected {_words(target)}, found {found.dtype}", where=where)
    if target.kind in "iu" and found.size:
        limits, ends = np.iinfo(target), (int(found.min()), int(found.max()))
        for end in ends:
            if not limits.min <= end <= limits.max:
                raise ArgumentError(f"{end} does not fit {target}", where=where)
    return found.astype(target)


def numbers(where: str, value: Any, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """As `of_kind`, with a check of the shape."""
    found = of_kind(where, value, dtype)
    if found.shape != shape:
        raise ArgumentError(f"expected shape {list(shape)}, found {list(found.shape)}", where=where)
    return found


def storage(where: str, value: Any, shape: tuple[int, ...], dtype: DType) -> npt.NDArray[np.uint8]:
    """The bytes of a matrix in its storage type, uint8 [nbytes]: unchanged, or converted from numbers of its shape.

    Raises:
        ArgumentError: the value is neither.
    """
    found, size = _array(where, value), dtype.size(shape)
    if found.dtype == np.uint8 and found.nbytes == size and dtype is not F32:
        return _bytes(found)
    if dtype.is_quantized:
        what = f"expected {size} bytes of {dtype}{list(shape)} as uint8, found {found.dtype}{list(found.shape)}"
        hint = "Quantize the values first, for example with gguf.quants.quantize, or declare the weight as f32."
        raise ArgumentError(what, where=where, hint=hint)
    if dtype is BF16 and found.dtype.name in ("uint16", "bfloat16"):
        if found.shape != shape:
            raise ArgumentError(f"expected shape {list(shape)}, found {list(found.shape)}", where=where)
        return _bytes(found)
    values = numbers(where, found, shape, np.float16 if dtype is F16 else np.float32)
    return _bytes(to_bf16(values) if dtype is BF16 else values)


def _bytes(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _array(where: str, value: Any) -> npt.NDArray[Any]:
    try:
        return np.asarray(value)
    except ValueError as error:  # rows of different length
        raise ArgumentError(f"this is no array: {error}", where=where) from error


def _words(dtype: np.dtype[Any]) -> str:
    return "numbers" if dtype.kind == "f" else "whole numbers"
