"""Attention over prompts on tensor cores: a block computes some rows of one sequence for the heads of one key head.

The form is that of FlashAttention-2 (Dao, arXiv 2307.08691): keys and values come in chunks, and each row keeps its
largest score, the sum of its weights and the weighted values so far. 16 pairs of a row and a head are an operand of a
product; four warps have 64 of them, and two such groups share the positions of each chunk. Chunks begin at multiples of
their size, and what a row does not see leaves its bits alone: so they do not depend on the other rows.

Queries and weights have the type of the cache, if it is f16 or bf16. With precision "exact" products keep the precision
of f32 as far as caches have it: queries and weights are sums of two f16, or of two or three bf16, and so are keys and
values of caches of other types than these.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlx.backends.cuda.code import F32, I8, I16, I32, RESERVED, THREADS, Code, Value, set_all
from rlx.backends.cuda.kernels.attention import Attention, SharedRows, operands_of
from rlx.backends.cuda.kernels.cache import Cache, Segment, numbered_segment
from rlx.backends.cuda.kernels.cards import of_card
from rlx.backends.cuda.kernels.tensor_cores import (
    commit_copies,
    copy_async,
    matrices,
    product,
    wait_copies,
)
from rlx.backends.cuda.numbers import LOG2_E, exp2, pair_parts, rounded, softcap
from rlx.ir.dims import DimLike
from rlx.ir.dtypes import DType
from rlx.ir.segments import ROWS

_PAIRS, _GROUPS = 64, 2  # of a row and a head in a block; groups of warps that share positions
_WIDEST, _HELD = 256, 128  # elements of a head: at most, and with queries in registers
_CHUNK = 8  # elements that a thread brings at a time
_LOWEST = float("-inf")


@dataclass(frozen=True)
class Tiles(SharedRows):
    """How the work is cut.

    Attributes:
        width: that of a head.
        keys: positions that a group has at a time.
        stages: chunks in shared memory.
    """

    keys: int
    stages: int

    @property
    def held(self) -> bool:
        """Whether queries stay in registers."""
        return self.width <= _HELD

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """The products of parts that count: those of both low parts do not."""
        return [(i, j) for i in range(self.own) for j in range(self.parts) if i + j < self.own]

    @property
    def positions(self) -> int:
        """Of a chunk."""
        return _GROUPS * self.keys

    @property
    def operand(self) -> int:
        """Bytes of one part of the keys, or of the values, of a chunk."""
        return self.positions * self.stride

    @property
    def stage(self) -> int:
        """Bytes of a chunk."""
        return 2 * self.parts * self.operand

    @property
    def shared(self) -> int:
        """Bytes of shared memory; at the end it holds the results of the second group."""
        queries = 0 if self.held else _PAIRS * self.width * 2 * self.own
        return max(queries + self.stages * self.stage, _PAIRS * (self.width + 8 + 2) * 4)


def tiles_of(a: Attention, keys: DType, values: DType, shared: int, *, exact: bool) -> Tiles | None:
    """How an attention is cut; None if this kernel does not serve it.

    Args:
        shared: bytes of shared memory that a block can have.
        exact: whether queries and weights are as precise as f32.
    """
    if a.width % 16 or a.width > _WIDEST or a.mask == "bias":
        return None
    kind, parts, own = operands_of(keys, values)
    own = own if exact or parts > 1 else 1
    positions = 32 if a.width <= _HELD and parts < 3 else 16
    for stages in (2, 1) if parts == 1 else (1,):
        found = Tiles(a.width, kind, parts, own, positions, stages)
        if found.shared + RESERVED <= shared:
            return found
    return None


def together(a: Attention) -> int:
    """Heads of a block."""
    return min(a.heads // a.kv_heads, _PAIRS)


def rows_of(a: Attention) -> int:
    """Rows of a block."""
    return _PAIRS // together(a)


def parts_of(a: Attention) -> int:
    """Blocks of a card that share rows."""
    return a.kv_heads // a.cards * -(-(a.heads // a.kv_heads) // together(a))


def find_rows(k: Code, a: Attention, table: Value | None, columns: int, count: DimLike) -> tuple[Segment, Value]:
    """The sequence of a block, and the first of its rows there. A block of no rows has a segment that is not found.

    Args:
        table, columns, count: as of `segment_of`. Sequences of one row have no blocks.
    """
    number, size = k.block // parts_of(a), rows_of(a)
    if table is None:
        last = (k.number(k.dim(a.rows)) + (size - 1)) // size - 1
        return Segment(k.as_value(1, "i1"), k.number(0), k.number(0), {}, None, None), (last - number) * size
    place, left = k.variable(I32, -1), k.variable(I32, number)
    first = k.variable(I32, 0)
    with k.loop(0, k.dim(count)) as i:
        rows = k.load(table, I32, i * columns + ROWS)
        own = k.select(rows > 1, (rows + (size - 1)) // size, 0)
        before = left.get()
        here = (before >= 0) & (before < own)
        place.set(k.select(here, i, place.get()))
        first.set(k.select(here, (own - 1 - before) * size, first.get()))
        left.set(before - own)
    return numbered_segment(k, place.get(), table, columns), first.get()


class Prompt:
    """The work of a block under construction.

    Args:
        first: the first of its rows, counted from the first of the sequence.
    """

    def __init__(
        self, k: Code, a: Attention, t: Tiles, keys: Cache, values: Cache, segment: Segment, first: Value
    ) -> None:  # fmt: skip
        self.k, self.a, self.t, self.keys, self.values, self.segment, self.first = k, a, t, keys, values, segment, first
        group, own = a.heads // a.kv_heads, of_card(k, a.cards, k.block % parts_of(a), parts_of(a))
        shares = -(-group // together(a))
        self.kv_head = own // shares
        self.head, self.end = self.kv_head * group + (own % shares) * together(a), (self.kv_head + 1) * group
        self.rows = segment.env.get("SEQ", k.number(k.dim(a.rows)))
        self.length = k.number(k.dim(a.length, segment.env))
        self.place = k.share(t.shared)
        self.chunks = self.place if t.held else k.at(self.place, I8, _PAIRS * t.width * 2 * t.own)
        self.g, self.t4 = k.lane >> 2, k.lane & 3
        self.group, self.line = k.warp >> 2, k.warp & 3
        self.queries: list[list[list[Value]]] = []
        self.top = [k.variable(F32, _LOWEST) for _ in range(2)]
        self.total = [k.variable(F32, 0.0) for _ in range(2)]
        self.sums = [[k.variable(F32, 0.0) for _ in range(4)] for _ in range(t.width // 8)]

    # -- rows ---------------------------------------------------------------------------------------------------------

    def pair(self, half: int) -> tuple[Value, Value, Value]:
        """Row and head of a pair of the lane, and whether there is such a pair."""
        k, count = self.k, together(self.a)
        number = self.line * 16 + self.g + 8 * half
        row, head = self.first + number // count, self.head + number % count
        valid = (number < rows_of(self.a) * count) & (row < self.rows) & (head < self.end)
        return self.segment.first + k.smaller(row, self.rows - 1), k.smaller(head, self.end - 1), valid

    def seen(self, row: Value) -> tuple[Value, Value]:
        """The first and the last position that a row sees."""
        k, a = self.k, self.a
        own = self.length - self.rows + (row - self.segment.first)
        last = own
        if a.mask == "none":
            last = self.length - 1
        elif a.mask == "visible":
            last = k.smaller(k.load(k.pointers["operand"], I32, row), self.length - 1)
        elif a.mask == "around":
            assert a.window is not None
            last = k.smaller(own + (a.window - 1), self.length - 1)
        return k.number(0) if a.window is None else k.larger(own - (a.window - 1), 0), last

    def bring_queries(self) -> None:
        """Queries as operands: in registers, or the same registers in shared memory."""
        k, a, t = self.k, self.a, self.t
        factor = a.scale * (1.0 if a.cap is not None else LOG2_E)
        places = [(row * a.heads + head) * a.width + self.t4 * 2 for row, head, _ in map(self.pair, range(2))]
        for step in range(t.width // 16):
            parts: list[list[Value]] = [[] for _ in range(t.own)]
            for i in range(4):
                at = k.at(k.pointers["q"], F32, places[i % 2] + (step * 16 + 8 * (i // 2)))
                x, y = k.lanes(k.load(at, "<2 x float>"))
                for own, part in zip(parts, pair_parts(k, x * factor, y * factor, t.kind, t.own), strict=True):
                    own.append(part)
            if t.held:
                self.queries.append(parts)
                continue
            with k.when(self.group.equals(0)):
                for which, words in enumerate(parts):
                    k.store(self.place, k.vector(words), self.query(step, which))

    def query(self, step: int, part: int) -> Value:
        """Where the four registers of an operand lie in shared memory, in such fours."""
        return ((self.line * (self.t.width // 16) + step) * self.t.own + part) * 32 + self.k.lane

    def query_of(self, step: int) -> list[list[Value]]:
        """The parts of an operand."""
        if self.t.held:
            return self.queries[step]
        k, four = self.k, "<4 x i32>"
        return [k.lanes(k.load(k.at(self.place, four, self.query(step, i)), four)) for i in range(self.t.own)]

    # -- keys and values ----------------------------------------------------------------------------------------------

    def bring(self, base: Value, last: Value, stage: Value) -> None:
        """Begins to bring a chunk; positions after `last` are zeros."""
        k, t, per_row = self.k, self.t, self.t.width // _CHUNK
        start = k.at(self.chunks, I8, stage * t.stage)
        items = t.positions * per_row
        for i in range(-(-items // THREADS)):
            item = k.thread + i * THREADS
            if items % THREADS and (i + 1) * THREADS > items:
                with k.when(item < items):
                    self._bring_item(start, base, last, item // per_row, item % per_row)
            else:
                self._bring_item(start, base, last, item // per_row, item % per_row)

    def _bring_item(self, start: Value, base: Value, last: Value, row: Value, column: Value) -> None:
        k, t = self.k, self.t
        position = base + row
        inside = position <= last
        place = self.keys.place(k, k.smaller(position, last), self.segment)
        target = row * t.stride + column * 16
        for which, cache in enumerate((self.keys, self.values)):
            source = cache.row(k, self.kv_head, place, self.segment.slot)
            to = k.at(start, I8, target + which * t.parts * t.operand)
            if t.parts == 1:
                copy_async(k, to, k.at(cache.base, I16, source * t.width + (column * _CHUNK).to("i64")),
                             k.select(inside, 16, 0))  # fmt: skip
                continue
            numbers = cache.read(k, source, column * _CHUNK, _CHUNK)
            numbers = [k.select(inside, number, k.f32(0.0)) for number in numbers]
            parts = [pair_parts(k, numbers[i], numbers[i + 1], t.kind, t.parts) for i in range(0, _CHUNK, 2)]
            for part in range(t.parts):
                k.store(k.at(to, I8, part * t.operand), k.vector([each[part] for each in parts]))

    def operands(
        self, start: Value, which: int, part: int, row: Value, column: int, *, transposed: bool
    ) -> list[Value]:
        """Four registers: operands of two products from 16 rows of keys or values, or 16 columns."""
        k, t = self.k, self.t
        if transposed:
            own, half = (k.lane & 7) + ((k.lane >> 3) & 1) * 8, k.lane >> 4
        else:
            own, half = (k.lane & 7) + (k.lane >> 4) * 8, (k.lane >> 3) & 1
        at = (row + own) * t.stride + half * 16 + (2 * column + (which * t.parts + part) * t.operand)
        return matrices(k, k.at(start, I8, at), transposed=transposed)

    # -- a chunk ------------------------------------------------------------------------------------------------------

    def add(self, base: Value, stage: Value, bounds: list[tuple[Value, Value]]) -> None:
        """Adds a chunk."""
        k, t = self.k, self.t
        start = k.at(self.chunks, I8, stage * t.stage)
        row = self.group * t.keys
        weights = self._weights(self._scores(start, row), base + row, bounds)
        for step in range(t.keys // 16):
            left = [[w[i][part] for w in weights[2 * step : 2 * step + 2] for i in range(2)] for part in range(t.own)]
            for column in range(0, t.width, 16):
                right = [
                    self.operands(start, 1, part, row + 16 * step, column, transposed=True) for part in range(t.parts)
                ]
                for half in range(2):
                    own = self.sums[column // 8 + half]
                    values = [value.get() for value in own]
                    for i, j in t.pairs:
                        values = product(k, left[i], right[j][2 * half : 2 * half + 2], values, t.kind)
                    set_all(own, values)

    def _scores(self, start: Value, row: Value) -> list[list[Value]]:
        """Of each eight positions four scores of the lane: two of each of its pairs."""
        k, t = self.k, self.t
        found = [[k.f32(0.0)] * 4 for _ in range(t.keys // 8)]
        for step in range(t.width // 16):
            left = self.query_of(step)
            right = [
                [self.operands(start, 0, part, row + 16 * i, 16 * step, transposed=False) for part in range(t.parts)]
                for i in range(t.keys // 16)
            ]
            for i, j in t.pairs:
                for n in range(t.keys // 8):
                    own = right[n // 2][j][2 * (n % 2) : 2 * (n % 2) + 2]
                    found[n] = product(k, left[i], own, found[n], t.kind)
        return found

    def _weights(
        self, scores: list[list[Value]], base: Value, bounds: list[tuple[Value, Value]]
    ) -> list[list[list[Value]]]:
        """The parts of the weights of each eight positions, for both pairs of the lane; what was summed is scaled."""
        k = self.k
        numbers = [[self._masked(s, base + self.t4 * 2 + (8 * n + i % 2), bounds[i // 2]) for i, s in enumerate(own)]
                   for n, own in enumerate(scores)]  # fmt: skip
        found: list[list[list[Value]]] = [[] for _ in numbers]
        for half in range(2):
            own = [number for some in numbers for number in some[2 * half : 2 * half + 2]]
            top = self.top[half].get()
            after = top
            largest = own[0]
            for number in own[1:]:
                largest = k.fmax(largest, number)
            for distance in (1, 2):
                largest = k.fmax(largest, k.exchanged(largest, distance))
            after = k.fmax(after, largest)
            shift = k.select(after.equals(_LOWEST), k.f32(0.0), after)
            factor = exp2(k, top - shift)
            weights = [exp2(k, number - shift) for number in own]
            summed = weights[0]
            for weight in weights[1:]:
                summed = summed + weight
            self.top[half].set(after)
            self.total[half].set(k.fma(self.total[half].get(), factor, summed))
            for some in self.sums:
                for variable in some[2 * half : 2 * half + 2]:
                    variable.set(variable.get() * factor)
            for n, parts in enumerate(found):
                parts.append(pair_parts(k, weights[2 * n], weights[2 * n + 1], self.t.kind, self.t.own))
        return found

    def _masked(self, score: Value, position: Value, bounds: tuple[Value, Value]) -> Value:
        """A score in units of log2(e); the lowest of all where the row does not see the position."""
        k, a = self.k, self.a
        if a.cap is not None:
            score = softcap(k, score, a.cap) * LOG2_E
        inside = position <= bounds[1]
        if a.window is not None:
            inside = inside & (position >= bounds[0])
        return k.select(inside, score, k.f32(_LOWEST))

    # -- results ------------------------------------------------------------------------------------------------------

    def write(self) -> None:
        """Merges both groups and writes the results."""
        k = self.k
        totals = []
        for half in range(2):
            total = self.total[half].get()
            for distance in (1, 2):
                total = total + k.exchanged(total, distance)
            totals.append(total)
        k.barrier()
        with k.when(self.group.equals(1)):
            for half in range(2):
                k.store(self._passed(half), k.vector([self.top[half].get(), totals[half]]))
                for n, own in enumerate(self.sums):
                    k.store(self._passed(half, n), k.vector([own[2 * half + i].get() for i in range(2)]))
        k.barrier()
        for half in range(2):
            row, head, valid = self.pair(half)
            with k.when(self.group.equals(0) & valid):
                self._write_pair(half, row, head, totals[half])

    def _passed(self, half: int, column: int | None = None) -> Value:
        """Where the second group leaves two sums of a pair, or its largest score and the sum of its weights."""
        line, stride = self.line * 16 + self.g + 8 * half, self.t.width + 8
        at = line * 2 + _PAIRS * stride if column is None else line * stride + self.t4 * 2 + 8 * column
        return self.k.at(self.place, F32, at)

    def _write_pair(self, half: int, row: Value, head: Value, total: Value) -> None:
        k, a = self.k, self.a
        other, other_total = k.lanes(k.load(self._passed(half), "<2 x float>"))
        own = self.top[half].get()
        tops = [own, other]
        if a.sinks:
            tops.append(k.load(k.pointers["sinks"], F32, head, constant=True) * LOG2_E)
        top = k.fmax(own, other) if len(tops) == 2 else k.fmax(k.fmax(own, other), tops[2])
        shift = k.select(top.equals(_LOWEST), k.f32(0.0), top)
        factors = [exp2(k, each - shift) for each in tops]
        total = total * factors[0] + other_total * factors[1]
        total = total + factors[2] if a.sinks else total
        for n, some in enumerate(self.sums):
            both = k.lanes(k.load(self._passed(half, n), "<2 x float>"))
            results = [(some[2 * half + i].get() * factors[0] + both[i] * factors[1]) / total for i in range(2)]
            place = (row * a.heads + head) * a.width + self.t4 * 2 + 8 * n
            at = k.at(k.pointers["out"], F32 if a.out == "f32" else I16, place)
            k.store(at, k.vector([rounded(each, a.out) for each in results]))


def prompt_attention(
    k: Code, a: Attention, t: Tiles, keys: Cache, values: Cache, segment: Segment, first: Value
) -> None:
    """The kernel."""
    with k.when(segment.found & (first >= 0)):
        own = Prompt(k, a, t, keys, values, segment, first)
        bounds = [own.seen(own.pair(half)[0]) for half in range(2)]
        low, last = _of_block(k, own, bounds)
        own.bring_queries()
        base = (low // t.positions) * t.positions
        if t.stages == 2:
            own.bring(base, last, k.number(0))
            commit_copies(k)
        stage = k.variable(I32, 0)
        with k.loop(base, last + 1, t.positions) as now:
            if t.stages == 2:
                wait_copies(k, 0)
                k.barrier()
                with k.when(now + t.positions <= last):
                    own.bring(now + t.positions, last, 1 - stage.get())
                commit_copies(k)
            else:
                k.barrier()
                own.bring(now, last, k.number(0))
                if t.parts == 1:
                    commit_copies(k)
                    wait_copies(k, 0)
                k.barrier()
            own.add(now, stage.get(), bounds)
            if t.stages == 2:
                stage.set(1 - stage.get())
        own.write()


def _of_block(k: Code, own: Prompt, bounds: list[tuple[Value, Value]]) -> tuple[Value, Value]:
    """The first and the last position that any row of a block sees."""
    if own.a.mask == "visible":
        found = k.block_max(k.fmax(bounds[0][1].to(F32), bounds[1][1].to(F32))).to(I32)
        return own.seen(own.segment.first + own.first)[0], found
    final = k.smaller(own.first + (rows_of(own.a) - 1), own.rows - 1)
    return own.seen(own.segment.first + own.first)[0], own.seen(own.segment.first + final)[1]
