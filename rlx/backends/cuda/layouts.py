"""How matrices lie in a card's memory: in tiles that tensor cores take, packed at load.

A tile is 16 rows, and a unit of a tile is 32 k, or 64 k of codes with 4 bits. A unit is stored as it is multiplied: 16
bytes of each of the 32 lanes of a warp, or 4, once or several times. Lane 4 g + t has rows g and g + 8, and of each 16 k
the four at 4 t. These are not the k that the instruction names, but the order of k is free as long as both operands
agree.

| form | the bytes of a lane |
|---|---|
| codes8 | int8 codes: [row g, row g + 8][k 0..15, k 16..31][k 0, 2, 1, 3 of the four] |
| codes6 | three of these four words, 4 bytes at a time, of codes of 0 to 63; their bits 6 and 7 are bits 2 i and 2 i + 1 of the codes of the fourth word, i the number of the word |
| codes4 | of each 32 k, [row g, row g + 8][k 0, 2, 1, 3 of the four]: k 0..15 in the low 4 bits, k 16..31 in the high ones |
| bf16, f16 | [row g], then [row g + 8]: [k 0..15, k 16..31][4] |
| f32 | [row g, k 0..15], [row g, k 16..31], then row g + 8: [4] |

After all units come what scales and lows are made of, as the file has them (`rlx.backends.blocks`): the fields of 32 k,
[tile, 32 k, g, field, row g or g + 8], then the f16 numbers of superblocks, [tile, superblock, g, number, row g or g + 8].
A value is scale * (code - zero) - low. Codes of 8 bits have their zero subtracted. In place of an index of a level stands
the level. Everything is padded with zeros.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from rlx.backends.blocks import BLOCKS, Blocks
from rlx.backends.blocks_read import Parts
from rlx.backends.blocks_values import SCALES, Floats, by_row, join, meaning
from rlx.errors import ShapeError
from rlx.ir.dtypes import BF16, F16, F32, DType
from rlx.ir.stored import from_bf16, to_bf16
from rlx.passes.capabilities import Layouts

Bytes = NDArray[np.uint8]

ROWS, DEPTH, LANES, LOAD = 16, 32, 32, 16
_ALIGN = 256

#: Bytes of a lane for 32 k, by form.
_LANE_BYTES = {"codes4": 8, "codes6": 12, "codes8": 16, "bf16": 32, "f16": 32, "f32": 64}


@dataclass(frozen=True)
class Form:
    """How matrices of one type are stored.

    Attributes:
        kind: of their numbers, see above.
        row: of a quantized type.
        zero: the code that means 0, of codes with 4 or 6 bits.
    """

    kind: str
    row: Blocks | None = None
    zero: int = 0

    @property
    def unit(self) -> int:
        """k of a unit."""
        return 64 if self.kind == "codes4" else DEPTH

    @property
    def words(self) -> int:
        """How many i32 of a lane lie side by side."""
        return 1 if self.kind == "codes6" else 4

    @property
    def loads(self) -> int:
        """How many times so many i32 a lane has of a unit."""
        return _LANE_BYTES[self.kind] * (self.unit // DEPTH) // (4 * self.words)

    @property
    def code_bytes(self) -> int:
        """Of the numbers of a unit."""
        return _LANE_BYTES[self.kind] * (self.unit // DEPTH) * LANES

    @property
    def scales(self) -> int:
        """Scales of 32 k: none, 1, or 2 if there is one for each 16 k."""
        return self.row.parts if self.row else 0

    @property
    def lows(self) -> bool:
        """Whether there are lows, as many as scales."""
        return bool(self.row and self.row.lows)

    @property
    def raw(self) -> bool:
        """Whether numbers are codes, which few rows are multiplied with as they lie."""
        return self.kind in ("codes8", "codes6", "codes4")

    @property
    def offset(self) -> int:
        """What codes of 0 to 255 have too much then. Those of 8 bits are raised by 128 if some are negative."""
        if self.kind == "codes8" and self.row:
            return 128 if self.row.zero else 0
        return self.zero

    @property
    def block(self) -> int:
        """The number of k must be a multiple of it."""
        return self.row.superblock if self.row else 1

    @property
    def field_bytes(self) -> int:
        """Of the fields of a unit."""
        return self.unit // DEPTH * ROWS * self.row.field_bytes if self.row else 0

    @property
    def head_bytes(self) -> int:
        """Of the numbers of a superblock."""
        return ROWS * self.row.head * 2 if self.row else 0

    @property
    def unit_bytes(self) -> int:
        """Of a unit, with its fields and the numbers of its superblock."""
        return self.code_bytes + self.field_bytes + self.head_bytes

    def units(self, k: int) -> int:
        """Units of a row of `k` elements."""
        return -(-k // self.unit)

    def groups(self, k: int) -> int:
        """Times 32 k in the units of a row."""
        return self.units(k) * (self.unit // DEPTH)

    def places(self, n: int, k: int) -> tuple[int, int, int]:
        """Where the fields of a matrix begin, where the numbers of superblocks begin, and where it ends."""
        tiles = -(-n // ROWS)
        fields = tiles * self.units(k) * self.code_bytes
        if self.row is None:
            return fields, fields, fields
        heads = _aligned(fields + tiles * self.groups(k) * ROWS * self.row.field_bytes)
        return fields, heads, heads + _aligned(tiles * (k // self.row.superblock) * ROWS * self.row.head * 2)


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
    narrow = not row.levels and row.bits <= 4
    kind = "bf16" if row.floats else "codes4" if narrow else "codes6" if row.bits <= 6 else "codes8"
    return Form(kind, row, row.zero if kind in ("codes4", "codes6") else 0)


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
    fields_at, heads_at, end = form.places(n, k)
    out = np.zeros(end, np.uint8)
    if form.row:
        parts = form.row.read(rows.reshape(tiles, ROWS, -1, dtype.nbytes))
        values = _values_of(form.row, parts.codes.reshape(tiles * ROWS, k), form)
        for start, some in ((fields_at, _packed_fields(form, parts, k)), (heads_at, _packed_heads(parts))):
            out[start : start + some.nbytes] = some.reshape(-1)
    else:
        values = rows.view(np.dtype(dtype.numpy))
    units = form.units(k)
    padded = np.zeros((tiles * ROWS, units * form.unit), values.dtype)
    padded[:, :k] = values
    out[:fields_at] = np.ascontiguousarray(_PACKED[form.kind](padded, tiles, units)).reshape(-1).view(np.uint8)
    return out


def _values_of(row: Blocks, codes: Bytes, form: Form) -> NDArray[np.generic]:
    """Codes of the file as they are stored."""
    if form.kind == "codes4":
        return codes
    numbers = meaning(row)[codes]
    return to_bf16(numbers) if row.floats else (numbers + form.zero).astype(np.int8)


def item_bytes(row: Blocks) -> int:
    """Bytes of a field."""
    return {"d": 2, "d_m": 2, "f32": 4}.get(row.scales, 1)


def _packed_fields(form: Form, parts: Parts, k: int) -> Bytes:
    """Fields of sub-blocks -> uint8 [tiles, groups, g, field, 2, bytes]."""
    row = form.row
    if row is None or not parts.fields:
        return np.zeros(0, np.uint8)
    joined = join(*map(by_row, parts.fields), lead=3)  # [tiles, superblocks, subs, field, half, g, bytes]
    found = joined.reshape(joined.shape[0], k // DEPTH, -1, 2, 8, item_bytes(row)).transpose(0, 1, 4, 2, 3, 5)
    out = np.zeros((found.shape[0], form.groups(k), *found.shape[2:]), np.uint8)
    out[:, : found.shape[1]] = found
    return out


def _packed_heads(parts: Parts) -> Bytes:
    """Numbers of superblocks -> bytes of f16 [tiles, superblocks, g, number, 2]."""
    if not parts.head:
        return np.zeros(0, np.uint8)
    stacked = np.stack([by_row(each).view(np.float16) for each in parts.head], axis=-1)  # [..., 16, number]
    halves = stacked.reshape(*stacked.shape[:2], 2, 8, -1).transpose(0, 1, 3, 4, 2)
    return np.ascontiguousarray(halves).view(np.uint8)


_SHIFTS = np.array([[0], [2], [4]], np.uint8)  # of the bits that each word has of the fourth one

# Axes of a padded matrix: [tile, half of rows, g, unit, (32 k of the unit), half of k, t, 4].


def _packed_codes8(padded: Bytes, tiles: int, units: int) -> Bytes:
    return padded.reshape(tiles, 2, 8, units, 2, 4, 2, 2).transpose(0, 3, 2, 5, 1, 4, 7, 6)


def _packed_codes6(padded: Bytes, tiles: int, units: int) -> Bytes:
    words = np.ascontiguousarray(_packed_codes8(padded, tiles, units)).view(np.uint8).reshape(tiles, units, LANES, 4, 4)
    found = words[..., :3, :] | ((words[..., 3:, :] >> _SHIFTS) & np.uint8(3)) << np.uint8(6)
    return found.swapaxes(2, 3)


def _packed_codes4(padded: Bytes, tiles: int, units: int) -> Bytes:
    split = padded.reshape(tiles, 2, 8, units, 2, 2, 4, 2, 2)  # [..., 32 k, half of k, t, pair, of the pair]
    nibbles = split.transpose(0, 3, 2, 6, 4, 1, 8, 7, 5)  # [..., half of rows, of the pair, pair, half of k]
    flat = np.ascontiguousarray(nibbles).reshape(-1, 2)
    return (flat[:, 0] | flat[:, 1] << np.uint8(4)).astype(np.uint8)


def _packed_16(padded: NDArray[np.generic], tiles: int, units: int) -> NDArray[np.generic]:
    return padded.reshape(tiles, 2, 8, units, 2, 4, 4).transpose(0, 3, 1, 2, 5, 4, 6)


def _packed_32(padded: NDArray[np.generic], tiles: int, units: int) -> NDArray[np.generic]:
    return padded.reshape(tiles, 2, 8, units, 2, 4, 4).transpose(0, 3, 1, 4, 2, 5, 6)


_PACKED: dict[str, Callable[..., NDArray[np.generic]]] = {
    "codes8": _packed_codes8, "codes6": _packed_codes6, "codes4": _packed_codes4, "bf16": _packed_16,
    "f16": _packed_16, "f32": _packed_32,
}  # fmt: skip


def unpack(dtype: DType, packed: Bytes, n: int, k: int) -> Floats:
    """A packed matrix -> its values, float32 [n, k]: the inverse of `pack`."""
    form, tiles = form_of(dtype), -(-n // ROWS)
    fields_at, heads_at, _ = form.places(n, k)
    values = _UNPACKED[form.kind](packed[:fields_at], tiles, form.units(k)).reshape(tiles * ROWS, -1)[:n]
    found = values.astype(np.float32)[:, :k] - np.float32(form.zero)
    if form.row:
        fields, heads = packed[fields_at:heads_at], packed[heads_at:]
        numbers = [_each_k(some)[:n] for some in _numbers(fields, heads, form, tiles, k)]
        parts = form.row.parts
        found = found * _interleaved(numbers[:parts])
        if form.lows:
            found = found - _interleaved(numbers[parts:])
    return np.ascontiguousarray(found)


def _numbers(fields: Bytes, heads: Bytes, form: Form, tiles: int, k: int) -> list[Floats]:
    """Scales, then lows, [tiles, superblocks, subs, 16] each."""
    row = form.row
    assert row is not None
    superblocks, groups, item = k // row.superblock, form.groups(k), item_bytes(row)
    stored = fields[: tiles * groups * ROWS * row.field_bytes].reshape(tiles, groups, 8, -1, 2, item)
    joined = np.ascontiguousarray(stored[:, : k // DEPTH].transpose(0, 1, 3, 4, 2, 5))
    halves = heads[: tiles * superblocks * ROWS * row.head * 2].view(np.float16)
    numbers = halves.reshape(tiles, superblocks, 8, row.head, 2).transpose(3, 0, 1, 4, 2)
    head = [each.reshape(tiles, superblocks, 1, ROWS).astype(np.float32) * np.float32(row.unit) for each in numbers]
    return SCALES[row.scales](head, joined.reshape(tiles, superblocks, row.subs, ROWS * row.field_bytes))


def _each_k(some: Floats) -> Floats:
    """[tiles, superblocks, subs, 16] -> one for each row and scale, [rows, k / 32]."""
    return some.reshape(some.shape[0], -1, ROWS).transpose(0, 2, 1).reshape(some.shape[0] * ROWS, -1)


def _interleaved(some: list[Floats]) -> Floats:
    """One array per part of 32 k -> one number for each element, [rows, k]."""
    return np.repeat(np.stack(some, axis=-1).reshape(some[0].shape[0], -1), DEPTH // len(some), axis=1)


def _unpacked_codes8(raw: NDArray[np.generic], tiles: int, units: int) -> NDArray[np.generic]:
    return raw.reshape(tiles, units, 8, 4, 2, 2, 2, 2).transpose(0, 4, 2, 1, 5, 3, 7, 6)


def _unpacked_codes6(raw: Bytes, tiles: int, units: int) -> NDArray[np.generic]:
    words = raw.reshape(tiles, units, 3, LANES, 4).swapaxes(2, 3)
    last = ((words >> np.uint8(6)) << _SHIFTS).sum(-2, keepdims=True, dtype=np.uint8)
    return _unpacked_codes8(np.concatenate([words & np.uint8(63), last], axis=-2), tiles, units)


def _unpacked_codes4(raw: Bytes, tiles: int, units: int) -> Floats:
    nibbles = np.stack([raw & 15, raw >> 4], axis=-1).reshape(tiles, units, 8, 4, 2, 2, 2, 2, 2)
    return nibbles.transpose(0, 5, 2, 1, 4, 8, 3, 7, 6).astype(np.float32)


def _unpacked_16(raw: NDArray[np.generic], tiles: int, units: int) -> NDArray[np.generic]:
    return raw.reshape(tiles, units, 2, 8, 4, 2, 4).transpose(0, 2, 3, 1, 5, 4, 6)


_UNPACKED: dict[str, Callable[..., NDArray[np.generic]]] = {
    "codes4": _unpacked_codes4,
    "codes6": _unpacked_codes6,
    "codes8": lambda raw, tiles, units: _unpacked_codes8(raw.view(np.int8), tiles, units),
    "bf16": lambda raw, tiles, units: from_bf16(np.ascontiguousarray(_unpacked_16(raw.view(np.uint16), tiles, units))),
    "f16": lambda raw, tiles, units: _unpacked_16(raw.view(np.float16), tiles, units),
    "f32": lambda raw, tiles, units: (
        raw.view(np.float32).reshape(tiles, units, 2, 2, 8, 4, 4).transpose(0, 2, 4, 1, 3, 5, 6)
    ),
}


def own_heads(heads: int, cards: int) -> int:
    """Heads of a cache that a card has: equal shares, or if there are none all of them."""
    return heads if heads % cards else heads // cards


#: The types that have a layout.
TYPES: tuple[DType, ...] = (F32, F16, BF16, *BLOCKS)


@dataclass(frozen=True)
class CardLayouts(Layouts):
    """The layouts of some cards.

    Attributes:
        cards: how many share the rows of each matrix.
    """

    matrices: str = "tensor_tiles"
    matrices_meaning: str = "packed at load in tiles of 16 rows, as tensor cores take them"
    tables: str = "tensor_tiles"
    page: int = 64
    align: int = 256
    cards: int = 1

    def own_rows(self, n: int) -> int:
        """Rows of a matrix of `n` that a card has: equal shares of whole tiles, or if there are none all of them."""
        return n if n % (ROWS * self.cards) else n // self.cards

    def own_heads(self, heads: int) -> int:
        return own_heads(heads, self.cards)

    @property
    def matrix_types(self) -> tuple[DType, ...]:
        return TYPES

    def matrix_bytes(self, dtype: DType, n: int, k: int) -> int:
        """On each card."""
        return matrix_bytes(dtype, self.own_rows(n), k)


LAYOUTS = CardLayouts()
