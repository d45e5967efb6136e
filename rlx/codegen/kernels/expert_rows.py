"""What all linear kernels of experts have in common: which rows they take, unit by unit, and where these lie.

With one row, as in decode, a unit is 16 results of one slot: only the weights of the chosen experts are read.

    for slot that has units in begin .. end:
        the row times those blocks of its expert

With more, a unit is 16 results of one expert, whatever rows chose it. About 16 units of one expert make a stretch, and
a stretch of each expert comes before the next of any: experts differ in rows, and so every range of units has some of
many experts.

    for stretch that has units in begin .. end:
        for macro tile of the pairs (row, slot) that chose the expert, found by a scan of the ids:
            those rows times the blocks

A pair has the number row * slots + slot, in ids and in the result.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from llvmlite import ir

from rlx.codegen.kernels.results import ResultWriter
from rlx.codegen.layouts import row_blocks
from rlx.codegen.tiles import I1, I16, I32, I64, LANES

_STRETCH = 16  # units of a stretch at most: enough that finding an expert's rows is little beside their work


@dataclass(frozen=True)
class Experts:
    """How many there are, and how they are used.

    Attributes:
        n: results of one.
        slots: experts of a row.
        x_slots: each slot has a row of activations of its own.
    """

    count: int
    n: int
    slots: int
    x_slots: bool = False

    @property
    def blocks(self) -> int:
        """Row blocks of an expert."""
        return row_blocks(self.n)

    @property
    def stretch(self) -> int:
        """Units of a stretch: stretches are equal, but the last one of an expert may have units without work."""
        return -(-self.blocks // -(-self.blocks // _STRETCH))

    def units(self, *, single: bool) -> int:
        """Work units, of any number of rows or of a single one."""
        if single:
            return self.slots * self.blocks
        return self.count * self.stretch * -(-self.blocks // self.stretch)


class ExpertWriter(ResultWriter):
    """A kernel while it is written; those who inherit from it multiply the rows of a macro tile.

    Attributes:
        pairs: scratch memory, the numbers of the pairs of the macro tile.
        most: how many it has at most.
    """

    def take(self, experts: Experts, most: int) -> None:
        """Says whose rows they are, and how many make a macro tile."""
        e = self.e
        self.experts, self.most = experts, 1 if self.shape.single else most
        self.pairs, self.first_block = e.stack(8 * self.most), e.i64(0)
        e.args["n"] = e.i64(experts.n)

    @abstractmethod
    def multiply_pairs(self, count: ir.Value, first: ir.Value, last: ir.Value) -> None:
        """The `count` pairs of the macro tile times the units [first, last) of their expert."""

    def write_units(self) -> None:
        """The units [begin, end)."""
        if self.shape.single:
            self._write_slots()
        else:
            self._write_stretches()

    def _write_slots(self) -> None:
        e = self.e
        with e.cut(self.experts.blocks) as (slot, first, last):
            e.store(slot, self.pairs, 8)
            self._choose(e.b.zext(e.load(I32, e.at(e.args["ids"], (slot, 4)), 4), I64))
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
        """How many pairs chose an expert."""
        e = self.e
        with e.loop(0, self._all_pairs(), LANES, [e.i64(0)]) as z:
            z.values = [e.b.add(z.values[0], self._how_many(self._hits(expert, z.i)))]
        return z.results[0]

    def _list(self, expert: ir.Value, first: ir.Value) -> None:
        """Lists the pairs of a macro tile, from the expert's pair number `first` on."""
        e = self.e
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
        """Of 16 pairs a bit for each one that chose the expert."""
        e = self.e
        mask = e.tail_mask(e.b.sub(self._all_pairs(), first))
        ids = e.masked_load(I32, e.at(e.args["ids"], (first, 4)), mask)
        same = e.b.icmp_signed("==", ids, e.splat(e.b.trunc(expert, I32)))
        return e.b.bitcast(e.b.and_(same, mask), I16)

    # --- where a linear finds what it multiplies ----------------------------------------------------------------------

    def activations_of(self, row: ir.Value) -> ir.Value:
        """The activations of a row of the macro tile."""
        e, sharing = self.e, 1 if self.experts.x_slots else self.experts.slots
        return e.at(e.args["x"], (e.b.udiv(self._result_row(row), e.i64(sharing)), self.shape.row_bytes))

    def _result_row(self, row: ir.Value) -> ir.Value:
        return self.e.load(I64, self.e.at(self.pairs, (row, 8)), 8)

    def _block(self, name: str, unit: ir.Value) -> ir.Value:
        return super()._block(name, self.e.b.add(self.first_block, unit))
