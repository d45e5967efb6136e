"""x86-64: the instructions of AVX2, AVX-512, VNNI, AVX-512 BF16 and AMX, used as far as the target has them.

No other module names an intrinsic of this machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llvmlite import ir

from rlx.backends.cpu.isa.amx import AmxTiles
from rlx.backends.cpu.isa.portable import Isa, Tiles
from rlx.backends.cpu.tiles import BF16X32, F32X16, I1, I16, I32, LANES, constant, mangle, vector

if TYPE_CHECKING:
    from rlx.backends.cpu.target import Target
    from rlx.backends.cpu.tiles import Emitter


class X86(Isa):
    """The instructions of an x86-64 target; the portable ones where it has none.

    int8 products: VNNI multiplies and sums groups of four in one instruction. Other targets from AVX2 on need two: u8 x
    s8 products summed in pairs to i16, then pairs of i16 to i32. The i16 sums must not saturate, which holds for codes
    of up to 7 bits. Codes of 8 bits are signed there and their sign is moved to the other operand: |q| <= 128 and
    |a| <= 127 give at most 32512 per pair. Where many rows share that, `dots.magnitudes` prepares the codes.
    """

    pause = "@llvm.x86.sse2.pause()"

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self.converts_half = target.has("f16c")
        self._wide = self.looks_up_f32 = target.vectors == "avx512"
        self.multiplies_half = self._wide and target.has("avx512fp16")
        self._plain = target.level == "generic"
        has_vnni = target.has_vnni512 or target.has_vnni256
        self.sums_pairs = self.signed_codes = self.moves_signs = not has_vnni and not self._plain
        self.dot_bytes = 64 if target.has_vnni512 or self._plain or (self.sums_pairs and self._wide) else 32

    def dot_step(self, e: Emitter, acc: ir.Value, code: ir.Value, x: ir.Value) -> ir.Value:
        if self._plain:
            return super().dot_step(e, acc, code, x)
        name = f"llvm.x86.avx512.vpdpbusd.{acc.type.count * 32}"  # the 256-bit intrinsic also selects AVX-VNNI
        return e.call(name, acc.type, [acc, code, x])

    def pair_sums(self, e: Emitter, code: ir.Value, x: ir.Value, *, signed: bool) -> ir.Value:
        wide = code.type.count == 4 * LANES
        operands = _move_sign(e, code, x, wide) if signed else [code, x]
        multiply = "llvm.x86.avx512.pmaddubs.w.512" if wide else "llvm.x86.avx2.pmadd.ub.sw"
        return e.call(multiply, vector(I16, code.type.count // 2), operands)

    def widened(self, e: Emitter, pairs: ir.Value) -> ir.Value:
        wide = pairs.type.count == 2 * LANES
        ones = constant(pairs.type, 1)
        name = "llvm.x86.avx512.pmaddw.d.512" if wide else "llvm.x86.avx2.pmadd.wd"
        return e.call(name, vector(I32, pairs.type.count // 2), [pairs, ones])

    def bf16_row(self, e: Emitter, low: ir.Value, high: ir.Value) -> ir.Value:
        """By the instruction, subnormals may become zero."""
        if not self.target.has_bf16_dots:
            return super().bf16_row(e, low, high)
        both = e.call("llvm.x86.avx512bf16.cvtne2ps2bf16.512", BF16X32, [high, low])
        return e.b.bitcast(both, vector(I16, 2 * LANES))

    def bf16_of_small_half(self, e: Emitter, values: ir.Value) -> ir.Value:
        """By a product of i16 that rounds: three bits of the mantissa go, and an exponent below 16 gets 112 more."""
        words = vector(I16, 2 * LANES)
        moved = e.call("llvm.x86.avx512.pmul.hr.sw.512", words, [e.b.bitcast(values, words), constant(words, 1 << 12)])
        return e.b.or_(e.b.and_(moved, constant(words, 0x8FFF)), constant(words, 0x3800))

    def dot_bf16(self, e: Emitter, acc: ir.Value, weights: ir.Value, activations: ir.Value) -> ir.Value:
        """The odd product is added first."""
        if not self.target.has_bf16_dots:
            return super().dot_bf16(e, acc, weights, activations)
        return e.call("llvm.x86.avx512bf16.dpbf16ps.512", F32X16, [acc, weights, activations])

    def tiles(self, e: Emitter) -> Tiles:
        return AmxTiles(e) if self.target.has_bf16_tiles else super().tiles(e)

    def look_up_bytes(self, e: Emitter, codes: ir.Value, levels: Sequence[int]) -> ir.Value:
        """By a byte shuffle of each 16 bytes."""
        if self._plain:
            return super().look_up_bytes(e, codes, levels)
        name = "llvm.x86.avx512.pshuf.b.512" if self._wide else "llvm.x86.avx2.pshuf.b"
        pieces = e.pieces(codes, 64 if self._wide else 32)
        table = ir.Constant(pieces[0].type, list(levels) * (pieces[0].type.count // len(levels)))
        done = [e.call(name, piece.type, [table, piece]) for piece in pieces]
        return done[0] if self._wide else e.concat(*done)

    def look_up_f32(self, e: Emitter, table: ir.Value, words: ir.Value) -> ir.Value:
        """The instruction uses the low four bits of a word."""
        if not self._wide:
            return super().look_up_f32(e, table, words)
        return e.call("llvm.x86.avx512.permvar.sf.512", F32X16, [table, words])

    def floor_and_rest(self, e: Emitter, x: ir.Value) -> tuple[ir.Value, ir.Value]:
        """`vreduceps` computes x - floor(x), and `vscalefps` takes the floor of its exponent."""
        if not self._wide:
            return super().floor_and_rest(e, x)
        floor, every, rounding = ir.Constant(I32, 9), ir.Constant(I16, -1), ir.Constant(I32, 4)
        operands = [x, floor, ir.Constant(F32X16, None), every, rounding]
        return x, e.call("llvm.x86.avx512.mask.reduce.ps.512", F32X16, operands)

    def scale_by_power(self, e: Emitter, x: ir.Value, n: ir.Value) -> ir.Value:
        if not self._wide:
            return super().scale_by_power(e, x, n)
        operands = [x, n, ir.Constant(F32X16, None), ir.Constant(I16, -1), ir.Constant(I32, 4)]
        return e.call("llvm.x86.avx512.mask.scalef.ps.512", F32X16, operands)


def _move_sign(e: Emitter, code: ir.Value, x: ir.Value, wide: bool) -> list[ir.Value]:
    """The operands |code| and x * sign(code), whose product is code * x."""
    size = e.call(f"llvm.abs.{mangle(code.type)}", code.type, [code, ir.Constant(I1, 0)])
    if not wide:
        return [size, e.call("llvm.x86.avx2.psign.b", x.type, [x, code])]
    negative = e.b.icmp_signed("<", code, constant(code.type))
    return [size, e.b.select(negative, e.b.neg(x), x)]
