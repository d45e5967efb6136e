"""Dot products on every target, next to `tiles.py`: int8, the step of quantized linears, and pairs of bf16.

One step multiplies 64 codes of weights (16 rows x 4 k, unsigned, `bits` wide) with 64 signed bytes and adds each four
neighbours to an i32 lane. VNNI is that instruction. Machines without it have it in two, u8 x s8 -> pairs in i16 ->
i32, where the i16 must not saturate: that holds for codes of up to 7 bits. Codes of 8 bits are made signed and their
sign is moved to the other operand: |q| <= 128 and |a| <= 127 give at most 32512 a pair. `bits` of a type whose codes
are looked up are those of its levels, at which every code arrives here.

A step on bf16 multiplies 32 numbers of weights (16 rows x 2 k) with as many of activations and adds each two neighbours
to an f32 lane, rounding to nearest even after each; subnormals count as zero. Only machines with the instruction have
it: elsewhere bf16 weights become f32.
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from rlx.codegen.target import Target
from rlx.codegen.tiles import BF16X32, F32X16, I1, I8X64, I16, I32, LANES, Emitter, mangle, vector

Vectors = Sequence[ir.Value]


def dot_kind(target: Target) -> str:
    """`vnni512`, `vnni256`, `maddubs` or `portable`."""
    if target.has_vnni512 or target.has_vnni256:
        return "vnni512" if target.has_vnni512 else "vnni256"
    return "portable" if target.level == "generic" else "maddubs"


def span(target: Target, bits: int) -> int:
    """How many steps over codes of `bits` bits may share one widening to i32; 1 where sharing would save nothing."""
    if dot_kind(target) != "maddubs":
        return 1
    return {2: 8, 3: 8, 4: 8, 5: 4, 6: 2}.get(bits, 1)  # so that span * 2 * (2^bits - 1) * 127 < 2^15


def ready(e: Emitter, codes: ir.Value, bits: int) -> ir.Value:
    """Unsigned codes -> the form in which `dot_u8s8` takes them."""
    return e.b.xor(codes, ir.Constant(I8X64, [-128] * 64)) if _is_signed(e.target, bits) else codes


def zero_left(target: Target, bits: int, zero: int) -> int:
    """What `ready` leaves of the codes' zero point: the caller takes it times the activations' sum from the result."""
    return zero - 128 if _is_signed(target, bits) else zero


def dot_u8s8(e: Emitter, acc: ir.Value, codes: Vectors, activations: Vectors, bits: int) -> ir.Value:
    """acc i32x16 + the sums of four neighbouring products, exact.

    Args:
        codes: at most `span(bits)` vectors of 64 codes from `ready`.
        activations: as many vectors of 64 int8 within [-127, 127].
    """
    kind = dot_kind(e.target)
    if kind == "portable":
        return _portable(e, acc, codes, activations)
    bytes_ = 64 if kind == "vnni512" or (kind == "maddubs" and e.target.vectors == "avx512") else 32
    step = _maddubs if kind == "maddubs" else _vnni
    accs = e.pieces(acc, bytes_ // 4)
    parts = zip(*(e.pieces(v, bytes_) for v in (*codes, *activations)), strict=True)
    done = [step(e, a, v[: len(codes)], v[len(codes) :], bits) for a, v in zip(accs, parts, strict=True)]
    return done[0] if len(done) == 1 else e.concat(*done)


def bf16_pairs(e: Emitter, pointer: ir.Value) -> ir.Value:
    """16 bf16 of one k, then 16 of the next, as packed weights lie -> each row's two side by side."""
    return _side_by_side(e, e.load(vector(I16, 2 * LANES), pointer))


def bf16_row(e: Emitter, low: ir.Value, high: ir.Value) -> ir.Value:
    """32 f32 -> the same in bf16, in their order; rounded as by `bf16_rounded`."""
    if e.target.has_bf16_dots:
        both = e.call("llvm.x86.avx512bf16.cvtne2ps2bf16.512", BF16X32, [high, low])
        return e.b.bitcast(both, vector(I16, 2 * LANES))
    return e.concat(e.f32_to_bf16(low), e.f32_to_bf16(high))


def bf16_rounded(e: Emitter, even: ir.Value, odd: ir.Value) -> ir.Value:
    """16 f32 of one k, 16 of the next -> the same in bf16, to nearest even; subnormals may become zero."""
    return _side_by_side(e, bf16_row(e, even, odd))


def _side_by_side(e: Emitter, both: ir.Value) -> ir.Value:
    return e.b.bitcast(e.pick(both, [lane + LANES * j for lane in range(LANES) for j in (0, 1)]), BF16X32)


def dot_bf16(e: Emitter, acc: ir.Value, weights: ir.Value, activations: ir.Value) -> ir.Value:
    """acc f32x16 + the sums of two neighbouring products of bf16, the odd one first."""
    return e.call("llvm.x86.avx512bf16.dpbf16ps.512", F32X16, [acc, weights, activations])


def _is_signed(target: Target, bits: int) -> bool:
    return bits == 8 and dot_kind(target) == "maddubs"


def _vnni(e: Emitter, acc: ir.Value, codes: Vectors, xs: Vectors, bits: int) -> ir.Value:
    name = f"llvm.x86.avx512.vpdpbusd.{acc.type.count * 32}"  # the 256-bit one is AVX-VNNI's instruction too
    for code, x in zip(codes, xs, strict=True):
        acc = e.call(name, acc.type, [acc, code, x])
    return acc


def _maddubs(e: Emitter, acc: ir.Value, codes: Vectors, xs: Vectors, bits: int) -> ir.Value:
    wide = acc.type.count == LANES
    multiply = "llvm.x86.avx512.pmaddubs.w.512" if wide else "llvm.x86.avx2.pmadd.ub.sw"
    widen = "llvm.x86.avx512.pmaddw.d.512" if wide else "llvm.x86.avx2.pmadd.wd"
    pairs_type = vector(I16, acc.type.count * 2)
    pairs = None
    for code, x in zip(codes, xs, strict=True):
        operands = _move_sign(e, code, x, wide) if bits == 8 else [code, x]
        product = e.call(multiply, pairs_type, operands)
        pairs = product if pairs is None else e.b.add(pairs, product)
    ones = ir.Constant(pairs_type, [1] * pairs_type.count)
    return e.b.add(acc, e.call(widen, acc.type, [pairs, ones]))


def _move_sign(e: Emitter, code: ir.Value, x: ir.Value, wide: bool) -> list[ir.Value]:
    """|code|, and x with the code's sign."""
    size = e.call(f"llvm.abs.{mangle(code.type)}", code.type, [code, ir.Constant(I1, 0)])
    if not wide:
        return [size, e.call("llvm.x86.avx2.psign.b", x.type, [x, code])]
    negative = e.b.icmp_signed("<", code, ir.Constant(code.type, None))
    return [size, e.b.select(negative, e.b.neg(x), x)]


def _portable(e: Emitter, acc: ir.Value, codes: Vectors, xs: Vectors) -> ir.Value:
    """Even and odd bytes apart, as i16 lanes; LLVM makes the sums of pairs its target's multiply-add."""
    i16, i32 = vector(I16, 32), vector(I32, 32)
    eight, low = ir.Constant(i16, [8] * 32), ir.Constant(i16, [255] * 32)
    for code, x in zip(codes, xs, strict=True):
        u, s = e.b.bitcast(code, i16), e.b.bitcast(x, i16)
        even = e.b.and_(u, low), e.b.ashr(e.b.shl(s, eight), eight)
        odd = e.b.lshr(u, eight), e.b.ashr(s, eight)
        for left, right in (even, odd):
            product = e.b.mul(e.b.sext(left, i32), e.b.sext(right, i32))
            acc = e.b.add(acc, e.b.add(e.pick(product, range(0, 32, 2)), e.pick(product, range(1, 32, 2))))
    return acc
