"""Attention of a single row, split into ranges of positions, so that all workers share a long context.

A unit is a range of one KV head. It stores its largest scores, the sums of its weights and its mixes of values in
scratch memory, and increments the counter of the head. The last unit to finish adds up the ranges, in their order. So
the result depends only on the ranges, which depend on the number of positions, and not on the order of the workers.

    positions = those that the row sees, from a multiple of 64 on
    active = min(parts, ceil(positions / least)); size = ceil(positions / active), rounded up to a multiple of 64
    range i = [i size, (i + 1) size)

If there is only one range, its unit writes the result directly.
"""

from __future__ import annotations

from dataclasses import dataclass

from llvmlite import ir

from rlx.backends.cpu import vmath
from rlx.backends.cpu.tiles import F32X16, I64, LANES, Emitter, Index

UNITS = 32  # most ranges of all heads together: the most ranges that the linker divides a call into
WORTH = 128  # positions of one head that justify a unit; shorter ranges cost more than they save
_FEW = 8  # number of units whose overhead is negligible even if they have no work


@dataclass(frozen=True)
class Split:
    """How positions are split into ranges.

    Attributes:
        parts: most ranges of a head.
        least: positions per range: with more positions than this there are two ranges.
    """

    parts: int
    least: int


def split(kv_heads: int, window: int | None) -> Split | None:
    """How to split the attention of one row; None if there are enough heads, or if the window is too short.

    With many heads, a context is split only when it is longer, because the heads already give work to the workers.
    """
    parts, least = UNITS // kv_heads, WORTH * kv_heads
    if window is not None:
        parts = min(parts, -(-(window + 63) // least))
    return Split(parts, least) if parts > 1 else None


def few(kv_heads: int, how: Split) -> bool:
    """Whether a call may always have the largest number of units, instead of a number that depends on the length."""
    return kv_heads * how.parts <= _FEW


def scratch_bytes(group: int, head_dim: int) -> int:
    """Bytes of scratch memory per unit.

    The scratch memory of a call begins with one cache line per head for its counter, zero before the first call. The
    ranges follow in the order of the units, so ranges that a length does not use need no memory.
    """
    return 64 + _slot_bytes(group, -(-head_dim // LANES))


def _slot_bytes(group: int, vectors: int) -> int:
    """Bytes of a range: for every query head of the group the largest score, the sum of weights and the mixes."""
    return 64 * group * (2 + vectors)


@dataclass(frozen=True)
class Range:
    """The range of a unit, as run-time values.

    Attributes:
        part: its number.
        active: the number of ranges.
        first, last: its positions are [first, last); it is empty if first >= last.
    """

    part: ir.Value
    active: ir.Value
    first: ir.Value
    last: ir.Value


def range_of(e: Emitter, how: Split, part: ir.Value, first: ir.Value, last: ir.Value, step: int) -> Range:
    """Range `part` of positions [first, last). All ranges start at multiples of `step`, and so must `first`."""
    b = e.b
    count = b.sub(last, first)
    wanted = e.smin(how.parts, b.udiv(b.add(count, e.i64(how.least - 1)), e.i64(how.least)))
    group = b.mul(wanted, e.i64(step))
    size = b.mul(b.udiv(b.add(count, b.sub(group, e.i64(1))), group), e.i64(step))
    active = b.udiv(b.add(count, b.sub(size, e.i64(1))), size)
    start = b.add(first, b.mul(part, size))
    return Range(part, active, start, e.smin(last, b.add(start, size)))


class Slots:
    """Emits accesses to the scratch memory of a call.

    Args:
        group: query heads per KV head.
        vectors: vectors of a head.
    """

    def __init__(self, e: Emitter, kv_heads: int, group: int, vectors: int) -> None:
        self.e, self.kv_heads = e, kv_heads
        self.vectors, self.slot = vectors, _slot_bytes(group, vectors)

    def _at(self, head: ir.Value, part: Index, query: ir.Value) -> ir.Value:
        first = self.e.at(self.e.args["scratch"], 64 * self.kv_heads, (part, self.kv_heads * self.slot))
        return self.e.at(first, (head, self.slot), (query, 64 * (2 + self.vectors)))

    def put(self, head: ir.Value, part: Index, query: ir.Value, sums: list[ir.Value]) -> None:
        """Stores the sums of a query: largest score, sum of weights, mixes."""
        place = self._at(head, part, query)
        for i, value in enumerate(sums):
            self.e.store(value, self.e.at(place, 64 * i), 64)

    def is_last(self, head: ir.Value, active: ir.Value) -> ir.Value:
        """Counts a finished range. Returns whether all ranges of the head are finished, and then resets the count."""
        e = self.e
        count = e.at(e.args["scratch"], (head, 64))
        before = e.b.atomic_rmw("add", count, ir.Constant(I64, 1), "acq_rel")
        last = e.b.icmp_signed("==", before, e.b.sub(active, e.i64(1)))
        with e.when(last):
            e.store(e.i64(0), count, 8)
        return last

    def added(self, head: ir.Value, active: ir.Value, query: ir.Value, least: float) -> list[ir.Value]:
        """The sums of weights and mixes over all ranges, relative to the largest score of all ranges."""
        e = self.e
        with e.loop(0, active, 1, [e.f32(least)]) as p:
            p.values = [e.max(e.load(F32X16, self._at(head, p.i, query), 64), p.values[0])]
        with e.loop(0, active, 1, [e.f32(0.0)] * (1 + self.vectors)) as q:
            place = self._at(head, q.i, query)
            factor = vmath.exp(e, e.b.fsub(e.load(F32X16, place, 64), p.results[0]))
            parts = [e.load(F32X16, e.at(place, 64 * (1 + i)), 64) for i in range(1 + self.vectors)]
            q.values = [e.fma(part, factor, total) for part, total in zip(parts, q.values, strict=True)]
        return q.results
