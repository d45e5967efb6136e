"""Pairs of a row and an expert, sorted by expert, so that an expert's weights are read once for all its rows.

The groups are i32: for each expert the number of pairs of the experts before it, and that of all; then the pairs, by
expert, those of one expert in their order. A pair, or unit, has the number row * slots + slot.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlx.backends.cuda.code import I32, THREADS, WARPS, Code, Operand, Value


@dataclass(frozen=True)
class Group:
    """Some pairs of one expert: their places [start, end) among all. There may be none."""

    expert: Value
    start: Value
    end: Value


def group(k: Code, units: Operand, experts: int) -> None:
    """A block for each expert, and one more for the number of all."""
    ids, out = k.pointers.values()
    own = k.block
    before = k.variable(I32, 0)
    with k.loop(k.thread, units, THREADS) as i:
        before.set(before.get() + (k.load(ids, I32, i) < own).to(I32))
    start = _sum(k, before.get())
    with k.when(k.thread.equals(0)):
        k.store(out, start, own)
    place = k.variable(I32, start)
    counts = k.share(4 * WARPS)
    with k.when(own < experts), k.loop(0, units, THREADS) as base:
        unit = base + k.thread
        mine = k.variable(I32, 0)
        with k.when(unit < units):
            mine.set(k.load(ids, I32, unit).equals(own).to(I32))
        before_me, of_warp = _ranks(k, mine.get())
        k.barrier()
        with k.when(k.lane.equals(0)):
            k.store(counts, of_warp, k.warp)
        k.barrier()
        at, total = place.get() + before_me, k.number(0)
        for warp in range(WARPS):
            count = k.load(counts, I32, warp)
            at = at + k.select(k.warp > warp, count, 0)
            total = total + count
        with k.when(mine.get().equals(1)):
            k.store(out, unit, at + (experts + 1))
        place.set(place.get() + total)


def _ranks(k: Code, mine: Value) -> tuple[Value, Value]:
    """How many lanes before this one have 1, and how many of the warp."""
    found, block = k.number(0), mine
    for distance in (1, 2, 4, 8, 16):
        other = k.exchanged(block, distance)
        found = found + k.select((k.lane & distance).equals(0), 0, other)
        block = block + other
    return found, block


def _sum(k: Code, value: Value) -> Value:
    """The sum over the threads of a block."""
    for distance in (16, 8, 4, 2, 1):
        value = value + k.exchanged(value, distance)
    place = k.share(4 * WARPS)
    with k.when(k.lane.equals(0)):
        k.store(place, value, k.warp)
    k.barrier()
    total = k.number(0)
    for warp in range(WARPS):
        total = total + k.load(place, I32, warp)
    return total


def find(k: Code, table: Value, experts: int, rows: int, number: Value) -> Group:
    """The pairs of a block: expert e has blocks e + starts[e] / rows up to those of the next one, which is enough."""
    place = k.share(4)
    with k.when(k.thread.equals(0)):
        k.store(place, k.number(0))
    k.barrier()
    with k.loop(k.thread, experts, THREADS) as e:
        first, after = (k.load(table, I32, e + i) // rows + (e + i) for i in range(2))
        with k.when((first <= number) & (number < after)):
            k.store(place, e)
    k.barrier()
    expert = k.load(place, I32)
    start, end = (k.load(table, I32, expert + i) for i in range(2))
    own = start + (number - start // rows - expert) * rows
    return Group(expert, own, k.smaller(own + rows, end))


def unit(k: Code, table: Value, experts: int, place: Value) -> Value:
    """The pair at a place."""
    return k.load(table, I32, place + (experts + 1))
