"""Rows of x as tensor cores take them beside weights: as sums of parts.

Codes of quantized weights are multiplied as int8. x is then the sum of three int8 times steps that 32 k share: the step
of the first part is 1/127 of the largest of the 32 numbers, the others are each 1/254 of the one before. So x is within
2^-23 of this largest one, and sums of products are exact. Beside other weights x is the sum of two bf16, within 2^-17.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlx.backends.cuda.code import F32, I32, Code, Value
from rlx.backends.cuda.numbers import pair_parts

STEP = 1 / 254  # of a part, in steps of the part before
_ROUND = 1.5 * 2.0**23  # added to a number it leaves its nearest integer in the low bits
_ROUND_BITS = 0x4B400000
_LEAST = 1e-30  # smaller numbers are 0


@dataclass(frozen=True)
class Parts:
    """How x is split.

    Attributes:
        count: of parts.
        nbytes: of 32 k of a part: [t][half of the k][4].
        ints: whether parts are int8.
    """

    count: int
    nbytes: int
    ints: bool

    def place(self, quad: Value) -> Value:
        """Where four k lie in their 32 k: bytes; quad: the number of the four."""
        h, t = quad >> 2 & 1, quad & 3
        return t * (self.nbytes // 4) + h * (self.nbytes // 8)

    def split(self, k: Code, numbers: Sequence[Value]) -> tuple[list[list[Value]], Value | None]:
        """Four numbers -> for each part their i32, and the step of the first part.

        Eight lanes side by side have the 32 k that share it.
        """
        if self.ints:
            return _int8_parts(k, numbers)
        pairs = [pair_parts(k, numbers[i], numbers[i + 1], "bf16") for i in (0, 2)]
        return [list(part) for part in zip(*pairs, strict=True)], None


INTS, FLOATS = Parts(3, 32, ints=True), Parts(2, 64, ints=False)


def _int8_parts(k: Code, numbers: Sequence[Value]) -> tuple[list[list[Value]], Value]:
    sizes = [number.bits(I32) & 0x7FFFFFFF for number in numbers]  # in the order of the numbers, NaN above infinity
    largest = k.larger(k.larger(sizes[0], sizes[1]), k.larger(sizes[2], sizes[3]))
    for distance in (1, 2, 4):
        largest = k.larger(largest, k.exchanged(largest, distance))
    top = largest.bits(F32)
    step = top * (1 / 127)
    inverse = k.select(top > _LEAST, k.call(F32, "llvm.nvvm.rcp.approx.ftz.f", top) * 127.0, k.f32(0.0))
    parts, rest = list[list[Value]](), list(numbers)
    own_step, own_inverse = step, inverse
    for _ in range(3):
        raised = [k.fma(number, own_inverse, _ROUND) for number in rest]
        parts.append([_bytes(k, [number.bits(I32) for number in raised])])
        rest = [k.fma(-(code - _ROUND), own_step, number) for code, number in zip(raised, rest, strict=True)]
        own_step, own_inverse = own_step * STEP, own_inverse * (1 / STEP)
    return parts, step


def _bytes(k: Code, words: Sequence[Value]) -> Value:
    """The lowest bytes of four i32, in the order 0, 2, 1, 3 in which codes lie."""
    first, second = k.bytes_of(words[0], words[2], 0x0040), k.bytes_of(words[1], words[3], 0x0040)
    return k.bytes_of(first, second, 0x5410)


def sums_of_products(k: Code, codes: Sequence[Value], x: Sequence[Value]) -> list[Value]:
    """The products of 16 rows of codes and 8 columns of x for 32 k, or 16, as f32 (mma.sync of s8): exact."""
    name = f"llvm.nvvm.mma.m16n8k{8 * len(codes)}.row.col.s8"
    start = k.number(_ROUND_BITS)  # so sums are the low bits of floats
    found = k.call("{i32, i32, i32, i32}", name, *codes, *x, *[start] * 4)
    sums = [k.op(f"extractvalue {found.type} {found.text}, {i}", I32) for i in range(4)]
    return [each.bits(F32) - _ROUND for each in sums]
