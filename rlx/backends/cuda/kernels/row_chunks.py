"""The part of attention of few rows that a block computes, and where its keys and values lie in shared memory.

Keys and values of a chunk of positions come to shared memory at a time: by copies that run by themselves, or, if they
are of a type that tensor cores do not take, as sums of parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rlx.backends.cuda.agreed.steps import POSITIONS, RANGES
from rlx.backends.cuda.code import BF16, F16, F32, I1, I8, I16, I32, I64, RESERVED, THREADS, Code, Value
from rlx.backends.cuda.kernels.attention import Attention, SharedRows, operands_of, visible
from rlx.backends.cuda.kernels.cache import Cache, Segment, every_lane
from rlx.backends.cuda.kernels.cards import of_card
from rlx.backends.cuda.kernels.tensor_cores import copy_async
from rlx.backends.cuda.numbers import pair_parts
from rlx.ir.dtypes import DType

_LEAST, _MOST = POSITIONS.bit_length() - 1, (RANGES * POSITIONS).bit_length() - 1
_STAGES = 2  # chunks of keys and values in shared memory
_CHUNK = 8  # elements that a thread brings at a time


@dataclass(frozen=True)
class Tiles(SharedRows):
    """How keys and values lie in shared memory.

    Attributes:
        width: that of a head, rounded up to a multiple of 16.
        keys: positions of a chunk.
        stages: chunks that are there at a time, or on their way. With 0, values take the place of keys.
    """

    keys: int
    stages: int

    @property
    def operand(self) -> int:
        """Bytes of the keys of a chunk, or of the values."""
        return self.parts * self.keys * self.stride

    @property
    def stage(self) -> int:
        """Bytes of a chunk."""
        return 2 * self.operand if self.stages else self.operand

    @property
    def lines(self) -> int:
        """Operands of 16 rows that have the parts of all queries."""
        return -(-self.own // 2)

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """The products that count: (line, part of a key or value)."""
        return [(i, j) for j in range(self.parts) for i in range(self.lines) if 2 * i + j < self.own]

    @property
    def weights(self) -> int:
        """Bytes from row to row of the weights of a chunk."""
        return 2 * self.keys + 16

    @property
    def chunks(self) -> int:
        """Bytes of all chunks."""
        return max(1, self.stages) * self.stage

    def shared(self, a: Attention) -> int:
        """Bytes of shared memory of a block, about."""
        staged = 4 * self.width * (a.together + 2)
        queries = self.own * a.together * self.stride
        return self.chunks + queries + 16 * self.lines * self.weights + staged + RESERVED


def tiles_of(a: Attention, keys: DType, values: DType, shared: int) -> Tiles:
    """How an attention lies in shared memory: so that two blocks share a multiprocessor, if that is possible.

    Heads for whose keys and values a block has no room at once have one after the other there.

    Args:
        shared: bytes of shared memory that a block can have.
    """
    width = -(-a.width // 16) * 16
    kind, parts, own = operands_of(keys, values)
    stages = 0 if parts > 1 or a.width % _CHUNK else _STAGES
    every = [Tiles(width, kind, parts, own, count, stages) for count in (POSITIONS, POSITIONS // 2, POSITIONS // 4)]
    half = (shared + RESERVED) // 2 - RESERVED
    least = every[-1] if every[-1].shared(a) <= shared + RESERVED else replace(every[-1], stages=0)
    return next((tiles for tiles in every if tiles.shared(a) <= half), least)


@dataclass(frozen=True)
class Share:
    """How blocks share a row.

    Attributes:
        number: of the block among them.
        each: positions of a block, about: a power of two.
        room: ranges of a row that there is memory for.
        place: number of the row among those that there is memory for.
    """

    number: Value
    each: Value
    room: Value
    place: Value


class Work:
    """The part of a row that a block computes.

    Args:
        part: which of the `Attention.parts` of the row.
        share: of the row; None if the block has all of it.

    Attributes:
        kv_head: whose keys are read.
        head, end: the first head, and the one after the last that a block of the row has.
        low, last: the positions that the row sees.
        size, shift: positions of a range, a power of two, and its logarithm.
        first, ranges: the first range that the row sees, and the one after the last.
        begin, stop: those of the block.
        start, limit: its positions; the first one begins a chunk.
    """

    def __init__(
        self, k: Code, a: Attention, t: Tiles, segment: Segment, row: Value, part: Value, share: Share | None
    ) -> None:
        self.k, self.a, self.t, self.segment, self.row, self.share = k, a, t, segment, row, share
        group = a.heads // a.kv_heads
        parts, part = -(-group // a.together), of_card(k, a.cards, part, a.parts)
        self.kv_head = part // parts
        self.head, self.end = self.kv_head * group + (part % parts) * a.together, (self.kv_head + 1) * group
        self.low, self.last = visible(k, a, segment, row)
        exponent = (self.last.to(F32).bits(I32) >> 23) - 127
        self.shift = k.larger(exponent - (_MOST - 1), 0) + _LEAST
        self.size = k.number(1) << self.shift
        self.first, self.ranges = self.low >> self.shift, (self.last >> self.shift) + 1
        self.begin, self.stop = self.first, self.ranges
        if share is not None:
            each = k.larger(share.each >> self.shift, 1)
            self.begin = self.first + share.number * each
            left = self.ranges - self.begin  # a rest of at most half a share goes to the block before
            last = k.select(left - each <= each >> 1, self.ranges, self.begin + each)
            self.stop = k.select(share.number.equals(0) | (left > each >> 1), last, self.begin)
        self.start = k.larger(self.begin * self.size, (self.low // t.keys) * t.keys)
        self.limit = k.smaller(self.stop * self.size, self.last + 1)

    @property
    def is_alone(self) -> Value:
        """Whether the block has all ranges of the row."""
        return self.begin.equals(self.first) & self.stop.equals(self.ranges)

    @property
    def is_shared(self) -> Value:
        """The opposite."""
        return (self.begin > self.first) | (self.stop < self.ranges)


class Chunks:
    """The keys and values of a block.

    Args:
        caches: of keys and of values.
        new: the positions of keys and values that the block writes before it reads them; None for none.
    """

    def __init__(self, w: Work, caches: Sequence[Cache], new: Sequence[Value | None]) -> None:
        self.w, self.k, self.t, self.caches, self.new = w, w.k, w.t, caches, new
        self.memory = self.k.share(w.t.chunks)
        #: Where the keys of the chunk lie that is brought next: in one piece. It is looked up early.
        self.place = self.k.variable(I32, 0)

    def stage(self, number: Value) -> Value:
        """Where a chunk lies."""
        return self.k.at(self.memory, I8, number * self.t.stage)

    def look_up(self, base: Value) -> None:
        """Looks up where the chunk lies that is brought next."""
        with self.k.when(base < self.w.limit):
            self.place.set(self.caches[0].place(self.k, base, self.w.segment))

    def copy(self, base: Value, stage: Value, *, skips: bool = False) -> None:
        """Begins to copy a chunk; what the row does not see becomes zeros.

        Args:
            skips: leaves new keys and values out.
        """
        k, t, w = self.k, self.t, self.w
        first, stop = k.larger(w.low - base, 0), k.smaller(w.last + 1 - base, t.keys)
        new = [each - base if skips and each is not None else None for each in self.new]
        whole = first.equals(0) & stop.equals(t.keys)
        for each in new:
            whole = whole if each is None else whole & (each >= t.keys)
        start = self.stage(stage)
        with k.when(whole):
            self._copy(start, None, [None, None])
        with k.when(whole ^ 1):
            self._copy(start, (first, stop), new)

    def _copy(self, start: Value, seen: tuple[Value, Value] | None, new: Sequence[Value | None]) -> None:
        """Begins to copy a chunk.

        Args:
            seen: the first row that is seen, and the one after the last; None if all are.
        """
        k, t, w = self.k, self.t, self.w
        for row, element, count, step in self._pieces():
            inside, valid = self._inside(element, k.as_value(1, I1), _CHUNK)
            target = k.at(start, I8, row * t.stride + element * 2)
            places = []
            for cache in self.caches:
                source = cache.row(k, w.kv_head, self.place.get() + row, w.segment.slot) * cache.width + inside.to(I64)
                places.append(k.at(cache.base, I16, source))
            for i in range(count):
                own = row + i * step
                kept = None if seen is None else valid & (own >= seen[0]) & (own < seen[1])
                if seen is None and t.width > w.a.width:
                    kept = valid
                for which, (place, other) in enumerate(zip(places, new, strict=True)):
                    to = k.at(target, I8, i * step * t.stride + which * t.operand)
                    size = None if kept is None else k.select(kept, 16, 0)
                    with k.guarded(None if other is None else (own < other) | (own > other)):
                        copy_async(k, to, k.at(place, I16, i * step * w.a.width), size)

    def _pieces(self) -> Iterator[tuple[Value, Value, int, int]]:
        """What a thread brings of a chunk: row and first element, how many such pieces, and rows between them."""
        k, t = self.k, self.t
        per_row = t.width // _CHUNK
        items = t.keys * per_row
        if THREADS % per_row == 0 and items % THREADS == 0:
            yield k.thread // per_row, k.thread % per_row * _CHUNK, items // THREADS, THREADS // per_row
            return
        for start in range(0, items, THREADS):
            item = k.thread + start
            with k.guarded(item < items if start + THREADS > items else None):
                yield item // per_row, item % per_row * _CHUNK, 1, 0

    def convert(self, base: Value, which: int) -> None:
        """Brings the keys or the values of a chunk as sums of parts; what the row does not see becomes zeros."""
        k, t, w, cache = self.k, self.t, self.w, self.caches[which]
        size = next(size for size in (_CHUNK, 4, 2, 1) if w.a.width % size == 0)
        first, stop = k.larger(w.low - base, 0), k.smaller(w.last + 1 - base, t.keys)
        for start, element, count, step in self._pieces():
            for i in range(count):
                row, numbers = start + i * step, list[Value]()
                seen, own = (row >= first) & (row < stop), k.larger(k.smaller(row, stop - 1), first)
                source = cache.row(k, w.kv_head, self.place.get() + own, w.segment.slot)
                for at in range(0, _CHUNK, size):
                    inside, valid = self._inside(element + at, seen, size)
                    numbers += [k.select(valid, x, k.f32(0.0)) for x in cache.read(k, source, inside, size)]
                parts = [pair_parts(k, numbers[j], numbers[j + 1], t.kind, t.parts) for j in range(0, _CHUNK, 2)]
                for part in range(t.parts):
                    to = k.at(self.memory, I8, row * t.stride + element * 2 + part * t.keys * t.stride)
                    k.store(to, k.vector([each[part] for each in parts]))

    def _inside(self, element: Value, seen: Value, count: int) -> tuple[Value, Value]:
        """An element of a head, and whether it and the next ones are those that were asked for."""
        if self.t.width == self.w.a.width:
            return element, seen
        return self.k.smaller(element, self.w.a.width - count), seen & (element < self.w.a.width)

    def keep(self, which: int, position: Value, staged: Value) -> None:
        """Puts a new key or value of one of the first chunks to where `copy` has left it out, by a warp.

        Args:
            staged: shared memory, f32 of the width of the chunks.
        """
        k, t, at = self.k, self.t, position - self.w.start
        target = k.at(self.stage(at // t.keys), I8, at % t.keys * t.stride + which * t.operand)
        for i, inside in every_lane(k, t.width):
            value = k.load(staged, F32, i)
            value = value if t.width == self.w.a.width else k.select(i < self.w.a.width, value, k.f32(0.0))
            with k.guarded(inside):
                k.store(target, value.to(F16 if t.kind == "f16" else BF16), i)
