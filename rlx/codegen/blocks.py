"""The quantized types: how a GGUF file stores their blocks, and which packed form (see layouts.py) each one takes.

A type is a row of `BLOCKS`. In the packed form every type is cut into sub-blocks of 32 k and its values are

    scale * (code - zero) - low

with one scale (and, where there are any, one low) for 32 k or for each 16 k. How scale and low are made of a
superblock's f16 numbers (d, dmin) and a sub-block's fields has a name, `Blocks.scales`:

| name | numbers of a superblock | fields of a sub-block | scale | low |
|---|---|---|---|---|
| `d` | | f16 d | d | |
| `d_m` | | f16 d, f16 m | d | -m |
| `d_s` | d | i8 s, or two: one a 16 k | d * s | |
| `d_s_m` | d, dmin | u8 s, u8 m | d * s | dmin * m |
| `d_sm` | d, dmin | two u8, one a 16 k: s low, m high nibble | d * s | dmin * m |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlx.ir.dtypes import IQ4_NL, IQ4_XS, Q2_K, Q3_K, Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0, DType

Bytes = NDArray[np.uint8]
_u8 = np.uint8

#: What the 16 codes of IQ4_NL and IQ4_XS stand for (source: ggml's table), plus 128: unsigned, as dot products take it.
LEVELS: tuple[int, ...] = tuple(
    128 + level for level in (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
)
_CRUMBS = np.array([[0], [2], [4], [6]], np.uint8)
_BITS = np.arange(8, dtype=np.uint8)[:, None]


@dataclass(frozen=True)
class Parts:
    """A weight's blocks taken apart; the axes before those named are [blocks of 16 rows, 16, superblocks].

    Attributes:
        head: bits of the f16 numbers of a superblock, `uint16[]` each.
        fields: those of each sub-block, `uint16[subs]` or `uint8[subs]`, or `uint8[subs, 2]` for two fields.
        codes: `uint8[superblock k]`.
    """

    head: list[NDArray[np.uint16]]
    fields: list[NDArray[Any]]
    codes: Bytes


@dataclass(frozen=True)
class Blocks:
    """One quantized type.

    Attributes:
        superblock: k of a superblock, the file's block.
        head: f16 numbers a superblock and row.
        field_bytes: bytes of a sub-block's fields a row.
        planes: the bits of a code in pieces, lowest first: each piece has vectors of its own.
        zero: the code that means 0, where there is no low.
        scales: how scales and lows are made: see the table above.
        read: file blocks `uint8[blocks of 16 rows, 16, superblocks, bytes]` -> their parts.
        halves: whether each 16 k have a scale of their own.
        levels: what a code stands for, itself unsigned; None for itself.
    """

    superblock: int
    head: int
    field_bytes: int
    planes: tuple[int, ...]
    zero: int
    scales: str
    read: Callable[[Bytes], Parts]
    halves: bool = False
    levels: tuple[int, ...] | None = None

    @property
    def bits(self) -> int:
        """Width of a code, looked up where there are levels."""
        return 8 if self.levels else sum(self.planes)

    @property
    def lows(self) -> bool:
        """Whether values have a low."""
        return "m" in self.scales

    @property
    def parts(self) -> int:
        """Scales a sub-block, and lows where there are any."""
        return 2 if self.halves else 1

    @property
    def subs(self) -> int:
        """Sub-blocks a superblock."""
        return self.superblock // 32

    @property
    def head_bytes(self) -> int:
        """Bytes of 16 rows before the sub-blocks."""
        return 32 * self.head

    @property
    def codes_at(self) -> int:
        """Bytes of 16 rows' fields before a sub-block's codes."""
        return 16 * self.field_bytes

    @property
    def stride(self) -> int:
        """Bytes of a sub-block of 16 rows."""
        return self.codes_at + 64 * sum(self.planes)

    @property
    def nbytes(self) -> int:
        """Bytes of a superblock of 16 rows."""
        return self.head_bytes + self.subs * self.stride


def _halves(raw: Bytes, *at: int) -> list[NDArray[np.uint16]]:
    """The f16 bits at some bytes of a block."""
    return [np.ascontiguousarray(raw[..., i : i + 2]).view(np.uint16)[..., 0] for i in at]


# --- blocks of 32: f16 numbers, perhaps a word of fifth bits, 16 bytes of nibbles -------------------------------------


def _read_q8_0(raw: Bytes) -> Parts:
    return Parts([], _fields_32(raw, 0), raw[..., 2:] ^ _u8(128))


def _reader_32(*numbers: int, fifth: bool = False) -> Callable[[Bytes], Parts]:
    """Reads f16 `numbers`, then one bit of each element if `fifth`, then nibbles: byte i is elements i and i + 16."""

    def read(raw: Bytes) -> Parts:
        at = 2 * len(numbers)
        codes = _pairs(raw[..., -16:], 16)
        if fifth:
            codes = codes | (np.unpackbits(raw[..., at : at + 4], axis=-1, bitorder="little") << _u8(4))
        return Parts([], _fields_32(raw, *numbers), codes)

    return read


def _fields_32(raw: Bytes, *at: int) -> list[NDArray[Any]]:
    return [number[..., None] for number in _halves(raw, *at)]


def _pairs(q: Bytes, run: int) -> Bytes:
    """Runs of `run` bytes hold as many elements in their low and the next ones in their high nibbles."""
    pairs = q.reshape(*q.shape[:-1], -1, 1, run)
    codes = np.concatenate([pairs & _u8(15), pairs >> _u8(4)], axis=-2)
    return codes.reshape(*q.shape[:-1], 2 * q.shape[-1])


# --- blocks of 256 ----------------------------------------------------------------------------------------------------


def _read_q4_k(raw: Bytes) -> Parts:
    return Parts(_halves(raw, 0, 2), _scales_and_mins(raw[..., 4:16]), _pairs(raw[..., 16:], 32))


def _read_q5_k(raw: Bytes) -> Parts:
    codes = _pairs(raw[..., 48:], 32) | (_planes_of_bits(raw[..., 16:48]) << _u8(4))
    return Parts(_halves(raw, 0, 2), _scales_and_mins(raw[..., 4:16]), codes)


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


def _by_halves(scales: Bytes) -> list[NDArray[Any]]:
    """Sixteen bytes, one a 16 k."""
    return [scales.reshape(*scales.shape[:-1], 8, 2)]


def _read_q6_k(raw: Bytes) -> Parts:
    codes = _pairs(raw[..., :128], 64) | (_crumbs(raw[..., 128:192]) << _u8(4))
    return Parts(_halves(raw, 208), _by_halves(raw[..., 192:208]), codes)


def _read_q2_k(raw: Bytes) -> Parts:
    return Parts(_halves(raw, 80, 82), _by_halves(raw[..., :16]), _crumbs(raw[..., 16:80]))


def _read_q3_k(raw: Bytes) -> Parts:
    """Sixteen 6-bit scales, 32 too large: low nibbles in 8 bytes (the first 8, then above the rest), crumbs in 4."""
    low, high = _pairs(raw[..., 96:104], 8), raw[..., 104:108]
    top = ((high[..., None, :] >> _CRUMBS) & _u8(3)).reshape(low.shape)
    codes = _crumbs(raw[..., 32:96]) | (_planes_of_bits(raw[..., :32]) << _u8(2))
    return Parts(_halves(raw, 108), _by_halves((low | (top << _u8(4))) - _u8(32)), codes)


def _read_iq4_xs(raw: Bytes) -> Parts:
    """Eight 6-bit scales, 32 too large: high crumbs in a word, low nibbles in 4 bytes."""
    high = (_halves(raw, 2)[0][..., None] >> np.arange(0, 16, 2, dtype=np.uint16)) & np.uint16(3)
    scale = (_pairs(raw[..., 4:8], 1) | (high.astype(np.uint8) << _u8(4))) - _u8(32)
    return Parts(_halves(raw, 0), [scale], _pairs(raw[..., 8:], 16))


#: Every quantized type that is packed.
BLOCKS: dict[DType, Blocks] = {
    Q8_0: Blocks(32, 0, 2, (8,), 128, "d", _read_q8_0),
    Q4_0: Blocks(32, 0, 2, (4,), 8, "d", _reader_32(0)),
    Q4_1: Blocks(32, 0, 4, (4,), 0, "d_m", _reader_32(0, 2)),
    Q5_0: Blocks(32, 0, 2, (4, 1), 16, "d", _reader_32(0, fifth=True)),
    Q5_1: Blocks(32, 0, 4, (4, 1), 0, "d_m", _reader_32(0, 2, fifth=True)),
    IQ4_NL: Blocks(32, 0, 2, (4,), 128, "d", _reader_32(0), levels=LEVELS),
    IQ4_XS: Blocks(256, 1, 1, (4,), 128, "d_s", _read_iq4_xs, levels=LEVELS),
    Q2_K: Blocks(256, 2, 2, (2,), 0, "d_sm", _read_q2_k, halves=True),
    Q3_K: Blocks(256, 1, 2, (2, 1), 4, "d_s", _read_q3_k, halves=True),
    Q4_K: Blocks(256, 2, 2, (4,), 0, "d_s_m", _read_q4_k),
    Q5_K: Blocks(256, 2, 2, (4, 1), 0, "d_s_m", _read_q5_k),
    Q6_K: Blocks(256, 1, 2, (4, 2), 32, "d_s", _read_q6_k, halves=True),
}
