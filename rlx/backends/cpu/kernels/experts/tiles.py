"""Linear layers of experts on tile registers: bf16 activations times weights of any type, converted to bf16.

    for macro tile of the pairs of an expert, in a stretch of its units:
        for panel of at most 512 k:
            gather the activations of the pairs, tile by tile
            for pair of row blocks of W:
                unpack the panel of both blocks, and multiply, as `linear_tiles.py` does

The rows of an expert are scattered, but a tile load needs rows at a constant stride, so the rows are copied. The copy
is cheap, because all blocks of the stretch share it. It also avoids conflict misses: rows of 2 KiB and more would
compete for the same few lines of the L1 cache.
"""

from __future__ import annotations

from llvmlite import ir

from rlx.backends.cpu.isa.amx import BYTES, ROW_BYTES, ROWS
from rlx.backends.cpu.kernels.experts.rows import Experts, ExpertWriter
from rlx.backends.cpu.kernels.linear.multiply import Shape
from rlx.backends.cpu.kernels.linear.tiles import PAIR, TOTALS, Piece, Strides, TileWriter
from rlx.backends.cpu.tiles import I8X64, Emitter

_PANEL = 512  # most k of a panel: few rows share the weights of both blocks, so these must stay in the L1 cache
_MOST = 4 * PAIR  # rows of a macro tile


class ExpertTiles(ExpertWriter, TileWriter):
    """Generates a linear kernel of experts on tile registers."""

    def __init__(self, e: Emitter, shape: Shape, experts: Experts) -> None:
        super().__init__(e, shape, _PANEL)
        self.take(experts, _MOST)
        self.strides = Strides(step=BYTES, tile=self.panel_steps * BYTES, row=ROW_BYTES)
        self.copies = e.stack(-(-self.most // ROWS) * self.strides.tile)
        self.unit_totals = self.most * len(shape.weights) * ROW_BYTES if self.panels > 1 else 0
        self.totals = e.stack(max(PAIR * TOTALS, (experts.stretch + 1) * self.unit_totals))

    def write(self) -> None:
        self.write_units()
        self.tiles.release()

    def multiply_pairs(self, count: ir.Value, first: ir.Value, last: ir.Value) -> None:
        """Multiplies the units in groups of at most a stretch, because scratch memory is limited.

        A single row has more units than a stretch.
        """
        e, stretch = self.e, self.experts.stretch
        with e.loop(first, last, stretch) as u, e.loop(0, self.panels) as p:
            self._copy(p.i, count)
            with self.loop_units(u.i, e.smin(e.b.add(u.i, e.i64(stretch)), last)) as (unit, end):
                totals = e.at(self.totals, (e.b.sub(unit, u.i), self.unit_totals))
                self.multiply_piece(Piece(self.copies, totals, e.i64(0), count, unit, end, p.i))
        self.delayed.flush()  # the pairs, which say where results go, change next

    def _copy(self, panel: ir.Value, count: ir.Value) -> None:
        """Copies the panel of the pairs' activations: one tile per 16 rows and 32 k."""
        e, strides = self.e, self.strides
        with e.loop(0, count) as r:
            x = e.at(self.activations_of(r.i), (panel, self.panel_steps * ROW_BYTES))
            tile, row = e.b.udiv(r.i, e.i64(ROWS)), e.b.urem(r.i, e.i64(ROWS))
            place = e.at(self.copies, (tile, strides.tile), (row, strides.row))
            with e.loop(0, self.steps(panel)) as s:
                e.store(e.load(I8X64, e.at(x, (s.i, ROW_BYTES))), e.at(place, (s.i, strides.step)), 64)
