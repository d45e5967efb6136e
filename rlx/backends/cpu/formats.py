"""Values in the memory of the CPU's programs as numbers, for RLX_VERIFY and for programs without machine code.

CPU backend: packed matrices, tiles of keys and int8 activations, over the plain formats of the reference.
"""

from __future__ import annotations

import numpy as np

from rlx.backends.cpu import layouts
from rlx.backends.cpu.layouts import LAYOUTS, TILE, rows_of, tiles_of
from rlx.backends.reference.formats import Array, Bytes, Formats, Shape
from rlx.ir.dtypes import Q4_0, Q8A, DType


class CpuFormats(Formats):
    """Reads and writes values as the CPU's kernels lay them out.

    Args:
        signed: codes of packed weights of 8 bits are signed bytes.
    """

    def __init__(self, signed: bool) -> None:
        super().__init__(LAYOUTS)
        self.signed = signed

    def read(self, dtype: DType, raw: Bytes, shape: Shape) -> Array:
        if dtype is not Q8A:
            return super().read(dtype, raw, shape)
        rows = raw.reshape(-1, layouts.q8a_bytes(shape[-1]))
        return layouts.q8a_dequantize(rows, shape[-1]).reshape(shape).astype(np.float64)

    def written(self, dtype: DType, values: Array) -> Bytes:
        if dtype is not Q8A:
            return super().written(dtype, values)
        return layouts.q8a_quantize(values.reshape(-1, values.shape[-1]).astype(np.float32)).reshape(-1)

    def state_rows(self, dtype: DType, raw: Bytes, shape: Shape, layout: str) -> Bytes:
        if layout != LAYOUTS.keys:
            return super().state_rows(dtype, raw, shape, layout)
        lead = int(np.prod(shape[:-2]))
        tiles = raw.view(_kind(dtype)).reshape(lead, shape[-2] // TILE, -1)
        rows = np.ascontiguousarray(rows_of(tiles, dtype))
        found = rows.reshape(-1).view(np.uint8).reshape(-1, dtype.row_bytes(shape[-1])).copy()
        return _apart(found) if dtype is Q4_0 else found

    def put_state_rows(self, dtype: DType, raw: Bytes, shape: Shape, layout: str, rows: Bytes) -> None:
        if layout != LAYOUTS.keys:
            super().put_state_rows(dtype, raw, shape, layout, rows)
            return
        stored = _interleaved(rows) if dtype is Q4_0 else rows
        elements = stored.reshape(-1).view(_kind(dtype)).reshape(int(np.prod(shape[:-2])), shape[-2], -1)
        raw[...] = np.ascontiguousarray(tiles_of(elements, dtype)).reshape(-1).view(np.uint8)

    def read_as_cache(self, dtype: DType, raw: Bytes, shape: Shape, layout: str, room: int) -> Array:
        stored = _untiled(self.read(dtype, raw, shape)) if layout == LAYOUTS.keys else self.read(dtype, raw, shape)
        return np.pad(stored[:, : shape[1] - room], ((0, 0), (0, room), (0, 0)))

    def write_as_cache(self, dtype: DType, raw: Bytes, layout: str, values: Array) -> None:
        heads, positions, head_dim = values.shape
        whole = positions // TILE * TILE
        if layout == LAYOUTS.keys:
            tiles = values[:, :whole].reshape(heads, -1, TILE, head_dim).swapaxes(2, 3).reshape(heads, whole, head_dim)
            values = np.concatenate([tiles, values[:, whole:]], axis=1)
        super().write_as_cache(dtype, raw, layout, values)

    def read_weight(self, dtype: DType, raw: Bytes, shape: Shape, layout: str) -> Array:
        if layout != LAYOUTS.matrices:
            return super().read_weight(dtype, raw, shape, layout)
        matrices = raw.reshape(int(np.prod(shape[:-2])), -1)
        values = [layouts.unpack(dtype, matrix, *shape[-2:], signed=self.signed) for matrix in matrices]
        return np.stack(values).reshape(shape)

    def read_table(self, dtype: DType, raw: Bytes, shape: Shape, layout: str, ids: Array) -> Array:
        if layout != LAYOUTS.matrices:
            return super().read_table(dtype, raw, shape, layout, ids)
        n, k = shape
        blocks, where = np.unique(ids // layouts.BLOCK_ROWS, return_inverse=True)
        chosen = raw.reshape(layouts.row_blocks(n), -1)[blocks]
        values = layouts.unpack(dtype, chosen.reshape(-1), len(blocks) * layouts.BLOCK_ROWS, k, signed=self.signed)
        found: Array = values[where * layouts.BLOCK_ROWS + ids % layouts.BLOCK_ROWS]
        return found


def _untiled(stored: Array) -> Array:
    """The places of whole tiles in order. There are no positions after them."""
    heads, positions, head_dim = stored.shape
    whole = positions // TILE * TILE
    return stored[:, :whole].reshape(heads, -1, head_dim, TILE).swapaxes(2, 3).reshape(heads, whole, head_dim)


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
