"""LLVM assembly as text: for functions without arithmetic worth optimizing, whose branches and atomics are the point.

CPU backend, under `link.py` and the worker loop. A function with a fixed body is a template that reads as LLVM
assembly, with `$name` for what differs (`fill`). A body that follows from a program is written line by line (`Text`).
Kernels are written in other ways: see docs/architecture.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from string import Template

from rlx.backends.cpu.kernel import Units
from rlx.ir.dims import DimLike

#: A line of modules whose code is as it should be, down to the vector instructions: LLVM runs few passes on them.
WRITTEN = "!rlx.written = !{}"


def fill(text: str, **values: object) -> str:
    """A template with its places `$name` filled; `KeyError` if one has no value. `$` has no meaning in our assembly."""
    return Template(text).substitute(values)


def place(name: str, plan: Sequence[str], base: str = "%plan", prefix: str = "") -> str:
    """The line that computes the address of a field of 8 bytes in the record at `base`, as `%name.at`.

    Args:
        plan: the names of the record's fields, in order.
    """
    return f"  %{prefix}{name}.at = getelementptr inbounds i8, ptr {base}, i64 {8 * plan.index(name)}\n"


def load(name: str, plan: Sequence[str], kind: str = "ptr", base: str = "%plan", prefix: str = "") -> str:
    """The lines that load the field, as `%name`."""
    value = f"  %{prefix}{name} = load {kind}, ptr %{prefix}{name}.at, align 8\n"
    return place(name, plan, base, prefix) + value


class Text:
    """The lines of an LLVM function body, with generated value names.

    Args:
        letter: what the names begin with.
    """

    def __init__(self, letter: str = "v") -> None:
        self.lines: list[str] = []
        self.letter, self.count = letter, 0

    def value(self, code: str) -> str:
        self.count += 1
        self.lines.append(f"  %{self.letter}{self.count} = {code}")
        return f"%{self.letter}{self.count}"

    def load(self, kind: str, table: str, index: int) -> str:
        return self.value(f"load {kind}, ptr {self.value(f'getelementptr {kind}, ptr {table}, i64 {index}')}")

    def dim(self, dim: DimLike, symbols: list[str]) -> str:
        """The value of a dim. `%ext` points to the values of the symbols."""
        if isinstance(dim, int):
            return str(dim)
        total = str(dim.const)
        for name, factor in dim.terms:
            part = self.load("i64", "%ext", symbols.index(name))
            part = part if factor == 1 else self.value(f"mul i64 {part}, {factor}")
            total = part if total == "0" else self.value(f"add i64 {total}, {part}")
        return total

    def units(self, units: Units, symbols: list[str]) -> str:
        """The number of units."""
        if isinstance(units.dim, int):
            return str(units.most({}))
        count = self.ceil_div(self.dim(units.dim, symbols), str(units.per))
        return count if units.times == 1 else self.value(f"mul i64 {count}, {units.times}")

    def ceil_div(self, count: str, by: str) -> str:
        if by == "1":
            return count
        if count.isdigit() and by.isdigit():
            return str(-(-int(count) // int(by)))
        less = str(int(by) - 1) if by.isdigit() else self.value(f"sub i64 {by}, 1")
        return self.value(f"udiv i64 {self.value(f'add i64 {count}, {less}')}, {by}")

    def least(self, a: str, b: str) -> str:
        return self.value(f"call i64 @llvm.umin.i64(i64 {a}, i64 {b})")
