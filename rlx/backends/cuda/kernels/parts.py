"""Rows of x as tensor cores take them beside weights: in bf16, or in f32 as the sum of two bf16, within 2^-17."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.backends.cuda.code import F32, I16, I32, Code, Value
from rlx.backends.cuda.layouts import DEPTH, Form
from rlx.backends.cuda.numbers import pair_parts

NBYTES = 64  # of 32 k of a part of a row: [t][half of the k][4]
QUAD = 4  # elements of x that a thread brings at a time
QUADS = DEPTH // QUAD


def count_of(rounded: bool) -> int:
    """Parts of x: one if it is in bf16."""
    return 1 if rounded else 2


def place(quad: Value) -> Value:
    """Where four k lie in their 32 k of a part: bytes; quad: the number of the four."""
    return (quad & 3) * 16 + (quad >> 2 & 1) * 8


def split(k: Code, numbers: Sequence[Value], rounded: bool) -> list[Value]:
    """Four numbers -> for each part two i32."""
    if rounded:
        return [k.vector(list(numbers))]
    pairs = [pair_parts(k, numbers[i], numbers[i + 1], "bf16") for i in (0, 2)]
    return [k.vector(list(part)) for part in zip(*pairs, strict=True)]


def summed(k: Code, numbers: Sequence[Value], sums: int, rounded: bool) -> Value:
    """The sum over the k of a scale, of which there are `sums` in 32 k; eight lanes side by side have these."""
    if rounded:
        numbers = [half.bits(F32) for word in numbers for half in (word << 16, word & -0x10000)]
    total = (numbers[0] + numbers[1]) + (numbers[2] + numbers[3])
    for distance in (1, 2, 4):
        if distance < QUADS // sums:
            total = total + k.exchanged(total, distance)
    return total


def sums_of(form: Form) -> int:
    """How many sums of x weights need for each 32 k."""
    return max(form.scales, 1) if form.lows else 0


def loaded(k: Code, x: Value, row: Value, column: Value, width: int, valid: Value, rounded: bool) -> list[Value]:
    """Four numbers of a row from `row` on, or zeros: four f32, or two i32 with two bf16 each.

    Something is always loaded, so that several are under way.
    """
    inside, element = valid & (column < width), I16 if rounded else F32
    start = k.select(inside, row + column, 0)
    if width % QUAD == 0:
        found = k.lanes(k.load(k.at(x, element, start), "<2 x i32>" if rounded else "<4 x float>"))
        return [k.select(inside, number, k.as_value(0, number.type)) for number in found]
    within = [inside & (column + i < width) for i in range(QUAD)]
    numbers = [k.load(x, element, k.select(each, start + i, 0)) for i, each in enumerate(within)]
    kept = [k.select(each, number, k.as_value(0, element)) for each, number in zip(within, numbers, strict=True)]
    if not rounded:
        return kept
    return [kept[i].to(I32) & 0xFFFF | kept[i + 1].to(I32) << 16 for i in (0, 2)]
