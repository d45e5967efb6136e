"""Values in memory: bytes -> numbers and back, for every type and layout that a lowered program has.

Reference backend. Numbers are read exactly. Writing rounds to the type, by the formulas that define it. `Formats` has
the plain layouts; a device with others has a class over it, with which `RLX_VERIFY` reads its memory, too.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlx.errors import CompileError
from rlx.ir.dtypes import BF16, Q4_0, Q8_0, Q8A, DType
from rlx.ir.stored import dequantize, from_bf16, to_bf16
from rlx.passes.capabilities import Layouts
from rlx.passes.layout import ROWS_LAYOUT

Array = NDArray[Any]
Bytes = NDArray[np.uint8]
Shape = tuple[int, ...]


class Formats:
    """Reads and writes values in the memory of a device.

    Args:
        layouts: how they lie there.
    """

    def __init__(self, layouts: Layouts | None = None) -> None:
        self.layouts = layouts or Layouts()

    def read(self, dtype: DType, raw: Bytes, shape: Shape) -> Array:
        """The numbers that the bytes of a value hold: float64, or the integers themselves."""
        if dtype in _BLOCKS:
            return _BLOCKS[dtype][0](raw.reshape(-1, dtype.nbytes)).reshape(shape).astype(np.float64)
        if dtype.numpy is None:
            return dequantize(raw, dtype, shape).astype(np.float64)
        array = raw.view(dtype.numpy).reshape(shape)
        if dtype is BF16:
            return from_bf16(array).astype(np.float64)
        return array.astype(np.float64) if array.dtype.kind == "f" else array.copy()

    def written(self, dtype: DType, values: Array) -> Bytes:
        """The bytes of numbers rounded to `dtype`, uint8: the inverse of `read`.

        Raises:
            CompileError: no op has results of this type.
        """
        if dtype in _BLOCKS:
            return _BLOCKS[dtype][1](values.reshape(-1, dtype.block).astype(np.float32)).reshape(-1)
        if dtype.numpy is None:
            raise CompileError(f"no op writes {dtype}", where="reference backend")
        with np.errstate(over="ignore"):
            found = to_bf16(values.astype(np.float32)) if dtype is BF16 else values.astype(dtype.numpy)
        return np.ascontiguousarray(found).reshape(-1).view(np.uint8)

    # -- caches -------------------------------------------------------------------------------------------------------

    def state_rows(self, dtype: DType, raw: Bytes, shape: Shape, layout: str) -> Bytes:
        """The rows of a state, each as `read` takes it: uint8 [rows, bytes of a row], perhaps a view."""
        return raw.reshape(-1, dtype.row_bytes(shape[-1]))

    def put_state_rows(self, dtype: DType, raw: Bytes, shape: Shape, layout: str, rows: Bytes) -> None:
        """The inverse of `state_rows`."""
        raw.reshape(rows.shape)[...] = rows

    def read_state(self, dtype: DType, raw: Bytes, shape: Shape, layout: str) -> Array:
        """As `read`, for a state."""
        return self.read(dtype, self.state_rows(dtype, raw, shape, layout).reshape(-1), shape)

    def write_state(
        self, dtype: DType, raw: Bytes, shape: Shape, layout: str, values: Array, changed: NDArray[np.bool_]
    ) -> None:
        """Writes the rows of a state that changed, and leaves the bytes of the others.

        Args:
            changed: bool, of the shape without its last axis.
        """
        rows, flat = self.state_rows(dtype, raw, shape, layout).copy(), changed.reshape(-1)
        rows[flat] = self.written(dtype, values.reshape(-1, shape[-1])[flat]).reshape(-1, rows.shape[1])
        self.put_state_rows(dtype, raw, shape, layout, rows)

    def read_as_cache(self, dtype: DType, raw: Bytes, shape: Shape, layout: str, room: int) -> Array:
        """As `read`, for plain keys or values in the form of a cache, [heads, positions + room, head_dim].

        The result has zeros after the last position, where memory may hold anything.
        """
        stored = self.read(dtype, raw, shape)[:, : shape[1] - room]
        return np.pad(stored, ((0, 0), (0, room), (0, 0)))

    def write_as_cache(self, dtype: DType, raw: Bytes, layout: str, values: Array) -> None:
        """The inverse of `read_as_cache`."""
        raw[...] = self.written(dtype, values)

    # -- weights ------------------------------------------------------------------------------------------------------

    def weight_bytes(self, dtype: DType, shape: Shape, layout: str) -> int:
        """Bytes of a weight in a layout of the manifest."""
        if layout == self.layouts.matrices:
            return prod(shape[:-2]) * self.layouts.matrix_bytes(dtype, *shape[-2:])
        return prod(shape) * 4 if layout == ROWS_LAYOUT else dtype.size(shape)

    def read_weight(self, dtype: DType, raw: Bytes, shape: Shape, layout: str) -> Array:
        """The values of a weight, float32: "rows" is plain float32, other layouts are those of the device."""
        if layout == ROWS_LAYOUT:
            return raw.view(np.float32).reshape(shape)
        return dequantize(raw, dtype, shape)

    def read_table(self, dtype: DType, raw: Bytes, shape: Shape, layout: str, ids: Array) -> Array:
        """Rows `ids` of a table [n, k], float32 [len(ids), k], without reading the others."""
        n, k = shape
        if layout == ROWS_LAYOUT:
            rows: Array = raw.view(np.float32).reshape(shape)[ids]
            return rows
        return dequantize(np.ascontiguousarray(raw.reshape(n, -1)[ids]).reshape(-1), dtype, (len(ids), k))


# -- blocks --------------------------------------------------------------------------------------------------------


def _read_q8a(blocks: Bytes) -> Array:
    """A float32 scale, then 32 codes."""
    codes: Array = blocks[:, 4:].view(np.int8).astype(np.float32)
    return codes * np.ascontiguousarray(blocks[:, :4]).view(np.float32)


def _written_q8a(values: Array) -> Bytes:
    """A block with NaN or infinity has codes 0 and that value as its scale, so that products are NaN."""
    scales = (np.abs(values).max(-1, keepdims=True) / np.float32(127)).astype(np.float32)
    with np.errstate(all="ignore"):
        codes = np.rint(values / scales)
    codes = np.clip(np.where(np.isfinite(codes), codes, 0), -127, 127).astype(np.int8)
    return np.concatenate([scales.view(np.uint8), codes.view(np.uint8)], axis=1)


def _read_q8_0(blocks: Bytes) -> Array:
    codes: Array = blocks[:, 2:].view(np.int8).astype(np.float32)
    return codes * _scales(blocks)


def _written_q8_0(values: Array) -> Bytes:
    """Of values that are such a block already: the largest has the code 127 or -127."""
    scales = np.abs(values).max(-1, keepdims=True) / np.float32(127)
    return _block(scales, _codes(values, scales).astype(np.int8).view(np.uint8))


def _read_q4_0(blocks: Bytes) -> Array:
    codes: Array = np.concatenate([blocks[:, 2:] & 15, blocks[:, 2:] >> 4], axis=1).astype(np.float32)
    return (codes - np.float32(8)) * _scales(blocks)


def _written_q4_0(values: Array) -> Bytes:
    """Of values that are such a block already: the largest has the code -8."""
    largest = np.abs(np.nan_to_num(values)).argmax(-1)[:, None]
    scales = np.take_along_axis(values, largest, -1) / np.float32(-8)
    low, high = np.split((_codes(values, scales) + 8).astype(np.uint8), 2, axis=1)
    return _block(scales, low | high << np.uint8(4))


def _scales(blocks: Bytes) -> Array:
    return np.ascontiguousarray(blocks[:, :2]).view(np.float16).astype(np.float32)


def _codes(values: Array, scales: Array) -> Array:
    """The codes of values, 0 where there is no number."""
    rounded = scales.astype(np.float16).astype(np.float32)
    with np.errstate(all="ignore"):
        codes = np.rint(values / rounded)
    return np.where(np.isfinite(codes), codes, 0)


def _block(scales: Array, codes: Bytes) -> Bytes:
    head = np.where(np.isfinite(scales), scales, np.nan).astype(np.float16)
    return np.concatenate([head.view(np.uint8), codes], axis=1)


_BLOCKS = {Q8_0: (_read_q8_0, _written_q8_0), Q4_0: (_read_q4_0, _written_q4_0), Q8A: (_read_q8a, _written_q8a)}
