"""Weights as pairs of bf16, for tile registers, by arithmetic in f16: half the instructions of `pairs.py`.

    reference = a power of two above every weight of a row of W
    weight / reference = number * (scale / reference) - low / reference        32 at a time, in f16
    bf16 = its bits, moved by three and rounded, with another exponent         of numbers below 1 in size

Sums of tiles are multiplied by the references of their rows in the end. Scales and lows are rounded to f16, by at most
2^-12, the difference is rounded to f16, and then to the nearest bf16; one in the middle goes away from zero. What is
below 2^-14 of the reference counts as at most 2^-14 of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from llvmlite import ir

from rlx.backends.cpu.kernels.linear.unpack import GROUPS, Format
from rlx.backends.cpu.tiles import BF16X32, F32X16, HALF, I8X64, I16, I32X16, LANES, Emitter, constant, vector

#: Formulas of scales -> the largest integer of a scale.
_LARGEST = {"d_s": 128, "d_s_m": 63, "d_sm": 15, "one": 1, "d": 1, "d_m": 1}
_H32, _I16X32 = vector(HALF, 2 * LANES), vector(I16, 2 * LANES)
_EXPONENT, _MANTISSA_BITS = 0x7F800000, 23
_MAGIC = 0x6400  # of 1024 in f16: numbers up to 1023 are its lowest bits


def serves(e: Emitter, format_: Format | None) -> bool:
    """Whether a type is read so on the target."""
    row = format_ and format_.row
    return bool(row and e.isa.multiplies_half and row.scales in _LARGEST and not row.signed)


def bound(e: Emitter, format_: Format, header: Sequence[ir.Value]) -> ir.Value:
    """No less than the size of every weight of a superblock, by the numbers of its header, for each of 16 rows.

    Of types without such numbers: of a sub-block, by its scales and lows.
    """
    row = format_.row
    numbers = [level - row.zero for level in row.levels] if row.levels else [(1 << row.bits) - 1 - row.zero, row.zero]
    most = _LARGEST[row.scales] * max(map(abs, numbers if not row.lows else [(1 << row.bits) - 1]))
    sizes = [_absolute(e, number) for number in header]
    whole = e.b.fmul(sizes[0], e.f32(float(most)))
    return e.fma(sizes[1], e.f32(float(_LARGEST[row.scales])), whole) if row.lows else whole


def references(e: Emitter, most: ir.Value) -> tuple[ir.Value, ir.Value]:
    """(reference, 1 / reference) of weights that are at most `most` in size; the reference of zeros is 0."""
    bits = e.b.and_(e.b.bitcast(most, I32X16), e.i32(_EXPONENT))
    above = e.b.add(bits, e.i32(1 << _MANTISSA_BITS))
    inverse = e.b.bitcast(e.b.sub(e.i32(254 << _MANTISSA_BITS), above), F32X16)
    is_zero = e.b.fcmp_ordered("==", most, e.f32(0.0))
    return e.b.select(is_zero, e.f32(0.0), e.b.bitcast(above, F32X16)), inverse


def pairs(
    e: Emitter, format_: Format, sub: ir.Value, header: list[ir.Value], inverse: ir.Value
) -> Iterator[tuple[int, ir.Value]]:
    """A sub-block over the references, as `pairs.pairs_bf16`."""
    scaled = [e.b.fmul(number, inverse) for number in format_.scales(e, header, sub)]
    parts, row = format_.row.parts, format_.row
    scales, lows = [_twice(e, s) for s in scaled[:parts]], [_twice(e, low) for low in scaled[parts:]]
    in_place = row.planes == (4,) and not row.levels

    def weights(group: int, bytes_: ir.Value, place: int) -> Iterator[tuple[int, ir.Value]]:
        """The pairs of a group whose codes are bits `place` and up of bytes."""
        part = group * parts // GROUPS
        width = 4 if in_place else row.bits
        mask = constant(_I16X32, ((1 << width) - 1) << place)
        scale = e.b.fmul(scales[part], _halves(2.0**-place)) if place else scales[part]
        for i, words in enumerate((bytes_, e.b.lshr(bytes_, constant(_I16X32, 8)))):
            bits = e.b.or_(e.b.and_(words, mask), constant(_I16X32, _MAGIC))
            zero = 0 if row.lows else row.zero
            number = e.b.fsub(e.b.bitcast(bits, _H32), _halves(1024.0 + zero * 2**place))
            value = e.fma(number, scale, e.b.fneg(lows[part])) if lows else e.b.fmul(number, scale)
            yield 2 * group + i, e.b.bitcast(e.isa.bf16_of_small_half(e, value), BF16X32)

    if not in_place:
        for group in format_.order(range(GROUPS)):
            yield from weights(group, _swapped(e, format_.codes(e, sub, [group])[0]), 0)
        return
    for group in range(GROUPS // 2):
        bytes_ = _swapped(e, e.load(I8X64, e.at(sub, row.codes_at + 64 * group)))
        yield from weights(group, bytes_, 0)
        yield from weights(group + GROUPS // 2, bytes_, 4)


def _swapped(e: Emitter, codes: ir.Value) -> ir.Value:
    """64 codes, 4 k of each row, as words whose lower bytes are k 0 and 1, and whose upper ones are k 2 and 3."""
    order = [4 * row + k for row in range(LANES) for k in (0, 2, 1, 3)]
    return e.b.bitcast(e.pick(codes, order), _I16X32)


def _twice(e: Emitter, numbers: ir.Value) -> ir.Value:
    """16 numbers f32 -> each twice in f16."""
    words = e.b.zext(e.b.bitcast(e.b.fptrunc(numbers, vector(HALF)), vector(I16)), I32X16)
    return e.b.bitcast(e.b.or_(words, e.b.shl(words, e.i32(16))), _H32)


def _halves(number: float) -> ir.Value:
    """A number of f16 in all lanes."""
    return ir.Constant(_H32, [number] * _H32.count)


def _absolute(e: Emitter, numbers: ir.Value) -> ir.Value:
    return e.call("llvm.fabs.v16f32", F32X16, [numbers])
