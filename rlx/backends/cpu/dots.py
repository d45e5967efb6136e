"""Dot products for the emitter of `tiles.py`, on every target: int8 for quantized linears, and pairs of bf16.

An int8 step multiplies 64 weight codes (16 rows x 4 k, unsigned, `bits` wide) with 64 signed bytes of activations and
adds each group of four neighbouring products to an i32 lane. VNNI does this in one instruction. Other targets need two:
u8 x s8 products summed in pairs to i16, then pairs of i16 to i32. The i16 sums must not saturate, which holds for codes
of up to 7 bits. Codes of 8 bits are made signed and their sign is moved to the other operand: |q| <= 128 and
|a| <= 127 give at most 32512 per pair. For types with levels, the operands are the levels and `bits` is their width.

A bf16 step multiplies 32 weights (16 rows x 2 k) with 32 activations and adds each pair of neighbouring products to an
f32 lane. It rounds to nearest even after each addition; subnormals count as zero. It needs the AVX-512 BF16
instruction: on other targets bf16 weights are converted to f32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import product

from llvmlite import ir

from rlx.backends.cpu.target import Target
from rlx.backends.cpu.tiles import BF16X32, F32X16, I1, I8X64, I16, I32, LANES, Emitter, Index, mangle, vector

Vectors = Sequence[ir.Value]


def dot_kind(target: Target) -> str:
    """`vnni512`, `vnni256`, `maddubs` or `portable`."""
    if target.has_vnni512 or target.has_vnni256:
        return "vnni512" if target.has_vnni512 else "vnni256"
    return "portable" if target.level == "generic" else "maddubs"


def span(target: Target, bits: int) -> int:
    """Number of steps over codes of `bits` bits that may share one widening to i32; 1 where sharing saves nothing."""
    if dot_kind(target) != "maddubs":
        return 1
    return {2: 8, 3: 8, 4: 8, 5: 4, 6: 2}.get(bits, 1)  # so that span * 2 * (2^bits - 1) * 127 < 2^15


def ready(e: Emitter, codes: ir.Value, bits: int) -> ir.Value:
    """Unsigned codes -> the form that `dot_u8s8` takes."""
    return e.b.xor(codes, ir.Constant(I8X64, [-128] * 64)) if _is_signed(e.target, bits) else codes


def zero_left(target: Target, bits: int, zero: int) -> int:
    """The zero point that remains after `ready`. The caller subtracts it times the sum of the activations."""
    return zero - 128 if _is_signed(target, bits) else zero


def dot_u8s8(e: Emitter, acc: ir.Value, codes: Vectors, activations: Vectors, bits: int) -> ir.Value:
    """acc i32x16 + the exact sums of four neighbouring products.

    Args:
        codes: at most `span(bits)` vectors of 64 codes from `ready`.
        activations: the same number of vectors of 64 int8 within [-127, 127].
    """
    steps = range(len(codes))
    return dot_tile(e, [acc], steps, 1, lambda step, _: codes[step], lambda step, _: activations[step], bits)[0]


def dot_tile(
    e: Emitter,
    sums: Vectors,
    steps: Sequence[Index],
    blocks: int,
    code: Callable[[Index, int], ir.Value],
    activation: Callable[[Index, int], ir.Value],
    bits: int,
) -> list[ir.Value]:
    """The same for a tile: sums i32x16 of some rows of activations times some blocks of codes.

    Wide registers hold the codes of all steps, and take one row after the other. On narrower ones, codes are read where
    they are needed, one step after the other.

    Args:
        sums: ordered by row, then by block.
        steps: at most `span(bits)` steps, which are given to `code` and `activation`.
        blocks: number of blocks.
        code: (step, block) -> 64 codes from `ready`.
        activation: (step, row) -> 64 int8 within [-127, 127].
    """
    rows, kind = range(len(sums) // blocks), dot_kind(e.target)
    wide = kind in ("portable", "vnni512") or (kind == "maddubs" and e.target.vectors == "avx512")
    bytes_ = 64 if wide else 32
    codes = cache(lambda step, block: e.pieces(code(steps[step], block), bytes_))
    xs = cache(lambda step, row: e.pieces(activation(steps[step], row), bytes_))
    parts = [e.pieces(total, bytes_ // 4) for total in sums]
    pairs: dict[tuple[int, int], ir.Value] = {}  # sums of pairs of products, by sum and piece
    if wide:
        order = [(step, row, block, 0) for row in rows for block in range(blocks) for step in range(len(steps))]
    else:
        order = list(product(range(len(steps)), rows, range(blocks), range(64 // bytes_)))
    for step, row, block, piece in order:
        i, operands = row * blocks + block, (codes(step, block)[piece], xs(step, row)[piece])
        if kind == "maddubs":
            found, at = _products(e, *operands, bits), (i, piece)
            pairs[at] = e.b.add(pairs[at], found) if at in pairs else found
            if step == len(steps) - 1:
                parts[i][piece] = e.b.add(parts[i][piece], _widened(e, pairs[at]))
        else:
            add = _portable if kind == "portable" else _vnni
            parts[i][piece] = add(e, parts[i][piece], *operands)
    return [part[0] if len(part) == 1 else e.concat(*part) for part in parts]


def bf16_pairs(e: Emitter, pointer: ir.Value) -> ir.Value:
    """Interleaves packed weights: 16 bf16 of one k and 16 of the next in memory -> one pair per row."""
    return _side_by_side(e, e.load(vector(I16, 2 * LANES), pointer))


def bf16_row(e: Emitter, low: ir.Value, high: ir.Value) -> ir.Value:
    """Two vectors of 16 f32 -> 32 bf16 in the same order, rounded as by `bf16_rounded`."""
    if e.target.has_bf16_dots:
        both = e.call("llvm.x86.avx512bf16.cvtne2ps2bf16.512", BF16X32, [high, low])
        return e.b.bitcast(both, vector(I16, 2 * LANES))
    return e.concat(e.f32_to_bf16(low), e.f32_to_bf16(high))


def bf16_rounded(e: Emitter, even: ir.Value, odd: ir.Value) -> ir.Value:
    """16 f32 of one k and 16 of the next -> 16 pairs of bf16, rounded to nearest even; subnormals may become zero."""
    return _side_by_side(e, bf16_row(e, even, odd))


def _side_by_side(e: Emitter, both: ir.Value) -> ir.Value:
    return e.b.bitcast(e.pick(both, [lane + LANES * j for lane in range(LANES) for j in (0, 1)]), BF16X32)


def dot_bf16(e: Emitter, acc: ir.Value, weights: ir.Value, activations: ir.Value) -> ir.Value:
    """acc f32x16 + the sums of two neighbouring bf16 products. The odd product is added first."""
    return e.call("llvm.x86.avx512bf16.dpbf16ps.512", F32X16, [acc, weights, activations])


def _is_signed(target: Target, bits: int) -> bool:
    return bits == 8 and dot_kind(target) == "maddubs"


def _vnni(e: Emitter, acc: ir.Value, code: ir.Value, x: ir.Value) -> ir.Value:
    name = f"llvm.x86.avx512.vpdpbusd.{acc.type.count * 32}"  # the 256-bit intrinsic also selects AVX-VNNI
    return e.call(name, acc.type, [acc, code, x])


def _products(e: Emitter, code: ir.Value, x: ir.Value, bits: int) -> ir.Value:
    """The sums of pairs of products, as i16."""
    wide = code.type.count == 4 * LANES
    operands = _move_sign(e, code, x, wide) if bits == 8 else [code, x]
    multiply = "llvm.x86.avx512.pmaddubs.w.512" if wide else "llvm.x86.avx2.pmadd.ub.sw"
    return e.call(multiply, vector(I16, code.type.count // 2), operands)


def _widened(e: Emitter, pairs: ir.Value) -> ir.Value:
    """The sums of pairs of i16, as i32."""
    wide = pairs.type.count == 2 * LANES
    ones = ir.Constant(pairs.type, [1] * pairs.type.count)
    name = "llvm.x86.avx512.pmaddw.d.512" if wide else "llvm.x86.avx2.pmadd.wd"
    return e.call(name, vector(I32, pairs.type.count // 2), [pairs, ones])


def _move_sign(e: Emitter, code: ir.Value, x: ir.Value, wide: bool) -> list[ir.Value]:
    """The operands |code| and x * sign(code), whose product is code * x."""
    size = e.call(f"llvm.abs.{mangle(code.type)}", code.type, [code, ir.Constant(I1, 0)])
    if not wide:
        return [size, e.call("llvm.x86.avx2.psign.b", x.type, [x, code])]
    negative = e.b.icmp_signed("<", code, ir.Constant(code.type, None))
    return [size, e.b.select(negative, e.b.neg(x), x)]


def _portable(e: Emitter, acc: ir.Value, code: ir.Value, x: ir.Value) -> ir.Value:
    """Multiplies even and odd bytes separately, as i16 lanes. LLVM turns the sums of pairs into multiply-adds."""
    i16, i32 = vector(I16, 32), vector(I32, 32)
    eight, low = ir.Constant(i16, [8] * 32), ir.Constant(i16, [255] * 32)
    u, s = e.b.bitcast(code, i16), e.b.bitcast(x, i16)
    even = e.b.and_(u, low), e.b.ashr(e.b.shl(s, eight), eight)
    odd = e.b.lshr(u, eight), e.b.ashr(s, eight)
    for left, right in (even, odd):
        product = e.b.mul(e.b.sext(left, i32), e.b.sext(right, i32))
        acc = e.b.add(acc, e.b.add(e.pick(product, range(0, 32, 2)), e.pick(product, range(1, 32, 2))))
    return acc
