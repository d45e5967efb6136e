"""The arithmetic of tile kernels over vectors, and moves of their lanes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from rlx.backends.cpu.tiles.builder import Builder
from rlx.backends.cpu.tiles.types import F32X16, I32, I32X16, LANES, constant, mangle, vector

_LANE_ZERO = constant(I32X16)  # a shuffle that repeats the first lane

# The rounds of a 16 x 16 transpose, as (bit, lanes, shift). A round replaces each pair of vectors whose indices differ
# only in `bit`: the first result takes `lanes` of the concatenated pair, the second the lanes plus `shift`. Groups of
# four lanes are interleaved in the way that the shuffle instructions of every level do it.
_UNPACK = [first + lane for first in (0, 4, 8, 12) for lane in (0, 16, 1, 17)]
_FOURS = [first + lane for first in (0, 16, 8, 24) for lane in range(4)]
_EIGHTS = [first + lane for first in (0, 16) for lane in range(8)]
_ROUNDS = ((2, _UNPACK, 2), (1, _UNPACK, 2), (4, _FOURS, 4), (8, _EIGHTS, 8))


class Vectors(Builder):
    """Vector arithmetic, and pieces of vectors."""

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
