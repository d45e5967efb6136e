"""Rows of x for products of many rows: parts of bf16, side by side, padded with zeros to whole chunks.

One part of an x that is bf16; of one that is f32 two, within 2^-17, or three, within 2^-25.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rlx.backends.cuda.code import F32, I8, I16, I32, I64, THREADS, Code, Operand, Value, set_all
from rlx.backends.cuda.numbers import pair_parts

CHUNK = 64  # k of a chunk
COPIED = 8  # elements that a thread copies at a time
SPLIT = 8  # elements of x that a thread of `write_parts` has


@dataclass(frozen=True)
class Parts:
    """How rows of x lie in memory.

    Attributes:
        width: of x.
        count: of parts.
        padded: elements of a part of a row.
    """

    width: int
    count: int
    padded: int

    @property
    def chunks(self) -> int:
        """Of a row."""
        return -(-self.width // CHUNK)

    @property
    def nbytes(self) -> int:
        """Bytes of a row."""
        return self.count * self.padded * 2

    @property
    def whole(self) -> bool:
        """Whether all chunks are."""
        return self.padded % CHUNK == 0


def parts_of(width: int, count: int) -> Parts:
    """How `write_parts` stores rows."""
    return Parts(width, count, -(-width // CHUNK) * CHUNK)


def as_they_are(width: int) -> Parts | None:
    """Rows of bf16 where they are; None if a thread cannot copy what it needs of them."""
    return Parts(width, 1, width) if width % COPIED == 0 else None


def write_parts(k: Code, p: Parts, rows: Operand, before: int = 0) -> None:
    """The kernel: a thread for each 8 elements.

    Args:
        before: bytes in front of the parts.
    """
    x, out = k.pointers["x"], k.at(k.pointers["parts"], I8, before)
    per_row = p.padded // SPLIT
    item = k.block * THREADS + k.thread
    row, column = item // per_row, item % per_row * SPLIT
    with k.when(row < rows):
        start = row * p.width + column
        words = _bf16(k, k.at(x, I16, start), column, p) if p.count == 1 else _split(k, k.at(x, F32, start), column, p)
        line = k.at(out, I8, row.to(I64) * p.nbytes)
        for part, own in enumerate(words):
            k.store(k.at(line, I8, column * 2 + part * p.padded * 2), k.vector(own))


def _bf16(k: Code, x: Value, column: Value, p: Parts) -> list[list[Value]]:
    """Eight elements of a row of bf16: two in each word."""
    found = [k.variable(I32, 0) for _ in range(SPLIT // 2)]

    def load(i: int) -> None:
        word = found[i // 2]
        word.set(word.get() | (k.load(x, I16, i).to(I32) & 0xFFFF) << 16 * (i % 2))

    _each(k, column, p, load)
    return [[word.get() for word in found]]


def _split(k: Code, x: Value, column: Value, p: Parts) -> list[list[Value]]:
    """Eight elements of a row of f32: of each part, two in each word."""
    found = [k.variable(F32, 0.0) for _ in range(SPLIT)]
    if p.width % SPLIT == 0:
        with k.when(column < p.width):
            for i in range(0, SPLIT, 4):
                set_all(found[i : i + 4], k.lanes(k.load(k.at(x, F32, i), "<4 x float>")))
    else:
        _each(k, column, p, lambda i: found[i].set(k.load(x, F32, i)))
    numbers = [number.get() for number in found]
    pairs = [pair_parts(k, numbers[i], numbers[i + 1], "bf16", p.count) for i in range(0, SPLIT, 2)]
    return [[pair[part] for pair in pairs] for part in range(p.count)]


def _each(k: Code, column: Value, p: Parts, load: Callable[[int], None]) -> None:
    for i in range(SPLIT):
        with k.when(column + i < p.width):
            load(i)
