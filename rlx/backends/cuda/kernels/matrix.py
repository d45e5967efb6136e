"""Reads packed matrices: operands of tensor cores, and single numbers (see `layouts.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rlx.backends.cuda.code import F32, I8, I16, I32, I64, Code, Value
from rlx.backends.cuda.layouts import DEPTH, LANES, ROWS, Form
from rlx.backends.cuda.numbers import bf16_parts

_ONES = 0x3F803F80  # two bf16 of 1
_V4 = "<4 x i32>"

#: For each half of 32 k, for each part that adds up, the four registers of an operand.
Halves: TypeAlias = list[list[list[Value]]]

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
        self.units, self.groups = form.units(k), form.units(k) * (form.unit // DEPTH)
        scales, lows, self.nbytes = form.places(n, k)
        self._scales, self._lows = code.at(base, I8, scales), code.at(base, I8, lows)

    def load(self, tile: Value, unit: Value) -> list[Value]:
        """What a lane has of a unit, as it is stored: registers."""
        k = self.code
        first = ((tile * self.units + unit) * self.form.loads) * LANES + k.lane
        return [
            word
            for i in range(self.form.loads)
            for word in k.lanes(k.load(self.base, _V4, first + i * LANES, constant=True))
        ]

    def numbers(self, tile: Value, unit: Value) -> list[list[tuple[Value, Value]]]:
        """The scales of a unit, and the lows: for each 32 k, for each scale of them, those of the two rows."""
        found: list[list[tuple[Value, Value]]] = []
        for q in range(self.form.unit // DEPTH):
            group = tile * self.groups + unit * (self.form.unit // DEPTH) + q
            for base in (self._scales, self._lows)[: bool(self.form.scales) + self.form.lows]:
                found.append(self._pairs(base, group))
        return found

    def _pairs(self, base: Value, group: Value) -> list[tuple[Value, Value]]:
        k, count = self.code, 2 * self.form.scales
        place = group * (ROWS // 2) + (k.lane >> 2)
        values = k.lanes(k.load(base, f"<{count} x float>", place, constant=True, align=4 * count))
        return list(zip(values[::2], values[1::2], strict=True))

    def unpacked(self, words: Sequence[Value], numbers: Sequence[list[tuple[Value, Value]]]) -> Iterator[Group]:
        """The groups of a unit."""
        lists = bool(self.form.scales) + self.form.lows
        for q in range(self.form.unit // DEPTH):
            parts = _UNPACK[self.form.kind](self.code, words, q, self.form.zero)
            own = numbers[q * lists : (q + 1) * lists]
            yield Group(parts, own[0] if lists else [], own[1] if lists > 1 else [])

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
        if form.kind == "codes4":
            value = value - float(form.zero)
        for base, scales in ((self._scales, True), (self._lows, False)):
            if (scales and form.scales) or (not scales and form.lows):
                part = h if form.scales == 2 else h * 0
                place = (((tile * self.groups + group) * 8 + g) * form.scales + part) * 2 + half
                number = k.load(base, F32, place, constant=True)
                value = value * number if scales else value - number
        return value


# -- registers of a lane -> operands ---------------------------------------------------------------------------------


def _codes8(k: Code, words: Sequence[Value], q: int, zero: int) -> Halves:
    """Word [half of rows][half of k] has four codes."""
    pairs = [[_two_codes(k, words[2 * half + h]) for half in range(2)] for h in range(2)]
    return [[[rows[0][0], rows[1][0], rows[0][1], rows[1][1]]] for rows in pairs]


def _two_codes(k: Code, word: Value) -> tuple[Value, Value]:
    """Four int8 as two registers of two bf16: through f32, 2^23 + (code + 128) less 2^23 + 128, which is exact."""
    flipped, magic = word ^ -0x7F7F7F80, k.number(0x4B000000)
    numbers = [(k.bytes_of(flipped, magic, 0x7440 + i).bits(F32) - float(2**23 + 128)).bits(I32) for i in range(4)]
    return k.bytes_of(numbers[0], numbers[1], 0x7632), k.bytes_of(numbers[2], numbers[3], 0x7632)


def _codes4(k: Code, words: Sequence[Value], q: int, zero: int) -> Halves:
    """Word [32 k][half of rows] has eight codes. A bf16 with the bits 0x4300 + code is 128 + code."""
    registers = [[_four_bits(k, words[2 * q + half], i, zero) for i in range(4)] for half in range(2)]
    return [
        [[registers[0][2 * h], registers[1][2 * h], registers[0][2 * h + 1], registers[1][2 * h + 1]]] for h in range(2)
    ]


def _four_bits(k: Code, word: Value, i: int, zero: int) -> Value:
    raised = ((word >> 4 * i) & 0x000F000F) | 0x43004300
    minus = 0xC300 | zero  # a bf16 of -(128 + zero)
    less = k.number(_signed(minus << 16 | minus))
    return k.pure_assembly(I32, "fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", raised, k.number(_ONES), less)


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


_UNPACK = {"codes8": _codes8, "codes4": _codes4, "bf16": _bf16, "f16": _f16, "f32": _f32}


# -- single numbers ----------------------------------------------------------------------------------------------------


def _element8(k: Code, base: Value, start: Value, lane: Value, half: Value, h: Value, j: Value, q: Value) -> Value:
    return k.load(base, I8, (start * LANES + lane) * 16 + half * 8 + h * 4 + j, constant=True).to(F32, signed=True)


def _element4(k: Code, base: Value, start: Value, lane: Value, half: Value, h: Value, j: Value, q: Value) -> Value:
    word = k.load(base, I32, (start * LANES + lane) * 4 + q * 2 + half, constant=True)
    nibble = (j % 2) * 4 + h * 2 + j // 2
    return (word >> (nibble * 4) & 15).to(F32)


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
    "codes8": _element8, "codes4": _element4, "bf16": _element16("bf16"), "f16": _element16("f16"), "f32": _element32,
}  # fmt: skip
