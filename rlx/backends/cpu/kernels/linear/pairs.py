"""Weights of quantized types as pairs of bf16, for tile registers, by arithmetic in f32: few instructions a weight.

A code is not shifted down and converted. Its bits stay where they are, or nearly, and become the mantissa of an f32
with a chosen exponent, by one instruction:

    bits [p, p + width) of a word, under the exponent 23 - p    ->    2^(23 - p) + code

    weight = number * scale - (low + (zero + 2^(23 - p)) * scale)

The bracket is rounded once a sub-block: to at most 2^-14 of a scale, as p is at least 12. Then a weight is rounded to
the nearest bf16; one in the middle goes away from zero.
"""

from __future__ import annotations

from collections.abc import Iterator

from llvmlite import ir

from rlx.backends.cpu import dots
from rlx.backends.cpu.kernels.linear.unpack import GROUPS, Format, weights_f32
from rlx.backends.cpu.tiles import BF16X32, F32X16, I32, I32X16, Emitter

_MANTISSA, _BIAS = 23, 127
_LOWEST = 12  # bit of a code in a mantissa: the lower, the more the bracket is rounded
_SMALL = ("d", "d_m", "d_s", "d_s_m", "d_sm", "one")  # formulas of scales that 2^11 does not bring out of range


def pairs_bf16(e: Emitter, format_: Format, sub: ir.Value, header: list[ir.Value]) -> Iterator[tuple[int, ir.Value]]:
    """A sub-block as 16 vectors of 16 pairs of bf16, k and the next one of each row: (number of the pair, vector)."""
    scales = format_.scales(e, header, sub)
    if format_.row.floats or format_.row.scales not in _SMALL:
        weights = weights_f32(e, format_, format_.codes(e, sub), scales)
        yield from enumerate(dots.bf16_rounded(e, *pair) for pair in zip(weights[::2], weights[1::2], strict=True))
        return
    reader, upper = _Reader(e, format_, sub, scales), _upper(e)
    for group in format_.order(range(GROUPS)):
        weights = [reader.weight(group, k) for k in range(4)]
        yield 2 * group, _rounded(e, weights[0], weights[1], upper)
        yield 2 * group + 1, _rounded(e, weights[2], weights[3], upper)


class _Reader:
    """Weights of the sub-block at `sub`.

    Args:
        scales: the vectors of scales, then those of lows.
    """

    def __init__(self, e: Emitter, format_: Format, sub: ir.Value, scales: list[ir.Value]) -> None:
        self.e, self.row, self._format, self._sub = e, format_.row, format_, sub
        self.scales, self.lows = scales[: self.row.parts], scales[self.row.parts :]
        self.in_place = self.row.planes == (4,) and not self.row.levels  # codes are read as they lie in memory
        self._words: dict[int, ir.Value] = {}
        self._moved: dict[tuple[int, int], ir.Value] = {}
        self._brackets: dict[tuple[int, int], ir.Value] = {}

    def weight(self, group: int, k: int) -> ir.Value:
        """Weight `k` of a group of 4, of each of 16 rows, in f32."""
        e, row, part = self.e, self.row, group * self.row.parts // GROUPS
        bits = 4 if self.in_place else row.bits
        first = 8 * k + (group // 4 * 4 if self.in_place else 0)
        left = _left(first, bits)
        place = first + left
        code = e.b.and_(self._word(group, left), e.i32(((1 << bits) - 1) << place))
        exponent = (_BIAS + _MANTISSA - place) << _MANTISSA
        flips = 1 << (place + bits - 1) if row.signed else 0  # -128 becomes 0
        number = e.b.xor(code, e.i32(exponent | flips)) if flips else e.b.or_(code, e.i32(exponent))
        return e.fma(e.b.bitcast(number, F32X16), self.scales[part], self._bracket(part, place))

    def _word(self, group: int, left: int) -> ir.Value:
        """The word with the codes of a group, moved to the left, or to the right if negative."""
        e, number = self.e, group % 4 if self.in_place else group
        if number not in self._words:
            at = e.at(self._sub, self.row.codes_at + 64 * number)
            word = e.load(I32X16, at) if self.in_place else self._format.codes(e, self._sub, [group])[0]
            self._words[number] = self._moved[number, 0] = e.b.bitcast(word, I32X16)
        if (number, left) not in self._moved:
            move = e.b.shl if left > 0 else e.b.lshr
            self._moved[number, left] = move(self._words[number], e.i32(abs(left)))
        return self._moved[number, left]

    def _bracket(self, part: int, place: int) -> ir.Value:
        """Minus the bracket of the module's text."""
        e, row, key = self.e, self.row, (part, place)
        if key not in self._brackets:
            zero = 0 if row.lows else row.zero + 128 * row.signed
            low = e.b.fneg(self.lows[part]) if row.lows else e.f32(0.0)
            self._brackets[key] = e.fma(self.scales[part], e.f32(-float(zero + (1 << (_MANTISSA - place)))), low)
        return self._brackets[key]


def _left(first: int, bits: int) -> int:
    """How far a code from bit `first` on moves to the left, or to the right if negative, to lie in the mantissa."""
    moves = (0, 12, -12, 4, -4)  # few different ones, as the codes of a word share them
    return next(left for left in moves if _LOWEST <= first + left <= _MANTISSA - bits)


def _rounded(e: Emitter, even: ir.Value, odd: ir.Value, upper: ir.Value) -> ir.Value:
    """16 f32 of one k and 16 of the next -> 16 pairs of bf16, rounded to nearest."""
    half = e.i32(1 << 15)
    low, high = (e.b.add(e.b.bitcast(each, I32X16), half) for each in (even, odd))
    return e.b.bitcast(e.b.or_(e.b.lshr(low, e.i32(16)), e.b.and_(high, upper)), BF16X32)


def _upper(e: Emitter) -> ir.Value:
    """A mask of the upper half of each word. LLVM must not know it: it would merge halves by a slow permutation."""
    zero = e.b.trunc(e.b.lshr(e.args["end"], e.i64(63)), I32)
    return e.b.or_(e.splat(zero), e.i32(-(1 << 16)))
