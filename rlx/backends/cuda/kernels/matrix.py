"""Reads packed matrices: operands of tensor cores, and single numbers (see `layouts.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TypeAlias

from rlx.backends.cuda.code import F32, I8, I16, I32, I64, Code, Value
from rlx.backends.cuda.kernels.scales import Numbers, numbers_of
from rlx.backends.cuda.kernels.tensor_cores import copy_async
from rlx.backends.cuda.layouts import DEPTH, LANES, LOAD, ROWS, Form
from rlx.backends.cuda.numbers import bf16_parts, fma_pairs

_ONES = 0x3F803F80  # two bf16 of 1
_MINUS = -0x407F4080  # two bf16 of -1
_LOW_BYTES, _SIX_BITS = 0x00FF00FF, 0x003F003F
_RAISED = 0x43004300  # two bf16 of 128
_V4 = "<4 x i32>"

#: For each half of 32 k, for each part that adds up, the four registers of an operand.
Halves: TypeAlias = list[list[list[Value]]]

#: The registers of a unit, and what its scales and lows are made of.
Loaded: TypeAlias = tuple[list[Value], list[list[Value]]]

#: (memory, first unit of a tile, lane, half of the rows, half of the k, k of the lane, 32 k of the unit) -> a number.
Element: TypeAlias = Callable[[Code, Value, Value, Value, Value, Value, Value, Value], Value]


@dataclass(frozen=True)
class Group:
    """A tile of 16 rows times 32 k, as a lane has it.

    Attributes:
        parts: the operands of products, registers of two bf16 each.
        scales, lows: for each scale of the 32 k those of the two rows of the lane.
    """

    parts: Halves
    scales: list[tuple[Value, Value]]
    lows: list[tuple[Value, Value]]


class Matrix:
    """A packed matrix in a kernel.

    Args:
        base: its memory.
        form: how it is stored.
        n, k: its sizes.
    """

    def __init__(self, code: Code, base: Value, form: Form, n: int, k: int) -> None:
        self.code, self.form, self.base = code, form, base
        self.units, self.groups, self.superblocks = form.units(k), form.groups(k), k // form.block
        fields, heads, self.nbytes = form.places(n, k)
        self._fields, self._heads = code.at(base, I8, fields), code.at(base, I8, heads)

    @staticmethod
    def one_of(first: Value, one: Matrix, other: Matrix) -> Matrix:
        """One of two matrices of the same form and sizes."""
        found = copy(one)
        for name in ("base", "_fields", "_heads"):
            setattr(found, name, one.code.select(first, getattr(one, name), getattr(other, name)))
        return found

    def codes_at(self, tile: Value) -> Value:
        """Where the codes of a tile begin."""
        return self.code.at(self.base, _V4, tile * (self.units * self.form.code_bytes // LOAD))

    def fields_at(self, tile: Value) -> Value:
        """Where the fields of a tile begin."""
        return self.code.at(self._fields, _V4, tile * (self.units * self.form.field_bytes // LOAD))

    def heads_at(self, tile: Value) -> Value:
        """Where the numbers of the superblocks of a tile begin."""
        return self.code.at(self._heads, _V4, tile * (self.superblocks * self.form.head_bytes // LOAD))

    def numbers(self, tile: Value, unit: Value) -> list[list[Value]]:
        """What the scales and lows of a unit are made of, for the two rows of the lane: registers for each 32 k."""
        count, g = self.form.unit // DEPTH, self.code.lane >> 2
        head = self._head(tile, unit * count, g)  # superblocks are whole units
        return [self._field(tile, unit * count + q, g) + head for q in range(count)]

    def _field(self, tile: Value, group: Value, g: Value) -> list[Value]:
        """The fields of 32 k of rows g and g + 8."""
        if self.form.row is None or not self.form.row.field_bytes:
            return []
        return self._words(self._fields, 2 * self.form.row.field_bytes, (tile * self.groups + group) * 8 + g)

    def _head(self, tile: Value, group: Value, g: Value) -> list[Value]:
        """The numbers of the superblock of 32 k."""
        if self.form.row is None or not self.form.row.head:
            return []
        place = (tile * self.superblocks + group // self.form.row.subs) * 8 + g
        return self._words(self._heads, 4 * self.form.row.head, place)

    def _words(self, base: Value, nbytes: int, index: Value) -> list[Value]:
        """The bytes with a number as i32."""
        k = self.code
        if nbytes == 2:
            return [k.load(base, I16, index, constant=True).to(I32)]
        return k.fetched(k.at(base, f"<{nbytes // 4} x i32>", index), nbytes // 4)

    def copy(self, to: Value, place: Value, tiles: int, kept: Value) -> None:
        """Begins to copy a unit, as it is stored, to shared memory of a warp.

        Args:
            place: its number among all units, or that of the unit so many tiles before.
            kept: of 16 bytes, or 0 if there is no such unit.
        """
        k, form = self.code, self.form
        superblock = place // (form.block // form.unit) if form.head_bytes else place
        end, arrays = 0, list[tuple[int, Value]]()  # where each ends, in times 16 bytes, and what a lane copies of it
        for base, nbytes, number, each in (
            (self.base, form.code_bytes, place, self.units),
            (self._fields, form.field_bytes, place, self.units),
            (self._heads, form.head_bytes, superblock, self.superblocks),
        ):
            if count := nbytes // LOAD:
                source = k.at(k.at(base, _V4, number * count + k.lane), _V4, tiles * each * count - end)
                end += count
                arrays.append((end, source))
        for start in range(0, end, LANES):
            *others, (_, source) = [(stop, own) for stop, own in arrays if stop > start]
            for stop, other in reversed(others):
                source = k.select(k.lane < stop - start, other, source)
            with k.guarded(k.lane < end - start if start + LANES > end else None):
                copy_async(k, k.at(to, _V4, k.lane + start), k.at(source, _V4, start), kept)

    def copied(self, place: Value) -> Loaded:
        """The registers of a unit that was copied."""
        k, form, g = self.code, self.form, self.code.lane >> 2
        words = lane_words(k, form, place, k.lane)
        count, fields = form.unit // DEPTH, form.code_bytes
        if form.row is None:
            return words, [[] for _ in range(count)]
        size = 2 * form.row.field_bytes
        head = _shared_words(k, k.at(place, I8, fields + form.field_bytes), 4 * form.row.head, g)
        return words, [_shared_words(k, k.at(place, I8, fields), size, g + 8 * q) + head for q in range(count)]

    def unpacked(self, words: Sequence[Value], numbers: Sequence[list[Value]], *, raw: bool = False) -> Iterator[Group]:
        """The groups of a unit.

        Args:
            raw: codes are as they lie.
        """
        for q in range(self.form.unit // DEPTH):
            found = numbers_of(self.code, self.form.row, numbers[q]) if self.form.row else Numbers([], [])
            yield (self.raw if raw else self.group)(words, q, found)

    def group(self, words: Sequence[Value], q: int, numbers: Numbers) -> Group:
        """32 k of a unit."""
        return Group(_UNPACK[self.form.kind](self.code, words, q, self.form.zero), numbers.scales, numbers.lows)

    def raw(self, words: Sequence[Value], q: int, numbers: Numbers) -> Group:
        """As `group`, whose codes are bf16 as they lie: c + `Form.offset` times 2^-133.

        Of codes of 4 bits, those of k 16 to 31 are times 2^-129.
        """
        unpack = _RAW.get(self.form.kind)
        if unpack is None:
            return self.group(words, q, numbers)
        return Group(unpack(self.code, words, q, self.form.offset), numbers.scales, numbers.lows)

    def element(self, row: Value, column: Value) -> Value:
        """One number of the matrix, f32."""
        k, form = self.code, self.form
        row, column = row.to(I64), column.to(I64)
        tile, half, g = row // ROWS, (row // 8) % 2, row % 8
        unit, group, low = column // form.unit, column // DEPTH, column % DEPTH
        h, t, j = low // 16, (low // 4) % 4, low % 4
        lane = g * 4 + t
        start = (tile * self.units + unit) * form.loads
        value = _ELEMENT[form.kind](k, self.base, start, lane, half, h, j, (column // DEPTH) % (form.unit // DEPTH))
        if form.zero:
            value = value - float(form.zero)
        if form.row:
            tile32, group32 = tile.to(I32), group.to(I32)
            stored = self._field(tile32, group32, g.to(I32)) + self._head(tile32, group32, g.to(I32))
            found = numbers_of(k, form.row, stored)
            first = h.equals(0) if form.scales == 2 else None
            value = value * self._one(found.scales, first, half.equals(0))
            if found.lows:
                value = value - self._one(found.lows, first, half.equals(0))
        return value

    def _one(self, pairs: Sequence[tuple[Value, Value]], first: Value | None, upper: Value) -> Value:
        """Of each 32 k the number of one row, in the first or the second half of the k."""
        rows = [self.code.select(upper, *pair) for pair in pairs]
        return rows[0] if first is None else self.code.select(first, *rows)


def lane_words(k: Code, form: Form, place: Value, lane: Value) -> list[Value]:
    """The registers of a lane of a unit in shared memory."""
    type_ = I32 if form.words == 1 else _V4
    found = [k.load(place, type_, lane + i * LANES) for i in range(form.loads)]
    return found if form.words == 1 else [word for vector in found for word in k.lanes(vector)]


def _shared_words(k: Code, base: Value, nbytes: int, index: Value) -> list[Value]:
    """As `Matrix._words`, in shared memory."""
    if not nbytes:
        return []
    if nbytes == 2:
        return [k.load(base, I16, index).to(I32)]
    return k.lanes(k.load(base, f"<{nbytes // 4} x i32>", index))


# -- registers of a lane -> operands ---------------------------------------------------------------------------------


def _by_rows(words: Sequence[Value], two: Callable[[Value], Value]) -> Halves:
    """Operands of four words [half of rows][half of k] of four codes, of k 0, 2, 1, 3.

    Args:
        two: a word -> the operand of the codes in its bytes 0 and 2.
    """
    pairs = [[(two(word), two(word >> 8)) for word in words[h::2]] for h in range(2)]
    return [[[rows[0][0], rows[1][0], rows[0][1], rows[1][1]]] for rows in pairs]


def _codes8(k: Code, words: Sequence[Value], q: int, zero: int) -> Halves:
    """A code is its low 7 bits, less 128 if its highest bit is set.

    With bits 0x4300 + low 7 bits a bf16 is 128 + these, with 0x4300 + highest bit it is 128 or 256: their difference is
    the code, exactly.
    """

    def two(word: Value) -> Value:
        low, high = word & 0x007F007F | _RAISED, word & 0x00800080 | _RAISED
        return fma_pairs(k, high, k.number(_MINUS), low)

    return _by_rows(words, two)


def _codes6(k: Code, words: Sequence[Value], q: int, zero: int) -> Halves:
    return _by_rows(_four_words(words), lambda word: _less(k, word & _SIX_BITS | _RAISED, zero))


def _four_words(words: Sequence[Value]) -> list[Value]:
    """The words of codes of 6 bits, whose bytes have others in bits 6 and 7."""
    first, second, third = words
    return [*words, first >> 6 & 0x03030303 | second >> 4 & 0x0C0C0C0C | third >> 2 & 0x30303030]


def _codes4(k: Code, words: Sequence[Value], q: int, zero: int) -> Halves:
    """Word [32 k][half of rows] has eight codes."""
    registers = [
        [_less(k, words[2 * q + half] >> 4 * i & 0x000F000F | _RAISED, zero) for i in range(4)] for half in range(2)
    ]
    return [[[registers[0][h], registers[1][h], registers[0][2 + h], registers[1][2 + h]]] for h in range(2)]


def _less(k: Code, raised: Value, zero: int) -> Value:
    """Two codes less `zero`. A bf16 with the bits 0x4300 + code is 128 + code."""
    minus = 0xC300 | zero  # a bf16 of -(128 + zero)
    return fma_pairs(k, raised, k.number(_ONES), k.number(_signed(minus << 16 | minus)))


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


def _bf16(k: Code, words: Sequence[Value], q: int, zero: int) -> Halves:
    """Word [half of rows][half of k][2] has two numbers."""
    return [[[words[2 * h], words[4 + 2 * h], words[2 * h + 1], words[5 + 2 * h]]] for h in range(2)]


def _f16(k: Code, words: Sequence[Value], q: int, zero: int) -> Halves:
    """As `_bf16`, of f16: two parts, which are exact for normal numbers."""
    split = [_both(k, [half.to(F32) for half in k.lanes(word.bits("<2 x half>"))]) for word in words]
    return _in_parts(split, [[2 * h, 4 + 2 * h, 2 * h + 1, 5 + 2 * h] for h in range(2)])


def _f32(k: Code, words: Sequence[Value], q: int, zero: int) -> Halves:
    """Word [half of rows][half of k][4] is a number: two parts."""
    numbers = [word.bits(F32) for word in words]
    split = [_both(k, numbers[i : i + 2]) for i in range(0, len(numbers), 2)]
    return _in_parts(split, [[2 * h, 4 + 2 * h, 2 * h + 1, 5 + 2 * h] for h in range(2)])


def _both(k: Code, numbers: Sequence[Value]) -> tuple[Value, Value]:
    """Two f32 as two registers: the high parts and the low parts, as bf16."""
    first, second = (bf16_parts(k, number) for number in numbers)
    return _pair(k, first[0], second[0]), _pair(k, first[1], second[1])


def _pair(k: Code, low: Value, high: Value) -> Value:
    return low.to(I32) & 0xFFFF | high.to(I32) << 16


def _in_parts(split: Sequence[tuple[Value, Value]], order: Sequence[Sequence[int]]) -> Halves:
    return [[[split[i][part] for i in own] for part in range(2)] for own in order]


_UNPACK = {"codes8": _codes8, "codes6": _codes6, "codes4": _codes4, "bf16": _bf16, "f16": _f16, "f32": _f32}


def _raw8(k: Code, words: Sequence[Value], q: int, offset: int) -> Halves:
    def two(word: Value) -> Value:
        if not offset:
            return word & _LOW_BYTES
        given = word, k.number(_LOW_BYTES), k.number(0x10001 * offset)
        return k.pure_assembly(I32, "lop3.b32 $0, $1, $2, $3, 0x6A;", "=r,r,r,r", *given)  # ($1 & $2) ^ $3

    return _by_rows(words, two)


def _raw6(k: Code, words: Sequence[Value], q: int, offset: int) -> Halves:
    return _by_rows(_four_words(words), lambda word: word & _SIX_BITS)


def _raw4(k: Code, words: Sequence[Value], q: int, offset: int) -> Halves:
    """Word [32 k][half of rows] has eight codes; those of k 16 to 31 stay at bits 4 to 7."""
    rows = [(word, word >> 8) for word in words[2 * q : 2 * q + 2]]
    return [[[rows[half][pair] & 0x000F000F << 4 * h for pair in range(2) for half in range(2)]] for h in range(2)]


_RAW = {"codes8": _raw8, "codes6": _raw6, "codes4": _raw4}


# -- single numbers ----------------------------------------------------------------------------------------------------


def _element8(k: Code, base: Value, start: Value, lane: Value, half: Value, h: Value, j: Value, q: Value) -> Value:
    place = (start * LANES + lane) * 16 + half * 8 + h * 4 + (j % 2 * 2 + j // 2)
    return k.load(base, I8, place, constant=True).to(F32, signed=True)


def _element6(k: Code, base: Value, start: Value, lane: Value, half: Value, h: Value, j: Value, q: Value) -> Value:
    own, word = (j % 2 * 2 + j // 2), half * 2 + h
    found = [k.load(base, I8, ((start + i) * LANES + lane) * 4 + own, constant=True).to(I32) for i in range(3)]
    value = found[0] >> 6 | found[1] >> 6 << 2 | found[2] >> 6 << 4
    for i, byte in enumerate(found):
        value = k.select(word.equals(i), byte & 63, value)
    return value.to(F32)


def _element4(k: Code, base: Value, start: Value, lane: Value, half: Value, h: Value, j: Value, q: Value) -> Value:
    word = k.load(base, I32, (start * LANES + lane) * 4 + q * 2 + half, constant=True)
    nibble = (j % 2 * 2 + j // 2) * 2 + h
    return (word >> (nibble.to(I32) * 4) & 15).to(F32)


def _element16(type_: str) -> Element:
    def element(k: Code, base: Value, start: Value, lane: Value, half: Value, h: Value, j: Value, q: Value) -> Value:
        place = ((start + half) * LANES + lane) * 8 + h * 4 + j
        if type_ == "bf16":
            return (k.load(base, I16, place, constant=True).to(I32) << 16).bits(F32)
        return k.load(base, "half", place, constant=True).to(F32)

    return element


def _element32(k: Code, base: Value, start: Value, lane: Value, half: Value, h: Value, j: Value, q: Value) -> Value:
    return k.load(base, F32, ((start + half * 2 + h) * LANES + lane) * 4 + j, constant=True)


_ELEMENT: dict[str, Element] = {
    "codes8": _element8, "codes6": _element6, "codes4": _element4, "bf16": _element16("bf16"),
    "f16": _element16("f16"), "f32": _element32,
}  # fmt: skip
