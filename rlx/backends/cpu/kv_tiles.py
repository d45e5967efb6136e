"""Conversion of key caches between tiles of 16 positions and rows.

CPU backend, beside `layouts.py`. A tile of f32, f16 or bf16 is [head_dim][16 positions]. A tile of a block type has,
for each block of 32 elements, 16 scales of two bytes and then the codes as pieces [n][16 positions]; see
`rlx.backends.cpu.kernels.attention.cache`. A row holds the blocks of one position, as bytes that are moved unchanged.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx.ir.dtypes import Q4_0, Q8_0, DType

Array = np.ndarray[Any, Any]

TILE = 16  # positions per tile of keys
_SCALE = 2  # bytes
_PIECE = {Q8_0: 1, Q4_0: 4}  # consecutive bytes of one position's codes


def rows_of(tiles: Array, dtype: DType) -> Array:
    """Tiles [heads, tiles, 16 * width] as rows [heads, tiles * 16, width]."""
    heads, count, size = tiles.shape
    if not dtype.is_quantized:
        return tiles.reshape(heads, count, -1, TILE).swapaxes(2, 3).reshape(heads, count * TILE, size // TILE)
    blocks = tiles.reshape(heads, count, -1, TILE * dtype.nbytes)
    scales = blocks[..., : TILE * _SCALE].reshape(*blocks.shape[:3], TILE, _SCALE)
    pieces = blocks[..., TILE * _SCALE :].reshape(*blocks.shape[:3], -1, TILE, _PIECE[dtype])
    codes = pieces.swapaxes(3, 4).reshape(*blocks.shape[:3], TILE, -1)
    together = np.concatenate([scales, codes], axis=-1)
    return together.swapaxes(2, 3).reshape(heads, count * TILE, size // TILE)


def tiles_of(rows: Array, dtype: DType) -> Array:
    """The inverse of `rows_of`."""
    heads, count, width = rows.shape[0], rows.shape[1] // TILE, rows.shape[2]
    if not dtype.is_quantized:
        return rows.reshape(heads, count, TILE, width).swapaxes(2, 3).reshape(heads, count, TILE * width)
    blocks = rows.reshape(heads, count, TILE, -1, dtype.nbytes).swapaxes(2, 3)
    scales = blocks[..., :_SCALE].reshape(*blocks.shape[:3], -1)
    pieces = blocks[..., _SCALE:].reshape(*blocks.shape[:4], -1, _PIECE[dtype])
    codes = pieces.swapaxes(3, 4).reshape(*blocks.shape[:3], -1)
    return np.concatenate([scales, codes], axis=-1).reshape(heads, count, TILE * width)
