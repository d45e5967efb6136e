"""The vectors of tile kernels: arithmetic and moves of lanes; addresses, loads and stores, masks, prefetches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from rlx.backends.cpu.tiles.builder import (
    F32X16,
    FLOAT,
    I8,
    I32,
    I32X16,
    LANES,
    POINTER,
    VOID,
    Builder,
    Index,
    constant,
    is_zero,
    mangle,
    vector,
)

_LANE_ZERO = constant(I32X16)  # a shuffle that repeats the first lane

# The rounds of a 16 x 16 transpose, as (bit, lanes, shift). A round replaces each pair of vectors whose indices differ
# only in `bit`: the first result takes `lanes` of the concatenated pair, the second the lanes plus `shift`. Groups of
# four lanes are interleaved in the way that the shuffle instructions of every level do it.
_UNPACK = [first + lane for first in (0, 4, 8, 12) for lane in (0, 16, 1, 17)]
_FOURS = [first + lane for first in (0, 16, 8, 24) for lane in range(4)]
_EIGHTS = [first + lane for first in (0, 16) for lane in range(8)]
_ROUNDS = ((2, _UNPACK, 2), (1, _UNPACK, 2), (4, _FOURS, 4), (8, _EIGHTS, 8))


class Vectors(Builder):
    """Vector arithmetic, pieces of vectors, and access to memory."""

    def splat(self, scalar: ir.Value) -> ir.Value:
        """A scalar in all 16 lanes."""
        type_ = vector(scalar.type)
        anything = ir.Constant(type_, ir.Undefined)
        single = self.b.insert_element(anything, scalar, ir.Constant(I32, 0))
        return self.b.shuffle_vector(single, anything, _LANE_ZERO)

    def fma(self, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
        """x * y + z: one instruction with one rounding if the target has FMA, else two."""
        return self.call(f"llvm.fmuladd.{mangle(x.type)}", x.type, [x, y, z])

    def max(self, x: ir.Value, y: ir.Value) -> ir.Value:
        """Lanewise maximum; y where either is NaN. One instruction."""
        return self.b.select(self.b.fcmp_ordered(">", x, y), x, y)

    def min(self, x: ir.Value, y: ir.Value) -> ir.Value:
        """Lanewise minimum; y where either is NaN. One instruction."""
        return self.b.select(self.b.fcmp_ordered("<", x, y), x, y)

    def to_f32(self, x: ir.Value) -> ir.Value:
        """Signed integers of any width -> f32."""
        return self.b.sitofp(x if x.type.element == I32 else self.b.sext(x, I32X16), F32X16)

    def reduce_max(self, x: ir.Value) -> ir.Value:
        """The largest lane, in all lanes. NaN lanes may be ignored."""
        return self._fold(x, self.max)

    def reduce_add(self, x: ir.Value) -> ir.Value:
        """The sum of the lanes, in all lanes. Adds pairs at distance 8, 4, 2 and 1."""
        return self._fold(x, self.b.fadd)

    def _fold(self, x: ir.Value, combine: Any) -> ir.Value:
        for distance in (8, 4, 2, 1):
            x = combine(x, self.pick(x, [lane ^ distance for lane in range(LANES)]))
        return x

    # --- pieces of vectors --------------------------------------------------------------------------------------------

    def pick(self, x: ir.Value, lanes: Sequence[int]) -> ir.Value:
        """The given lanes of x, as a vector."""
        order = constant(vector(I32, len(lanes)), tuple(lanes))
        return self.b.shuffle_vector(x, ir.Constant(x.type, ir.Undefined), order)

    def pieces(self, x: ir.Value, lanes: int) -> list[ir.Value]:
        """Splits a vector into vectors of `lanes` lanes."""
        count = x.type.count
        return [x] if count == lanes else [self.pick(x, range(at, at + lanes)) for at in range(0, count, lanes)]

    def concat(self, *parts: ir.Value) -> ir.Value:
        """Concatenates equally long vectors, whose number is a power of two."""
        if len(parts) == 1:
            return parts[0]
        low, high = self.concat(*parts[: len(parts) // 2]), self.concat(*parts[len(parts) // 2 :])
        order = constant(vector(I32, 2 * low.type.count), tuple(range(2 * low.type.count)))
        return self.b.shuffle_vector(low, high, order)

    def transpose(self, rows: Sequence[ir.Value]) -> list[ir.Value]:
        """Transposes 16 vectors of 16 lanes: result i holds lane i of each vector."""
        done = list(rows)
        for bit, lanes, shift in _ROUNDS:
            orders = [constant(I32X16, tuple(lane + more for lane in lanes)) for more in (0, shift)]
            for i in (i for i in range(LANES) if not i & bit):
                pair = done[i], done[i | bit]
                done[i], done[i | bit] = (self.b.shuffle_vector(*pair, order) for order in orders)
        return done

    # --- memory -------------------------------------------------------------------------------------------------------

    def at(self, pointer: ir.Value, *terms: Index | tuple[Index, Index]) -> ir.Value:
        """The address `pointer` plus the sum of the terms in bytes. A pair stands for index times stride."""
        for term in terms:
            offset = self.mul_add(*term) if isinstance(term, tuple) else term
            pointer = self.b.gep(pointer, [self.i64(offset)], source_etype=I8) if not is_zero(offset) else pointer
        return pointer

    def near(self, pointer: ir.Value) -> ir.Value:
        """The same address, from which offsets stay small where that lets one instruction load two registers.

        LLVM would count loops by an offset from the end of the data, which is large.
        """
        if not self.isa.loads_pairs:
            return pointer
        return self.call("llvm.launder.invariant.group.p0", pointer.type, [pointer])

    def load(self, type_: ir.Type, pointer: ir.Value, align: int = 1) -> ir.Value:
        return self.b.load(pointer, typ=type_, align=align)

    def store(self, value: ir.Value, pointer: ir.Value, align: int = 1) -> None:
        self.b.store(value, pointer, align=align)

    def stack(self, nbytes: int) -> ir.Value:
        """Stack memory of the kernel's call, aligned to 64 bytes."""
        slot = ir.IRBuilder(self._entry).alloca(ir.ArrayType(I8, nbytes))
        slot.align, slot.type = 64, POINTER  # llvmlite still types it as a pointer to the array
        return slot

    def prefetch(self, pointer: ir.Value, nbytes: int, level: int = 1) -> None:
        """Prefetches the cache lines of `nbytes` bytes for reading, into the cache of a level and the outer levels.

        Level 1 is for data that is needed soon. More than a few lines would evict other data from that cache.
        """
        for line in range(0, nbytes, 64):
            hints = [ir.Constant(I32, hint) for hint in (0, 4 - level, 1)]  # read, how near, data
            self.call("llvm.prefetch", VOID, [self.at(pointer, line), *hints])

    def splat_f32(self, pointer: ir.Value) -> ir.Value:
        """The f32 at `pointer` in all lanes."""
        return self.splat(self.load(FLOAT, pointer, 4))

    def splat_i32(self, pointer: ir.Value) -> ir.Value:
        """The i32 (or four bytes) at `pointer` in all lanes."""
        return self.splat(self.load(I32, pointer))

    def splat_of_four(self, element: ir.Type, pointer: ir.Value, i: Index) -> ir.Value:
        """Number `i` of the f32 or i32 at `pointer`, which are a multiple of four, in all lanes.

        Where instructions take one lane of a register as an operand, the four numbers around it are read together.
        """
        if self.isa.takes_lanes and isinstance(i, int):
            return self.pick(self.load(vector(element, 4), self.at(pointer, i // 4 * 16)), [i % 4] * LANES)
        place = self.at(pointer, (i, 4))
        return self.splat_f32(place) if element is FLOAT else self.splat_i32(place)

    def tail_mask(self, count: ir.Value) -> ir.Value:
        """A mask of the first `count` (i64) of 16 lanes: all lanes if `count` exceeds 16, none if it is negative."""
        limit = self.splat(self.b.trunc(self.clamp(count, 0, LANES), I32))
        return self.b.icmp_signed("<", ir.Constant(I32X16, list(range(LANES))), limit)

    def masked_load(self, element: ir.Type, pointer: ir.Value, mask: ir.Value) -> ir.Value:
        type_ = vector(element)
        operands = [pointer, ir.Constant(I32, 1), mask, ir.Constant(type_, None)]
        return self.call(f"llvm.masked.load.{mangle(type_)}.p0", type_, operands)

    def masked_store(self, value: ir.Value, pointer: ir.Value, mask: ir.Value) -> None:
        operands = [value, pointer, ir.Constant(I32, 1), mask]
        self.call(f"llvm.masked.store.{mangle(value.type)}.p0", VOID, operands)
