"""The portable instruction set: plain vector IR that LLVM compiles for any machine. Every other set builds on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llvmlite import ir

from rlx.backends.cpu.isa.base import Isa, Tiles
from rlx.backends.cpu.tiles import F32X16, I8X64, I16, I32, I32X16, constant, vector
from rlx.errors import CompileError

if TYPE_CHECKING:
    from rlx.backends.cpu.tiles import Emitter


class Portable(Isa):
    """Every operation, without an instruction of one machine."""

    def span(self, bits: int) -> int:
        return 1

    def dot_step(self, e: Emitter, acc: ir.Value, code: ir.Value, x: ir.Value) -> ir.Value:
        """Multiplies even and odd bytes separately, as i16 lanes. LLVM turns the sums of pairs into multiply-adds."""
        i16, i32 = vector(I16, 32), vector(I32, 32)
        eight, low = constant(i16, 8), constant(i16, 255)
        u, s = e.b.bitcast(code, i16), e.b.bitcast(x, i16)
        even = e.b.and_(u, low), e.b.ashr(e.b.shl(s, eight), eight)
        odd = e.b.lshr(u, eight), e.b.ashr(s, eight)
        for left, right in (even, odd):
            product = e.b.mul(e.b.sext(left, i32), e.b.sext(right, i32))
            acc = e.b.add(acc, e.b.add(e.pick(product, range(0, 32, 2)), e.pick(product, range(1, 32, 2))))
        return acc

    def pair_sums(self, e: Emitter, code: ir.Value, x: ir.Value, *, signed: bool) -> ir.Value:
        raise CompileError("the target sums no pairs", where=f"target {self.target.level}")

    def widened(self, e: Emitter, pairs: ir.Value) -> ir.Value:
        raise CompileError("the target sums no pairs", where=f"target {self.target.level}")

    def pair_products(self, e: Emitter, acc: ir.Value, codes: ir.Value, x: ir.Value) -> ir.Value:
        raise CompileError("the target has no matrix products", where=f"target {self.target.level}")

    def bf16_row(self, e: Emitter, low: ir.Value, high: ir.Value) -> ir.Value:
        return e.concat(e.f32_to_bf16(low), e.f32_to_bf16(high))

    def dot_bf16(self, e: Emitter, acc: ir.Value, weights: ir.Value, activations: ir.Value) -> ir.Value:
        raise CompileError("the target has no dot products of bf16", where=f"target {self.target.level}")

    def tiles(self, e: Emitter) -> Tiles:
        raise CompileError("the target has no tile registers", where=f"target {self.target.level}")

    def look_up_bytes(self, e: Emitter, codes: ir.Value, levels: Sequence[int]) -> ir.Value:
        """By selects: each bit of the code halves the candidates."""
        values = [constant(I8X64, level) for level in levels]
        for bit in [1 << i for i in range(len(levels).bit_length() - 1)]:
            is_set = e.b.icmp_unsigned("!=", e.b.and_(codes, constant(I8X64, bit)), constant(I8X64))
            pairs = zip(values[::2], values[1::2], strict=True)
            values = [e.b.select(is_set, odd, even) for even, odd in pairs]
        return values[0]

    def look_up_f32(self, e: Emitter, table: ir.Value, words: ir.Value) -> ir.Value:
        raise CompileError("the target has no table lookup", where=f"target {self.target.level}")

    def floor_and_rest(self, e: Emitter, x: ir.Value) -> tuple[ir.Value, ir.Value]:
        n = e.b.fsub(e.b.fadd(e.b.fsub(x, e.f32(0.5)), e.f32(12582912.0)), e.f32(12582912.0))
        return n, e.b.fsub(x, n)

    def scale_by_power(self, e: Emitter, x: ir.Value, n: ir.Value) -> ir.Value:
        """Two factors, because 2^n may exceed the exponent range."""
        # 1.5 * 2^23 + n holds the integer n in its low bits.
        shifted = e.b.bitcast(e.b.fadd(n, e.f32(12582912.0)), I32X16)
        whole = e.b.sub(shifted, e.i32(0x4B400000))
        half = e.b.ashr(whole, e.i32(1))
        for exponent in (half, e.b.sub(whole, half)):
            biased = e.b.shl(e.b.add(exponent, e.i32(127)), e.i32(23))
            x = e.b.fmul(x, e.b.bitcast(biased, F32X16))
        return x
