"""Dot products for the emitter of `tiles.py`, on every target: int8 for quantized linears, and pairs of bf16.

An int8 step multiplies 64 weight codes (16 rows x 4 k, unsigned, `bits` wide) with 64 signed bytes of activations and
adds each group of four neighbouring products to an i32 lane. Some targets take codes of 8 bits as signed bytes
(`Isa.signed_codes`) and widen the sums of several steps at once (`span`); `rlx.backends.cpu.isa` has their
instructions. For types with levels, the operands are the levels and `bits` is their width.

A bf16 step multiplies 32 weights (16 rows x 2 k) with 32 activations and adds each pair of neighbouring products to an
f32 lane. It rounds to nearest even after each addition; subnormals count as zero. It needs an instruction of its own:
on other targets bf16 weights are converted to f32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import product

from llvmlite import ir

from rlx.backends.cpu.isa.portable import Vectors
from rlx.backends.cpu.target import Target
from rlx.backends.cpu.tiles import BF16X32, I8X64, LANES, Emitter, Index, constant
from rlx.ir.dtypes import BF16, DType


def span(target: Target, bits: int) -> int:
    """Number of steps over codes of `bits` bits that may share one widening to i32; 1 where sharing saves nothing."""
    return target.isa.span(bits)


def magnitudes(e: Emitter, codes: Sequence[ir.Value]) -> tuple[list[ir.Value], list[ir.Value], ir.Value]:
    """Signed codes -> (their magnitudes, their signs as 0 or -1, the start of sums i32x16).

    A product by x becomes magnitude * (x ^ sign), because x ^ -1 = -x - 1. That is too small by the magnitude of a
    negative code, which depends on the codes only, so sums start with it. One instruction for a row moves the signs,
    and of a kind that all vector units have. Two products are at least -2 * 128 * 128, which i16 just holds.
    """
    none = constant(I8X64)
    signs = [e.b.sext(e.b.icmp_signed("<", code, none), I8X64) for code in codes]
    sizes = [e.b.sub(e.b.xor(code, sign), sign) for code, sign in zip(codes, signs, strict=True)]
    start = dot_tile(e, [e.i32(0)], range(len(codes)), 1, lambda i, _: sizes[i], lambda i, _: signs[i])[0]
    return sizes, signs, e.b.neg(start)


def dot_u8s8(e: Emitter, acc: ir.Value, codes: Vectors, activations: Vectors, bits: int) -> ir.Value:
    """acc i32x16 + the exact sums of four neighbouring products.

    Args:
        codes: at most `span(bits)` vectors of 64 codes.
        activations: the same number of vectors of 64 int8 within [-127, 127].
    """
    steps, signed = range(len(codes)), e.isa.signed_codes and bits == 8
    (total,) = dot_tile(e, [acc], steps, 1, lambda i, _: codes[i], lambda i, _: activations[i], signed=signed)
    return total


def dot_tile(
    e: Emitter,
    sums: Vectors,
    steps: Sequence[Index],
    blocks: int,
    code: Callable[[Index, int], ir.Value],
    activation: Callable[[Index, int], ir.Value],
    *,
    signed: bool = False,
    sign: Callable[[Index, int], ir.Value] | None = None,
) -> list[ir.Value]:
    """The same for a tile: sums i32x16 of some rows of activations times some blocks of codes.

    Wide registers hold the codes of all steps, and take one row after the other. On narrower ones, codes are read where
    they are needed, one step after the other.

    Args:
        sums: ordered by row, then by block.
        steps: at most `span(bits)` steps, which are given to `code` and `activation`. The sums of pairs must fit i16.
        blocks: number of blocks.
        code: (step, block) -> 64 codes, or magnitudes.
        activation: (step, row) -> 64 int8 within [-127, 127].
        signed: whether the codes are signed.
        sign: (step, block) -> 64 signs of magnitudes.
    """
    rows, isa, bytes_ = range(len(sums) // blocks), e.isa, e.isa.dot_bytes
    codes = cache(lambda step, block: e.pieces(code(steps[step], block), bytes_))
    signs = cache(lambda step, block: e.pieces(sign(steps[step], block), bytes_) if sign else [])
    xs = cache(lambda step, row: e.pieces(activation(steps[step], row), bytes_))
    parts = [e.pieces(total, bytes_ // 4) for total in sums]
    pairs: dict[tuple[int, int], ir.Value] = {}  # sums of pairs of products, by sum and piece
    if bytes_ == 64:
        order = [(step, row, block, 0) for row in rows for block in range(blocks) for step in range(len(steps))]
    else:
        order = list(product(range(len(steps)), rows, range(blocks), range(64 // bytes_)))
    for step, row, block, piece in order:
        i, x = row * blocks + block, xs(step, row)[piece]
        operands = codes(step, block)[piece], e.b.xor(x, signs(step, block)[piece]) if sign else x
        if isa.sums_pairs:
            found, at = isa.pair_sums(e, *operands, signed=signed), (i, piece)
            pairs[at] = e.b.add(pairs[at], found) if at in pairs else found
            if step == len(steps) - 1:
                parts[i][piece] = e.b.add(parts[i][piece], isa.widened(e, pairs[at]))
        else:
            parts[i][piece] = isa.dot_step(e, parts[i][piece], *operands)
    return [e.concat(*part) for part in parts]


def bf16_pairs(e: Emitter, dtype: DType, pointer: ir.Value) -> ir.Value:
    """Loads packed weights of type bf16 or f16 of one k and the next, as one pair of bf16 per row.

    f16 is rounded as by `bf16_rounded`.
    """
    if dtype is BF16:
        return e.load(BF16X32, pointer)
    return bf16_rounded(e, e.load_as_f32(dtype, pointer), e.load_as_f32(dtype, e.at(pointer, dtype.row_bytes(LANES))))


def bf16_row(e: Emitter, low: ir.Value, high: ir.Value) -> ir.Value:
    """Two vectors of 16 f32 -> 32 bf16 in the same order, rounded as by `bf16_rounded`."""
    return e.isa.bf16_row(e, low, high)


def bf16_rounded(e: Emitter, even: ir.Value, odd: ir.Value) -> ir.Value:
    """16 f32 of one k and 16 of the next -> 16 pairs of bf16, rounded to nearest even; subnormals may become zero."""
    return _side_by_side(e, bf16_row(e, even, odd))


def paired(e: Emitter, even: ir.Value, odd: ir.Value) -> ir.Value:
    """16 bf16 of one k and 16 of the next, as i16 -> 16 pairs of bf16."""
    return _side_by_side(e, e.concat(even, odd))


def _side_by_side(e: Emitter, both: ir.Value) -> ir.Value:
    return e.b.bitcast(e.pick(both, [lane + LANES * j for lane in range(LANES) for j in (0, 1)]), BF16X32)


def dot_bf16(e: Emitter, acc: ir.Value, weights: ir.Value, activations: ir.Value) -> ir.Value:
    """acc f32x16 + the sums of two neighbouring bf16 products."""
    return e.isa.dot_bf16(e, acc, weights, activations)
