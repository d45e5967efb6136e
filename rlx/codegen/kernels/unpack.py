"""Packed weights in registers: how a linear kernel reads each type of the layout that `layouts.py` defines.

A quantized type is read in sub-blocks of 32 k: eight vectors of 64 unsigned codes (one a group of 4 k, 16 rows each)
and one or two vectors of 16 scales. A weight is then

    scale * (code - zero)             one scale a sub-block
    scale[k // 16] * (code - zero)    two scales, "halves": q6_k
    scale * code - low                a scale and a minimum: q4_k, q5_k
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llvmlite import ir

from rlx.codegen.layouts import PACKINGS
from rlx.codegen.tiles import F32X16, I8, I8X64, I32X16, Emitter, vector
from rlx.ir.dtypes import F16, Q4_0, Q4_K, Q5_K, Q6_K, Q8_0, DType

#: k of a chunk: the codes of a chunk are summed in registers, chunks are summed in f32.
CHUNK = 256
#: k of a sub-block and its groups of 4 k.
SUB, GROUPS = 32, 8


@dataclass(frozen=True)
class Format:
    """How one quantized type is read.

    Attributes:
        bits: width of a code.
        zero: the code that means 0, where there is no minimum.
        header: bytes of a superblock before its sub-blocks.
        stride: bytes of a sub-block.
        halves: whether the two halves of a sub-block have scales of their own.
        lows: whether a sub-block has a minimum.
        chunk: the header's values, loaded once a chunk.
        scales: (header's values, sub-block) -> the scale vectors, f32.
        codes: sub-block -> 8 vectors of 64 codes.
    """

    bits: int
    zero: int
    header: int
    stride: int
    halves: bool
    lows: bool
    chunk: Callable[[Emitter, ir.Value], list[ir.Value]]
    scales: Callable[[Emitter, list[ir.Value], ir.Value], list[ir.Value]]
    codes: Callable[[Emitter, ir.Value], list[ir.Value]]


def chunk_bytes(dtype: DType) -> int:
    """Bytes of a chunk of one row block."""
    return PACKINGS[dtype].nbytes * CHUNK // PACKINGS[dtype].superblock


def sub_block(e: Emitter, format_: Format, chunk: ir.Value, s: ir.Value) -> ir.Value:
    """Address of sub-block `s` of a chunk."""
    return e.at(chunk, (s, format_.stride), format_.header)


def weights_f32(e: Emitter, format_: Format, codes: list[ir.Value], scales: list[ir.Value]) -> list[ir.Value]:
    """The 32 weight vectors of a sub-block in f32, exactly as dequantization defines them.

    scale * code has at most 24 bits, so it is exact, and the multiply-add rounds once, as the reference does.
    """
    if format_.lows:
        offsets = [e.b.fneg(scales[1])]
    else:
        offsets = [e.b.fmul(scale, e.f32(-format_.zero)) for scale in scales]
    weights = []
    for k in range(SUB):
        half = k // 16 if format_.halves else 0
        word = e.b.bitcast(codes[k // 4], I32X16)
        code = e.b.and_(e.b.lshr(word, e.i32(8 * (k % 4))), e.i32(255))
        weights.append(e.fma(e.to_f32(code), scales[half], offsets[half]))
    return weights


# --- scales ---------------------------------------------------------------------------------------------------------


def _no_header(e: Emitter, chunk: ir.Value) -> list[ir.Value]:
    return []


def _header(count: int) -> Callable[[Emitter, ir.Value], list[ir.Value]]:
    return lambda e, chunk: [e.load_as_f32(F16, e.at(chunk, 32 * i)) for i in range(count)]


def _own_scale(e: Emitter, header: list[ir.Value], sub: ir.Value) -> list[ir.Value]:
    return [e.load_as_f32(F16, sub)]


def _scale_and_low(e: Emitter, header: list[ir.Value], sub: ir.Value) -> list[ir.Value]:
    bytes_ = [e.b.zext(e.load(vector(I8), e.at(sub, at)), I32X16) for at in (0, 16)]
    return [e.b.fmul(e.b.sitofp(b, F32X16), d) for b, d in zip(bytes_, header, strict=True)]


def _two_scales(e: Emitter, header: list[ir.Value], sub: ir.Value) -> list[ir.Value]:
    bytes_ = [e.b.sext(e.load(vector(I8), e.at(sub, at)), I32X16) for at in (0, 16)]
    return [e.b.fmul(e.b.sitofp(b, F32X16), header[0]) for b in bytes_]


# --- codes ----------------------------------------------------------------------------------------------------------


def _bytes_at(e: Emitter, sub: ir.Value, at: int, count: int) -> list[ir.Value]:
    return [e.load(I32X16, e.at(sub, at + 64 * i)) for i in range(count)]


def _mask(e: Emitter, word: ir.Value, byte: int) -> ir.Value:
    return e.b.and_(word, e.i32(byte * 0x01010101))


def _move(e: Emitter, word: ir.Value, left: int) -> ir.Value:
    """All bits moved left (right where negative); the caller masks what crossed a byte."""
    if left == 0:
        return word
    return e.b.shl(word, e.i32(left)) if left > 0 else e.b.lshr(word, e.i32(-left))


def _nibbles(e: Emitter, sub: ir.Value, at: int) -> list[ir.Value]:
    words = _bytes_at(e, sub, at, 4)
    return [_mask(e, w, 15) for w in words] + [_mask(e, _move(e, w, -4), 15) for w in words]


def _as_codes(e: Emitter, words: list[ir.Value]) -> list[ir.Value]:
    return [e.b.bitcast(w, I8X64) for w in words]


def _codes_q8(e: Emitter, sub: ir.Value) -> list[ir.Value]:
    return _as_codes(e, _bytes_at(e, sub, 32, 8))


def _codes_q4(at: int) -> Callable[[Emitter, ir.Value], list[ir.Value]]:
    return lambda e, sub: _as_codes(e, _nibbles(e, sub, at))


def _codes_q5(e: Emitter, sub: ir.Value) -> list[ir.Value]:
    low, plane = _nibbles(e, sub, 32), e.load(I32X16, e.at(sub, 288))
    high = [_mask(e, _move(e, plane, 4 - g), 16) for g in range(GROUPS)]
    return _as_codes(e, [e.b.or_(a, b) for a, b in zip(low, high, strict=True)])


def _codes_q6(e: Emitter, sub: ir.Value) -> list[ir.Value]:
    low, planes = _nibbles(e, sub, 32), _bytes_at(e, sub, 288, 2)
    high = [_mask(e, _move(e, planes[g // 4], 4 - 2 * (g % 4)), 48) for g in range(GROUPS)]
    return _as_codes(e, [e.b.or_(a, b) for a, b in zip(low, high, strict=True)])


FORMATS: dict[DType, Format] = {
    Q8_0: Format(8, 128, 0, 544, False, False, _no_header, _own_scale, _codes_q8),
    Q4_0: Format(4, 8, 0, 288, False, False, _no_header, _own_scale, _codes_q4(32)),
    Q4_K: Format(4, 0, 64, 288, False, True, _header(2), _scale_and_low, _codes_q4(32)),
    Q5_K: Format(5, 0, 64, 352, False, True, _header(2), _scale_and_low, _codes_q5),
    Q6_K: Format(6, 32, 32, 416, True, False, _header(1), _two_scales, _codes_q6),
}
