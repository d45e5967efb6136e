"""How matrices lie in a card's memory: in tiles that tensor cores take, packed at load.

A tile is 16 rows, and a unit of a tile is 32 k, or 64 k of codes with 4 bits. A unit is stored as it is multiplied: 16
bytes of each of the 32 lanes of a warp, once or several times. Lane 4 g + t has rows g and g + 8, and of each 16 k the
four at 4 t. These are not the k that the instruction names, but the order of k is free as long as both operands agree.

| form | 16 bytes of a lane, several times |
|---|---|
| codes8 | int8 codes: [row g, row g + 8][k 0..15, k 16..31][4] |
| codes4 | of each 32 k, [row g, row g + 8], 8 codes in an i32: k 0, 2 of the first half, 0, 2 of the second half in its low 16 bits, 1, 3, 1, 3 in its high ones |
| bf16, f16 | [row g], then [row g + 8]: [k 0..15, k 16..31][4] |
| f32 | [row g, k 0..15], [row g, k 16..31], then row g + 8: [4] |

After all units come the scales, f32[tile, 32 k, g, scales of 32 k, row g or g + 8], then the lows in the same form. A
value is scale * (code - zero) - low. Codes of 8 bits have their zero subtracted. Everything is padded with zeros.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from rlx.backends.blocks import BLOCKS, Blocks
from rlx.backends.blocks_read import Parts
from rlx.backends.blocks_values import SCALES, Floats, by_row, f16, join, meaning
from rlx.errors import ShapeError
from rlx.ir.dtypes import BF16, F16, F32, DType
from rlx.ir.rounding import from_bf16, to_bf16
from rlx.passes.capabilities import Layouts

Bytes = NDArray[np.uint8]

ROWS, DEPTH, LANES, LOAD = 16, 32, 32, 16
_ALIGN = 256

#: Bytes of a lane for 32 k, by form.
_LANE_BYTES = {"codes4": 8, "codes8": 16, "bf16": 32, "f16": 32, "f32": 64}


@dataclass(frozen=True)
class Form:
    """How matrices of one type are stored.

    Attributes:
        kind: of their numbers, see above.
        scales: for each 32 k: 0 for none, 1, or 2 if there is one for each 16 k.
        lows: whether there are lows, as many as scales.
        zero: the code that means 0, of codes with 4 bits.
        block: the number of k must be a multiple of it.
    """

    kind: str
    scales: int = 0
    lows: bool = False
    zero: int = 0
    block: int = 1

    @property
    def unit(self) -> int:
        """k of a unit."""
        return 64 if self.kind == "codes4" else DEPTH

    @property
    def loads(self) -> int:
        """How many times 16 bytes a lane has of a unit."""
        return _LANE_BYTES[self.kind] * (self.unit // DEPTH) // LOAD

    def units(self, k: int) -> int:
        """Units of a row of `k` elements."""
        return -(-k // self.unit)

    def places(self, n: int, k: int) -> tuple[int, int, int]:
        """Where the scales of a matrix begin, where the lows begin, and where it ends."""
        tiles = -(-n // ROWS)
        codes = tiles * self.units(k) * self.loads * LANES * LOAD
        numbers = tiles * self.units(k) * (self.unit // DEPTH) * self.scales * ROWS * 4
        lows = _aligned(codes + numbers)
        return codes, lows, lows + (_aligned(numbers) if self.lows else 0)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


@cache
def form_of(dtype: DType) -> Form:
    """The form of matrices of a type.

    Raises:
        ShapeError: there is none.
    """
    plain = {F32: "f32", F16: "f16", BF16: "bf16"}.get(dtype)
    if plain:
        return Form(plain)
    if dtype not in BLOCKS:
        raise ShapeError(f"{dtype} has no layout on this device", hint=f"Types: {', '.join(map(str, TYPES))}")
    row = BLOCKS[dtype]
    narrow = not row.levels and sum(row.planes) <= 4
    kind = "bf16" if row.floats else "codes4" if narrow else "codes8"
    return Form(kind, row.parts, row.lows, row.zero if narrow else 0, row.superblock)


def matrix_bytes(dtype: DType, n: int, k: int) -> int:
    """Bytes of a packed matrix.

    Raises:
        ShapeError: no kernel reads it.
    """
    form = form_of(dtype)
    if k <= 0 or k % form.block:
        raise ShapeError(f"k = {k} is no multiple of the {form.block} elements of a block of {dtype}")
    return form.places(n, k)[2]


def pack(dtype: DType, raw: Bytes, n: int, k: int) -> Bytes:
    """The bytes of a matrix [n, k] in a file -> packed, uint8 [matrix_bytes]."""
    with np.errstate(all="ignore"):  # scales that are no numbers stay so
        return _packed(dtype, raw, n, k)


def _packed(dtype: DType, raw: Bytes, n: int, k: int) -> Bytes:
    form, tiles = form_of(dtype), -(-n // ROWS)
    rows = np.zeros((tiles * ROWS, k // dtype.block * dtype.nbytes), np.uint8)
    rows[:n] = raw.reshape(n, -1)
    scales_at, lows_at, end = form.places(n, k)
    out = np.zeros(end, np.uint8)
    if dtype in BLOCKS:
        row = BLOCKS[dtype]
        parts = row.read(rows.reshape(tiles, ROWS, -1, dtype.nbytes))
        numbers = SCALES[row.scales](_head(row, parts), join(*map(by_row, parts.fields), lead=3) if parts.fields else
                                     np.empty((tiles, k // row.superblock, row.subs, 0), np.uint8))
        values = _values_of(row, parts.codes.reshape(tiles * ROWS, k), form)
        for start, some in ((scales_at, numbers[: row.parts]), (lows_at, numbers[row.parts :])):
            if some:
                found = _packed_numbers(some, form.units(k) * (form.unit // DEPTH))
                out[start : start + found.nbytes] = found.reshape(-1).view(np.uint8)
    else:
        values = rows.view(np.dtype(dtype.numpy))
    units = form.units(k)
    padded = np.zeros((tiles * ROWS, units * form.unit), values.dtype)
    padded[:, :k] = values
    out[:scales_at] = np.ascontiguousarray(_PACKED[form.kind](padded, tiles, units)).reshape(-1).view(np.uint8)
    return out


def _head(row: Blocks, parts: Parts) -> list[Floats]:
    return [f16(by_row(number))[..., None, :] * np.float32(row.unit) for number in parts.head]


def _values_of(row: Blocks, codes: Bytes, form: Form) -> NDArray[np.generic]:
    """Codes of the file as they are stored."""
    if form.kind == "codes4":
        return codes
    numbers = meaning(row)[codes]
    return to_bf16(numbers) if row.floats else numbers.astype(np.int8)


def _packed_numbers(some: list[Floats], groups: int) -> Floats:
    """Scales or lows [tiles, superblocks, subs, 16], one array per part -> [tiles, groups, g, parts, 2]."""
    stacked = np.stack([x.reshape(x.shape[0], -1, 2, 8) for x in some], axis=-1)  # [tiles, groups, half, g, part]
    out = np.zeros((stacked.shape[0], groups, 8, len(some), 2), np.float32)
    out[:, : stacked.shape[1]] = stacked.transpose(0, 1, 3, 4, 2)
    return out


# Axes of a padded matrix: [tile, half of rows, g, unit, (32 k of the unit), half of k, t, 4].


def _packed_codes8(padded: Bytes, tiles: int, units: int) -> Bytes:
    return padded.reshape(tiles, 2, 8, units, 2, 4, 4).transpose(0, 3, 2, 5, 1, 4, 6)


def _packed_codes4(padded: Bytes, tiles: int, units: int) -> Bytes:
    split = padded.reshape(tiles, 2, 8, units, 2, 2, 4, 2, 2)  # [..., 32 k, half of k, t, pair, of the pair]
    nibbles = split.transpose(0, 3, 2, 6, 4, 1, 8, 5, 7)  # [..., half of rows, of the pair, half of k, pair]
    flat = np.ascontiguousarray(nibbles).reshape(-1, 2)
    return (flat[:, 0] | flat[:, 1] << np.uint8(4)).astype(np.uint8)


def _packed_16(padded: NDArray[np.generic], tiles: int, units: int) -> NDArray[np.generic]:
    return padded.reshape(tiles, 2, 8, units, 2, 4, 4).transpose(0, 3, 1, 2, 5, 4, 6)


def _packed_32(padded: NDArray[np.generic], tiles: int, units: int) -> NDArray[np.generic]:
    return padded.reshape(tiles, 2, 8, units, 2, 4, 4).transpose(0, 3, 1, 4, 2, 5, 6)


_PACKED: dict[str, Callable[..., NDArray[np.generic]]] = {
    "codes8": _packed_codes8, "codes4": _packed_codes4, "bf16": _packed_16, "f16": _packed_16, "f32": _packed_32,
}  # fmt: skip


def unpack(dtype: DType, packed: Bytes, n: int, k: int) -> Floats:
    """A packed matrix -> its values, float32 [n, k]: the inverse of `pack`."""
    form, tiles = form_of(dtype), -(-n // ROWS)
    scales_at, lows_at, _ = form.places(n, k)
    units = form.units(k)
    values = _UNPACKED[form.kind](packed[:scales_at], tiles, units).reshape(tiles * ROWS, -1)[:n]
    found = values.astype(np.float32) - np.float32(form.zero)
    if form.scales:
        found = found * _numbers(packed, scales_at, form, tiles, units)[:n]
    if form.lows:
        found = found - _numbers(packed, lows_at, form, tiles, units)[:n]
    return np.ascontiguousarray(found[:, :k])


def _numbers(packed: Bytes, start: int, form: Form, tiles: int, units: int) -> Floats:
    """Scales or lows, one for each element [rows, k]."""
    groups = units * (form.unit // DEPTH)
    count = tiles * groups * ROWS * form.scales
    stored = packed[start : start + 4 * count].view(np.float32).reshape(tiles, groups, 8, form.scales, 2)
    rows = stored.transpose(0, 4, 2, 1, 3).reshape(tiles * ROWS, -1)
    return np.repeat(rows, DEPTH // form.scales, axis=1)


def _unpacked_codes4(raw: Bytes, tiles: int, units: int) -> Floats:
    nibbles = np.stack([raw & 15, raw >> 4], axis=-1).reshape(tiles, units, 8, 4, 2, 2, 2, 2, 2)
    return nibbles.transpose(0, 5, 2, 1, 4, 7, 3, 8, 6).astype(np.float32)


def _unpacked_16(raw: NDArray[np.generic], tiles: int, units: int) -> NDArray[np.generic]:
    return raw.reshape(tiles, units, 2, 8, 4, 2, 4).transpose(0, 2, 3, 1, 5, 4, 6)


_UNPACKED: dict[str, Callable[..., NDArray[np.generic]]] = {
    "codes4": _unpacked_codes4,
    "codes8": lambda raw, tiles, units: (
        raw.view(np.int8).reshape(tiles, units, 8, 4, 2, 2, 4).transpose(0, 4, 2, 1, 5, 3, 6)
    ),
    "bf16": lambda raw, tiles, units: from_bf16(np.ascontiguousarray(_unpacked_16(raw.view(np.uint16), tiles, units))),
    "f16": lambda raw, tiles, units: _unpacked_16(raw.view(np.float16), tiles, units),
    "f32": lambda raw, tiles, units: (
        raw.view(np.float32).reshape(tiles, units, 2, 2, 8, 4, 4).transpose(0, 2, 4, 1, 3, 5, 6)
    ),
}

#: The types that have a layout.
TYPES: tuple[DType, ...] = (F32, F16, BF16, *BLOCKS)


@dataclass(frozen=True)
class CardLayouts(Layouts):
    """The layouts of a card."""

    matrices: str = "tensor_tiles"
    matrices_meaning: str = "packed at load in tiles of 16 rows, as tensor cores take them"
    tables: str = "tensor_tiles"
    page: int = 64
    align: int = 256

    @property
    def matrix_types(self) -> tuple[DType, ...]:
        return TYPES

    def matrix_bytes(self, dtype: DType, n: int, k: int) -> int:
        return matrix_bytes(dtype, n, k)


LAYOUTS = CardLayouts()
