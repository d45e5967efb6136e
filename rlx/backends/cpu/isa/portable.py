"""The instruction set as kernels see it, and the portable one: plain vector IR that LLVM compiles for any machine.

CPU backend, under the emitter of tile kernels. An `Isa` has the operations whose instructions differ from machine to
machine; everything else that a kernel does is plain vector IR anyway. A set of a machine overrides what it has
instructions for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn, Protocol

from llvmlite import ir

from rlx.backends.cpu.tiles import F32X16, I8X64, I16, I32, I32X16, constant, vector
from rlx.errors import CompileError

if TYPE_CHECKING:
    from rlx.backends.cpu.target import Target
    from rlx.backends.cpu.tiles import Emitter, Index

Vectors = Sequence[ir.Value]


class Tiles(Protocol):
    """Tile registers, addressed by number: matrices in registers and their products."""

    def configure(self, rows: Sequence[Index]) -> None:
        """Sets the number of rows (1 to 16) of tiles 0 and up, and clears all tiles."""

    def release(self) -> None:
        """Ends the use of the tiles."""

    def zero(self, tile: int) -> None:
        """Sets a tile to zeros."""

    def load(self, tile: int, pointer: ir.Value, stride: Index) -> None:
        """Loads the rows of a tile, `stride` bytes apart in memory."""

    def store(self, tile: int, pointer: ir.Value, stride: Index) -> None:
        """The inverse of `load`."""

    def dot_bf16(self, c: int, a: int, b: int) -> None:
        """c f32[rows, 16] += a bf16[rows, 32] times b, where a row of b holds two consecutive k of 16 columns."""

    def space(self) -> None:
        """Keeps the operations before and after it apart, where that makes them faster."""

    def dot_int8(self, c: int, a: int, b: int) -> None:
        """c i32[rows, 16] += a i8[rows, 64] times b, where a row of b holds four consecutive k of 16 columns."""


class Isa:
    """The operations of one target, here without an instruction of one machine. The methods that emit code take the
    emitter of the kernel.

    Attributes:
        pause: the LLVM function that a spinning thread calls, with its arguments; "" if there is none.
        converts_half: whether one instruction converts between f16 and f32.
        looks_up_f32: whether one instruction looks up 16 numbers in a table.
        multiplies_half: whether one instruction multiplies and adds 32 numbers of f16.
        shifts_bytes: whether one instruction shifts each byte of a register.
        takes_lanes: whether an instruction takes one lane of a register of 16 bytes as an operand for all lanes.
        loads_pairs: whether one instruction loads two registers, at small offsets from a base.
        product_rows: rows of activations that one int8 product of registers of 16 bytes takes: 2 (`pair_products`), or
            1 by its lanes (`dot_step`). 0 where `linear.narrow` is not used.
        scales_late: whether a superblock's numbers are applied to the sums of a chunk, and the sums of types without
            them start with the totals. This decides about roundings.
        dot_bytes: bytes of an operand of an int8 product: 64, or fewer where registers are narrower.
        signed_codes: whether codes of 8 bits are signed bytes, with their zero subtracted, in packed weights, too.
        sums_pairs: whether int8 products are summed in pairs to i16 (`pair_sums`), and later widened.
        moves_signs: whether products of signed codes take instructions that move the codes' signs to the activations.
    """

    pause = ""
    multiplies_half = converts_half = looks_up_f32 = shifts_bytes = takes_lanes = loads_pairs = scales_late = False
    signed_codes = sums_pairs = moves_signs = False
    dot_bytes, product_rows = 64, 0

    def __init__(self, target: Target) -> None:
        self.target = target

    def _lacks(self, what: str) -> NoReturn:
        raise CompileError(f"the target has no {what}", where=f"target {self.target.level}")

    # -- int8 dot products --------------------------------------------------------------------------------------------

    def span(self, bits: int) -> int:
        """Number of steps over codes of `bits` bits whose sums of pairs fit 16 bits together; 1 without such sums."""
        return {2: 8, 3: 8, 4: 8, 5: 4, 6: 2}.get(bits, 1) if self.sums_pairs else 1  # span 2 (2^bits - 1) 127 < 2^15

    def dot_step(self, e: Emitter, acc: ir.Value, code: ir.Value, x: ir.Value) -> ir.Value:
        """acc i32 [dot_bytes / 4] + the sums of four neighbouring products of codes and activations [dot_bytes]."""
        # Even and odd bytes apart, as i16 lanes. LLVM turns the sums of pairs into multiply-adds.
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
        """The sums of two neighbouring products, as i16 [dot_bytes / 2]. Only if `sums_pairs`.

        Args:
            signed: whether codes are signed bytes; else they are at most 128.
        """
        self._lacks("sums of pairs")

    def widened(self, e: Emitter, pairs: ir.Value) -> ir.Value:
        """The sums of two neighbouring i16, as i32. Only if `sums_pairs`."""
        self._lacks("sums of pairs")

    def pair_products(self, e: Emitter, acc: ir.Value, codes: ir.Value, x: ir.Value) -> ir.Value:
        """acc i32 [2][2] + the products of 2 rows of 8 codes and 2 of activations. Only if `product_rows` is 2."""
        self._lacks("matrix products")

    def settled(self, e: Emitter, values: Vectors) -> list[ir.Value]:
        """The same values. Where registers are few: computed before what the code loads from here on."""
        return list(values)

    # -- bf16 ---------------------------------------------------------------------------------------------------------

    def bf16_row(self, e: Emitter, low: ir.Value, high: ir.Value) -> ir.Value:
        """Two vectors of 16 f32 -> 32 bf16 in the same order, as i16, rounded to nearest even."""
        return e.concat(e.f32_to_bf16(low), e.f32_to_bf16(high))

    def dot_bf16(self, e: Emitter, acc: ir.Value, weights: ir.Value, activations: ir.Value) -> ir.Value:
        """acc f32x16 + the sums of two neighbouring bf16 products. Only if `target.has_bf16_dots`."""
        self._lacks("dot products of bf16")

    def tiles(self, e: Emitter) -> Tiles:
        """The tile registers of a kernel. Only if `target.has_bf16_tiles`."""
        self._lacks("tile registers")

    # -- lanes --------------------------------------------------------------------------------------------------------

    def look_up_bytes(self, e: Emitter, codes: ir.Value, levels: Sequence[int]) -> ir.Value:
        """64 codes -> levels[code], for a power of two of at most 16 levels."""
        values = [constant(I8X64, level) for level in levels]
        for bit in [1 << i for i in range(len(levels).bit_length() - 1)]:  # each bit of the code halves the candidates
            is_set = e.b.icmp_unsigned("!=", e.b.and_(codes, constant(I8X64, bit)), constant(I8X64))
            pairs = zip(values[::2], values[1::2], strict=True)
            values = [e.b.select(is_set, odd, even) for even, odd in pairs]
        return values[0]

    def look_up_f32(self, e: Emitter, table: ir.Value, words: ir.Value) -> ir.Value:
        """16 words i32 -> table[word % 16] of a table f32x16. Only if `looks_up_f32`."""
        self._lacks("table lookup")

    def bf16_of_small_half(self, e: Emitter, values: ir.Value) -> ir.Value:
        """32 numbers of f16 below 1 in size -> bf16, as i16: to nearest, the middle away from zero; below 2^-14 with
        an error of as much. Only if `multiplies_half`.
        """
        self._lacks("products of f16")

    def floor_and_rest(self, e: Emitter, x: ir.Value) -> tuple[ir.Value, ir.Value]:
        """(n, r) with x = n + r and 0 <= r <= 1, for |x| < 2^22; other x give anything. n is for `scale_by_power`
        only: it may be x itself, where that takes the next whole number below.
        """
        n = e.b.fsub(e.b.fadd(e.b.fsub(x, e.f32(0.5)), e.f32(12582912.0)), e.f32(12582912.0))
        return n, e.b.fsub(x, n)

    def scale_by_power(self, e: Emitter, x: ir.Value, n: ir.Value) -> ir.Value:
        """x * 2^n, for lanes n that are whole numbers within +-252. Rounds once, also to infinity or subnormals."""
        # 1.5 * 2^23 + n holds the integer n in its low bits. Two factors, because 2^n may exceed the exponent range.
        shifted = e.b.bitcast(e.b.fadd(n, e.f32(12582912.0)), I32X16)
        whole = e.b.sub(shifted, e.i32(0x4B400000))
        half = e.b.ashr(whole, e.i32(1))
        for exponent in (half, e.b.sub(whole, half)):
            biased = e.b.shl(e.b.add(exponent, e.i32(127)), e.i32(23))
            x = e.b.fmul(x, e.b.bitcast(biased, F32X16))
        return x
