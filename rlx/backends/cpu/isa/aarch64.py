"""aarch64: the instructions of NEON, its dot products and matrix products, used as far as the target has them.

No other module names an intrinsic of this machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llvmlite import ir

from rlx.backends.cpu.isa.portable import Isa
from rlx.backends.cpu.tiles import BFLOAT, F32X16, FLOAT, I8, I16, I32, I32X16, vector

if TYPE_CHECKING:
    from rlx.backends.cpu.target import Target
    from rlx.backends.cpu.tiles import Emitter

_REGISTER = 16  # bytes


class Aarch64(Isa):
    """The instructions of an aarch64 target; the portable ones at level `generic`.

    int8 products: `sdot` (dotprod) multiplies signed bytes and sums groups of four in one instruction, `smmla` (i8mm)
    two rows by two. Codes of up to 7 bits are signed bytes already. Without dotprod, `smull` and `smlal` add products
    to i16, which `addp` and `sadalp` then sum. There the sums of pairs must fit i16, as for `pmaddubsw` of x86.
    """

    # `yield`. Waiting by `wfe` would save power, but needs an exclusive load by each waiter or a `sev` by each writer.
    # Threads spin for microseconds only: whoever waits longer sleeps in the operating system.
    pause = "@llvm.aarch64.hint(i32 1)"
    converts_half = shifts_bytes = True

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self._plain = target.level == "generic"
        self.dot_bytes = 64 if self._plain else _REGISTER
        self.takes_lanes = self.loads_pairs = self.scales_late = self.signed_codes = not self._plain
        self.sums_pairs = not self._plain and not target.has("dotprod")
        if target.has("dotprod") and not self._plain:
            self.product_rows = 2 if target.has("i8mm") else 1

    def dot_step(self, e: Emitter, acc: ir.Value, code: ir.Value, x: ir.Value) -> ir.Value:
        if self._plain:
            return super().dot_step(e, acc, code, x)
        return e.call("llvm.aarch64.neon.sdot.v4i32.v16i8", acc.type, [acc, code, x])

    def pair_sums(self, e: Emitter, code: ir.Value, x: ir.Value, *, signed: bool) -> ir.Value:
        wide = vector(I16, _REGISTER)
        return e.b.mul(e.b.sext(code, wide), e.b.sext(x, wide))

    def widened(self, e: Emitter, pairs: ir.Value) -> ir.Value:
        half, quarter = vector(I16, 8), vector(I32, 4)
        sums = e.call("llvm.aarch64.neon.addp.v8i16", half, e.pieces(pairs, 8))
        return e.call("llvm.aarch64.neon.saddlp.v4i32.v8i16", quarter, [sums])

    def pair_products(self, e: Emitter, acc: ir.Value, codes: ir.Value, x: ir.Value) -> ir.Value:
        if self.product_rows != 2:
            return super().pair_products(e, acc, codes, x)
        return e.call("llvm.aarch64.neon.smmla.v4i32.v16i8", acc.type, [acc, codes, x])

    def settled(self, e: Emitter, values: Sequence[ir.Value]) -> list[ir.Value]:
        """By an assembler statement without instructions that takes and returns the values, and may write to memory."""
        if self._plain:
            return super().settled(e, values)
        types, numbers = [value.type for value in values], range(len(values))
        constraints = ",".join(["=w" for _ in numbers] + [str(i) for i in numbers] + ["~{memory}"])
        result = ir.LiteralStructType(types)
        same = e.b.asm(ir.FunctionType(result, types), "", constraints, values, side_effect=True)
        return [e.b.extract_value(same, i) for i in numbers]

    def bf16_row(self, e: Emitter, low: ir.Value, high: ir.Value) -> ir.Value:
        """By the instruction, which rounds to nearest even like the portable code."""
        if not self.target.has_bf16_dots:
            return super().bf16_row(e, low, high)
        return e.concat(*(e.b.bitcast(e.b.fptrunc(x, vector(BFLOAT)), vector(I16)) for x in (low, high)))

    def dot_bf16(self, e: Emitter, acc: ir.Value, weights: ir.Value, activations: ir.Value) -> ir.Value:
        if not self.target.has_bf16_dots:
            return super().dot_bf16(e, acc, weights, activations)
        four, operands = vector(FLOAT, 4), zip(*(e.pieces(x, 8) for x in (weights, activations)), strict=True)
        sums = [
            e.call("llvm.aarch64.neon.bfdot.v4f32.v8bf16", four, [part, *both])
            for part, both in zip(e.pieces(acc, 4), operands, strict=True)
        ]
        return e.concat(*sums)

    def look_up_bytes(self, e: Emitter, codes: ir.Value, levels: Sequence[int]) -> ir.Value:
        """By a table of one register."""
        if self._plain:
            return super().look_up_bytes(e, codes, levels)
        table = ir.Constant(vector(I8, _REGISTER), list(levels) * (_REGISTER // len(levels)))
        found = [
            e.call("llvm.aarch64.neon.tbl1.v16i8", table.type, [table, piece]) for piece in e.pieces(codes, _REGISTER)
        ]
        return e.concat(*found)

    def floor_and_rest(self, e: Emitter, x: ir.Value) -> tuple[ir.Value, ir.Value]:
        n = e.call("llvm.floor.v16f32", F32X16, [x])
        return n, e.b.fsub(x, n)

    def scale_by_power(self, e: Emitter, x: ir.Value, n: ir.Value) -> ir.Value:
        """Two factors, because 2^n may exceed the exponent range."""
        whole = e.call("llvm.fptosi.sat.v16i32.v16f32", I32X16, [n])  # without the undefined result of NaN
        half = e.b.ashr(whole, e.i32(1))
        for exponent in (half, e.b.sub(whole, half)):
            x = e.b.fmul(x, e.b.bitcast(e.b.shl(e.b.add(exponent, e.i32(127)), e.i32(23)), F32X16))
        return x
