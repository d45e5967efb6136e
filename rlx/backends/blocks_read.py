"""Readers of quantized file blocks: one NumPy function per type that returns codes and fields (see `blocks.py`).

Readers take `uint8[blocks of 16 rows, 16, superblocks, bytes]`. The readers of the types with codebooks are in
`blocks_grids.py`. A crumb is a 2-bit field, a nibble a 4-bit field.
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
    """The parts of a weight's blocks. All arrays begin with the axes [blocks of 16 rows, 16, superblocks].

    Attributes:
        head: the f16 numbers of a superblock as bits, `uint16[]` each.
        fields: the fields of each sub-block, `uint32[subs]`, `uint16[subs]` or `uint8[subs]`; `uint8[subs, 2]` where a
            sub-block has two.
        codes: `uint8[superblock k]`.
    """

    head: list[NDArray[np.uint16]]
    fields: list[NDArray[Any]]
    codes: Bytes


def halves(raw: Bytes, *at: int) -> list[NDArray[np.uint16]]:
    """The bits of the f16 numbers at these byte offsets of a block."""
    return [np.ascontiguousarray(raw[..., i : i + 2]).view(np.uint16)[..., 0] for i in at]


# --- blocks of 32: f16 numbers, a word of fifth bits in some types, 16 bytes of nibbles -------------------------------


def read_q8_0(raw: Bytes) -> Parts:
    return Parts([], _fields_32(raw, 0), raw[..., 2:] ^ _u8(128))


def reader_32(*numbers: int, fifth: bool = False) -> Callable[[Bytes], Parts]:
    """A reader of f16 numbers at the byte offsets `numbers`, then one bit per element if `fifth`, then nibbles.

    Byte i of the nibbles holds elements i and i + 16.
    """

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
    """Nibbles -> codes. The low nibbles of each `run` bytes hold `run` elements, the high nibbles the next `run`."""
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
    """Bit s of byte l belongs to element 32 s + l."""
    return ((high[..., None, :] >> _BITS) & _u8(1)).reshape(*high.shape[:-1], 256)


def _crumbs(q: Bytes) -> Bytes:
    """Crumbs -> codes. Byte l of each 32 bytes holds elements l, l + 32, l + 64 and l + 96 of 128."""
    return ((q.reshape(*q.shape[:-1], 2, 1, 32) >> _CRUMBS) & _u8(3)).reshape(*q.shape[:-1], 256)


def _scales_and_mins(scales: Bytes) -> list[NDArray[Any]]:
    """The eight 6-bit scales s and mins m of Q4_K and Q5_K, stored in twelve bytes.

    - Bytes 0-3: s0..s3 in the low six bits, the two high bits of s4..s7 above.
    - Bytes 4-7: m0..m3 in the low six bits, the two high bits of m4..m7 above.
    - Bytes 8-11: the low four bits of s4..s7 in the low nibble, those of m4..m7 in the high nibble.
    """
    a, b, c = scales[..., 0:4], scales[..., 4:8], scales[..., 8:12]
    scale = np.concatenate([a & _u8(63), (c & _u8(15)) | ((a >> _u8(2)) & _u8(48))], axis=-1)
    low = np.concatenate([b & _u8(63), (c >> _u8(4)) | ((b >> _u8(2)) & _u8(48))], axis=-1)
    return [scale, low]


def by_halves(scales: Bytes) -> list[NDArray[Any]]:
    """Sixteen bytes, one per 16 k."""
    return [scales.reshape(*scales.shape[:-1], 8, 2)]


def read_q6_k(raw: Bytes) -> Parts:
    codes = pairs(raw[..., :128], 64) | (_crumbs(raw[..., 128:192]) << _u8(4))
    return Parts(halves(raw, 208), by_halves(raw[..., 192:208]), codes)


def read_q2_k(raw: Bytes) -> Parts:
    return Parts(halves(raw, 80, 82), by_halves(raw[..., :16]), _crumbs(raw[..., 16:80]))


def read_q3_k(raw: Bytes) -> Parts:
    """Sixteen 6-bit scales, stored plus 32.

    Their low four bits are in 8 bytes, scales 0-7 in the low nibbles and 8-15 in the high ones. Their high two bits are
    in 4 bytes.
    """
    low, high = pairs(raw[..., 96:104], 8), raw[..., 104:108]
    top = ((high[..., None, :] >> _CRUMBS) & _u8(3)).reshape(low.shape)
    codes = _crumbs(raw[..., 32:96]) | (_planes_of_bits(raw[..., :32]) << _u8(2))
    return Parts(halves(raw, 108), by_halves((low | (top << _u8(4))) - _u8(32)), codes)


def read_iq4_xs(raw: Bytes) -> Parts:
    """Eight 6-bit scales, stored plus 32: their high two bits in a 16-bit word, their low four bits in 4 bytes."""
    high = (halves(raw, 2)[0][..., None] >> np.arange(0, 16, 2, dtype=np.uint16)) & np.uint16(3)
    scale = (pairs(raw[..., 4:8], 1) | (high.astype(np.uint8) << _u8(4))) - _u8(32)
    return Parts(halves(raw, 0), [scale], pairs(raw[..., 8:], 16))


def read_tq1_0(raw: Bytes) -> Parts:
    """Five ternary digits per byte: 160 elements in 32 bytes and 80 in 16; then 16 in four bytes of four digits."""
    codes = [_digits(raw[..., :32], 5), _digits(raw[..., 32:48], 5), _digits(raw[..., 48:52], 4)]
    return Parts(halves(raw, 52), [], np.concatenate(codes, axis=-1))


def _digits(q: Bytes, count: int) -> Bytes:
    """The first digits of all bytes, then the second ones, and so on.

    A byte is a fixed-point fraction q / 256. The integer part of 3 q / 256 is its first ternary digit.
    """
    turned = q[..., None, :] * _POWERS[:count]
    return ((turned.astype(np.uint16) * np.uint16(3)) >> 8).astype(np.uint8).reshape(*q.shape[:-1], -1)


def read_tq2_0(raw: Bytes) -> Parts:
    return Parts(halves(raw, 64), [], _crumbs(raw[..., :64]))


# --- numbers of 4 and 8 bits ------------------------------------------------------------------------------------------


def read_mxfp4(raw: Bytes) -> Parts:
    return Parts([], [raw[..., :1]], pairs(raw[..., 1:], 16))


def read_nvfp4(raw: Bytes) -> Parts:
    """Blocks of 64: a scale per 16 elements. The 16 elements are 8 bytes, the low nibbles before the high ones."""
    scales = raw[..., :4].reshape(*raw.shape[:-1], 2, 2)
    return Parts([], [scales], pairs(raw[..., 4:], 8))


def read_f8_e4m3(raw: Bytes) -> Parts:
    """An f32 scale, then 32 e4m3fn numbers."""
    scales = np.ascontiguousarray(raw[..., :4]).view(np.uint32)
    return Parts([], [scales], raw[..., 4:])
