"""The emitter of tile kernels: loops, vector arithmetic and memory access over `llvmlite.ir`.

Tile kernels control the use of registers, so they are written as vector code: 16 f32 or i32 lanes, or 64 int8 lanes, on
every machine. LLVM splits these vectors for narrower targets. Instructions of one machine stand behind `Emitter.isa`
(`rlx.backends.cpu.isa`), so that the code of a kernel shows its loops and tiles.

The emitter's operations are in one file for each kind:

    builder.py    the function, its parameters and its text; whole numbers; loops, tiles of a range, conditions
    vectors.py    arithmetic of vectors; pieces of vectors; addresses, loads and stores, masks, prefetches
    here          loads and stores of f32, f16 and bf16, and the conversions
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from rlx.backends.cpu.tiles.builder import (
    BF16X32,
    BFLOAT,
    F32X16,
    FLOAT,
    HALF,
    I1,
    I8,
    I8X64,
    I16,
    I32,
    I32X16,
    I64,
    LANES,
    POINTER,
    VOID,
    Control,
    Index,
    Loop,
    constant,
    mangle,
    vector,
)
from rlx.backends.cpu.tiles.vectors import Vectors
from rlx.ir.dtypes import BF16, F16, F32, DType

__all__ = [
    "BF16X32",
    "BFLOAT",
    "F32X16",
    "FLOAT",
    "HALF",
    "I1",
    "I8",
    "I8X64",
    "I16",
    "I32",
    "I32X16",
    "I64",
    "LANES",
    "POINTER",
    "VOID",
    "Emitter",
    "Index",
    "Loop",
    "constant",
    "mangle",
    "vector",
]  # fmt: skip


class Emitter(Control, Vectors):
    """Generates one kernel: a C function over buffers, extents and a range [begin, end) of work units.

    Args:
        target: the machine that the code is for.
        buffers: names of the pointer parameters.
        extents: names of the i64 parameters between the pointers and begin, end.
    """

    def scale_by_power(self, x: ir.Value, n: ir.Value) -> ir.Value:
        """x * 2^n, for lanes n that are whole numbers within +-252. Rounds once, also to infinity or subnormals."""
        return self.isa.scale_by_power(self, x, n)

    def load_row(self, start: ir.Value, count: int, type_: ir.Type = F32X16) -> list[ir.Value]:
        """`count` vectors of 64 bytes, one after the other, from an address on that is a multiple of 64."""
        return [self.load(type_, self.at(start, 64 * i), 64) for i in range(count)]

    def store_row(self, values: Sequence[ir.Value], start: ir.Value) -> None:
        """The inverse of `load_row`."""
        for i, value in enumerate(values):
            self.store(value, self.at(start, 64 * i), 64)

    def load_as_f32(self, dtype: DType, pointer: ir.Value, mask: ir.Value | None = None) -> ir.Value:
        """Loads 16 numbers of type f32, f16 or bf16 as f32. Lanes outside the mask are 0, and are not read."""
        element = {F32: FLOAT, F16: I16, BF16: I16}[dtype]
        raw = self.masked_load(element, pointer, mask) if mask is not None else self.load(vector(element), pointer)
        if dtype is F32:
            return raw
        return self.half_to_f32(raw) if dtype is F16 else self.bf16_to_f32(raw)

    def load_bits(self, pointer: ir.Value, mask: ir.Value | None = None) -> ir.Value:
        """Loads 16 numbers of two bytes as <16 x i16>. Lanes outside the mask are 0, and are not read."""
        return self.load(vector(I16), pointer) if mask is None else self.masked_load(I16, pointer, mask)

    def store_from_f32(self, dtype: DType, value: ir.Value, pointer: ir.Value, mask: ir.Value | None = None) -> None:
        """Stores 16 f32 as f32, f16 or bf16, rounded to nearest even; NaN stays NaN."""
        convert = {F32: lambda v: v, F16: self.f32_to_half, BF16: self.f32_to_bf16}[dtype]
        if mask is None:
            self.store(convert(value), pointer)
        else:
            self.masked_store(convert(value), pointer, mask)

    def bf16_to_f32(self, bits: ir.Value) -> ir.Value:
        """<16 x i16> bf16 bits -> f32. The bits are the upper half of the f32."""
        return self.b.bitcast(self.b.shl(self.b.zext(bits, I32X16), self.i32(16)), F32X16)

    def bf16_pairs_to_f32(self, pairs: ir.Value) -> tuple[ir.Value, ir.Value]:
        """16 pairs of bf16 -> the first and the second of each as f32."""
        words = self.b.bitcast(pairs, I32X16)
        even, odd = self.b.shl(words, self.i32(16)), self.b.and_(words, self.i32(-0x10000))
        return self.b.bitcast(even, F32X16), self.b.bitcast(odd, F32X16)

    def half_to_f32(self, bits: ir.Value) -> ir.Value:
        """<16 x i16> f16 bits -> f32."""
        if self.isa.converts_half:
            return self.b.fpext(self.b.bitcast(bits, vector(HALF)), F32X16)
        # Without the instruction: shift the fields into place; a multiplication then rebiases normals and subnormals.
        wide = self.b.zext(bits, I32X16)
        magnitude = self.b.shl(self.b.and_(wide, self.i32(0x7FFF)), self.i32(13))
        scaled = self.b.bitcast(self.b.fmul(self.b.bitcast(magnitude, F32X16), self.f32(2.0**112)), I32X16)
        special = self.b.icmp_unsigned(">=", magnitude, self.i32(0x0F800000))
        scaled = self.b.select(special, self.b.or_(magnitude, self.i32(0x7F800000)), scaled)
        sign = self.b.shl(self.b.and_(wide, self.i32(0x8000)), self.i32(16))
        return self.b.bitcast(self.b.or_(scaled, sign), F32X16)

    def f32_to_half(self, value: ir.Value) -> ir.Value:
        """f32 -> <16 x i16> f16 bits, round to nearest even."""
        if self.isa.converts_half:
            return self.b.bitcast(self.b.fptrunc(value, vector(HALF)), vector(I16))
        b, i = self.b, self.i32
        bits = b.bitcast(value, I32X16)
        size = b.and_(bits, i(0x7FFFFFFF))
        # Adding 0.5 moves the bits of a subnormal half to the low end of the mantissa, and rounds them.
        small = b.sub(b.bitcast(b.fadd(b.bitcast(size, F32X16), self.f32(0.5)), I32X16), i(0x3F000000))
        odd = b.and_(b.lshr(size, i(13)), i(1))
        normal = b.lshr(b.add(b.add(size, odd), i(0xFFF - (112 << 23))), i(13))
        special = b.select(b.icmp_unsigned(">", size, i(0x7F800000)), i(0x7E00), i(0x7C00))
        finite = b.select(b.icmp_unsigned("<", size, i(0x38800000)), small, normal)
        half = b.select(b.icmp_unsigned(">=", size, i(0x47800000)), special, finite)
        return b.trunc(b.or_(half, b.lshr(b.and_(bits, i(-0x80000000)), i(16))), vector(I16))

    def f32_to_bf16(self, value: ir.Value) -> ir.Value:
        """f32 -> <16 x i16> bf16 bits, rounded to nearest even; NaN becomes a quiet NaN."""
        bits = self.b.bitcast(value, I32X16)
        odd = self.b.and_(self.b.lshr(bits, self.i32(16)), self.i32(1))
        rounded = self.b.add(self.b.add(bits, odd), self.i32(0x7FFF))
        quiet = self.b.or_(bits, self.i32(0x400000))
        chosen = self.b.select(self.b.fcmp_unordered("uno", value, value), quiet, rounded)
        return self.b.trunc(self.b.lshr(chosen, self.i32(16)), vector(I16))
