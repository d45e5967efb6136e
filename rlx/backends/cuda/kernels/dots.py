"""How lanes add up the products of a tile of weights and eight rows of x.

Tensor cores leave lane 4 g + t four sums: of rows g and g + 8 of the tile and rows 2 t and 2 t + 1 of x. Where they do
not multiply bf16 (before sm_80), a lane multiplies the k that it has of the tile with those of all rows of x, in f32:
products of two bf16 are exact there. So it has parts of 16 sums. At the end those of the four lanes with a g are added,
(0 + 1) + (2 + 3). If the eight rows of x are the same one, a lane has two sums, or parts of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rlx.backends.cuda.code import F32, I8, Code, Value, Variable
from rlx.backends.cuda.kernels.parts import NBYTES
from rlx.backends.cuda.kernels.tensor_cores import product
from rlx.backends.cuda.numbers import halves

_COLUMNS = 8


class Dots:
    """On tensor cores.

    Args:
        alike: whether the eight rows of x are the same one.

    Attributes:
        kept: numbers of the sums that a lane adds up.
        count: of sums that products have.
    """

    def __init__(self, code: Code, *, alike: bool) -> None:
        self.code, self.alike = code, alike
        self.kept: Sequence[int] = (0, 2) if alike else range(4)
        self.count = 4

    def lanes(self) -> tuple[Value, Value]:
        """Where a lane begins to read 32 k of the rows of x, and their sums: bytes."""
        k = self.code
        return ((k.lane & 3) * 16, k.number(0)) if self.alike else (k.lane * 16, (k.lane & 3) * 8)

    def x(self, place: Value) -> list[Value]:
        """The registers that a lane has of a part of 32 k of the rows of x."""
        return self.code.lanes(self.code.load(place, "<4 x i32>"))

    def totals(self, place: Value) -> list[Value]:
        """The sums of x of a lane."""
        k = self.code
        return [k.load(place, F32)] if self.alike else k.lanes(k.load(place, "<2 x float>"))

    def place(self, number: int) -> tuple[int, int]:
        """Of a sum: the half of the rows of the tile, and which of `totals`."""
        return number // 2, 0 if self.alike else number % 2

    def add(self, a: Sequence[Value], x: Sequence[Value], half: int, found: list[Value]) -> list[Value]:
        """Adds the products of a half of 32 k."""
        return product(self.code, a, x[2 * half : 2 * half + 2], found)

    def results(self, sums: Mapping[int, Variable]) -> Callable[[int], Value]:
        """The four sums of a lane, by number."""
        return values_of(sums)


class LaneDots(Dots):
    """By lanes: of the 16 sums, [half of the rows of the tile][row of x], if not all rows of x are the same one."""

    def __init__(self, code: Code, *, alike: bool) -> None:
        super().__init__(code, alike=alike)
        self._rows = 1 if alike else _COLUMNS
        if not alike:
            self.count = 2 * _COLUMNS
            self.kept = range(self.count)

    def lanes(self) -> tuple[Value, Value]:
        k = self.code
        return (k.lane & 3) * 16, k.number(0)

    def x(self, place: Value) -> list[Value]:
        k = self.code
        rows = [k.load(k.at(place, I8, i * NBYTES), "<4 x i32>") for i in range(self._rows)]
        return [word for row in rows for word in k.lanes(row)]

    def totals(self, place: Value) -> list[Value]:
        k, first = self.code, (self.code.lane & 3).equals(0)  # only one of the four lanes adds them
        return [k.select(first, k.load(place, F32, i), k.f32(0.0)) for i in range(self._rows)]

    def place(self, number: int) -> tuple[int, int]:
        return super().place(number) if self.alike else divmod(number, _COLUMNS)

    def add(self, a: Sequence[Value], x: Sequence[Value], half: int, found: list[Value]) -> list[Value]:
        found = list(found)
        rows = [_numbers(a[i::2]) for i in range(2)]
        columns = [_numbers(x[i + 2 * half : i + 2 * half + 2]) for i in range(0, len(x), 4)]
        for number in self.kept:
            row, column = self.place(number)
            for one, other in zip(rows[row], columns[column], strict=True):
                found[number] = self.code.fma(one, other, found[number])
        return found

    def results(self, sums: Mapping[int, Variable]) -> Callable[[int], Value]:
        k, whole = self.code, {number: self._over_lanes(each.get()) for number, each in sums.items()}
        if self.alike:
            return whole.__getitem__
        t, found = k.lane & 3, list[Value]()
        for number in range(4):
            row, which = divmod(number, 2)
            value = whole[row * _COLUMNS + which]
            for i in range(1, 4):
                value = k.select(t.equals(i), whole[row * _COLUMNS + 2 * i + which], value)
            found.append(value)
        return found.__getitem__

    def _over_lanes(self, value: Value) -> Value:
        """The sum over the four lanes with a g."""
        for distance in (1, 2):
            value = value + self.code.exchanged(value, distance)
        return value


def dots_of(code: Code, *, alike: bool = False) -> Dots:
    """How a card adds products up."""
    return (Dots if code.features.bf16 else LaneDots)(code, alike=alike)


def values_of(sums: Mapping[int, Variable]) -> Callable[[int], Value]:
    """The values of sums, by number."""
    return lambda i: sums[i].get()


def _numbers(words: Sequence[Value]) -> list[Value]:
    return [number for word in words for number in halves(word)]
