"""Taking the blocks of a file apart: one reader a type, in NumPy, into codes and fields (see `blocks.py`).

Readers take `uint8[blocks of 16 rows, 16, superblocks, bytes]`. Those of the types with codebooks are in
`blocks_grids.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
_u8 = np.uint8

_CRUMBS = np.array([[0], [2], [4], [6]], np.uint8)
_BITS = np.arange(8, dtype=np.uint8)[:, None]
_POWERS = np.array([[1], [3], [9], [27], [81]], np.uint8)


@dataclass(frozen=True)
class Parts:
    """A weight's blocks taken apart; the axes before those named are [blocks of 16 rows, 16, superblocks].

    Attributes:
        head: bits of the f16 numbers of a superblock, `uint16[]` each.
        fields: those of each sub-block, `uint32[subs]`, `uint16[subs]` or `uint8[subs]`, or `uint8[subs, 2]` for two.
        codes: `uint8[superblock k]`.
    """

    head: list[NDArray[np.uint16]]
    fields: list[NDArray[Any]]
    codes: Bytes


def halves(raw: Bytes, *at: int) -> list[NDArray[np.uint16]]:
    """The f16 bits at some bytes of a block."""
    return [np.ascontiguousarray(raw[..., i : i + 2]).view(np.uint16)[..., 0] for i in at]


# --- blocks of 32: f16 numbers, perhaps a word of fifth bits, 16 bytes of nibbles -------------------------------------


def read_q8_0(raw: Bytes) -> Parts:
    return Parts([], _fields_32(raw, 0), raw[..., 2:] ^ _u8(128))


def reader_32(*numbers: int, fifth: bool = False) -> Callable[[Bytes], Parts]:
    """Reads f16 `numbers`, then one bit of each element if `fifth`, then nibbles: byte i is elements i and i + 16."""

    def read(raw: Bytes) -> Parts:
        at = 2 * len(numbers)
        codes = pairs(raw[..., -16:], 16)
        if fifth:
            codes = codes | (np.unpackbits(raw[..., at : at + 4], axis=-1, bitorder="little") << _u8(4))
        return Parts([], _fields_32(raw, *numbers), codes)

    return read


def _fields_32(raw: Bytes, *at: int) -> list[NDArray[Any]]:
    return [number[..., None] for number in halves(raw, *at)]


def pairs(q: Bytes, run: int) -> Bytes:
    """Runs of `run` bytes hold as many elements in their low and the next ones in their high nibbles."""
    pairs = q.reshape(*q.shape[:-1], -1, 1, run)
    codes = np.concatenate([pairs & _u8(15), pairs >> _u8(4)], axis=-2)
    return codes.reshape(*q.shape[:-1], 2 * q.shape[-1])


# --- blocks of 256 ----------------------------------------------------------------------------------------------------


def read_q4_k(raw: Bytes) -> Parts:
    return Parts(halves(raw, 0, 2), _scales_and_mins(raw[..., 4:16]), pairs(raw[..., 16:], 32))


def read_q5_k(raw: Bytes) -> Parts:
    codes = pairs(raw[..., 48:], 32) | (_planes_of_bits(raw[..., 16:48]) << _u8(4))
    return Parts(halves(raw, 0, 2), _scales_and_mins(raw[..., 4:16]), codes)


def _planes_of_bits(high: Bytes) -> Bytes:
    """Bit s of byte l is that of element 32 s + l."""
    return ((high[..., None, :] >> _BITS) & _u8(1)).reshape(*high.shape[:-1], 256)


def _crumbs(q: Bytes) -> Bytes:
    """Each 32 bytes hold two bits of elements l, l + 32, l + 64, l + 96 of 128."""
    return ((q.reshape(*q.shape[:-1], 2, 1, 32) >> _CRUMBS) & _u8(3)).reshape(*q.shape[:-1], 256)


def _scales_and_mins(scales: Bytes) -> list[NDArray[Any]]:
    """The eight 6-bit scales s and mins m of Q4_K and Q5_K in twelve bytes.

    Bytes 0-3 are s0..s3 and bytes 4-7 m0..m3 (low six bits) with the two high bits of s4..s7 and m4..m7 above them,
    bytes 8-11 the low nibbles of s4..s7 and, above, of m4..m7.
    """
    a, b, c = scales[..., 0:4], scales[..., 4:8], scales[..., 8:12]
    scale = np.concatenate([a & _u8(63), (c & _u8(15)) | ((a >> _u8(2)) & _u8(48))], axis=-1)
    low = np.concatenate([b & _u8(63), (c >> _u8(4)) | ((b >> _u8(2)) & _u8(48))], axis=-1)
    return [scale, low]


def by_halves(scales: Bytes) -> list[NDArray[Any]]:
    """Sixteen bytes, one a 16 k."""
    return [scales.reshape(*scales.shape[:-1], 8, 2)]


def read_q6_k(raw: Bytes) -> Parts:
    codes = pairs(raw[..., :128], 64) | (_crumbs(raw[..., 128:192]) << _u8(4))
    return Parts(halves(raw, 208), by_halves(raw[..., 192:208]), codes)


def read_q2_k(raw: Bytes) -> Parts:
    return Parts(halves(raw, 80, 82), by_halves(raw[..., :16]), _crumbs(raw[..., 16:80]))


def read_q3_k(raw: Bytes) -> Parts:
    """Sixteen 6-bit scales, 32 too large: low nibbles in 8 bytes (the first 8, then above the rest), crumbs in 4."""
    low, high = pairs(raw[..., 96:104], 8), raw[..., 104:108]
    top = ((high[..., None, :] >> _CRUMBS) & _u8(3)).reshape(low.shape)
    codes = _crumbs(raw[..., 32:96]) | (_planes_of_bits(raw[..., :32]) << _u8(2))
    return Parts(halves(raw, 108), by_halves((low | (top << _u8(4))) - _u8(32)), codes)


def read_iq4_xs(raw: Bytes) -> Parts:
    """Eight 6-bit scales, 32 too large: high crumbs in a word, low nibbles in 4 bytes."""
    high = (halves(raw, 2)[0][..., None] >> np.arange(0, 16, 2, dtype=np.uint16)) & np.uint16(3)
    scale = (pairs(raw[..., 4:8], 1) | (high.astype(np.uint8) << _u8(4))) - _u8(32)
    return Parts(halves(raw, 0), [scale], pairs(raw[..., 8:], 16))


def read_tq1_0(raw: Bytes) -> Parts:
    """Five ternary digits a byte: 160 elements in 32 bytes, 80 in 16, and 16 in four bytes of four digits."""
    codes = [_digits(raw[..., :32], 5), _digits(raw[..., 32:48], 5), _digits(raw[..., 48:52], 4)]
    return Parts(halves(raw, 52), [], np.concatenate(codes, axis=-1))


def _digits(q: Bytes, count: int) -> Bytes:
    """The first digits of all bytes, then the second ones: a byte is a fraction of 256, times 3 its digit comes out."""
    turned = q[..., None, :] * _POWERS[:count]
    return ((turned.astype(np.uint16) * np.uint16(3)) >> 8).astype(np.uint8).reshape(*q.shape[:-1], -1)


def read_tq2_0(raw: Bytes) -> Parts:
    return Parts(halves(raw, 64), [], _crumbs(raw[..., :64]))


# --- numbers of 4 and 8 bits ------------------------------------------------------------------------------------------


def read_mxfp4(raw: Bytes) -> Parts:
    return Parts([], [raw[..., :1]], pairs(raw[..., 1:], 16))


def read_nvfp4(raw: Bytes) -> Parts:
    """Blocks of 64: a scale for each 16, which are 8 bytes of low and then high nibbles."""
    scales = raw[..., :4].reshape(*raw.shape[:-1], 2, 2)
    return Parts([], [scales], pairs(raw[..., 4:], 8))


def read_f8_e4m3(raw: Bytes) -> Parts:
    """An f32 scale and 32 numbers."""
    scales = np.ascontiguousarray(raw[..., :4]).view(np.uint32)
    return Parts([], [scales], raw[..., 4:])
