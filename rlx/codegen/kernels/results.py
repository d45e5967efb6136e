"""What all linear kernels have in common: where weights and results lie, and what becomes of a finished sum."""

from __future__ import annotations

from llvmlite import ir

from rlx.codegen import vmath
from rlx.codegen.kernels.multiply import Shape, Sums
from rlx.codegen.layouts import BLOCK_ROWS
from rlx.codegen.tiles import F32X16, Emitter
from rlx.ir.dtypes import ACTIVATIONS, F32


class ResultWriter:
    """A kernel while it is written; those who inherit from it write the sums."""

    def __init__(self, e: Emitter, shape: Shape) -> None:
        self.e, self.shape = e, shape

    def _block(self, name: str, unit: ir.Value) -> ir.Value:
        """The packed weights of a unit."""
        return self.e.at(self.e.args[name], (unit, self.shape.block_bytes))

    def _result_row(self, row: ir.Value) -> ir.Value:
        """The row of the result that a row of activations makes."""
        return row

    def _place(self, row: ir.Value, column: ir.Value) -> ir.Value:
        """Number of a result, counted through all rows."""
        return self.e.b.add(self.e.b.mul(self._result_row(row), self.e.args["n"]), column)

    def _fetch_results(self, row: ir.Value, unit: ir.Value, units: int) -> None:
        """Asks for the memory that some units' results of a row are going to: stores would wait for it."""
        e, dtype = self.e, ACTIVATIONS[self.shape.out]
        place = self._place(row, e.b.mul(unit, e.i64(BLOCK_ROWS)))
        e.prefetch(e.at(e.args["out"], (place, dtype.nbytes)), units * dtype.row_bytes(BLOCK_ROWS))

    def _finish_rows(self, totals: ir.Value, blocks: int, count: ir.Value, macro: ir.Value, unit: ir.Value) -> None:
        """Writes the unit's results of `count` rows, from `macro` on; their sums lie 64 * `blocks` bytes apart."""
        e, products = self.e, len(self.shape.weights)
        with e.loop(0, count) as r:
            place = e.at(totals, (r.i, 64 * blocks))
            self._finish(e.b.add(macro, r.i), unit, [e.load(F32X16, e.at(place, 64 * j), 64) for j in range(products)])

    def _finish(self, row: ir.Value, unit: ir.Value, totals: Sums) -> None:
        """Bias, gate and residual of 16 results, and their store; the last unit may hold fewer."""
        e, shape = self.e, self.shape
        column = e.b.mul(unit, e.i64(BLOCK_ROWS))
        place = self._place(row, column)
        mask = e.tail_mask(e.b.sub(e.args["n"], column)) if shape.ragged else None
        biases = [e.load_as_f32(F32, e.at(e.args[name], (column, 4)), mask) for name in shape.biases]
        totals = [e.b.fadd(t, b) for t, b in zip(totals, biases, strict=True)] if biases else totals
        value = totals[0]
        if shape.gated:
            value = e.b.fmul(vmath.UNARY[shape.gated](e, value), totals[1])
        if shape.residual:
            value = e.b.fadd(value, e.load_as_f32(F32, e.at(e.args["residual"], (place, 4)), mask))
        dtype = ACTIVATIONS[shape.out]
        e.store_from_f32(dtype, value, e.at(e.args["out"], (place, dtype.nbytes)), mask)
