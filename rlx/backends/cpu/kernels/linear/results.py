"""Common part of all linear kernels: the addresses of weights and results, and the epilogue of a finished sum."""

from __future__ import annotations

from llvmlite import ir

from rlx.backends.cpu import vmath
from rlx.backends.cpu.kernels.linear.multiply import Shape, Sums
from rlx.backends.cpu.layouts import BLOCK_ROWS
from rlx.backends.cpu.tiles import F32X16, Emitter
from rlx.ir.dtypes import ACTIVATIONS, F32


class ResultWriter:
    """Base class of the generators of linear kernels. Subclasses emit the sums."""

    def __init__(self, e: Emitter, shape: Shape) -> None:
        self.e, self.shape = e, shape

    def _block(self, name: str, unit: ir.Value) -> ir.Value:
        """Address of the packed weights of a unit."""
        return self.e.at(self.e.args[name], (unit, self.shape.block_bytes))

    def _result_row(self, row: ir.Value) -> ir.Value:
        """The row of the result that belongs to a row of activations."""
        return row

    def _place(self, row: ir.Value, column: ir.Value) -> ir.Value:
        """The flat index of a result."""
        return self.e.b.add(self.e.b.mul(self._result_row(row), self.e.args["n"]), column)

    def _fetch_results(self, row: ir.Value, unit: ir.Value, units: int) -> None:
        """Prefetches the memory of some units' results of a row, so that the stores do not wait for it."""
        e, dtype = self.e, ACTIVATIONS[self.shape.out]
        place = self._place(row, e.b.mul(unit, e.i64(BLOCK_ROWS)))
        e.prefetch(e.at(e.args["out"], (place, dtype.nbytes)), units * dtype.row_bytes(BLOCK_ROWS))

    def _finish_rows(self, totals: ir.Value, blocks: int, count: ir.Value, macro: ir.Value, unit: ir.Value) -> None:
        """Writes a unit's results of `count` rows, from `macro` on. The sums of rows are 64 * `blocks` bytes apart."""
        e, products = self.e, len(self.shape.weights)
        with e.loop(0, count) as r:
            place = e.at(totals, (r.i, 64 * blocks))
            self.finish(e.b.add(macro, r.i), unit, [e.load(F32X16, e.at(place, 64 * j), 64) for j in range(products)])

    def finish(self, row: ir.Value, unit: ir.Value, totals: Sums) -> None:
        """Applies bias, gate and residual to 16 results and stores them. The last unit may hold fewer results."""
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
