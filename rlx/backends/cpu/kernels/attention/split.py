"""Positions in pieces, so that all workers share the attention of a single row, and a row gets the same bits anywhere.

The softmax runs online within a piece, and the sums of the pieces are added in the order of the positions. Where pieces
begin depends on the shape of the attention only. So a row has the same bits alone, among other rows, and whatever the
number of positions after it.

    without a window    `parts` pieces of `least` positions, then `parts` pieces of twice as many, and so on
    with a window       pieces of `least` positions; a row sees at most `parts` of them

**A single row.** Units are numbered part * kv_heads + head, and a unit computes every `parts`-th piece of its head. So
units have about equal work, however long the context is, and there is scratch memory for a limited number of pieces. A
unit stores the largest scores, the sums of weights and the mixes of values of each piece in scratch memory, and then
increments the counter of the head. The last unit to finish adds up the pieces. If the row sees only one piece, its unit
writes the result directly.

**A row each of several sequences** (`rows.py`). As for a single row: a unit has the same piece of all of them.

**Many rows.** A unit computes the pieces one after the other, and adds each one to the sums of those before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llvmlite import ir

from rlx.backends.cpu import vmath
from rlx.backends.cpu.tiles import I1, I64, LANES, Emitter, Index
from rlx.errors import CompileError

UNITS = 32  # most units of all heads together; bits depend on it
WORTH = 128  # positions of one head that justify a unit; shorter pieces cost more than they save
_LEAST = 256  # fewest positions of a piece: many rows add up the pieces, too
_FEW = 8  # number of units whose overhead is negligible even if they have no work
_OCTAVES = 6  # times that the length of pieces doubles, at most; the last piece then takes all further positions
_STEP = 64  # pieces begin at multiples of it: the positions whose scores are in scratch memory together
_ENDLESS = 1 << 62


@dataclass(frozen=True)
class Split:
    """How the positions of a KV head are cut into pieces.

    Attributes:
        parts: units of a head for a single row.
        least: positions of the first pieces, a multiple of 64.
        doubles: whether every `parts` pieces are twice as long as those before. If not, a row must see at most `parts`
            pieces.

    Raises:
        CompileError: `least` is no multiple of 64.
    """

    parts: int
    least: int
    doubles: bool = True

    def __post_init__(self) -> None:
        if self.least % _STEP:
            raise CompileError(f"pieces of {self.least} positions, no multiple of {_STEP}", where="attention")

    @property
    def slots(self) -> int:
        """Pieces of a head that scratch memory has room for."""
        return self.parts * (_OCTAVES if self.doubles else 1)


def split(kv_heads: int, window: int | None) -> Split | None:
    """How the positions are cut; None if there are enough heads for all workers, or if the window is too short.

    With many heads, pieces are longer, because the heads already give work to the workers.
    """
    parts, least = UNITS // kv_heads, max(_LEAST, WORTH * kv_heads)
    if parts < 2 or window is None:
        return Split(parts, least) if parts > 1 else None
    if window + _STEP - 1 <= least:
        return None
    longer = -(-window // (parts - 1))
    least = max(least, -(-longer // _STEP) * _STEP)
    return Split(-(-window // least) + 1, least, doubles=False)


def few(kv_heads: int, how: Split) -> bool:
    """Whether a call may always have the largest number of units, instead of a number that depends on the length."""
    return kv_heads * how.parts <= _FEW


def scratch_bytes(group: int, head_dim: int, how: Split) -> int:
    """Bytes of scratch memory per unit.

    The scratch memory of a call begins with one cache line per head for its counter, zero before the first call. The
    pieces follow in their order, so pieces that a length does not have need no memory.
    """
    return 64 + how.slots // how.parts * _slot_bytes(group, -(-head_dim // LANES))


def _slot_bytes(group: int, vectors: int) -> int:
    """Bytes of a piece: for every query head of the group the largest score, the sum of weights and the mixes."""
    return 64 * group * (2 + vectors)


class Pieces:
    """Emits the arithmetic of piece numbers."""

    def __init__(self, e: Emitter, how: Split) -> None:
        self.e, self.how = e, how

    def number(self, position: ir.Value) -> ir.Value:
        """The number of the piece that a position belongs to."""
        e, b, parts = self.e, self.e.b, self.e.i64(self.how.parts)
        unit = b.udiv(position, e.i64(self.how.least))
        if not self.how.doubles:
            return unit
        zeros = e.call("llvm.ctlz.i64", I64, [b.add(b.udiv(unit, parts), e.i64(1)), ir.Constant(I1, 1)])
        octave = e.smin(b.sub(e.i64(63), zeros), _OCTAVES - 1)
        part = b.sub(b.lshr(b.add(unit, parts), octave), parts)
        return b.add(b.mul(octave, parts), e.smin(part, self.how.parts - 1))

    def first(self, number: ir.Value) -> ir.Value:
        """The first position of a piece."""
        b, least, parts = self.e.b, self.e.i64(self.how.least), self.e.i64(self.how.parts)
        if not self.how.doubles:
            return b.mul(number, least)
        octave, part = b.udiv(number, parts), b.urem(number, parts)
        return b.mul(b.sub(b.shl(b.add(parts, part), octave), parts), least)

    def end(self, number: ir.Value) -> ir.Value:
        """The first position after a piece."""
        e, following = self.e, self.e.b.add(number, self.e.i64(1))
        if not self.how.doubles:
            return self.first(following)
        is_last = e.b.icmp_signed(">=", following, e.i64(self.how.slots))
        return e.b.select(is_last, e.i64(_ENDLESS), self.first(following))

    def of_part(self, part: ir.Value, first: ir.Value) -> ir.Value:
        """The lowest number from `first` on that belongs to a part; the others follow `parts` apart."""
        b, parts = self.e.b, self.e.i64(self.how.parts)
        return b.add(first, b.urem(b.sub(b.add(part, parts), b.urem(first, parts)), parts))


def added(e: Emitter, sums: Sequence[ir.Value], more: Sequence[ir.Value]) -> list[ir.Value]:
    """The sums over two stretches of positions, in their order. Sums: the largest score, then what it scales."""
    largest = e.max(sums[0], more[0])
    before, after = (vmath.exp_of_negative(e, e.b.fsub(each[0], largest)) for each in (sums, more))
    rest = zip(sums[1:], more[1:], strict=True)
    return [largest, *(e.fma(part, after, e.b.fmul(total, before)) for total, part in rest)]


class Slots:
    """Emits accesses to the scratch memory of a call.

    Args:
        base: address of the scratch memory.
        group: query heads per KV head.
        vectors: vectors of a head.
    """

    def __init__(self, e: Emitter, base: ir.Value, how: Split, kv_heads: int, group: int, vectors: int) -> None:
        self.e, self.base, self.how, self.kv_heads = e, base, how, kv_heads
        self.vectors, self.slot = vectors, _slot_bytes(group, vectors)

    def _at(self, head: ir.Value, piece: ir.Value, query: ir.Value) -> ir.Value:
        e = self.e
        number = piece if self.how.doubles else e.b.urem(piece, e.i64(self.how.parts))
        first = e.at(self.base, 64 * self.kv_heads, (number, self.kv_heads * self.slot))
        return e.at(first, (head, self.slot), (query, 64 * (2 + self.vectors)))

    def put(self, head: ir.Value, piece: ir.Value, query: ir.Value, sums: Sequence[ir.Value]) -> None:
        """Stores the sums of a query: largest score, sum of weights, mixes."""
        self.e.store_row(sums, self._at(head, piece, query))

    def _get(self, head: ir.Value, piece: ir.Value, query: ir.Value) -> list[ir.Value]:
        return self.e.load_row(self._at(head, piece, query), 2 + self.vectors)

    def is_last(self, head: ir.Value, active: ir.Value) -> ir.Value:
        """Counts a finished unit. Returns whether all `active` units of the head are finished, and then resets it."""
        e = self.e
        count = e.at(self.base, (head, 64))
        before = e.b.atomic_rmw("add", count, ir.Constant(I64, 1), "acq_rel")
        last = e.b.icmp_signed("==", before, e.b.sub(active, e.i64(1)))
        with e.when(last):
            e.store(e.i64(0), count, 8)
        return last

    def total(self, head: ir.Value, first: ir.Value, last: Index, query: ir.Value) -> list[ir.Value]:
        """The sums of a query over the pieces first .. last, added in their order."""
        e, one = self.e, self.e.i64(1)
        with e.loop(e.b.add(first, one), e.b.add(last, one), 1, self._get(head, first, query)) as p:
            p.values = added(e, p.values, self._get(head, p.i, query))
        return p.results
