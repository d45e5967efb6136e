"""Rows of x as tensor cores take them beside weights: in bf16, or in f32 as the sum of two bf16, within 2^-17.

Codes of quantized weights are multiplied as they lie (`Matrix.raw`): a bf16 with the bits c, of 0 to 255, is the
number c 2^-133. So x is raised beside them, by 2^64, and products are `LOWERED` times too small until the end. If code
c means c - offset, the sum of x times -offset is added to that of products.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlx.backends.cuda.code import F32, I16, I32, Code, Value
from rlx.backends.cuda.layouts import DEPTH, Form
from rlx.backends.cuda.numbers import fma_pairs, pair_parts

NBYTES = 64  # of 32 k of a part of a row: [t][half of the k][4]
QUAD = 4  # elements of x that a thread brings at a time
QUADS = DEPTH // QUAD
_RAISED = 64, 60  # powers of two; the second one beside codes that lie 4 bits higher
#: Times this, products of x with codes as they lie are what they mean.
LOWERED = 2.0 ** (133 - _RAISED[0])
_MINUS_ZEROS = -0x7FFF8000  # two bf16 of -0


def count_of(rounded: bool) -> int:
    """Parts of x: one if it is in bf16."""
    return 1 if rounded else 2


def place(quad: Value) -> Value:
    """Where four k lie in their 32 k of a part: bytes; quad: the number of the four."""
    return (quad & 3) * 16 + (quad >> 2 & 1) * 8


def split(k: Code, numbers: Sequence[Value], quad: Value, form: Form, rounded: bool) -> list[list[Value]]:
    """Four numbers of x -> for each part two i32, raised as the weights need it."""
    if rounded:
        return [[_raised_pair(k, word, quad, form) for word in numbers]]
    if form.raw:
        factor = _factor(k, quad, form, k.f32(2.0 ** _RAISED[0]), k.f32(2.0 ** _RAISED[1]))
        numbers = [number * factor for number in numbers]
    pairs = [pair_parts(k, numbers[i], numbers[i + 1], "bf16") for i in (0, 2)]
    return [list(part) for part in zip(*pairs, strict=True)]


def _factor(k: Code, quad: Value, form: Form, first: Value, second: Value) -> Value:
    """One of two factors: the second one for k 16 to 31 beside codes of 4 bits, which lie 4 bits higher there."""
    return first if form.kind != "codes4" else k.select((quad & 4).equals(0), first, second)


def _raised_pair(k: Code, word: Value, quad: Value, form: Form) -> Value:
    """Two bf16 times a power of two."""
    if not form.raw:
        return word
    factor = _factor(k, quad, form, *(k.number(0x10001 * (by + 127 << 7)) for by in _RAISED))
    return fma_pairs(k, word, factor, k.number(_MINUS_ZEROS))


def summed(k: Code, parts: Sequence[Sequence[Value]], quad: Value, form: Form) -> Value:
    """The sum of x over the k of a scale, of which there are `sums_of` in 32 k; eight lanes side by side have these.

    It is that of the parts, times what it is multiplied with: lowered as products are, and what codes have too much.
    """
    halves = [[half.bits(F32) for word in words for half in (word << 16, word & -0x10000)] for words in parts]
    numbers = [each[0] if len(each) == 1 else each[0] + each[1] for each in zip(*halves, strict=True)]
    total: Value = (numbers[0] + numbers[1]) + (numbers[2] + numbers[3])
    if form.raw:
        times = (-float(form.offset) if form.offset else 1.0) / LOWERED
        total = total * _factor(k, quad, form, k.f32(times / 2.0 ** _RAISED[0]), k.f32(times / 2.0 ** _RAISED[1]))
    for distance in (1, 2, 4):
        if distance < QUADS // sums_of(form):
            total = total + k.exchanged(total, distance)
    return total


def sums_of(form: Form) -> int:
    """How many sums of x weights need for each 32 k."""
    return max(form.scales, 1) if form.lows or form.offset else 0


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
