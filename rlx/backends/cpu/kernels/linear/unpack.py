"""Unpacks packed weights to registers, for linear kernels: each type of the layout that `layouts.py` defines.

A quantized type is read in sub-blocks of 32 k: eight vectors of 64 unsigned codes (one per group of 4 k, 16 rows each)
and vectors of 16 scales, one per sub-block or one per half of it. A weight is then

    scale * (code - zero)    or, for types with lows,    scale * code - low

The codes of F8_E4M3 are not integers: `weights_f32` can read them, int8 dot products cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llvmlite import ir

from rlx.backends.blocks import Blocks
from rlx.backends.cpu.layouts import PACKINGS
from rlx.backends.cpu.tiles import F32X16, I8, I8X64, I32X16, Emitter, Index, constant, vector
from rlx.ir.dtypes import F16, F32, DType

#: k of a chunk: a chunk is summed in registers, and the sums of chunks are added in f32.
CHUNK = 256
#: k of a sub-block and its groups of 4 k.
SUB, GROUPS = 32, 8


@dataclass(frozen=True)
class Format:
    """Emits the reads of one quantized type.

    Attributes:
        row: the type's row of `BLOCKS`; `bits` is the width of the codes that `codes` returns.
    """

    row: Blocks

    @property
    def vectors(self) -> int:
        """Number of vectors of scales and lows per sub-block."""
        return self.row.parts * (2 if self.row.lows else 1)

    def chunk(self, e: Emitter, chunk: ir.Value) -> list[ir.Value]:
        """The f16 numbers of a superblock as f32, loaded once per chunk."""
        numbers = [e.load_as_f32(F16, e.at(chunk, 32 * i)) for i in range(self.row.head)]
        return numbers if self.row.unit == 1 else [e.b.fmul(n, e.f32(self.row.unit)) for n in numbers]

    def scales(self, e: Emitter, header: list[ir.Value], sub: ir.Value) -> list[ir.Value]:
        """(numbers from `chunk`, sub-block) -> the vectors of scales, then of lows, f32.

        Without the numbers of a type that has some: the integers that they multiply.
        """
        numbers = header or [e.f32(1.0)] * self.row.head
        return _SCALES[self.row.scales](e, numbers, sub, self.row.parts)

    def codes(self, e: Emitter, sub: ir.Value, groups: Sequence[int] = range(GROUPS)) -> list[ir.Value]:
        """Sub-block -> the vectors of 64 codes of some groups. Memory is read in ascending order."""
        at, first = self.row.codes_at, 0
        words: list[ir.Value] = []
        for width in self.row.planes:
            plane = e.at(sub, at)
            read = {j: e.load(I32X16, e.at(plane, 64 * j)) for j in sorted({group % width for group in groups})}
            piece = [_bits(e, read[group % width], first, width, group) for group in groups]
            words = [e.b.or_(a, b) for a, b in zip(words, piece, strict=True)] if words else piece
            at, first = at + 64 * width, first + width
        codes = [e.b.bitcast(w, I8X64) for w in words]
        return [e.isa.look_up_bytes(e, c, self.row.levels) for c in codes] if self.row.levels else codes

    @property
    def plain(self) -> bool:
        """Whether codes lie in memory as `codes` returns them."""
        return self.row.planes == (8,) and not self.row.levels

    def plain_code(self, e: Emitter, sub: ir.Value, group: Index) -> ir.Value:
        """The codes of a group of a `plain` type, which may be a run-time value."""
        return e.load(I8X64, e.at(sub, (group, 64), self.row.codes_at))

    def order(self, groups: Sequence[int]) -> list[int]:
        """Groups in the order in which as few words of planes as possible are needed at the same time."""
        widths = sorted(self.row.planes)
        return sorted(groups, key=lambda group: [group % width for width in widths])


def chunk_bytes(dtype: DType) -> int:
    """Bytes of a chunk of one row block."""
    return PACKINGS[dtype].nbytes * CHUNK // PACKINGS[dtype].superblock


def sub_block(e: Emitter, format_: Format, chunk: ir.Value, s: ir.Value) -> ir.Value:
    """Address of sub-block `s` of a chunk."""
    return e.at(chunk, (s, format_.row.stride), format_.row.head_bytes)


def weights_f32(e: Emitter, format_: Format, codes: list[ir.Value], scales: list[ir.Value]) -> list[ir.Value]:
    """The 32 weight vectors of a sub-block in f32, equal to the reference dequantization.

    scale * code has at most 24 bits, so it is exact, and the multiply-add rounds once, like the reference. Levels are
    converted to signed numbers first. The reason is that scales of MXFP4 reach 2^127: scale * zero would overflow where
    the value does not.
    """
    row = format_.row
    if row.floats or row.levels or row.signed:
        number = _e4m3 if row.floats else _signed_byte
        words = [e.b.bitcast(code if row.floats else _without_zero(e, row, code), I32X16) for code in codes]
        return [e.b.fmul(number(e, words[k // 4], k % 4), scales[k * row.parts // SUB]) for k in range(SUB)]
    if row.lows:
        offsets = [e.b.fneg(low) for low in scales[row.parts :]]
    else:
        offsets = [e.b.fmul(scale, e.f32(-row.zero)) for scale in scales]
    weights = []
    for k in range(SUB):
        part = k * row.parts // SUB
        word = e.b.bitcast(codes[k // 4], I32X16)
        code = e.b.and_(e.b.lshr(word, e.i32(8 * (k % 4))), e.i32(255))
        weights.append(e.fma(e.to_f32(code), scales[part], offsets[part]))
    return weights


def _without_zero(e: Emitter, row: Blocks, codes: ir.Value) -> ir.Value:
    return e.b.sub(codes, constant(I8X64, row.zero - 256 * (row.zero > 127)))


def _signed_byte(e: Emitter, word: ir.Value, byte: int) -> ir.Value:
    """One signed byte of each word, as f32."""
    return e.to_f32(e.b.ashr(_move(e, word, 24 - 8 * byte), e.i32(24)))


def _e4m3(e: Emitter, word: ir.Value, byte: int) -> ir.Value:
    """One e4m3fn number of each word, as f32. The result does not depend on the mode for f32 subnormals."""
    sign = e.b.and_(_move(e, word, 24 - 8 * byte), e.i32(-0x80000000))
    size = e.b.and_(_move(e, word, 20 - 8 * byte), e.i32(0x07F00000))
    is_nan = e.b.icmp_unsigned("==", size, e.i32(0x07F00000))
    bits = e.b.select(is_nan, e.i32(0x7FC00000), _e4m3_size(e, size))
    return e.b.bitcast(e.b.or_(bits, sign), F32X16)


def _e4m3_size(e: Emitter, size: ir.Value) -> ir.Value:
    """Exponent and mantissa at bits 20 to 26 -> the bits of the f32 magnitude. NaN is not handled."""
    normal = e.b.bitcast(e.b.add(size, e.i32((127 - 7) << 23)), F32X16)
    # With exponent 0 the value is m * 2^-9, but `normal` is 2^-7 * (1 + m / 8). Twice `normal` is 2^-6 too large.
    small = e.fma(normal, e.f32(2.0), e.f32(-(2.0**-6)))
    value = e.b.select(e.b.icmp_unsigned("<", size, e.i32(1 << 23)), small, normal)
    return e.b.bitcast(value, I32X16)


# --- scales: (f16 numbers, sub-block, parts) -> scales, then lows ---------------------------------------------------


def _scales_d(e: Emitter, header: list[ir.Value], sub: ir.Value, parts: int) -> list[ir.Value]:
    return [e.load_as_f32(F16, sub)]


def _scales_d_m(e: Emitter, header: list[ir.Value], sub: ir.Value, parts: int) -> list[ir.Value]:
    return [e.load_as_f32(F16, sub), e.b.fneg(e.load_as_f32(F16, e.at(sub, 32)))]


def _scales_d_s(e: Emitter, header: list[ir.Value], sub: ir.Value, parts: int) -> list[ir.Value]:
    bytes_ = [e.b.sext(e.load(vector(I8), e.at(sub, 16 * part)), I32X16) for part in range(parts)]
    return [e.b.fmul(e.b.sitofp(b, F32X16), header[0]) for b in bytes_]


def _scales_d_s_m(e: Emitter, header: list[ir.Value], sub: ir.Value, parts: int) -> list[ir.Value]:
    bytes_ = _unsigned(e, sub, 2)
    return [e.b.fmul(e.b.sitofp(b, F32X16), d) for b, d in zip(bytes_, header, strict=True)]


def _scales_d_sm(e: Emitter, header: list[ir.Value], sub: ir.Value, parts: int) -> list[ir.Value]:
    bytes_ = _unsigned(e, sub, parts)
    both = [[e.b.and_(b, e.i32(15)) for b in bytes_], [e.b.lshr(b, e.i32(4)) for b in bytes_]]
    return [e.b.fmul(e.b.sitofp(b, F32X16), d) for d, own in zip(header, both, strict=True) for b in own]


def _scales_one(e: Emitter, header: list[ir.Value], sub: ir.Value, parts: int) -> list[ir.Value]:
    return header


def _scales_f32(e: Emitter, header: list[ir.Value], sub: ir.Value, parts: int) -> list[ir.Value]:
    return [e.load_as_f32(F32, sub)]


def _scales_e8m0(e: Emitter, header: list[ir.Value], sub: ir.Value, parts: int) -> list[ir.Value]:
    """2^(x - 128): x - 1 is the f32 exponent field, except for the two subnormal results."""
    (x,) = _unsigned(e, sub, 1)
    subnormal = e.b.select(e.b.icmp_unsigned("==", x, e.i32(0)), e.i32(1 << 21), e.i32(1 << 22))
    normal = e.b.shl(e.b.sub(x, e.i32(1)), e.i32(23))
    return [e.b.bitcast(e.b.select(e.b.icmp_unsigned("<", x, e.i32(2)), subnormal, normal), F32X16)]


def _scales_e4m3(e: Emitter, header: list[ir.Value], sub: ir.Value, parts: int) -> list[ir.Value]:
    """Half of an e4m3 number without its sign; 0x7f is 0."""
    scales = []
    for x in _unsigned(e, sub, parts):
        size = e.b.and_(x, e.i32(0x7F))
        number = e.b.bitcast(_e4m3_size(e, e.b.shl(size, e.i32(20))), F32X16)
        scales.append(e.b.select(e.b.icmp_unsigned("==", x, e.i32(0x7F)), e.f32(0.0), e.b.fmul(number, e.f32(0.5))))
    return scales


def _unsigned(e: Emitter, sub: ir.Value, count: int) -> list[ir.Value]:
    return [e.b.zext(e.load(vector(I8), e.at(sub, 16 * i)), I32X16) for i in range(count)]


_SCALES: dict[str, Callable[[Emitter, list[ir.Value], ir.Value, int], list[ir.Value]]] = {
    "d": _scales_d,
    "d_m": _scales_d_m,
    "d_s": _scales_d_s,
    "d_s_m": _scales_d_s_m,
    "d_sm": _scales_d_sm,
    "one": _scales_one,
    "f32": _scales_f32,
    "e8m0": _scales_e8m0,
    "e4m3": _scales_e4m3,
}


# --- codes ----------------------------------------------------------------------------------------------------------


def _bits(e: Emitter, word: ir.Value, first: int, width: int, group: int) -> ir.Value:
    """A group's bits of a word of a plane, moved to bits `first` and up of the codes."""
    if width == 8:
        return word
    place = group // width * width
    if e.isa.shifts_bytes and first == 0 and place + width == 8:  # nothing is left to mask
        shifted = e.b.lshr(e.b.bitcast(word, I8X64), constant(I8X64, place))
        return e.b.bitcast(shifted, I32X16)
    return _mask(e, _move(e, word, first - place), ((1 << width) - 1) << first)


def _mask(e: Emitter, word: ir.Value, byte: int) -> ir.Value:
    return e.b.and_(word, e.i32(byte * 0x01010101))


def _move(e: Emitter, word: ir.Value, left: int) -> ir.Value:
    """Shifts words left, or right if negative. The caller masks the bits that crossed a byte."""
    if left == 0:
        return word
    return e.b.shl(word, e.i32(left)) if left > 0 else e.b.lshr(word, e.i32(-left))
