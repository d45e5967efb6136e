"""Attention of many rows: a block computes some heads of one row, over all positions that it sees.

The positions are cut into at most `SPLITS` ranges, whose size follows from the row's own position alone, and their
results are merged in order. A range is computed in chunks of `THREADS` keys: each thread has the scores of one key,
then the threads share the elements of the values. With few rows several blocks share one: see `row_attention.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from rlx.backends.cuda.code import F32, I32, THREADS, WARPS, Code, Value, Variable
from rlx.backends.cuda.kernels.cache import Cache, Segment
from rlx.backends.cuda.kernels.cards import of_card
from rlx.backends.cuda.numbers import exp, rounded, softcap
from rlx.ir.dims import DimLike

SPLITS = 32
_CHUNKS = SPLITS * THREADS  # positions up to which a range is one chunk
_HEADS = 8  # of a block at most
_LOWEST = float("-inf")


@dataclass(frozen=True)
class Attention:
    """An attention.

    Attributes:
        heads, kv_heads, width: its sizes.
        scale, window, cap, mask: as in `rlx.ir.meaning.attention`.
        length: number of positions.
        rows: number of rows.
        bias_heads: heads of a bias.
        sinks: whether each head has one more score, which counts for no value.
        out: type of the results.
        cards: how many share the heads.
    """

    heads: int
    kv_heads: int
    width: int
    scale: float
    window: int | None
    cap: float | None
    mask: str
    length: DimLike
    rows: DimLike
    bias_heads: int
    sinks: bool
    out: str
    cards: int = 1

    @property
    def together(self) -> int:
        """Heads of a block; they share keys."""
        return min(self.heads // self.kv_heads, _HEADS)

    @property
    def parts(self) -> int:
        """Blocks of a row on a card, without ranges."""
        return self.kv_heads // self.cards * -(-(self.heads // self.kv_heads) // self.together)

    @property
    def partial(self) -> int:
        """Numbers of the result of a range: largest score, sum of weights, and the weighted values."""
        return self.width + 2


@dataclass(frozen=True)
class Seen:
    """The positions [low, last] that a row sees, in ranges of `size`."""

    low: Value
    last: Value
    size: Value


def visible(k: Code, a: Attention, segment: Segment, row: Value) -> tuple[Value, Value]:
    """The first and the last position that a row sees."""
    length = k.number(k.dim(a.length, segment.env))
    rows = segment.env.get("SEQ", k.number(k.dim(a.rows)))
    own = length - rows + (row - segment.first)
    last = own
    if a.mask in ("none", "bias"):
        last = length - 1
    elif a.mask == "visible":
        last = k.smaller(k.load(k.pointers["operand"], I32, row), length - 1)
    elif a.mask == "around":
        assert a.window is not None
        last = k.smaller(own + (a.window - 1), length - 1)
    low = k.number(0) if a.window is None else k.larger(own - (a.window - 1), 0)
    return low, last


def seen(k: Code, a: Attention, segment: Segment, row: Value) -> Seen:
    """What a row sees."""
    low, last = visible(k, a, segment, row)
    return Seen(low, last, ((last + _CHUNKS) // _CHUNKS) * THREADS)


class Heads:
    """The heads of a row that a block computes.

    Args:
        part: which of the `Attention.parts` of the row.
    """

    q: Value  # shared memory of the queries, [heads, width]

    def __init__(
        self, k: Code, a: Attention, keys: Cache, values: Cache, segment: Segment, row: Value, part: Value
    ) -> None:
        self.k, self.a, self.keys, self.values, self.segment, self.row = k, a, keys, values, segment, row
        group, count = a.heads // a.kv_heads, a.together
        tiles, part = -(-group // count), of_card(k, a.cards, part, a.parts)
        self.kv_head, self.first = part // tiles, (part // tiles) * group + (part % tiles) * count
        self.end = (self.kv_head + 1) * group

    def bring_queries(self) -> None:
        """Puts the queries into shared memory."""
        k, a = self.k, self.a
        with k.loop(k.thread, a.together * a.width, THREADS) as i:
            head = k.smaller(self.first + i // a.width, self.end - 1)
            k.store(self.q, k.load(k.pointers["q"], F32, (self.row * a.heads + head) * a.width + i % a.width), i)

    def query(self, i: int, start: Value, count: int) -> list[Value]:
        """Some elements of a query."""
        k, size = self.k, min(count, 4)
        found = list[Value]()
        for at in range(0, count, size):
            place = k.at(self.q, F32, start + (i * self.a.width + at))
            found += [k.load(place, F32)] if size == 1 else k.lanes(k.load(place, f"<{size} x float>"))
        return found


class Block(Heads):
    """The work of a block under construction."""

    def __init__(self, k: Code, a: Attention, keys: Cache, values: Cache, segment: Segment, row: Value) -> None:
        super().__init__(k, a, keys, values, segment, row, k.block % a.parts)
        count = a.together
        self.vector = 2 if a.width % 2 == 0 else 1  # elements of the values that a thread reads at a time
        wide = a.width // self.vector
        self.columns = -(-wide // THREADS)  # how many times
        self.lanes = -(-wide // self.columns)
        self.sharing = max(1, THREADS // self.lanes)  # threads that share the keys of an element
        self.q = k.share(4 * count * a.width)
        self.weights = k.share(4 * count * THREADS)
        self.places = k.share(4 * THREADS)
        self.warps = k.share(4 * 2 * count * WARPS)
        self.found = k.share(4 * self.sharing * count * a.width)

    def range_of(self, seen_: Seen, number: Value) -> tuple[list[Variable], list[Variable]]:
        """Largest scores and sums of weights over a range; the weighted values are then in `found`."""
        k, a = self.k, self.a
        top = [k.variable(F32, _LOWEST) for _ in range(a.together)]
        total = [k.variable(F32, 0.0) for _ in range(a.together)]
        sums = [[k.variable(F32, 0.0) for _ in range(self.columns * self.vector)] for _ in range(a.together)]
        begin = number * seen_.size
        start = k.larger(begin, (seen_.low // THREADS) * THREADS)
        with k.loop(start, k.smaller(begin + seen_.size, seen_.last + 1), THREADS) as base:
            self._chunk(seen_, base, top, total, sums)
        self._gather(sums)
        return top, total

    def _chunk(
        self, seen_: Seen, base: Value, top: list[Variable], total: list[Variable], sums: list[list[Variable]]
    ) -> None:
        k, a = self.k, self.a
        position = base + k.thread
        inside = (position >= seen_.low) & (position <= seen_.last)
        scores = [k.variable(F32, _LOWEST) for _ in range(a.together)]
        with k.when(inside):
            place = self.keys.place(k, position, self.segment)
            k.store(self.places, place, k.thread)
            for score, found in zip(scores, self._scores(place, position), strict=True):
                score.set(found)
        factors = self._weigh(inside, scores, top, total)
        for own, factor in zip(sums, factors, strict=True):
            for variable in own:
                variable.set(variable.get() * factor)
        self._add_values(seen_, base, sums)
        k.barrier()

    def _scores(self, place: Value, position: Value) -> list[Value]:
        """The scores of a key."""
        k, a = self.k, self.a
        row = self.keys.row(k, self.kv_head, place, self.segment.slot)
        step = next(size for size in (32, 16, 8, 4, 2, 1) if a.width % size == 0)
        found = [k.variable(F32, 0.0) for _ in range(a.together)]
        with k.loop(0, a.width, step) as start:
            count = min(step, 8 if self.keys.dtype.name != "f32" else 4)
            for at in range(0, step, count):
                key = self.keys.read(k, row, start + at, count)
                for i, total in enumerate(found):
                    value = total.get()
                    for q, x in zip(self.query(i, start + at, count), key, strict=True):
                        value = k.fma(q, x, value)
                    total.set(value)
        results = []
        for i, total in enumerate(found):
            score = total.get() * a.scale
            score = score if a.cap is None else softcap(k, score, a.cap)
            results.append(score + self._bias(i, position) if a.mask == "bias" else score)
        return results

    def _bias(self, i: int, position: Value) -> Value:
        k, a = self.k, self.a
        length = k.number(k.dim(a.length, self.segment.env))
        head = k.smaller(self.first + i, self.end - 1) if a.bias_heads > 1 else k.number(0)
        return k.load(k.pointers["operand"], F32, (self.row * a.bias_heads + head) * length + position)

    def _weigh(self, inside: Value, scores: list[Variable], top: list[Variable], total: list[Variable]) -> list[Value]:
        """Puts the weights of a chunk into shared memory; the factors of what was summed before."""
        k, a = self.k, self.a
        for i, score in enumerate(scores):
            largest = k.warp_max(score.get())
            with k.when(k.lane.equals(0)):
                k.store(self.warps, largest, k.warp + i * WARPS)
        k.barrier()
        factors = []
        for i, (score, before) in enumerate(zip(scores, top, strict=True)):
            after = before.get()
            for warp in range(WARPS):
                after = k.fmax(after, k.load(self.warps, F32, i * WARPS + warp))
            base = k.select(after.equals(_LOWEST), k.f32(0.0), after)
            weight = k.select(inside, exp(k, score.get() - base), k.f32(0.0))
            factors.append(exp(k, before.get() - base))
            before.set(after)
            k.store(self.weights, weight, k.thread + i * THREADS)
            summed = k.warp_sum(weight)
            with k.when(k.lane.equals(0)):
                k.store(self.warps, summed, k.warp + (a.together + i) * WARPS)
        k.barrier()
        for i, (value, factor) in enumerate(zip(total, factors, strict=True)):
            own = k.f32(0.0)
            for warp in range(WARPS):
                own = own + k.load(self.warps, F32, (a.together + i) * WARPS + warp)
            value.set(value.get() * factor + own)
        return factors

    def _add_values(self, seen_: Seen, base: Value, sums: list[list[Variable]]) -> None:
        """Adds the weighted values of a chunk: each thread has some elements of every `sharing`-th key."""
        k, a = self.k, self.a
        part, lane = k.thread // self.lanes, k.thread % self.lanes
        first = k.larger(seen_.low - base, 0)
        first = ((first + (self.sharing - 1) - part) // self.sharing) * self.sharing + part
        stop = k.smaller(seen_.last + 1 - base, THREADS)
        with k.when(part < self.sharing), k.loop(first, stop, self.sharing) as key:
            row = self.values.row(k, self.kv_head, k.load(self.places, I32, key), self.segment.slot)
            weights = [k.load(self.weights, F32, key + i * THREADS) for i in range(a.together)]
            for column in range(self.columns):
                at = (lane + column * self.lanes) * self.vector
                with self._within(at):
                    value = self.values.read(k, row, at, self.vector)
                    for own, weight in zip(sums, weights, strict=True):
                        for j, x in enumerate(value):
                            place = own[column * self.vector + j]
                            place.set(k.fma(weight, x, place.get()))

    def _within(self, at: Value) -> AbstractContextManager[None]:
        return self.k.when(at < self.a.width)

    def _gather(self, sums: list[list[Variable]]) -> None:
        """Puts the weighted values into `found`, [sharing, heads, width]."""
        k, a = self.k, self.a
        part, lane = k.thread // self.lanes, k.thread % self.lanes
        with k.when(part < self.sharing):
            for i, own in enumerate(sums):
                for column in range(self.columns):
                    at = (lane + column * self.lanes) * self.vector
                    with self._within(at):
                        for j in range(self.vector):
                            place = (part * a.together + i) * a.width + at + j
                            k.store(self.found, own[column * self.vector + j].get(), place)
        k.barrier()

    def value(self, item: Value) -> Value:
        """The weighted values of the last range; item: head * width + element."""
        k, found = self.k, self.k.f32(0.0)
        for part in range(self.sharing):
            found = found + k.load(self.found, F32, item + part * self.a.together * self.a.width)
        return found


def merged(k: Code, before: tuple[Value, Value], after: tuple[Value, Value]) -> tuple[Value, Value, Value, Value]:
    """Largest score and sum of two ranges together, and the factors of both."""
    top = k.fmax(before[0], after[0])
    base = k.select(top.equals(_LOWEST), k.f32(0.0), top)
    first, second = exp(k, before[0] - base), exp(k, after[0] - base)
    return top, before[1] * first + after[1] * second, first, second


def attention(k: Code, a: Attention, keys: Cache, values: Cache, segment: Segment, row: Value) -> None:
    """The kernel."""
    with k.when(segment.found):
        block = Block(k, a, keys, values, segment, row)
        what = seen(k, a, segment, row)
        block.bring_queries()
        k.barrier()
        _all_ranges(k, block, what)


def _all_ranges(k: Code, block: Block, what: Seen) -> None:
    a = block.a
    count = -(-a.together * a.width // THREADS)
    tops = [k.variable(F32, _LOWEST) for _ in range(a.together)]
    totals = [k.variable(F32, 0.0) for _ in range(a.together)]
    sums = [k.variable(F32, 0.0) for _ in range(count)]
    scales = k.share(4 * 2 * a.together)
    with k.loop(0, what.last // what.size + 1) as number:
        top, total = block.range_of(what, number)
        for i in range(a.together):
            after = merged(k, (tops[i].get(), totals[i].get()), (top[i].get(), total[i].get()))
            tops[i].set(after[0])
            totals[i].set(after[1])
            with k.when(k.thread.equals(0)):
                k.store(scales, after[2], 2 * i)
                k.store(scales, after[3], 2 * i + 1)
        k.barrier()
        _each_item(k, a, count, lambda n, item: sums[n].set(
            sums[n].get() * k.load(scales, F32, (item // a.width) * 2)
            + block.value(item) * k.load(scales, F32, (item // a.width) * 2 + 1)
        ))  # fmt: skip
        k.barrier()
    for i in range(a.together):
        head = k.smaller(block.first + i, block.end - 1)
        whole, factor = with_sink(k, a, head, tops[i].get(), totals[i].get())
        with k.when(k.thread.equals(0)):
            k.store(scales, whole, 2 * i)
            k.store(scales, factor, 2 * i + 1)
    k.barrier()

    def write(n: int, item: Value) -> None:
        head = block.first + item // a.width
        with k.when(head < block.end):
            total, factor = (k.load(scales, F32, (item // a.width) * 2 + i) for i in range(2))
            _store(k, a, sums[n].get() * factor / total, (block.row * a.heads + head) * a.width + item % a.width)

    _each_item(k, a, count, write)


def with_sink(k: Code, a: Attention, head: Value, top: Value, total: Value) -> tuple[Value, Value]:
    """The sum of weights with that of the sink of a head, and the factor of the values."""
    if not a.sinks:
        return total, k.f32(1.0)
    _, summed, factor, _ = merged(k, (top, total), (k.load(k.pointers["sinks"], F32, head, constant=True), k.f32(1.0)))
    return summed, factor


def _each_item(k: Code, a: Attention, count: int, body: Callable[[int, Value], None]) -> None:
    for n in range(count):
        item = k.thread + n * THREADS
        with k.when(item < a.together * a.width):
            body(n, item)


def _store(k: Code, a: Attention, value: Value, place: Value) -> None:
    k.store(k.pointers["out"], rounded(value, a.out), place)
