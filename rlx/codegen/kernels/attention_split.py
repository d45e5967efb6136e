"""Attention of one row cut into ranges of positions, so that all workers have a share of a long context.

A unit is a range of one KV head. Each puts its largest scores, the sums of its weights and its mixes of values into
scratch memory, and counts itself at its head; the last to come adds the ranges up, in their order. So the result
depends on the ranges only, which depend on the number of positions: neither on the workers nor on who was last.

    positions = those that the row sees, from a multiple of 64 on
    active = min(parts, ceil(positions / least)); size = ceil(positions / active) up to a multiple of 64
    range i = [i size, (i + 1) size)

A context of one range goes straight to the result.
"""

from __future__ import annotations

from dataclasses import dataclass

from llvmlite import ir

from rlx.codegen import vmath
from rlx.codegen.tiles import F32X16, I64, LANES, Emitter, Index

UNITS = 32  # ranges of all heads together: what the linker cuts a call into at most
WORTH = 128  # positions of one head that are worth a unit of their own; shorter ranges cost more than they bring
_FEW = 8  # units that may find nothing to do without being noticed


@dataclass(frozen=True)
class Split:
    """How positions are cut into ranges.

    Attributes:
        parts: ranges of a head at most.
        least: positions from which on there are two.
    """

    parts: int
    least: int


def split(kv_heads: int, window: int | None) -> Split | None:
    """How to cut the attention of one row; None where the heads alone are units enough, or a window too short for it.

    With many heads the first cut comes later: they are shares by themselves.
    """
    parts, least = UNITS // kv_heads, WORTH * kv_heads
    if window is not None:
        parts = min(parts, -(-(window + 63) // least))
    return Split(parts, least) if parts > 1 else None


def few(kv_heads: int, how: Split) -> bool:
    """Whether a call may have all units that there can be, rather than as many as its length has."""
    return kv_heads * how.parts <= _FEW


def scratch_bytes(group: int, head_dim: int) -> int:
    """Scratch memory of a unit. In a call's, a line for the count of each head comes first, zero before the first call,
    then the ranges in the order of the units: those that a length does not have need no memory.
    """
    return 64 + _slot_bytes(group, -(-head_dim // LANES))


def _slot_bytes(group: int, vectors: int) -> int:
    """A range: for every query head of the group the largest score, weights, mixes."""
    return 64 * group * (2 + vectors)


@dataclass(frozen=True)
class Range:
    """A unit's range at run time.

    Attributes:
        part: its number; `active` is how many there are.
        first, last: its positions are [first, last), none where first is not below.
    """

    part: ir.Value
    active: ir.Value
    first: ir.Value
    last: ir.Value


def range_of(e: Emitter, how: Split, part: ir.Value, first: ir.Value, last: ir.Value, step: int) -> Range:
    """Range `part` of positions [first, last), where first is a multiple of `step`, as all ranges begin at."""
    b = e.b
    count = b.sub(last, first)
    wanted = e.smin(how.parts, b.udiv(b.add(count, e.i64(how.least - 1)), e.i64(how.least)))
    group = b.mul(wanted, e.i64(step))
    size = b.mul(b.udiv(b.add(count, b.sub(group, e.i64(1))), group), e.i64(step))
    active = b.udiv(b.add(count, b.sub(size, e.i64(1))), size)
    start = b.add(first, b.mul(part, size))
    return Range(part, active, start, e.smin(last, b.add(start, size)))


class Slots:
    """The scratch memory of a call while its kernel is written.

    Args:
        group, vectors: query heads of a KV head, vectors of a head.
    """

    def __init__(self, e: Emitter, kv_heads: int, group: int, vectors: int) -> None:
        self.e, self.kv_heads = e, kv_heads
        self.vectors, self.slot = vectors, _slot_bytes(group, vectors)

    def _at(self, head: ir.Value, part: Index, query: ir.Value) -> ir.Value:
        first = self.e.at(self.e.args["scratch"], 64 * self.kv_heads, (part, self.kv_heads * self.slot))
        return self.e.at(first, (head, self.slot), (query, 64 * (2 + self.vectors)))

    def put(self, head: ir.Value, part: Index, query: ir.Value, sums: list[ir.Value]) -> None:
        """Stores the sums of a query: largest score, weights, mixes."""
        place = self._at(head, part, query)
        for i, value in enumerate(sums):
            self.e.store(value, self.e.at(place, 64 * i), 64)

    def is_last(self, head: ir.Value, active: ir.Value) -> ir.Value:
        """Counts a range that is done; whether the others of its head are, too. The count then starts anew."""
        e = self.e
        count = e.at(e.args["scratch"], (head, 64))
        before = e.b.atomic_rmw("add", count, ir.Constant(I64, 1), "acq_rel")
        last = e.b.icmp_signed("==", before, e.b.sub(active, e.i64(1)))
        with e.when(last):
            e.store(e.i64(0), count, 8)
        return last

    def added(self, head: ir.Value, active: ir.Value, query: ir.Value, least: float) -> list[ir.Value]:
        """The weights and mixes of all ranges, relative to the largest score of all."""
        e = self.e
        with e.loop(0, active, 1, [e.f32(least)]) as p:
            p.values = [e.max(e.load(F32X16, self._at(head, p.i, query), 64), p.values[0])]
        with e.loop(0, active, 1, [e.f32(0.0)] * (1 + self.vectors)) as q:
            place = self._at(head, q.i, query)
            factor = vmath.exp(e, e.b.fsub(e.load(F32X16, place, 64), p.results[0]))
            parts = [e.load(F32X16, e.at(place, 64 * (1 + i)), 64) for i in range(1 + self.vectors)]
            q.values = [e.fma(part, factor, total) for part, total in zip(parts, q.values, strict=True)]
        return q.results
