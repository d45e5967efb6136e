"""Common part of the linear kernels of experts: the units, the rows that belong to each unit, and their addresses.

With one row, as in decode, a unit is 16 results of one slot. The kernel reads only the weights of the chosen experts.

    for slot that has units in begin .. end:
        multiply the row by those blocks of its expert

With more rows, a unit is 16 results of one expert for all rows that chose it. Some units of one expert form a
stretch. Stretches are ordered by their number first and by expert second. The number of rows differs between experts,
so this order mixes many experts in each range of units and balances the load.

    for stretch that has units in begin .. end:
        for macro tile of the pairs (row, slot) that chose the expert, found by a scan of the ids:
            multiply those rows by the blocks

A pair has the number row * slots + slot, in ids and in the result.

On tile registers, bf16 activations are multiplied by weights of any type, converted to bf16:

    for macro tile of the pairs of an expert, in a stretch of its units:
        for panel of at most 512 k:
            gather the activations of the pairs, tile by tile
            for pair of row blocks of W:
                unpack the panel of both blocks, and multiply, as `linear/tiles.py` does

The rows of an expert are scattered, but a tile load needs rows at a constant stride, so the rows are copied. The copy
is cheap, because all blocks of the stretch share it. It also avoids conflict misses: rows of 2 KiB and more would
compete for the same few lines of the L1 cache.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from llvmlite import ir

from rlx.backends.cpu.isa.amx import BYTES, ROW_BYTES, ROWS
from rlx.backends.cpu.kernels.linear.multiply import ResultWriter, Shape
from rlx.backends.cpu.kernels.linear.tile_step import Strides
from rlx.backends.cpu.kernels.linear.tiles import PAIR, TOTALS, Piece, TileWriter
from rlx.backends.cpu.layouts import row_blocks
from rlx.backends.cpu.tiles import I1, I8X64, I16, I32, I64, LANES, Emitter

_UNITS = 16  # of a stretch, at most: enough that the search for an expert's rows takes little of the time
_BYTES = 1 << 16  # or as many units as have so many bytes of weights: memory reads short stretches slowly


@dataclass(frozen=True)
class Experts:
    """The experts of a kernel.

    Attributes:
        count: number of experts.
        n: results per expert and row.
        slots: experts per row.
        unit_bytes: weights of 16 results.
        x_slots: whether each slot has its own row of activations.
        each: slot i is always of expert i, so there are no ids.
    """

    count: int
    n: int
    slots: int
    unit_bytes: int
    x_slots: bool = False
    each: bool = False

    @property
    def blocks(self) -> int:
        """Row blocks of an expert."""
        return row_blocks(self.n)

    @property
    def stretch(self) -> int:
        """Units of a stretch. All stretches are equal; the last one of an expert may have units without work."""
        most = max(_UNITS, _BYTES // self.unit_bytes)
        return -(-self.blocks // -(-self.blocks // most))

    def units(self, *, single: bool) -> int:
        """Number of work units, for a single row or for any number of rows."""
        if single:
            return self.slots * self.blocks
        return self.count * self.stretch * -(-self.blocks // self.stretch)


class ExpertWriter(ResultWriter):
    """Base class of the generators of expert kernels. Subclasses multiply the rows of a macro tile.

    Attributes:
        pairs: scratch memory with the numbers of the macro tile's pairs.
        most: most pairs of a macro tile.
    """

    def take(self, experts: Experts, most: int) -> None:
        """Sets the experts, and the most rows of a macro tile."""
        e = self.e
        self.experts, self.most = experts, 1 if self.shape.single else most
        self.pairs, self.first_block = e.stack(8 * self.most), e.i64(0)
        e.args["n"] = e.i64(experts.n)

    @abstractmethod
    def multiply_pairs(self, count: ir.Value, first: ir.Value, last: ir.Value) -> None:
        """Multiplies the `count` pairs of the macro tile by the units [first, last) of their expert."""

    def write_units(self) -> None:
        """Emits the loop over the units [begin, end)."""
        if self.shape.single:
            self._write_slots()
        else:
            self._write_stretches()

    def _write_slots(self) -> None:
        e = self.e
        with e.cut(self.experts.blocks) as (slot, first, last):
            e.store(slot, self.pairs, 8)
            chosen = slot if self.experts.each else e.b.zext(e.load(I32, e.at(e.args["ids"], (slot, 4)), 4), I64)
            self._choose(chosen)
            self.multiply_pairs(e.i64(1), first, last)

    def _write_stretches(self) -> None:
        e, experts, stretch = self.e, self.e.i64(self.experts.count), self.experts.stretch
        with e.cut(stretch) as (number, first, last):
            start = e.b.mul(e.b.udiv(number, experts), e.i64(stretch))
            last = e.smin(e.b.add(start, last), self.experts.blocks)
            self._one_expert(e.b.urem(number, experts), e.b.add(start, first), last)

    def _one_expert(self, expert: ir.Value, first: ir.Value, last: ir.Value) -> None:
        e = self.e
        self._choose(expert)
        found = self._count(expert)
        with e.loop(0, found, self.most) as m:
            self._list(expert, m.i)
            self.multiply_pairs(e.smin(self.most, e.b.sub(found, m.i)), first, last)

    def _choose(self, expert: ir.Value) -> None:
        self.first_block = self.e.b.mul(expert, self.e.i64(self.experts.blocks))

    # --- the pairs of an expert ---------------------------------------------------------------------------------------

    def _count(self, expert: ir.Value) -> ir.Value:
        """Number of pairs that chose an expert."""
        e = self.e
        if self.experts.each:
            return e.args["rows"]
        with e.loop(0, self._all_pairs(), LANES, [e.i64(0)]) as z:
            z.values = [e.b.add(z.values[0], self._how_many(self._hits(expert, z.i)))]
        return z.results[0]

    def _list(self, expert: ir.Value, first: ir.Value) -> None:
        """Stores the numbers of a macro tile's pairs, from the `first`-th pair of the expert on."""
        e = self.e
        if self.experts.each:
            with e.loop(0, e.smin(self.most, e.b.sub(e.args["rows"], first))) as row:
                pair = e.mul_add(e.b.add(first, row.i), self.experts.slots, expert)
                e.store(e.i64(pair), e.at(self.pairs, (row.i, 8)), 8)
            return
        with e.loop(0, self._all_pairs(), LANES, [e.b.neg(first)]) as z:
            hits = self._hits(expert, z.i)
            with e.loop(0, self._how_many(hits), 1, [hits, *z.values]) as hit:
                bits, at = hit.values
                lane = e.call("llvm.cttz.i16", I16, [bits, ir.Constant(I1, 1)])
                with e.when(e.b.icmp_unsigned("<", at, e.i64(self.most))):
                    e.store(e.b.add(z.i, e.b.zext(lane, I64)), e.at(self.pairs, (at, 8)), 8)
                hit.values = [e.b.and_(bits, e.b.sub(bits, ir.Constant(I16, 1))), e.b.add(at, e.i64(1))]
            z.values = hit.results[1:]

    def _how_many(self, hits: ir.Value) -> ir.Value:
        return self.e.b.zext(self.e.call("llvm.ctpop.i16", I16, [hits]), I64)

    def _all_pairs(self) -> ir.Value:
        return self.e.b.mul(self.e.args["rows"], self.e.i64(self.experts.slots))

    def _hits(self, expert: ir.Value, first: ir.Value) -> ir.Value:
        """A 16-bit mask of 16 pairs: a bit is set if the pair chose the expert."""
        e = self.e
        mask = e.tail_mask(e.b.sub(self._all_pairs(), first))
        ids = e.masked_load(I32, e.at(e.args["ids"], (first, 4)), mask)
        same = e.b.icmp_signed("==", ids, e.splat(e.b.trunc(expert, I32)))
        return e.b.bitcast(e.b.and_(same, mask), I16)

    # --- addresses of activations, results and weights ----------------------------------------------------------------

    def activations_of(self, row: ir.Value) -> ir.Value:
        """Address of the activations of a row of the macro tile."""
        e, sharing = self.e, 1 if self.experts.x_slots else self.experts.slots
        return e.at(e.args["x"], (e.b.udiv(self._result_row(row), e.i64(sharing)), self.shape.row_bytes))

    def _result_row(self, row: ir.Value) -> ir.Value:
        return self.e.load(I64, self.e.at(self.pairs, (row, 8)), 8)

    def _block(self, name: str, unit: ir.Value) -> ir.Value:
        return super()._block(name, self.e.b.add(self.first_block, unit))


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
        self.configure(count)
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
