"""Attention of a single row, or of one row each of several sequences whose caches begin with the same pages.

    for unit = (KV head, part of the positions):
        for piece of the part:
            for chunk of 64 positions before `shared`:      # the same pages for all: read once
                add it to the sums of all rows
            for row:
                for chunk from there on: add it to the sums of the row
        the last unit of a head to finish adds up the pieces, see `split.py`

Each row adds the chunks of its positions in their order, so it has the bits that it has alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from llvmlite import ir

from rlx.backends.cpu.kernels.attention.shape import CHUNK, Unit
from rlx.backends.cpu.kernels.attention.split import Pieces, Slots, Split, scratch_bytes
from rlx.backends.cpu.layouts import ALIGN
from rlx.backends.cpu.tiles import I32, I64, Index
from rlx.ir.segments import FIRST_ROW, PAST

if TYPE_CHECKING:
    from rlx.backends.cpu.kernels.attention.attention import AttentionWriter


def segment_bytes(heads: int, kv_heads: int, head_dim: int, how: Split) -> int:
    """Bytes of scratch memory of a sequence."""
    size = scratch_bytes(heads // kv_heads, head_dim, how) * kv_heads * how.parts
    return -(-size // ALIGN) * ALIGN


class Rows:
    """Emits the kernel. A unit is a part of a KV head, numbered part * kv_heads + head.

    Args:
        writer: emits what is done with the positions of a unit.
    """

    def __init__(self, writer: AttentionWriter, how: Split) -> None:
        self.writer, self.how, self.e, self.shape = writer, how, writer.e, writer.shape
        self.scratch, self.positions, self.pieces = writer.scratch, writer.positions, Pieces(writer.e, how)

    def write(self) -> None:
        e, shape = self.e, self.shape
        one, kv_heads = e.i64(1), e.i64(shape.kv_heads)
        first = self.positions.first_seen(e.args["past"])
        last = self.positions.last_seen(e.i64(0), one)
        if shape.mask == "visible":
            last = e.smax(last, e.b.add(first, one))  # a row that sees none has a piece, too
        numbers = self.pieces.number(first), self.pieces.number(e.b.sub(last, one))
        active = e.smin(e.b.add(e.b.sub(numbers[1], numbers[0]), one), self.how.parts)
        with e.loop(e.args["begin"], e.args["end"]) as u:
            head = e.b.urem(u.i, kv_heads)
            own = self.pieces.of_part(e.b.udiv(u.i, kv_heads), numbers[0])
            with e.when(e.b.icmp_signed("<=", own, numbers[1])):
                self._each(head, first, last, self.writer.start)
                self._compute(head, (first, last), (own, *numbers), active)

    def _compute(
        self, head: ir.Value, seen: tuple[ir.Value, ir.Value], numbers: tuple[ir.Value, ...], active: ir.Value
    ) -> None:
        """Computes the pieces of a unit. If there is more than one, they go to scratch memory, and the last unit of a
        head to finish adds them up.

        Args:
            seen: the positions that a row sees, from the first to the last of all rows.
            numbers: the unit's first piece; the rows' first and last one.
            active: the number of units of a head with work.
        """
        e, pieces, one = self.e, self.pieces, self.e.i64(1)
        own, lowest, highest = numbers
        several = e.b.icmp_signed("<", lowest, highest)
        with e.loop(own, e.b.add(highest, one), self.how.parts) as p:
            low, high = e.smax(pieces.first(p.i), seen[0]), e.smin(pieces.end(p.i), seen[1])
            self._run(head, low, high)
            with e.when(several):
                self._each(head, low, high, lambda unit: self._put(unit, p.i))
        with e.b.if_else(several) as (added, whole):
            with added, e.when(self._slots().is_last(head, active)):
                self._each(head, *seen, lambda unit: self._add_up(unit, lowest))
            with whole:
                self._each(head, *seen, self.scratch.finish)

    def _put(self, unit: Unit, piece: ir.Value) -> None:
        """Stores the sums of a row over a piece."""
        with self.e.loop(0, self.shape.group) as query:
            self._slots(unit).put(unit.head, piece, query.i, self.scratch.sums(self._number(unit, query.i)))

    def _add_up(self, unit: Unit, first: ir.Value) -> None:
        """Writes the results of a row from its pieces, from the first one on."""
        last = self.pieces.number(self.e.b.sub(unit.last, self.e.i64(1)))
        with self.e.loop(0, self.shape.group) as query:
            total = self._slots(unit).total(unit.head, first, last, query.i)
            self.scratch.store(total, self.scratch.sum_places(self._number(unit, query.i)))
        self.scratch.finish(unit)

    def _number(self, unit: Unit, query: ir.Value) -> ir.Value:
        """The number of a query of a unit in scratch memory."""
        return self.e.i64(self.e.mul_add(query, 1, unit.start))

    def _slots(self, unit: Unit | None = None) -> Slots:
        """The slots of a row; those of the first row, which is the default, have the counters."""
        e, shape = self.e, self.shape
        base = e.args["scratch"]
        if unit is not None and shape.columns:
            sizes = shape.heads, shape.kv_heads, shape.head_dim
            number = e.b.udiv(e.i64(unit.start), e.i64(shape.group))
            base = e.at(base, (number, segment_bytes(*sizes, self.how)))
        return Slots(e, base, self.how, shape.kv_heads, shape.group, shape.vectors)

    def _run(self, head: ir.Value, first: ir.Value, last: ir.Value) -> None:
        """Computes the sums of all rows over the positions from `first` to `last`."""
        self._each(head, first, last, self.scratch.clear)
        if not self.shape.columns:
            self._each(head, first, last, self.writer.walk)
            return
        e, step = self.e, CHUNK * self.writer.held
        common = e.b.and_(e.smin(e.args["shared"], last), e.i64(-step))
        queries = e.b.mul(e.args["rows"], e.i64(self.shape.group))
        with e.when(e.b.icmp_signed("<", first, common)):
            self.writer.walk(Unit(head, e.i64(0), e.args["rows"], 0, queries, common, first, common, e.args["pages"]))

        def rest(unit: Unit) -> None:
            with e.when(e.b.icmp_signed("<", unit.first, unit.last)):
                self.writer.walk(unit)

        self._each(head, e.smax(first, common), last, rest)

    def _each(self, head: ir.Value, first: ir.Value, last: ir.Value, body: Callable[[Unit], None]) -> None:
        """Emits `body` for each row, with those of the positions from `first` to `last` that it sees."""
        e, shape, zero = self.e, self.shape, self.e.i64(0)
        if not shape.columns:
            pages = e.args.get("pages")
            body(Unit(head, zero, 1, 0, e.i64(shape.group), e.args["past"], first, last, pages))
            return
        with e.loop(0, e.args["rows"]) as number:
            past = self._column(number.i, PAST)
            row = e.b.sub(self._column(number.i, FIRST_ROW), self._column(zero, FIRST_ROW))
            start = e.b.mul(number.i, e.i64(shape.group))
            end, seen = e.b.add(start, e.i64(shape.group)), e.smin(last, e.b.add(past, e.i64(1)))
            pages = e.at(e.args["pages"], (number.i, e.b.mul(e.args["width"], e.i64(4))))
            body(Unit(head, row, 1, start, end, past, first, seen, pages))

    def _column(self, number: Index, column: int) -> ir.Value:
        e = self.e
        place = e.at(e.args["segments"], (number, 4 * self.shape.columns), 4 * column)
        return e.b.sext(e.load(I32, place, 4), I64)
