"""Packed weights in registers: how a linear kernel reads each type of the layout that `layouts.py` defines.

A quantized type is read in sub-blocks of 32 k: eight vectors of 64 unsigned codes (one a group of 4 k, 16 rows each)
and vectors of 16 scales, for all 32 k or for each 16 ("halves"). A weight is then

    scale * (code - zero)    or, for types with minima,    scale * code - low
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llvmlite import ir

from rlx.codegen.blocks import BLOCKS, Blocks
from rlx.codegen.layouts import PACKINGS
from rlx.codegen.tiles import F32X16, I8, I8X64, I32X16, Emitter, vector
from rlx.ir.dtypes import F16, DType

#: k of a chunk: the codes of a chunk are summed in registers, chunks are summed in f32.
CHUNK = 256
#: k of a sub-block and its groups of 4 k.
SUB, GROUPS = 32, 8


@dataclass(frozen=True)
class Format:
    """How one quantized type is read: its row of the layout, in instructions.

    Attributes:
        row: the type's row; its `bits` are those of the codes that come out here.
    """

    row: Blocks

    @property
    def vectors(self) -> int:
        """Scale vectors of a sub-block: the scales, then the lows."""
        return self.row.parts * (2 if self.row.lows else 1)

    def chunk(self, e: Emitter, chunk: ir.Value) -> list[ir.Value]:
        """The numbers of a superblock, loaded once a chunk."""
        return [e.load_as_f32(F16, e.at(chunk, 32 * i)) for i in range(self.row.head)]

    def scales(self, e: Emitter, header: list[ir.Value], sub: ir.Value) -> list[ir.Value]:
        """(numbers from `chunk`, sub-block) -> the scale vectors, f32."""
        return _SCALES[self.row.scales](e, header, sub, self.row.parts)

    def codes(self, e: Emitter, sub: ir.Value) -> list[ir.Value]:
        """Sub-block -> 8 vectors of 64 codes."""
        at, first = self.row.codes_at, 0
        words: list[ir.Value] = []
        for width in self.row.planes:
            piece = _plane(e, e.at(sub, at), first, width)
            words = [e.b.or_(a, b) for a, b in zip(words, piece, strict=True)] if words else piece
            at, first = at + 64 * width, first + width
        codes = [e.b.bitcast(w, I8X64) for w in words]
        return [_look_up(e, c, self.row.levels) for c in codes] if self.row.levels else codes


def chunk_bytes(dtype: DType) -> int:
    """Bytes of a chunk of one row block."""
    return PACKINGS[dtype].nbytes * CHUNK // PACKINGS[dtype].superblock


def sub_block(e: Emitter, format_: Format, chunk: ir.Value, s: ir.Value) -> ir.Value:
    """Address of sub-block `s` of a chunk."""
    return e.at(chunk, (s, format_.row.stride), format_.row.head_bytes)


def weights_f32(e: Emitter, format_: Format, codes: list[ir.Value], scales: list[ir.Value]) -> list[ir.Value]:
    """The 32 weight vectors of a sub-block in f32, exactly as dequantization defines them.

    scale * code has at most 24 bits, so it is exact, and the multiply-add rounds once, as the reference does.
    """
    row = format_.row
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


# --- scales: (header's values, sub-block, parts) -> scales, then lows -----------------------------------------------


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


def _unsigned(e: Emitter, sub: ir.Value, count: int) -> list[ir.Value]:
    return [e.b.zext(e.load(vector(I8), e.at(sub, 16 * i)), I32X16) for i in range(count)]


_SCALES: dict[str, Callable[[Emitter, list[ir.Value], ir.Value, int], list[ir.Value]]] = {
    "d": _scales_d,
    "d_m": _scales_d_m,
    "d_s": _scales_d_s,
    "d_s_m": _scales_d_s_m,
    "d_sm": _scales_d_sm,
}


# --- codes ----------------------------------------------------------------------------------------------------------


def _plane(e: Emitter, plane: ir.Value, first: int, width: int) -> list[ir.Value]:
    """Bits `first` and up of all groups' codes, in words of 4 codes."""
    words = [e.load(I32X16, e.at(plane, 64 * j)) for j in range(width)]
    if width == 8:
        return words
    moved = [_move(e, words[g % width], first - g // width * width) for g in range(GROUPS)]
    return [_mask(e, w, ((1 << width) - 1) << first) for w in moved]


def _mask(e: Emitter, word: ir.Value, byte: int) -> ir.Value:
    return e.b.and_(word, e.i32(byte * 0x01010101))


def _move(e: Emitter, word: ir.Value, left: int) -> ir.Value:
    """All bits moved left (right where negative); the caller masks what crossed a byte."""
    if left == 0:
        return word
    return e.b.shl(word, e.i32(left)) if left > 0 else e.b.lshr(word, e.i32(-left))


def _look_up(e: Emitter, codes: ir.Value, levels: Sequence[int]) -> ir.Value:
    """Codes of 4 bits -> the levels they stand for: a byte shuffle of each 16 bytes where the target has it."""
    if e.target.level == "generic":
        return _select(e, codes, levels)
    wide = e.target.level == "avx512"
    name = "llvm.x86.avx512.pshuf.b.512" if wide else "llvm.x86.avx2.pshuf.b"
    pieces = e.pieces(codes, 64 if wide else 32)
    table = ir.Constant(pieces[0].type, list(levels) * (pieces[0].type.count // 16))
    done = [e.call(name, piece.type, [table, piece]) for piece in pieces]
    return done[0] if wide else e.concat(*done)


def _select(e: Emitter, codes: ir.Value, levels: Sequence[int]) -> ir.Value:
    """The same by choosing between neighbours, bit by bit of the code."""
    values = [ir.Constant(I8X64, [level] * 64) for level in levels]
    for bit in (1, 2, 4, 8):
        is_set = e.b.icmp_unsigned("!=", e.b.and_(codes, ir.Constant(I8X64, [bit] * 64)), ir.Constant(I8X64, None))
        pairs = zip(values[::2], values[1::2], strict=True)
        values = [e.b.select(is_set, odd, even) for even, odd in pairs]
    return values[0]


FORMATS: dict[DType, Format] = {dtype: Format(row) for dtype, row in BLOCKS.items()}
