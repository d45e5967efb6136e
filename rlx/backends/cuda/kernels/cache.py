"""Rows of caches: where they lie, how they are written and read; rotation, which writes them.

A cache is [heads, positions, width], with slots in front of it where each sequence has its own. Position p lies at p,
at p modulo the capacity in a ring, or in the page that a page table names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlx.backends.cuda.code import (
    BF16,
    F16,
    F32,
    I8,
    I16,
    I32,
    I64,
    THREADS,
    WARP,
    WARPS,
    Code,
    Operand,
    Value,
)
from rlx.backends.cuda.kernels.cards import of_card
from rlx.backends.cuda.numbers import cos_sin, rsqrt
from rlx.ir.dims import DimLike
from rlx.ir.dtypes import DType
from rlx.ir.segments import FIRST_ROW, PAST, ROWS, SLOT, SLOT_WRITTEN

_BLOCK = 32  # elements of a block of q8_0 and q4_0


@dataclass(frozen=True)
class Segment:
    """The sequence of a row, as a kernel finds it.

    Attributes:
        found: whether the row belongs to a sequence.
        number: of the segment; 0 without segments.
        first: the first row of its rows in this call.
        env: values of SEQ and PAST_SEQ for it.
        slot, written: the slots that are read and written; None without slots.
    """

    found: Value
    number: Value
    first: Value
    env: Mapping[str, Value]
    slot: Value | None
    written: Value | None


def segment_of(k: Code, row: Value, table: Value | None, columns: int, count: DimLike) -> Segment:
    """The segment of a row. All threads of a block ask for the same row.

    Args:
        table: memory of `segments`; None if all rows belong to one sequence.
        columns: of the table.
        count: number of segments.
    """
    if table is None:
        return Segment(k.as_value(1, "i1"), k.number(0), k.number(0), {}, None, None)
    place = k.share(4)
    with k.when(k.thread.equals(0)):
        k.store(place, k.number(-1))
    k.barrier()
    with k.loop(k.thread, k.dim(count), THREADS) as i:
        first, rows = (k.load(table, I32, i * columns + column) for column in (FIRST_ROW, ROWS))
        with k.when((first <= row) & (row < first + rows)):
            k.store(place, i)
    k.barrier()
    return numbered_segment(k, k.load(place, I32), table, columns)


def numbered_segment(k: Code, number: Value, table: Value, columns: int) -> Segment:
    """A segment by its number; none has the number -1."""
    found = number >= 0
    number = k.select(found, number, 0)
    row = {column: k.load(table, I32, number * columns + column) for column in range(columns)}
    env = {"SEQ": row[ROWS], "PAST_SEQ": row[PAST]}
    return Segment(found, number, row[FIRST_ROW], env, row[SLOT], row.get(SLOT_WRITTEN, row[SLOT]))


@dataclass(frozen=True)
class Cache:
    """A cache in a kernel.

    Attributes:
        base: its memory.
        dtype: of its elements.
        heads, width: its sizes.
        capacity: positions.
        page: positions of a page, or 0.
        wrap: whether it is a ring.
        pages: memory of the page table [segments, `table`].
        table: pages of a sequence.
        slotted: whether each sequence has a slot of its own.
        plain: whether it holds the keys of the call itself: of segments, the slot is the place of the first one.
        cards: how many share its heads. A card finds its own by their numbers among all.
    """

    base: Value
    dtype: DType
    heads: int
    width: int
    capacity: Operand
    page: int = 0
    wrap: bool = False
    pages: Value | None = None
    table: Operand = 0
    slotted: bool = False
    plain: bool = False
    cards: int = 1

    @property
    def own_heads(self) -> int:
        """Heads that a card has."""
        return self.heads // self.cards

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.dtype.size((self.width,))

    def place(self, k: Code, position: Value, segment: Segment) -> Value:
        """The place of a position of a sequence."""
        if self.page:
            assert self.pages is not None
            entry = k.load(self.pages, I32, segment.number * self.table + position // self.page)
            return entry * self.page + position % self.page
        if self.plain:
            return position if segment.slot is None else position + segment.slot
        return position % self.capacity if self.wrap else position

    def row(self, k: Code, head: Value, place: Value, slot: Value | None) -> Value:
        """The number of a row of `width` elements, i64."""
        capacity = k.number(self.capacity).to(I64)
        own = head.to(I64) * capacity + place.to(I64)
        return own + slot.to(I64) * (capacity * self.own_heads) if self.slotted and slot is not None else own

    def read(self, k: Code, row: Value, start: Value, count: int) -> list[Value]:
        """Elements of a row from `start` on, a multiple of `count`, as f32."""
        if self.dtype.name == "f32":
            return _vector(k, self.base, F32, row * self.width + start.to(I64), count)
        if self.dtype.name == "f16":
            values = _vector(k, self.base, F16, row * self.width + start.to(I64), count)
            return [value.to(F32) for value in values]
        if self.dtype.name == "bf16":
            bits = _vector(k, self.base, I16, row * self.width + start.to(I64), count)
            return [(each.to(I32) << 16).bits(F32) for each in bits]
        block = row * (self.width // _BLOCK) + (start // _BLOCK).to(I64)
        at = block * self.dtype.nbytes
        scale = k.load(k.at(self.base, I8, at), F16).to(F32)
        return [self._code(k, at + 2, start % _BLOCK + i) * scale for i in range(count)]

    def _code(self, k: Code, codes: Value, i: Value) -> Value:
        if self.dtype.name == "q8_0":
            return k.load(self.base, I8, codes + i.to(I64)).to(F32, signed=True)
        byte = k.load(self.base, I8, codes + (i % 16).to(I64)).to(I32) & 255
        return ((byte >> ((i // 16) * 4) & 15) - 8).to(F32)

    def write(self, k: Code, row: Value, staged: Value) -> None:
        """Writes a row from shared memory, f32 [width], by a warp."""
        if self.dtype.name in ("q8_0", "q4_0"):
            for block in range(self.width // _BLOCK):
                value = k.load(staged, F32, k.lane + block * _BLOCK)
                self._write_block(k, (row * (self.width // _BLOCK) + block) * self.dtype.nbytes, value)
            return
        type_ = {"f32": F32, "f16": F16, "bf16": BF16}[self.dtype.name]
        base = k.at(self.base, type_, row * self.width)
        for i, inside in every_lane(k, self.width):
            with k.guarded(inside):
                k.store(base, k.load(staged, F32, i).to(type_), i)

    def _write_block(self, k: Code, at: Value, value: Value) -> None:
        """Writes a block, of which each lane has an element (see `rlx.ir.stored`)."""
        size = k.fabs(value)
        largest = k.warp_max(size)
        bad = (k.warp_sum(k.select(size < float("inf"), k.f32(0.0), k.f32(1.0)))) > 0.0
        wide = self.dtype.name == "q8_0"
        scale = largest / 127.0 if wide else self._first_largest(k, value, size.equals(largest)) / -8.0
        inverse = 1.0 / scale
        inverse = k.select(k.fabs(inverse) < float("inf"), inverse, k.f32(0.0))
        if wide:
            scaled = k.select(bad, k.f32(0.0), k.fabs(value * inverse))
            whole = (scaled + 0.5).to(I32)  # halves away from zero
            whole = k.select(whole.to(F32) - scaled > 0.5, whole - 1, whole)  # where the addition rounded up
            code = k.select(value < 0.0, 0 - whole, whole)
            k.store(k.at(self.base, I8, at + 2), code.to(I8), k.lane)
        else:
            raised = k.select(bad, k.f32(0.0), value * inverse + 8.5)
            code = k.smaller(raised.to(I32), 15)
            other = k.exchanged(code, 16)
            with k.when(k.lane < 16):
                k.store(k.at(self.base, I8, at + 2), (code | other << 4).to(I8), k.lane)
        with k.when(k.lane.equals(0)):
            stored = k.select(bad, k.f32(float("nan")), scale).to(F16)
            k.store(k.at(self.base, I8, at), stored)

    def _first_largest(self, k: Code, value: Value, is_largest: Value) -> Value:
        """The first of the elements of the largest magnitude."""
        lane = k.select(is_largest, k.lane, WARP)
        for distance in (16, 8, 4, 2, 1):
            lane = k.smaller(lane, k.exchanged(lane, distance))
        return k.shuffled(value, lane & 31)


def _vector(k: Code, base: Value, type_: str, index: Value, count: int) -> list[Value]:
    if count == 1:
        return [k.load(base, type_, index)]
    return k.lanes(k.load(k.at(base, type_, index), f"<{count} x {type_}>"))


# -- rotation ----------------------------------------------------------------------------------------------------------


def rope_angles(k: Code, count: Operand, half: int, scale: float, components: Sequence[int] | None, width: int) -> None:
    """cos then sin of position times inverse frequency, an angle for each thread.

    Args:
        half: number of frequencies.
        components: of a position, the one that each frequency turns by.
        width: components of a position.
    """
    positions, frequencies, result = k.pointers.values()
    i = k.block * THREADS + k.thread
    with k.when(i < count):
        row, j = i // half, i % half
        which: Operand = 0
        for frequency, component in enumerate(components or ()):
            if component:
                which = k.select(j.equals(frequency), component, which)
        position = k.load(positions, I32, row * width + which)
        cos, sin = cos_sin(k, position.to(F32) * k.load(frequencies, F32, j, constant=True))
        k.store(result, cos * scale, row * (2 * half) + j)
        k.store(result, sin * scale, row * (2 * half) + j + half)


@dataclass(frozen=True)
class Rope:
    """How heads are rotated, and normalized before.

    Attributes:
        angles: memory, [rows, 2 `half`].
        half: pairs that are rotated.
        interleaved: whether the elements of a pair lie side by side.
        norm: memory of the weight of the norm, and its eps.
    """

    angles: Value
    half: int
    interleaved: bool
    norm: tuple[Value, float] | None = None


def staged_head(
    k: Code, x: Value, row: Value, head: Value, heads: int, width: int, rope: Rope | None, place: Value
) -> None:
    """Brings a head of a row to shared memory, f32 [width], by a warp; rotated if `rope` says so."""
    source = k.at(x, F32, (row * heads + head) * width)
    columns, rotated = every_lane(k, width), every_lane(k, rope.half if rope else 0)
    weight, eps = rope.norm if rope and rope.norm else (None, 0.0)
    values = [k.load(source, F32, i) for i, _ in columns]
    factors = [k.load(weight, F32, i, constant=True) for i, _ in columns] if weight else []
    rotations = [
        [k.load(rope.angles, F32, row * (2 * rope.half) + i + at) for at in (0, rope.half)] if rope else []
        for i, _ in rotated
    ]
    if weight:
        squares = k.f32(0.0)
        for (_, inside), value in zip(columns, values, strict=True):
            squares = squares + k.chosen(inside, value * value, 0.0)
        factor = rsqrt(k, k.warp_sum(squares) / float(width) + eps)
        values = [value * factor * own for value, own in zip(values, factors, strict=True)]
    for (i, inside), value in zip(columns, values, strict=True):
        with k.guarded(inside):
            k.store(place, value, i)
    k.sync_warp()
    if rope is None:
        return
    pairs = [(i * 2, i * 2 + 1) if rope.interleaved else (i, i + rope.half) for i, _ in rotated]
    read = [(k.load(place, F32, first), k.load(place, F32, second)) for first, second in pairs]
    k.sync_warp()
    for (_, inside), own, (x0, x1), (cos, sin) in zip(rotated, pairs, read, rotations, strict=True):
        with k.guarded(inside):
            k.store(place, x0 * cos - x1 * sin, own[0])
            k.store(place, x0 * sin + x1 * cos, own[1])
    k.sync_warp()


def every_lane(k: Code, width: int) -> list[tuple[Value, Value | None]]:
    """The elements of a lane, `WARP` apart, and whether each is inside; those beyond are the last one."""
    found: list[tuple[Value, Value | None]] = []
    for start in range(0, width, WARP):
        i = k.lane + start
        found.append((i, None) if start + WARP <= width else (k.smaller(i, width - 1), i < width))
    return found


def of_warp(k: Code, width: int) -> Value:
    """Shared memory for f32 [width] of a warp."""
    return k.at(k.share(4 * WARPS * width), F32, k.warp * width)


def heads_of(k: Code, heads: int) -> tuple[Value, Value]:
    """(row, head) of a warp: a block has `WARPS` heads of a row. The number may be one of no head."""
    blocks = -(-heads // WARPS)
    return k.block // blocks, (k.block % blocks) * WARPS + k.warp


def rope(k: Code, heads: int, width: int, how: Rope) -> None:
    """Rotated heads, [rows, heads, width]."""
    row, head = heads_of(k, heads)
    with k.when(head < heads):
        staged = of_warp(k, width)
        staged_head(k, k.pointers["x"], row, head, heads, width, how, staged)
        with k.loop(k.lane, width, WARP) as i:
            k.store(k.pointers["out"], k.load(staged, F32, i), (row * heads + head) * width + i)


def write(k: Code, cache: Cache, at: DimLike, how: Rope | None, segment: Segment) -> None:
    """Writes rows [rows, heads, width] into a cache."""
    row, own = heads_of(k, cache.own_heads)
    with k.when(segment.found & (own < cache.own_heads)):
        head = of_card(k, cache.cards, own, cache.own_heads)
        staged = of_warp(k, cache.width)
        staged_head(k, k.pointers["x"], row, head, cache.heads, cache.width, how, staged)
        position = k.number(k.dim(at, segment.env)) + (row - segment.first)
        place = cache.place(k, position, segment)
        cache.write(k, cache.row(k, head, place, segment.slot), staged)


def as_cache(k: Code, cache: Cache, order: str, segment: Segment, positions: Operand) -> None:
    """Plain keys or values, [positions, heads, width] or heads first, in the form of a cache."""
    row, head = heads_of(k, cache.heads)
    with k.when(segment.found & (head < cache.heads)):
        staged = of_warp(k, cache.width)
        first = row * cache.heads + head if order == "rows" else head * positions + row
        with k.loop(k.lane, cache.width, WARP) as i:
            k.store(staged, k.load(k.pointers["x"], F32, first * cache.width + i), i)
        k.sync_warp()
        place = cache.place(k, row - segment.first, segment)
        cache.write(k, cache.row(k, head, place, None), staged)
