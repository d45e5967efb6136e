"""The memory of tile kernels: addresses, loads and stores, masks of the last vector, prefetches."""

from __future__ import annotations

from llvmlite import ir

from rlx.backends.cpu.tiles.builder import is_zero
from rlx.backends.cpu.tiles.types import FLOAT, I8, I32, I32X16, LANES, POINTER, Index, mangle, vector
from rlx.backends.cpu.tiles.vectors import Vectors


class Memory(Vectors):
    """Access to memory."""

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
            self.call("llvm.prefetch", ir.VoidType(), [self.at(pointer, line), *hints])

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
        self.call(f"llvm.masked.store.{mangle(value.type)}.p0", ir.VoidType(), operands)
