"""Values in memory: bytes -> numbers and back, for every dtype and layout that a lowered program has.

Reference backend. Numbers are read exactly. Writing rounds to the dtype, by the formulas that define it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlx.backends.cpu import layouts
from rlx.backends.kv_tiles import rows_of, tiles_of
from rlx.errors import CompileError
from rlx.ir.dtypes import BF16, Q4_0, Q8_0, Q8A, DType
from rlx.ir.infer import ROOM
from rlx.ir.rounding import from_bf16, to_bf16
from rlx.passes.layout import ROWS_LAYOUT

Array = NDArray[Any]
Bytes = NDArray[np.uint8]
Shape = tuple[int, ...]

TILE = 16  # positions of a tile of keys


def read(dtype: DType, raw: Bytes, shape: Shape) -> Array:
    """The numbers that `raw`, uint8 [dtype.size(shape)], holds: float64, or the integers themselves."""
    if dtype is Q8A:
        rows = raw.reshape(-1, dtype.row_bytes(shape[-1]))
        return layouts.q8a_dequantize(rows, shape[-1]).reshape(shape).astype(np.float64)
    if dtype in _BLOCKS:
        return _BLOCKS[dtype][0](raw.reshape(-1, dtype.nbytes)).reshape(shape).astype(np.float64)
    if dtype.numpy is None:
        return values_of_rows(dtype, raw, *_as_matrix(shape)).reshape(shape).astype(np.float64)
    array = raw.view(dtype.numpy).reshape(shape)
    if dtype is BF16:
        return from_bf16(array).astype(np.float64)
    return array.astype(np.float64) if array.dtype.kind == "f" else array.copy()


def written(dtype: DType, values: Array) -> Bytes:
    """The bytes of numbers rounded to `dtype`, uint8: the inverse of `read`.

    Raises:
        CompileError: no op has results of this type.
    """
    if dtype is Q8A:
        return layouts.q8a_quantize(values.reshape(-1, values.shape[-1]).astype(np.float32)).reshape(-1)
    if dtype in _BLOCKS:
        return _BLOCKS[dtype][1](values.reshape(-1, dtype.block).astype(np.float32)).reshape(-1)
    if dtype.numpy is None:
        raise CompileError(f"no op writes {dtype}", where="reference backend")
    with np.errstate(over="ignore"):
        found = to_bf16(values.astype(np.float32)) if dtype is BF16 else values.astype(dtype.numpy)
    return np.ascontiguousarray(found).reshape(-1).view(np.uint8)


# -- caches --------------------------------------------------------------------------------------------------------


def read_state(dtype: DType, raw: Bytes, shape: Shape, layout: str) -> Array:
    """As `read`, for a state; a tiled one [..., heads, positions, head_dim] is in tiles of 16 positions."""
    return read(dtype, _state_rows(dtype, raw, shape).reshape(-1) if layout == "tiles" else raw, shape)


def write_state(dtype: DType, raw: Bytes, shape: Shape, layout: str, values: Array, changed: NDArray[np.bool_]) -> None:
    """Writes the rows of a state that changed, and leaves the bytes of the others.

    Args:
        changed: bool, of the shape without its last axis.
    """
    rows = raw.reshape(-1, dtype.row_bytes(shape[-1])) if layout != "tiles" else _state_rows(dtype, raw, shape)
    flat = changed.reshape(-1)
    rows[flat] = written(dtype, values.reshape(-1, shape[-1])[flat]).reshape(-1, rows.shape[1])
    if layout == "tiles":
        lead, width = int(np.prod(shape[:-2])), rows.shape[1] // _element(dtype)
        stored = _interleaved(rows) if dtype is Q4_0 else rows
        elements = stored.reshape(-1).view(_kind(dtype)).reshape(lead, shape[-2], width)
        raw[...] = np.ascontiguousarray(tiles_of(elements, dtype)).reshape(-1).view(np.uint8)


def read_as_cache(dtype: DType, raw: Bytes, shape: Shape, layout: str) -> Array:
    """As `read`, for plain keys or values in the form of a cache, [heads, positions + 15, head_dim].

    The result has zeros after the last position, where memory may hold anything.
    """
    stored = _tiled(read(dtype, raw, shape), layout)
    positions = shape[1] - ROOM
    return np.pad(stored[:, :positions], ((0, 0), (0, ROOM), (0, 0)))


def write_as_cache(dtype: DType, raw: Bytes, layout: str, values: Array) -> None:
    """The inverse of `read_as_cache`."""
    heads, positions, head_dim = values.shape
    whole = positions // TILE * TILE
    if layout == "tiles":
        tiles = values[:, :whole].reshape(heads, -1, TILE, head_dim).swapaxes(2, 3).reshape(heads, whole, head_dim)
        values = np.concatenate([tiles, values[:, whole:]], axis=1)
    raw[...] = written(dtype, values)


def _tiled(stored: Array, layout: str) -> Array:
    """The places of whole tiles in order. There are no positions after them."""
    if layout != "tiles":
        return stored
    heads, positions, head_dim = stored.shape
    whole = positions // TILE * TILE
    return stored[:, :whole].reshape(heads, -1, head_dim, TILE).swapaxes(2, 3).reshape(heads, whole, head_dim)


def _state_rows(dtype: DType, raw: Bytes, shape: Shape) -> Bytes:
    """A copy of a tiled state, position by position: uint8 [rows, bytes of a row]."""
    lead = int(np.prod(shape[:-2]))
    tiles = raw.view(_kind(dtype)).reshape(lead, shape[-2] // TILE, -1)
    rows = np.ascontiguousarray(rows_of(tiles, dtype))
    found = rows.reshape(-1).view(np.uint8).reshape(-1, dtype.row_bytes(shape[-1])).copy()
    return _apart(found) if dtype is Q4_0 else found


def _apart(rows: Bytes) -> Bytes:
    """Blocks of q4_0 whose byte i holds elements 2 i and 2 i + 1, as in tiles -> i and i + 16, as in files."""
    blocks = rows.reshape(-1, Q4_0.nbytes)
    codes = np.stack([blocks[:, 2:] & 15, blocks[:, 2:] >> 4], axis=-1).reshape(-1, 2, 16)
    return np.concatenate([blocks[:, :2], codes[:, 0] | codes[:, 1] << np.uint8(4)], axis=1).reshape(rows.shape)


def _interleaved(rows: Bytes) -> Bytes:
    """The inverse of `_apart`."""
    blocks = rows.reshape(-1, Q4_0.nbytes)
    codes = np.concatenate([blocks[:, 2:] & 15, blocks[:, 2:] >> 4], axis=1).reshape(-1, 16, 2)
    return np.concatenate([blocks[:, :2], codes[..., 0] | codes[..., 1] << np.uint8(4)], axis=1).reshape(rows.shape)


def _kind(dtype: DType) -> str:
    return dtype.numpy or "uint8"


def _element(dtype: DType) -> int:
    return np.dtype(_kind(dtype)).itemsize


# -- weights -------------------------------------------------------------------------------------------------------


def weight_bytes(dtype: DType, shape: Shape, layout: str) -> int:
    """Bytes of a weight in a layout of the manifest."""
    if layout == layouts.LAYOUTS.matrices:
        return int(np.prod(shape[:-2])) * layouts.packed_bytes(dtype, *shape[-2:])
    return int(np.prod(shape)) * 4 if layout == ROWS_LAYOUT else dtype.size(shape)


def read_weight(dtype: DType, raw: Bytes, shape: Shape, layout: str, signed: bool = False) -> Array:
    """The values of a weight, float32: "rows" is plain float32, "r16k4" packed, "file" as the file has it.

    Args:
        signed: packed codes are signed.
    """
    if layout == ROWS_LAYOUT:
        return raw.view(np.float32).reshape(shape)
    if layout == layouts.LAYOUTS.matrices:
        pieces = raw.reshape(int(np.prod(shape[:-2])), -1)
        return np.stack([layouts.unpack(dtype, piece, *shape[-2:], signed=signed) for piece in pieces]).reshape(shape)
    return values_of_rows(dtype, raw, *_as_matrix(shape)).reshape(shape)


def read_table(dtype: DType, raw: Bytes, shape: Shape, layout: str, ids: Array, signed: bool = False) -> Array:
    """Rows `ids` of a table [n, k], float32 [len(ids), k], without reading the others."""
    n, k = shape
    if layout == layouts.LAYOUTS.matrices:
        blocks, where = np.unique(ids // layouts.BLOCK_ROWS, return_inverse=True)
        chosen = raw.reshape(layouts.row_blocks(n), -1)[blocks]
        values = layouts.unpack(dtype, chosen.reshape(-1), len(blocks) * layouts.BLOCK_ROWS, k, signed=signed)
        found: Array = values[where * layouts.BLOCK_ROWS + ids % layouts.BLOCK_ROWS]
        return found
    if layout == ROWS_LAYOUT:
        rows: Array = raw.view(np.float32).reshape(shape)[ids]
        return rows
    return values_of_rows(dtype, np.ascontiguousarray(raw.reshape(n, -1)[ids]).reshape(-1), len(ids), k)


def values_of_rows(dtype: DType, raw: Bytes, n: int, k: int) -> Array:
    """The values of rows as a file holds them, float32 [n, k]."""
    return layouts.unpack(dtype, layouts.pack(dtype, raw, n, k), n, k)


def _as_matrix(shape: Shape) -> tuple[int, int]:
    return int(np.prod(shape[:-1])), shape[-1]


# -- blocks of caches ----------------------------------------------------------------------------------------------


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


_BLOCKS = {Q8_0: (_read_q8_0, _written_q8_0), Q4_0: (_read_q4_0, _written_q4_0)}
