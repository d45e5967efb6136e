"""Memory layouts of weights and activations for the kernels: packed weights "r16k4" and int8 activation rows "q8a".

This module defines the layouts, in vectorized NumPy. Tests and the interpreter use it, and the native packing kernels
are checked against it. Code generation reads its sizes and offsets from here.

Packed weights [N, K] are stored in row blocks of 16 rows, one after the other. Rows of zero bytes pad the last block.
Inside a row block, superblocks of contiguous bytes follow each other along K. "Group g" is 4 consecutive k. The 64-byte
vector of a group holds, at byte r * 4 + j, the code of row r at k = 4 * g + j. Such a vector is one operand of a
16-lane int8 dot product, so no sum crosses lanes. f32 and f16 have superblocks of 1 k: 16 elements, one per row. bf16
has superblocks of 2 k: of each row the two elements side by side, as dot products of bf16 take them.

A quantized superblock consists of its f16 numbers (the first for 16 rows, then the second for 16 rows) and of
sub-blocks of 32 k. A sub-block consists of its fields, each for 16 rows, and of its codes in planes, lowest bits first.
A plane of w bits is w vectors: bits w * i and up of vector j hold those bits of group j + w * i. For example, codes of
4 bits take 4 vectors: vector j holds group j in its low and group j + 4 in its high nibbles.

| type | superblock | numbers | fields of a sub-block | planes | bytes of 16 rows |
|---|---|---|---|---|---|
| q8_0 | 32 k | | f16 d | 8 (q + 128, or q) | 544 |
| q4_0, iq4_nl | 32 k | | f16 d | 4 | 288 |
| q4_1 | 32 k | | f16 d, f16 m | 4 | 320 |
| q5_0 | 32 k | | f16 d | 4, 1 | 352 |
| q5_1 | 32 k | | f16 d, f16 m | 4, 1 | 384 |
| iq4_xs | 256 k | d | i8 scale | 4 | 2208 |
| q2_k | 256 k | d, dmin | 2 x u8 scale and min, one per 16 k | 2 | 1344 |
| q3_k | 256 k | d | 2 x i8 scale, one per 16 k | 2, 1 | 1824 |
| q4_k | 256 k | d, dmin | u8 scale, u8 min | 4 | 2368 |
| q5_k | 256 k | d, dmin | u8 scale, u8 min | 4, 1 | 2880 |
| q6_k | 256 k | d | 2 x i8 scale, one per 16 k | 4, 2 | 3360 |
| tq1_0, tq2_0 | 256 k | d | | 2 | 1056 |
| iq1_s, iq2_xxs | 256 k | d | i8 scale | 2, 1 | 1696 |
| iq1_m, iq2_xs, iq2_s | 256 k | d | 2 x i8 scale, one per 16 k | 2, 1 | 1824 |
| iq3_xxs, iq3_s | 256 k | d | i8 scale | 4 | 2208 |
| mxfp4 | 32 k | | u8 scale, e8m0 | 4 | 272 |
| nvfp4 | 64 k | | 2 x u8 scale, e4m3, one per 16 k | 4 | 576 |
| f8_e4m3 | 32 k | | f32 scale | 8 | 576 |

Codes of q8_0 are signed where the machine's int8 products take signed bytes (`Isa.signed_codes`). Scales keep the
precision of the file (f32, f16, 4-, 6- and 8-bit integers or floats), so packing does not round. Packed weights have no
codebook indices: each element has a small code instead (see `blocks.py`).

Key caches lie in tiles of 16 positions; `rows_of` and `tiles_of` convert them. A tile of f32, f16 or bf16 is
[head_dim][16 positions]. A tile of a block type has, for each block of 32 elements, 16 scales of two bytes and then the
codes as pieces [n][16 positions]; see `rlx.backends.cpu.kernels.attention.cache`. A row holds the blocks of one
position, as bytes that are moved unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlx.backends import blocks
from rlx.backends.blocks import BLOCKS, Blocks
from rlx.backends.blocks_values import SCALES, by_row, f16, join, meaning, split
from rlx.errors import ShapeError
from rlx.ir.dtypes import BF16, F16, F32, Q4_0, Q8_0, Q8A, DType
from rlx.ir.stored import from_bf16
from rlx.passes.capabilities import Layouts

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

_u8 = np.uint8

#: Rows of a row block: one per lane of a 16-lane vector.
BLOCK_ROWS = 16
#: Positions of a page of a cache. Attention reads as many at a time.
PAGE = 64
#: Positions of a tile of keys.
TILE = 16

ALIGN = 64  # of values, in bytes: a cache line, and the widest vector
_Q8A_BLOCK = 44  # bytes of 32 codes, their scale and their two sums


@dataclass(frozen=True)
class Packing:
    """How one type is packed.

    Attributes:
        superblock: k of a superblock.
        nbytes: bytes of a superblock for 16 rows.
        pack: file blocks `uint8[blocks of 16 rows, 16, superblocks, bytes]` -> `uint8[.., superblocks, nbytes]`.
        unpack: packed bytes -> values, `float32[.., superblocks, superblock k, 16]`.
    """

    superblock: int
    nbytes: int
    pack: Callable[[Bytes], Bytes]
    unpack: Callable[[Bytes], Floats]


def row_blocks(n: int) -> int:
    """Blocks of 16 rows that hold `n` rows."""
    return -(-n // BLOCK_ROWS)


def packed_bytes(dtype: DType, n: int, k: int) -> int:
    """Bytes of a packed weight [n, k]; `ShapeError` if the type cannot be packed or `k` is no multiple of its block."""
    packing = _packing(dtype, k)
    return row_blocks(n) * (k // packing.superblock) * packing.nbytes


def pack(dtype: DType, raw: Bytes, n: int, k: int, *, signed: bool = False) -> Bytes:
    """File bytes of a row-major [n, k] weight -> packed bytes, `uint8[packed_bytes(dtype, n, k)]`.

    Args:
        signed: codes of 8 bits are signed bytes.
    """
    packing = _packing(dtype, k, signed)
    if raw.dtype != np.uint8 or raw.size != dtype.size((n, k)):
        raise ShapeError(f"expected {dtype.size((n, k))} bytes of {dtype} for [{n}, {k}], found {raw.size}")
    padded = np.zeros((row_blocks(n) * BLOCK_ROWS, dtype.row_bytes(k)), np.uint8)
    padded[:n] = raw.reshape(n, -1)
    return packing.pack(padded.reshape(row_blocks(n), BLOCK_ROWS, k // packing.superblock, -1)).reshape(-1)


def unpack(dtype: DType, packed: Bytes, n: int, k: int, *, signed: bool = False) -> Floats:
    """Packed bytes -> the weight's values, `float32[n, k]`, equal bit by bit to the GGUF reference dequantization."""
    packing = _packing(dtype, k, signed)
    if packed.dtype != np.uint8 or packed.size != packed_bytes(dtype, n, k):
        raise ShapeError(f"expected {packed_bytes(dtype, n, k)} packed bytes of {dtype}, found {packed.size}")
    values = packing.unpack(packed.reshape(row_blocks(n), k // packing.superblock, packing.nbytes))
    rows = np.moveaxis(values, -1, 1).reshape(row_blocks(n) * BLOCK_ROWS, k)
    return np.ascontiguousarray(rows[:n])


def q8a_bytes(k: int) -> int:
    """Bytes of one q8a row: k int8 codes, k/32 f32 scales, k/16 i32 sums of 16 codes each."""
    return k // 32 * _Q8A_BLOCK


def q8a_quantize(x: Floats) -> Bytes:
    """f32[rows, k] -> q8a rows, `uint8[rows, 1.375 k]`.

    For each block of 32 elements, scale = max|x| / 127 and code = x / scale, rounded half to even, within +-127. The
    scale of a block of zeros is 0. A block with NaN or infinity has codes 0 and that value as its scale, so products
    are NaN.
    """
    rows, k = x.shape
    blocks = x.reshape(rows, -1, 32)
    scales = (np.abs(blocks).max(axis=2) / np.float32(127)).astype(np.float32)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.rint(blocks / scales[:, :, None])
    codes = np.clip(np.where(np.isfinite(ratio), ratio, 0), -127, 127).astype(np.int8)
    sums = codes.reshape(rows, -1, 16).sum(axis=2, dtype=np.int32)
    parts = [codes.reshape(rows, k).view(np.uint8), scales.view(np.uint8), sums.view(np.uint8)]
    assert q8a_bytes(k) == sum(p.shape[1] for p in parts)
    return np.concatenate(parts, axis=1)


def q8a_dequantize(rows: Bytes, k: int) -> Floats:
    """q8a rows -> their values, `float32[rows, k]`: code times scale."""
    codes = rows[:, :k].view(np.int8).reshape(len(rows), -1, 32)
    scales = np.ascontiguousarray(rows[:, k : k + k // 8]).view(np.float32)
    return (codes.astype(np.float32) * scales[:, :, None]).reshape(len(rows), k)


def _packing(dtype: DType, k: int, signed: bool = False) -> Packing:
    if dtype not in PACKINGS:
        raise ShapeError(f"{dtype} has no packed layout", hint=f"Packed types: {', '.join(map(str, PACKINGS))}")
    if k % PACKINGS[dtype].superblock or k <= 0:
        raise ShapeError(f"k = {k} is no multiple of the {PACKINGS[dtype].superblock} elements a superblock of {dtype}")
    return _of_blocks(blocks.of(dtype, signed=True)) if signed and dtype in BLOCKS else PACKINGS[dtype]


# --- codes and their vectors: [..., k, 16 rows] <-> [..., k/4, 64 bytes] ---------------------------------------------


def _vectors(codes: Bytes) -> Bytes:
    """u8[blocks, 16, superblocks, k] -> u8[blocks, superblocks, groups, 64]."""
    blocks, _, supers, k = codes.shape
    grouped = codes.reshape(blocks, BLOCK_ROWS, supers, k // 4, 4)
    return grouped.transpose(0, 2, 3, 1, 4).reshape(blocks, supers, k // 4, 64)


def _codes(vectors: Bytes) -> Bytes:
    """u8[..., groups, 64] -> u8[..., k, 16]."""
    *lead, groups, _ = vectors.shape
    grouped = vectors.reshape(*lead, groups, BLOCK_ROWS, 4)
    return np.swapaxes(grouped, -1, -2).reshape(*lead, groups * 4, BLOCK_ROWS)


def _plane(codes: Bytes, first: int, width: int) -> Bytes:
    """Bits `first` to `first + width - 1` of codes [..., 8 groups, 64] -> a plane [..., width, 64]."""
    bits = ((codes >> _u8(first)) & _u8((1 << width) - 1)).reshape(*codes.shape[:-2], 8 // width, width, 64)
    plane: Bytes = np.bitwise_or.reduce(bits << _shifts(width), axis=-3)
    return plane


def _from_plane(plane: Bytes, first: int, width: int) -> Bytes:
    bits = (plane[..., None, :, :] >> _shifts(width)) & _u8((1 << width) - 1)
    return bits.reshape(*plane.shape[:-2], 8, 64) << _u8(first)


def _shifts(width: int) -> Bytes:
    return np.arange(0, 8, width, dtype=np.uint8)[:, None, None]


# --- plain numbers --------------------------------------------------------------------------------------------------


def _pack_scalar(size: int) -> Callable[[Bytes], Bytes]:
    return lambda raw: by_row(raw.view(f"u{size}")[..., 0])


def _unpack_bf16(packed: Bytes) -> Floats:
    pairs = from_bf16(packed.view(np.uint16))
    return np.moveaxis(pairs.reshape(*pairs.shape[:-1], BLOCK_ROWS, 2), -1, -2)


# --- quantized types --------------------------------------------------------------------------------------------------


def _pack_blocks(row: Blocks, raw: Bytes) -> Bytes:
    parts = row.read(raw)
    vectors = _vectors(parts.codes ^ _u8(128) if row.signed and not row.levels else parts.codes)
    vectors = vectors.reshape(*vectors.shape[:2], row.subs, 8, 64)
    first = np.cumsum([0, *row.planes]).tolist()
    planes = [_plane(vectors, at, width) for at, width in zip(first, row.planes, strict=False)]
    return join(*map(by_row, parts.head), join(*map(by_row, parts.fields), *planes, lead=3), lead=2)


def _unpack_blocks(row: Blocks, packed: Bytes) -> Floats:
    *head, rest = split(packed, *[32] * row.head, row.subs * row.stride)
    fields, *planes = split(
        rest.reshape(*rest.shape[:-1], row.subs, row.stride), row.codes_at, *[64 * width for width in row.planes]
    )
    scales = SCALES[row.scales]([f16(number)[..., None, :] * np.float32(row.unit) for number in head], fields)
    codes, first = np.zeros((*fields.shape[:-1], 8, 64), np.uint8), 0
    for plane, width in zip(planes, row.planes, strict=True):
        codes |= _from_plane(plane.reshape(*plane.shape[:-1], width, 64), first, width)
        first += width
    numbers = meaning(row)[_codes(codes)]
    values = _a_part(scales[: row.parts]) * numbers.reshape(*fields.shape[:-1], row.parts, 32 // row.parts, BLOCK_ROWS)
    if row.lows:
        values -= _a_part(scales[row.parts :])
    return values.reshape(*packed.shape[:-1], row.superblock, BLOCK_ROWS)


def _a_part(scales: list[Floats]) -> Floats:
    """Scales [..., subs, 16], one array per part of a sub-block -> [..., subs, parts, 1, 16]."""
    return np.stack(scales, axis=-2)[..., None, :]


def _of_blocks(row: Blocks) -> Packing:
    return Packing(row.superblock, row.nbytes, partial(_pack_blocks, row), partial(_unpack_blocks, row))


PACKINGS: dict[DType, Packing] = {
    F32: Packing(1, 64, _pack_scalar(4), lambda p: p.view(np.float32)[..., None, :]),
    F16: Packing(1, 32, _pack_scalar(2), lambda p: f16(p)[..., None, :]),
    BF16: Packing(2, 64, _pack_scalar(4), _unpack_bf16),
    **{dtype: _of_blocks(row) for dtype, row in BLOCKS.items()},
}

#: The types that have a packed layout.
PACKED_DTYPES: tuple[DType, ...] = tuple(PACKINGS)


@dataclass(frozen=True)
class CpuLayouts(Layouts):
    """The layouts of the CPU."""

    matrices: str = "r16k4"
    matrices_meaning: str = "packed at load in blocks of 16 rows"
    keys: str = "tiles"
    keys_meaning: str = "keys in tiles of 16 positions"  # so that attention scores need no horizontal sums
    tile: int = TILE
    room: int = TILE - 1  # plain keys are read in whole tiles
    page: int = PAGE
    align: int = ALIGN

    @property
    def matrix_types(self) -> tuple[DType, ...]:
        return PACKED_DTYPES

    def matrix_bytes(self, dtype: DType, n: int, k: int) -> int:
        return packed_bytes(dtype, n, k)

    def size(self, dtype: DType, shape: Sequence[int]) -> int:
        return prod(shape[:-1]) * q8a_bytes(shape[-1]) if dtype is Q8A else dtype.size(shape)

    def rows_of(self, stored: NDArray[Any], dtype: DType) -> NDArray[Any]:
        return rows_of(stored, dtype)

    def stored_of(self, rows: NDArray[Any], dtype: DType) -> NDArray[Any]:
        return tiles_of(rows, dtype)


LAYOUTS = CpuLayouts()


Array = np.ndarray[Any, Any]

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
