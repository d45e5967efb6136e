"""Attention of few rows: several blocks share a row, each has some heads and a range of positions.

The positions that a row sees are cut into at most `SPLITS` ranges, whose size follows from its own position alone. So
its result has the same bits whatever else a call computes. A range is computed in chunks of `KEYS` keys, of which each
has `THREADS / KEYS` threads for its score; then each thread has some elements of the values of every few keys. The
block that ends last merges the ranges of a row, in order.

With one row the block also computes what comes right before: it rotates its queries, and the block that sees the newest
position writes its key and value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rlx.backends.cuda.code import F32, I8, I32, I64, LINE, THREADS, WARP, WARPS, Code, Value, Variable
from rlx.backends.cuda.kernels.attention import Attention, Heads, merged, visible, with_sink
from rlx.backends.cuda.kernels.cache import Cache, Rope, Segment, staged_head
from rlx.backends.cuda.kernels.cards import of_card
from rlx.backends.cuda.numbers import exp, rounded, softcap
from rlx.ir.dims import PAST_SEQ, DimLike

SPLITS, KEYS = 32, 64
_SHARE = THREADS // KEYS  # threads of a key
_LOWEST = float("-inf")
_MERGED = 8  # ranges that are loaded at a time
_EARLY = 8  # vectors of values that a thread loads before it knows their weights


@dataclass(frozen=True)
class Written:
    """A row of a cache that is written first.

    Attributes:
        x: memory of the row, [heads, width].
        at: its position.
        rope: how it is rotated, if it is.
    """

    x: Value
    at: DimLike
    rope: Rope | None


@dataclass(frozen=True)
class Before:
    """What comes before attention of one row.

    Attributes:
        rope: how queries are rotated.
        written: what is written to the cache of keys, and to that of values.
    """

    rope: Rope | None
    written: tuple[Written | None, Written | None]


class Block(Heads):
    """The work of a block under construction."""

    def __init__(
        self, k: Code, a: Attention, keys: Cache, values: Cache, segment: Segment, row: Value, before: Before
    ) -> None:
        self.before, self.splits, count = before, k.dim_named("SPLITS"), a.together
        self.part, self.number = (k.block // self.splits) % a.parts, k.block % self.splits
        super().__init__(k, a, keys, values, segment, row, self.part)
        self.low, self.last, self.size = seen(k, a, segment, row)
        self.key_vector, self.value_vector = (_vector(a.width, cache) for cache in (keys, values))
        self.pieces = a.width // self.value_vector  # vectors of a value
        self.columns = -(-self.pieces // THREADS)  # how many of them a thread has of a key
        self.lanes = -(-self.pieces // self.columns)
        self.sharing = max(1, THREADS // self.lanes)  # threads that share the keys of an element
        self.start = k.larger(self.number * self.size, (self.low // KEYS) * KEYS)
        #: Where the keys of a chunk begin: they lie in one piece. The first place is looked up early.
        self.place = k.variable(I32, keys.place(k, self.start, segment))
        self.q = k.share(4 * count * a.width)
        self.scores = k.share(4 * count * KEYS)
        self.in_warp = WARP % self.lanes == 0 and self.columns == 1  # lanes of a warp that share are added first
        self.found_parts = WARPS if self.in_warp else self.sharing
        self.found = k.share(4 * self.found_parts * count * a.width)

    # -- what comes before --------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Puts the queries into shared memory, and writes the newest key and value."""
        k, a = self.k, self.a
        tasks = a.together + sum(each is not None for each in self.before.written)
        if self.before.rope is None and tasks == a.together:
            self.bring_queries()
        else:
            with k.loop(k.warp, tasks, WARPS) as task:
                self._task(task)
        k.barrier()

    def _task(self, task: Value) -> None:
        """A head of the queries, or of the key or the value that is written, by a warp."""
        k, a = self.k, self.a
        with k.when(task < a.together):
            head = k.smaller(self.first + task, self.end - 1)
            own = k.at(self.q, F32, task * a.width)
            staged_head(k, k.pointers["q"], self.row, head, a.heads, a.width, self.before.rope, own)
        number = a.together
        for cache, written in zip((self.keys, self.values), self.before.written, strict=True):
            if written is None:
                continue
            position = k.number(k.dim(written.at, self.segment.env))
            mine = (position // self.size).equals(self.number)
            with k.when(task.equals(number) & mine):
                staged = k.share(4 * cache.width)
                staged_head(k, written.x, self.row, self.kv_head, a.kv_heads, cache.width, written.rope, staged)
                place = cache.place(k, position, self.segment)
                cache.write(k, cache.row(k, self.kv_head, place, self.segment.slot), staged)
            number += 1

    # -- a range ------------------------------------------------------------------------------------------------------

    def range(self) -> tuple[list[Variable], list[Variable]]:
        """Largest scores and sums of weights over the range; the weighted values are then in `found`."""
        k, a = self.k, self.a
        top = [k.variable(F32, _LOWEST) for _ in range(a.together)]
        total = [k.variable(F32, 0.0) for _ in range(a.together)]
        count = self.columns * self.value_vector
        sums = [[k.variable(F32, 0.0) for _ in range(count)] for _ in range(a.together)]
        stop = k.smaller(self.number * self.size + self.size, self.last + 1)
        with k.loop(self.start, stop, KEYS) as base:
            self._chunk(base, top, total, sums)
            with k.when(base + KEYS < stop):
                self.place.set(self.keys.place(k, base + KEYS, self.segment))
        self._gather(sums)
        return top, total

    def _chunk(self, base: Value, top: list[Variable], total: list[Variable], sums: list[list[Variable]]) -> None:
        k = self.k
        first = k.larger(self.low - base, 0)
        stop = k.smaller(self.last + 1 - base, KEYS)
        place = self.place.get()
        key = k.thread // _SHARE
        row = self.keys.row(k, self.kv_head, place + self._clamped(key, first, stop), self.segment.slot)
        early = self._early()
        values = [self._value(place, self._clamped(self._key(j), first, stop)) for j in range(early)]
        scores = self._scores(row, base + key)
        inside = (key >= first) & (key < stop)
        with k.when((k.thread % _SHARE).equals(0)):
            for i, score in enumerate(scores):
                k.store(self.scores, k.select(inside, score, k.f32(_LOWEST)), key + i * KEYS)
        k.barrier()
        bases = self._weigh(top, total, sums)
        if early:
            for j, some in enumerate(values):
                self._add(self._key(j), some, bases, sums)
        else:
            within = k.thread < self.sharing * self.lanes
            with (
                k.loop(k.thread // self.lanes, KEYS, self.sharing) as own,
                k.when(within & (own >= first) & (own < stop)),
            ):
                self._add(own, self._value(place, own), bases, sums)
        k.barrier()

    def _early(self) -> int:
        """How many keys a thread has in a chunk, if it can hold their values; else 0."""
        whole = self.sharing * self.lanes == THREADS and KEYS % self.sharing == 0 and self.columns == 1
        plain = self.values.dtype.name in ("f32", "f16", "bf16")
        count = KEYS // self.sharing
        return count if whole and plain and count <= _EARLY else 0

    def _clamped(self, key: Value, first: Value, stop: Value) -> Value:
        return self.k.larger(self.k.smaller(key, stop - 1), first)

    def _key(self, j: int) -> Value:
        """The number in the chunk of a thread's j-th key of values."""
        return self.k.thread // self.lanes + j * self.sharing

    def _value(self, place: Value, key: Value) -> list[Value]:
        """Some elements of the value of a key."""
        k = self.k
        row, found = self.values.row(k, self.kv_head, place + key, self.segment.slot), list[Value]()
        for column in range(self.columns):
            piece = k.smaller(k.thread % self.lanes + column * self.lanes, self.pieces - 1)
            found += self.values.read(k, row, piece * self.value_vector, self.value_vector)
        return found

    def _scores(self, row: Value, position: Value) -> list[Value]:
        """The scores of a key, in all threads that share it."""
        k, a, size = self.k, self.a, self.key_vector
        found = [k.f32(0.0) for _ in range(a.together)]
        pieces = a.width // size
        steps = [k.thread % _SHARE + start for start in range(0, pieces, _SHARE)]
        keys = [self.keys.read(k, row, k.smaller(piece, pieces - 1) * size, size) for piece in steps]
        for n, (piece, key) in enumerate(zip(steps, keys, strict=True)):
            whole = (n + 1) * _SHARE <= pieces
            if not whole:
                key = [k.select(piece < pieces, x, k.f32(0.0)) for x in key]
            start = piece * size if whole else k.smaller(piece, pieces - 1) * size
            for i, total in enumerate(found):
                for q, x in zip(self.query(i, start, size), key, strict=True):
                    total = k.fma(q, x, total)
                found[i] = total
        results = []
        for i, total in enumerate(found):
            for distance in (1, 2):
                total = total + k.exchanged(total, distance)
            score = total * a.scale
            score = score if a.cap is None else softcap(k, score, a.cap)
            results.append(score + self._bias(i, position) if a.mask == "bias" else score)
        return results

    def _bias(self, i: int, position: Value) -> Value:
        k, a = self.k, self.a
        length = k.number(k.dim(a.length, self.segment.env))
        head = k.smaller(self.first + i, self.end - 1) if a.bias_heads > 1 else k.number(0)
        place = k.smaller(position, length - 1)
        return k.load(k.pointers["operand"], F32, (self.row * a.bias_heads + head) * length + place)

    def _weigh(self, top: list[Variable], total: list[Variable], sums: list[list[Variable]]) -> list[Value]:
        """Takes the scores of a chunk into account, in every warp; what is subtracted from scores."""
        k, bases = self.k, []
        for i, (largest, weights, own) in enumerate(zip(top, total, sums, strict=True)):
            scores = [k.load(self.scores, F32, k.lane + (i * KEYS + at)) for at in range(0, KEYS, WARP)]
            before = largest.get()
            after = k.fmax(before, k.warp_max(k.fmax(scores[0], scores[1])))
            base = k.select(after.equals(_LOWEST), k.f32(0.0), after)
            factor = exp(k, before - base)
            summed = k.warp_sum(exp(k, scores[0] - base) + exp(k, scores[1] - base))
            weights.set(k.fma(weights.get(), factor, summed))
            largest.set(after)
            for value in own:
                value.set(value.get() * factor)
            bases.append(base)
        return bases

    def _add(self, key: Value, value: Sequence[Value], bases: Sequence[Value], sums: list[list[Variable]]) -> None:
        """Adds the weighted value of a key, whose weight is 0 outside of what the row sees."""
        k = self.k
        for i, (base, own) in enumerate(zip(bases, sums, strict=True)):
            weight = exp(k, k.load(self.scores, F32, key + i * KEYS) - base)
            for x, variable in zip(value, own, strict=True):
                variable.set(k.fma(weight, x, variable.get()))

    def _gather(self, sums: list[list[Variable]]) -> None:
        """Puts the weighted values into `found`, [part, heads, width]."""
        k, a = self.k, self.a
        part, lane = k.thread // self.lanes, k.thread % self.lanes
        writes = part < self.sharing
        if self.in_warp:
            for variable in (variable for own in sums for variable in own):
                value, distance = variable.get(), WARP // 2
                while distance >= self.lanes:
                    value, distance = value + k.exchanged(value, distance), distance // 2
                variable.set(value)
            part, lane, writes = k.warp, k.lane, k.lane < self.lanes
        with k.when(writes):
            for i, own in enumerate(sums):
                for column in range(self.columns):
                    piece = lane + column * self.lanes
                    with k.when(piece < self.pieces):
                        place = (part * a.together + i) * a.width + piece * self.value_vector
                        for j in range(self.value_vector):
                            k.store(self.found, own[column * self.value_vector + j].get(), place + j)
        k.barrier()

    def value(self, item: Value) -> Value:
        """The weighted values of the range; item: head * width + element."""
        k, found = self.k, self.k.f32(0.0)
        for part in range(self.found_parts):
            found = found + k.load(self.found, F32, item + part * self.a.together * self.a.width)
        return found

    # -- results ------------------------------------------------------------------------------------------------------

    def finish(self, top: list[Variable], total: list[Variable]) -> None:
        """Writes the results if the row has one range, else those of the range, and merges them if it is the last."""
        k = self.k
        ranges = self.last // self.size + 1
        with k.when(ranges.equals(1)):
            self._write_whole(top, total)
        with k.when(ranges > 1):
            self._write_range(top, total)
            counter = k.at(k.pointers["counters"], I32, self.row * self.a.parts + self.part)
            with k.when(k.is_last(counter, ranges)):
                self._merge(ranges)

    def _write_whole(self, top: list[Variable], total: list[Variable]) -> None:
        k, a = self.k, self.a
        with self._each_item() as (i, head, e):
            tops, totals = self._of(i, top), self._of(i, total)
            whole, factor = with_sink(k, a, head, tops, totals)
            self._store(head, e, self.value(e + i * a.width) * factor / whole)

    @contextmanager
    def _each_item(self) -> Iterator[tuple[Value, Value, Value]]:
        """Number of a head in the block, the head, and an element, a thread for each."""
        k, a = self.k, self.a
        with k.loop(k.thread, a.together * a.width, THREADS) as item:
            i = item // a.width
            with k.when(self.first + i < self.end):
                yield i, self.first + i, item % a.width

    def _of(self, i: Value, values: list[Variable]) -> Value:
        """One of the values by its number."""
        k, found = self.k, values[0].get()
        for n, value in enumerate(values[1:], 1):
            found = k.select(i.equals(n), value.get(), found)
        return found

    def _store(self, head: Value, element: Value, value: Value) -> None:
        k, a = self.k, self.a
        k.store(k.pointers["out"], rounded(value, a.out), (self.row * a.heads + head) * a.width + element)

    def _partial(self, head: Value, number: Value) -> Value:
        """Where the result of a range begins: largest score, sum of weights, weighted values."""
        return ((self.row * self.a.heads + head) * self.splits + number) * self.a.partial

    def _write_range(self, top: list[Variable], total: list[Variable]) -> None:
        k, a, scratch = self.k, self.a, self.k.pointers["scratch"]
        with self._each_item() as (i, head, e):
            place = self._partial(head, self.number)
            with k.when(e.equals(0)):
                k.store(scratch, self._of(i, top), place)
                k.store(scratch, self._of(i, total), place + 1)
            k.store(scratch, self.value(e + i * a.width), place + 2 + e)

    def _merge(self, ranges: Value) -> None:
        k, a = self.k, self.a
        with self._each_item() as (_, head, e):
            top, total, value = k.variable(F32, _LOWEST), k.variable(F32, 0.0), k.variable(F32, 0.0)
            with k.loop(0, ranges, _MERGED) as start:
                some = [self._range_of(head, e, k.smaller(start + n, ranges - 1)) for n in range(_MERGED)]
                for n, own in enumerate(some):
                    inside = start + n < ranges
                    found = k.select(inside, own[0], k.f32(_LOWEST)), k.select(inside, own[1], k.f32(0.0))
                    largest, summed, first, second = merged(k, (top.get(), total.get()), found)
                    top.set(largest)
                    total.set(summed)
                    value.set(value.get() * first + own[2] * second)
            whole, factor = with_sink(k, a, head, top.get(), total.get())
            self._store(head, e, value.get() * factor / whole)

    def _range_of(self, head: Value, element: Value, number: Value) -> tuple[Value, Value, Value]:
        k, scratch, place = self.k, self.k.pointers["scratch"], self._partial(head, number)
        found = [k.load(scratch, F32, place + at) for at in (0, 1)]
        return found[0], found[1], k.load(scratch, F32, place + 2 + element)


def _vector(width: int, cache: Cache) -> int:
    """Elements that a thread reads at a time: 16 bytes if the width allows."""
    most = 4 if cache.dtype.name == "f32" else 8
    return next(size for size in (most, 4, 2, 1) if size <= most and width % size == 0)


def seen(k: Code, a: Attention, segment: Segment, row: Value) -> tuple[Value, Value, Value]:
    """The positions [low, last] that a row sees, and the size of a range."""
    low, last = visible(k, a, segment, row)
    return low, last, ((last + SPLITS * KEYS) // (SPLITS * KEYS)) * KEYS


def fetch_early(k: Code, a: Attention, caches: Sequence[Cache]) -> None:
    """Before waiting, brings what the block will read of the caches to the card's cache: hints, which change nothing.

    The number of positions may be that of the step before.
    """
    if a.mask != "causal" or a.length not in (PAST_SEQ, PAST_SEQ + 1):
        return
    past = k.assembly(I32, "ld.relaxed.gpu.global.u32 $0, [$1];", "=r,l", k.at(k.extents, I32, k.symbol("PAST_SEQ")))
    segment = Segment(k.as_value(1, "i1"), k.number(0), k.number(0), {"PAST_SEQ": past}, None, None)
    low, last, size = seen(k, a, segment, k.number(0))
    splits, group = k.dim_named("SPLITS"), a.heads // a.kv_heads
    part, number = of_card(k, a.cards, (k.block // splits) % a.parts, a.parts), k.block % splits
    kv_head = part // -(-group // a.together)
    first = k.larger(low, number * size)
    for cache in caches:
        lines = -(-cache.row_bytes // LINE)
        with k.loop(k.thread, k.smaller(size, last + 1 - first) * lines, THREADS) as i:
            position = first + i // lines
            row = cache.row(k, kv_head, cache.place(k, position, segment), None)
            k.fetch_line(k.at(cache.base, I8, row * cache.row_bytes + (i % lines * LINE).to(I64)))


def attention(k: Code, a: Attention, keys: Cache, values: Cache, segment: Segment, row: Value, before: Before) -> None:
    """The kernel."""
    with k.when(segment.found):
        block = Block(k, a, keys, values, segment, row, before)
        with k.when(block.number * block.size <= block.last):
            block.prepare()
            k.let_next()
            block.finish(*block.range())
