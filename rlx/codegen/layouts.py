"""How weights and activations lie in memory for the kernels: the packed layout "r16k4" and the int8 rows "q8a".

This file is the definition: NumPy, vectorized, read by tests, by the interpreter and as the oracle of the native
packing kernels. Code generation reads the same sizes and offsets from here.

Packed weights [N, K]: rows in blocks of 16, the last one padded with zero bytes, block after block; inside a block K
runs in superblocks of contiguous bytes. "Group g" is 4 consecutive k; the 64-byte vector of a group holds at byte
r * 4 + j the code of row r at k = 4 * g + j: one operand of a 16-lane int8 dot product, so nothing is ever summed
across lanes. A "nibble vector" j (of 4) holds group j in its low and group j + 4 in its high nibbles.

| type | superblock | bytes of a superblock, in order |
|---|---|---|
| f32 f16 bf16 | 1 k | 16 elements, one a row |
| q8_0 | 32 k | 16 f16 scales; 8 code vectors, u8 = q + 128 |
| q4_0 | 32 k | 16 f16 scales; 4 nibble vectors, zero point 8 |
| q4_k | 256 k | 16 f16 d; 16 f16 dmin; 8 sub-blocks of { 16 u8 scales; 16 u8 mins; 4 nibble vectors } |
| q5_k | 256 k | as q4_k, each sub-block followed by 64 bytes: bit g of byte b is the fifth bit of group g's byte b |
| q6_k | 256 k | 16 f16 d; 8 sub-blocks of { 2 x 16 i8 scales, one a 16 k; 4 nibble vectors; 2 vectors of high bits: |
| | | bits 2i, 2i+1 of byte b of vector j are the high bits of group 4j+i's byte b }, zero point 32 |

Scales keep the file's own bits (f16, 6-bit integers), so packing rounds nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlx.errors import ShapeError
from rlx.ir.dtypes import BF16, F16, F32, Q4_0, Q4_K, Q5_K, Q6_K, Q8_0, Q8A, DType

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

_u8 = np.uint8

#: Rows of a row block: the 16 lanes of every vector.
BLOCK_ROWS = 16


@dataclass(frozen=True)
class Packing:
    """How one type is packed.

    Attributes:
        superblock: k of a superblock.
        nbytes: bytes of a superblock of 16 rows.
        pack: file blocks `uint8[blocks of 16 rows, 16, superblocks, bytes]` -> `uint8[.., superblocks, nbytes]`.
        unpack: the way back to values, `float32[.., superblocks, superblock k, 16]`.
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


def pack(dtype: DType, raw: Bytes, n: int, k: int) -> Bytes:
    """File bytes of a row-major [n, k] weight -> packed bytes, `uint8[packed_bytes(dtype, n, k)]`."""
    packing = _packing(dtype, k)
    if raw.dtype != np.uint8 or raw.size != dtype.size((n, k)):
        raise ShapeError(f"expected {dtype.size((n, k))} bytes of {dtype} for [{n}, {k}], found {raw.size}")
    padded = np.zeros((row_blocks(n) * BLOCK_ROWS, dtype.row_bytes(k)), np.uint8)
    padded[:n] = raw.reshape(n, -1)
    return packing.pack(padded.reshape(row_blocks(n), BLOCK_ROWS, k // packing.superblock, -1)).reshape(-1)


def unpack(dtype: DType, packed: Bytes, n: int, k: int) -> Floats:
    """Packed bytes -> the weight's values, `float32[n, k]`, bit for bit those of the GGUF reference dequantization."""
    packing = _packing(dtype, k)
    if packed.dtype != np.uint8 or packed.size != packed_bytes(dtype, n, k):
        raise ShapeError(f"expected {packed_bytes(dtype, n, k)} packed bytes of {dtype}, found {packed.size}")
    values = packing.unpack(packed.reshape(row_blocks(n), k // packing.superblock, packing.nbytes))
    rows = np.moveaxis(values, -1, 1).reshape(row_blocks(n) * BLOCK_ROWS, k)
    return np.ascontiguousarray(rows[:n])


def q8a_bytes(k: int) -> int:
    """Bytes of one q8a row: k int8 codes, k/32 f32 scales, k/16 i32 sums of the codes of each 16."""
    return Q8A.row_bytes(k)


def q8a_quantize(x: Floats) -> Bytes:
    """f32[rows, k] -> q8a rows, `uint8[rows, 1.375 k]`.

    scale = max|x| / 127 over 32 elements; code = x / scale rounded half to even, within +-127; a block of zeros has
    scale 0. A block with NaN or infinity gets codes 0 and that NaN or infinity as scale, so products come out NaN.
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
    """q8a rows -> the values they stand for, `float32[rows, k]`: code times scale."""
    codes = rows[:, :k].view(np.int8).reshape(len(rows), -1, 32)
    scales = np.ascontiguousarray(rows[:, k : k + k // 8]).view(np.float32)
    return (codes.astype(np.float32) * scales[:, :, None]).reshape(len(rows), k)


def _packing(dtype: DType, k: int) -> Packing:
    if dtype not in PACKINGS:
        raise ShapeError(f"{dtype} has no packed layout", hint=f"Packed types: {', '.join(map(str, PACKINGS))}")
    if k % PACKINGS[dtype].superblock or k <= 0:
        raise ShapeError(f"k = {k} is no multiple of the {PACKINGS[dtype].superblock} elements a superblock of {dtype}")
    return PACKINGS[dtype]


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


def _nibbles(vectors: Bytes) -> Bytes:
    """u4 codes [..., 8, 64] -> nibble vectors [..., 4, 64]."""
    return (vectors[..., :4, :] & _u8(15)) | (vectors[..., 4:, :] << _u8(4))


def _from_nibbles(packed: Bytes) -> Bytes:
    return np.concatenate([packed & _u8(15), packed >> _u8(4)], axis=-2)


def _subblocks(vectors: Bytes) -> Bytes:
    """[blocks, superblocks, 64 groups, 64] -> [blocks, superblocks, 8 sub-blocks, 8 groups, 64]."""
    return vectors.reshape(*vectors.shape[:2], 8, 8, 64)


def _by_row(field: NDArray[Any]) -> Bytes:
    """A per-row field [blocks, 16, superblocks, ...] -> bytes [blocks, superblocks, ..., 16 x itemsize]."""
    return np.ascontiguousarray(np.moveaxis(field, 1, -1)).view(np.uint8)


def _join(*parts: Bytes, lead: int) -> Bytes:
    """Flattens each part's axes from `lead` on and lays the parts one after the other."""
    return np.concatenate([p.reshape(*p.shape[:lead], -1) for p in parts], axis=-1)


def _split(packed: Bytes, *sizes: int) -> list[Bytes]:
    assert sum(sizes) == packed.shape[-1]
    return np.split(packed, np.cumsum(sizes)[:-1].tolist(), axis=-1)


def _f16(field: Bytes) -> Floats:
    """The f16 numbers in the last axis, as f32."""
    return np.ascontiguousarray(field).view(np.float16).astype(np.float32)


# --- the types ------------------------------------------------------------------------------------------------------


def _pack_scalar(size: int) -> Callable[[Bytes], Bytes]:
    return lambda raw: _by_row(raw.view(f"u{size}")[..., 0])


def _unpack_bf16(packed: Bytes) -> Floats:
    return (packed.view(np.uint16).astype(np.uint32) << 16).view(np.float32)[..., None, :]


def _pack_q8_0(raw: Bytes) -> Bytes:
    d, q = raw[..., :2], raw[..., 2:]
    return _join(_half_by_row(d), _vectors(q ^ _u8(128)), lead=2)


def _unpack_q8_0(packed: Bytes) -> Floats:
    d, codes = _split(packed, 32, 512)
    q = _codes(codes.reshape(*codes.shape[:-1], 8, 64)).astype(np.float32) - 128
    return q * _f16(d)[..., None, :]


def _pack_q4_0(raw: Bytes) -> Bytes:
    d, q = raw[..., :2], raw[..., 2:]
    codes = np.concatenate([q & _u8(15), q >> _u8(4)], axis=-1)
    return _join(_half_by_row(d), _nibbles(_vectors(codes)), lead=2)


def _unpack_q4_0(packed: Bytes) -> Floats:
    d, codes = _split(packed, 32, 256)
    q = _codes(_from_nibbles(codes.reshape(*codes.shape[:-1], 4, 64))).astype(np.float32) - 8
    return _f16(d)[..., None, :] * q


def _pack_q4_k(raw: Bytes) -> Bytes:
    d, dmin, scales, q = np.split(raw, [2, 4, 16], axis=-1)
    return _join(_half_by_row(d), _half_by_row(dmin), _join(*_k_subblocks(scales, _k_codes(q)), lead=3), lead=2)


def _pack_q5_k(raw: Bytes) -> Bytes:
    d, dmin, scales, high, q = np.split(raw, [2, 4, 16, 48], axis=-1)
    # Byte l of `high` holds the fifth bits of elements l, 32 + l, ..., 224 + l.
    fifth = (high[..., None, :] >> np.arange(8, dtype=np.uint8)[:, None]) & _u8(1)
    codes = _k_codes(q) | (fifth.reshape(*q.shape[:-1], 256) << _u8(4))
    bits = _subblocks(_vectors(codes)) >> _u8(4)
    plane = np.bitwise_or.reduce(bits << np.arange(8, dtype=np.uint8)[:, None], axis=-2)
    return _join(_half_by_row(d), _half_by_row(dmin), _join(*_k_subblocks(scales, codes), plane, lead=3), lead=2)


def _unpack_q4_k(packed: Bytes) -> Floats:
    d, dmin, rest = _split(packed, 32, 32, 8 * 288)
    scale, low, nibbles = _split(rest.reshape(*rest.shape[:-1], 8, 288), 16, 16, 256)
    return _k_values(d, dmin, scale, low, _from_nibbles(nibbles.reshape(*nibbles.shape[:-1], 4, 64)))


def _unpack_q5_k(packed: Bytes) -> Floats:
    d, dmin, rest = _split(packed, 32, 32, 8 * 352)
    scale, low, nibbles, plane = _split(rest.reshape(*rest.shape[:-1], 8, 352), 16, 16, 256, 64)
    fifth = (plane[..., None, :] >> np.arange(8, dtype=np.uint8)[:, None]) & _u8(1)
    return _k_values(
        d, dmin, scale, low, _from_nibbles(nibbles.reshape(*nibbles.shape[:-1], 4, 64)) | (fifth << _u8(4))
    )


def _k_codes(q: Bytes) -> Bytes:
    """The low nibbles of Q4_K and Q5_K: 32 bytes hold 32 elements in their low and the next 32 in their high halves."""
    pairs = q.reshape(*q.shape[:-1], 4, 1, 32)
    return np.concatenate([pairs & _u8(15), pairs >> _u8(4)], axis=-2).reshape(*q.shape[:-1], 256)


def _k_subblocks(scales: Bytes, codes: Bytes) -> tuple[Bytes, Bytes, Bytes]:
    """The sub-blocks' scales, mins and nibble vectors, each [blocks, superblocks, 8, ...].

    Twelve bytes hold eight 6-bit scales s and mins m: bytes 0-3 s0..s3 and bytes 4-7 m0..m3 (low six bits) with the two
    high bits of s4..s7 and m4..m7 above them, bytes 8-11 the low nibbles of s4..s7 and, above, of m4..m7.
    """
    a, b, c = scales[..., 0:4], scales[..., 4:8], scales[..., 8:12]
    scale = np.concatenate([a & _u8(63), (c & _u8(15)) | ((a >> _u8(2)) & _u8(48))], axis=-1)
    low = np.concatenate([b & _u8(63), (c >> _u8(4)) | ((b >> _u8(2)) & _u8(48))], axis=-1)
    return _by_row(scale), _by_row(low), _nibbles(_subblocks(_vectors(codes)))


def _k_values(d: Bytes, dmin: Bytes, scale: Bytes, low: Bytes, vectors: Bytes) -> Floats:
    q = _codes(vectors).astype(np.float32)
    factor = _f16(d)[..., None, :] * scale.astype(np.float32)
    offset = _f16(dmin)[..., None, :] * low.astype(np.float32)
    return (factor[..., None, :] * q - offset[..., None, :]).reshape(*q.shape[:-3], 256, BLOCK_ROWS)


def _pack_q6_k(raw: Bytes) -> Bytes:
    low, high, scales, d = np.split(raw, [128, 192, 208], axis=-1)
    # Each half of 128 elements: 64 bytes hold elements l and, above, l + 64; 32 bytes hold bits of l, l+32, l+64, l+96.
    nibbles = low.reshape(*low.shape[:-1], 2, 1, 64) >> np.array([[0], [4]], np.uint8)
    crumbs = high.reshape(*high.shape[:-1], 2, 1, 32) >> np.array([[0], [2], [4], [6]], np.uint8)
    codes = (nibbles & _u8(15)).reshape(*low.shape[:-1], 256) | (
        (crumbs & _u8(3)).reshape(*low.shape[:-1], 256) << _u8(4)
    )
    vectors = _subblocks(_vectors(codes))
    quads = (vectors >> _u8(4)).reshape(*vectors.shape[:-2], 2, 4, 64) << np.array([[0], [2], [4], [6]], np.uint8)
    halves = _by_row(scales.reshape(*scales.shape[:-1], 8, 2))
    return _join(
        _half_by_row(d), _join(halves, _nibbles(vectors), np.bitwise_or.reduce(quads, axis=-2), lead=3), lead=2
    )


def _unpack_q6_k(packed: Bytes) -> Floats:
    d, rest = _split(packed, 32, 8 * 416)
    scales, low, high = _split(rest.reshape(*rest.shape[:-1], 8, 416), 32, 256, 128)
    lead = low.shape[:-1]
    crumbs = (high.reshape(*lead, 2, 1, 64) >> np.array([[0], [2], [4], [6]], np.uint8)) & _u8(3)
    vectors = _from_nibbles(low.reshape(*lead, 4, 64)) | (crumbs.reshape(*lead, 8, 64) << _u8(4))
    q = (_codes(vectors).astype(np.float32) - 32).reshape(*lead, 2, 16, BLOCK_ROWS)
    factor = _f16(d)[..., None, None, :] * scales.view(np.int8).astype(np.float32).reshape(*lead, 2, BLOCK_ROWS)
    return (factor[..., None, :] * q).reshape(*lead[:-1], 256, BLOCK_ROWS)


def _half_by_row(field: Bytes) -> Bytes:
    """An f16 field [blocks, 16, superblocks, 2 bytes] -> [blocks, superblocks, 32 bytes]."""
    return _by_row(np.ascontiguousarray(field).view(np.uint16)[..., 0])


PACKINGS: dict[DType, Packing] = {
    F32: Packing(1, 64, _pack_scalar(4), lambda p: p.view(np.float32)[..., None, :]),
    F16: Packing(1, 32, _pack_scalar(2), lambda p: _f16(p)[..., None, :]),
    BF16: Packing(1, 32, _pack_scalar(2), _unpack_bf16),
    Q8_0: Packing(32, 544, _pack_q8_0, _unpack_q8_0),
    Q4_0: Packing(32, 288, _pack_q4_0, _unpack_q4_0),
    Q4_K: Packing(256, 2368, _pack_q4_k, _unpack_q4_k),
    Q5_K: Packing(256, 2880, _pack_q5_k, _unpack_q5_k),
    Q6_K: Packing(256, 3360, _pack_q6_k, _unpack_q6_k),
}

#: The types that have a packed layout.
PACKED_DTYPES: tuple[DType, ...] = tuple(PACKINGS)
