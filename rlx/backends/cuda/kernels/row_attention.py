"""Attention of few rows: a block computes some heads of one row, over some of the positions that the row sees.

The positions are cut into at most `RANGES` ranges, whose size follows from the row's own position alone. The results of
ranges are added in order, whatever block has them: so a row has the same bits whatever else a call computes. A range is
computed in chunks, which come to shared memory while others are computed. Tensor cores multiply a chunk with up to
eight queries. These are sums of parts, which are rows of an operand: the first part of query g is row g, the second one
row g + 8. Each warp has some of the keys, and some elements of the values.

With one row the block also computes what comes right before: it rotates its queries, and the block that sees the newest
position writes its key and value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rlx.backends.cuda.code import F32, I1, I8, I32, WARP, WARPS, Code, Value
from rlx.backends.cuda.kernels.attention import QUERIES, Attention, known
from rlx.backends.cuda.kernels.cache import Cache, Rope, Segment, staged_head
from rlx.backends.cuda.kernels.row_chunks import Chunks, Share, Tiles, Work
from rlx.backends.cuda.kernels.row_results import Results, finite
from rlx.backends.cuda.kernels.tensor_cores import commit_copies, matrices, product, wait_copies
from rlx.backends.cuda.numbers import LOG2_E, exp2, pair_parts, softcap
from rlx.ir.dims import DimLike

_LOWEST = float("-inf")


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

    rope: Rope | None = None
    written: tuple[Written | None, Written | None] = (None, None)


class Block:
    """The work of a block under construction.

    Args:
        early: chunks may be brought before `Code.wait`, but for what the block itself writes.
    """

    def __init__(self, w: Work, keys: Cache, values: Cache, before: Before, early: bool) -> None:
        self.w, self.k, self.a, self.t, self.before = w, w.k, w.a, w.t, before
        self.early = early and w.t.stages > 0
        k, t, tasks = self.k, self.t, self.a.together + len(before.written)
        new = [None if each is None else self._position(each) for each in before.written]
        self.chunks = Chunks(w, (keys, values), new)
        self.results = Results(w, self.chunks.memory)
        self.queries = k.share(t.own * self.a.together * t.stride)  # [part, query, width]
        self.weights = k.share(16 * t.lines * t.weights)
        self.tops, self.totals = (k.share(4 * QUERIES * WARPS) for _ in range(2))
        self.staged = k.share(4 * t.width * tasks)
        self.g, self.t4 = k.lane >> 2, k.lane & 3

    # -- what comes before --------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Puts the queries into shared memory, and the newest key and value. A barrier must follow."""
        k, a = self.k, self.a
        tasks = a.together + (len(self.before.written) if any(self.before.written) else 0)
        with k.loop(k.warp, tasks, WARPS) as task:
            staged = self._staged(task)
            with k.when(task < a.together):
                head = k.smaller(self.w.head + task, self.w.end - 1)
                staged_head(k, k.pointers["q"], self.w.row, head, a.heads, a.width, self.before.rope, staged)
                self._split_query(task, staged)
            for which, each in enumerate(self.before.written):
                if each is not None:
                    with k.when(task.equals(a.together + which) & self._has(each)):
                        kv_heads, width = a.kv_heads, self.chunks.caches[which].width
                        staged_head(k, each.x, self.w.row, self.w.kv_head, kv_heads, width, each.rope, staged)
                        is_here = self._is_here(each)
                        with k.when(is_here):
                            self.chunks.keep(which, self._position(each), staged)
                        with k.when(is_here ^ 1):
                            self._write(which, each, staged)

    def write_new(self) -> None:
        """Writes the newest key and value to the caches, if they were in shared memory so far."""
        k = self.k
        for which, each in enumerate(self.before.written):
            if each is not None:
                with k.when(k.warp.equals(which) & self._has(each) & self._is_here(each)):
                    self._write(which, each, self._staged(k.number(self.a.together + which)))

    def _write(self, which: int, written: Written, staged: Value) -> None:
        k, cache, w = self.k, self.chunks.caches[which], self.w
        place = cache.place(k, self._position(written), w.segment)
        cache.write(k, cache.row(k, w.kv_head, place, w.segment.slot), staged)

    def _has(self, written: Written) -> Value:
        """Whether the block sees the newest position."""
        position = self._position(written)
        return (position >= self.w.start) & (position < self.w.limit)

    def _is_here(self, written: Written) -> Value:
        """Whether its chunk is brought before it is known, so that the block puts it there."""
        if not self.early:
            return self.k.as_value(0, I1)
        return self._position(written) - self.w.start < self.t.keys

    def _position(self, written: Written) -> Value:
        return self.k.number(self.k.dim(written.at, self.w.segment.env))

    def _staged(self, task: Value) -> Value:
        """Where a warp leaves the numbers of a head."""
        return self.k.at(self.staged, F32, task * self.t.width)

    def _split_query(self, number: Value, staged: Value) -> None:
        """Puts the parts of a query into rows of the operands, by a warp."""
        k, a, t = self.k, self.a, self.t
        factor = a.scale * (LOG2_E if a.cap is None else 1.0)
        for start in range(0, t.width, 2 * WARP):
            i = k.lane * 2 + start
            with k.guarded(i < t.width if start + 2 * WARP > t.width else None):
                x, y = (k.load(staged, F32, i + at) * factor for at in range(2))
                if start + 2 * WARP > a.width:
                    x, y = (k.select(i + at < a.width, own, k.f32(0.0)) for at, own in enumerate((x, y)))
                for part, word in enumerate(pair_parts(k, x, y, t.kind, t.own)):
                    k.store(k.at(self.queries, I8, (number + part * a.together) * t.stride + i * 2), word)

    # -- a chunk ------------------------------------------------------------------------------------------------------

    def scores(self, start: Value, base: Value) -> None:
        """The scores of the keys of each warp: their largest goes to shared memory."""
        k, t = self.k, self.t
        self.own = [k.variable(F32, _LOWEST) for _ in range(2)]
        with self._with_keys():
            sums = [[[k.f32(0.0)] * 4 for _ in range(2)] for _ in range(t.lines)]
            for step in range(0, t.width // 16, 2):
                right = [self._keys(start, step, part) for part in range(t.parts)]
                for half in range(min(2, t.width // 16 - step)):
                    left = [self._query(step + half, line) for line in range(t.lines)]
                    for i, j in t.pairs:
                        own = right[j][2 * half : 2 * half + 2]
                        sums[i][half] = product(k, left[i], own, sums[i][half], t.kind)
            for i, variable in enumerate(self.own):
                variable.set(self._masked(self._of_parts(sums, i), base + k.warp * 8 + self.t4 * 2 + i))
            largest = k.fmax(self.own[0].get(), self.own[1].get())
            for distance in (1, 2):
                largest = k.fmax(largest, k.exchanged(largest, distance))
            with k.when(self.t4.equals(0)):
                k.store(self.tops, largest, self.g * WARPS + k.warp)

    @contextmanager
    def _with_keys(self) -> Iterator[None]:
        """The warps that have keys of a chunk."""
        with self.k.guarded(self.k.warp < self.t.keys // 8 if self.t.keys < 8 * WARPS else None):
            yield

    def _of_parts(self, sums: Sequence[Sequence[Sequence[Value]]], i: int) -> Value:
        """The sum of the products of all parts of a query. A line's second part is in the second half of its rows."""
        found = None
        for line, some in enumerate(sums):
            for half in range(2):
                if 2 * line + half < self.t.own:
                    own = some[0][2 * half + i] if len(some) == 1 else some[0][2 * half + i] + some[1][2 * half + i]
                    found = own if found is None else found + own
        assert found is not None
        return found

    def _keys(self, start: Value, step: int, part: int) -> list[Value]:
        """Eight keys of the warp as operands of two products: elements 16 step and on."""
        k, t = self.k, self.t
        column = k.smaller((k.lane >> 3) + 2 * step, t.width // 8 - 1) if 16 * step + 32 > t.width else None
        column = (k.lane >> 3) + 2 * step if column is None else column
        row = k.warp * 8 + (k.lane & 7) + part * t.keys
        return matrices(k, k.at(start, I8, row * t.stride + column * 16))

    def _query(self, step: int, line: int) -> list[Value]:
        """Two parts of eight queries as an operand; those that there are not are others."""
        k, t, count = self.k, self.t, self.a.together
        part = k.smaller((k.lane >> 3 & 1) + 2 * line, t.own - 1)
        row = part * count + k.smaller(k.lane & 7, count - 1)
        return matrices(k, k.at(self.queries, I8, row * t.stride + (k.lane >> 4) * 16 + 32 * step))

    def _masked(self, score: Value, position: Value) -> Value:
        """A score in units of log2(e); the lowest of all where the row does not see the position."""
        k, a = self.k, self.a
        if a.cap is not None:
            score = softcap(k, score, a.cap) * LOG2_E
        if a.mask == "bias":
            score = score + self._bias(position) * LOG2_E
        return k.select((position >= self.w.low) & (position <= self.w.last), score, k.f32(_LOWEST))

    def _bias(self, position: Value) -> Value:
        k, a = self.k, self.a
        length = k.number(k.dim(a.length, self.w.segment.env))
        head = k.smaller(self.w.head + self.g, self.w.end - 1) if a.bias_heads > 1 else k.number(0)
        place = k.smaller(position, length - 1)
        return k.load(k.pointers["operand"], F32, (self.w.row * a.bias_heads + head) * length + place)

    def weigh(self) -> Value:
        """Puts the weights of a chunk into shared memory; what was subtracted from the scores of a query."""
        k, t = self.k, self.t
        largest = self._over_warps(self.tops)
        top = largest[0]
        for each in largest[1:]:
            top = k.fmax(top, each)
        top = k.call(F32, "llvm.ceil.f32", top)
        base = finite(k, top)
        with self._with_keys():
            first, second = (exp2(k, own.get() - base) for own in self.own)
            total = first + second
            for distance in (1, 2):
                total = total + k.exchanged(total, distance)
            with k.when(self.t4.equals(0)):
                k.store(self.totals, total, self.g * WARPS + k.warp)
            for part, word in enumerate(pair_parts(k, first, second, t.kind, t.own)):
                line = self.g + (part // 2 * 16 + part % 2 * 8)
                k.store(k.at(self.weights, I8, line * t.weights + k.warp * 16 + self.t4 * 4), word)
        return top

    def _over_warps(self, place: Value) -> list[Value]:
        """A number of each warp that has keys, for the query of the thread."""
        k, count = self.k, self.t.keys // 8
        size, found = min(4, count), list[Value]()
        for at in range(0, count, size):
            found += k.lanes(k.load(k.at(place, F32, self.g * WARPS + at), f"<{size} x float>"))
        return found

    def weighted(self, start: Value) -> tuple[Value, list[Value]]:
        """The sum of the weights of a chunk, and the weighted values of the thread: two of each eight elements."""
        k, t = self.k, self.t
        total, *others = self._over_warps(self.totals)
        for other in others:
            total = total + other
        steps = range(t.keys // 16)
        left = [[self._weights(step, line) for line in range(t.lines)] for step in steps]
        found = list[Value]()
        for n in range(self.results.columns):
            group = k.smaller(k.warp + n * WARPS, t.width // 16 - 1)
            sums = [[[k.f32(0.0)] * 4 for _ in range(2)] for _ in range(t.lines)]
            for step in steps:
                for part in range(t.parts):
                    right = self._values(start, step, group, part)
                    for i, j in t.pairs:
                        if j == part:
                            for half in range(2):
                                own = right[2 * half : 2 * half + 2]
                                sums[i][half] = product(k, left[step][i], own, sums[i][half], t.kind)
            found += [self._of_parts([[some[half]] for some in sums], i) for half in range(2) for i in range(2)]
        return total, found

    def _weights(self, step: int, line: int) -> list[Value]:
        k, t = self.k, self.t
        at = ((k.lane & 15) + 16 * line) * t.weights + (k.lane >> 4) * 16 + 32 * step
        return matrices(k, k.at(self.weights, I8, at))

    def _values(self, start: Value, step: int, group: Value, part: int) -> list[Value]:
        """Sixteen values as operands of two products: the elements of a group of sixteen."""
        k, t = self.k, self.t
        row = (k.lane & 15) + (16 * step + part * t.keys)
        return matrices(k, k.at(start, I8, row * t.stride + (k.lane >> 4) * 16 + group * 32), transposed=True)

    # -- all chunks ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Computes the ranges of the block."""
        if self.t.stages:
            self._run_copied()
        else:
            self._run_converted()
        self.results.finish()

    def _run_copied(self) -> None:
        k, t, w, chunks = self.k, self.t, self.w, self.chunks
        chunks.look_up(w.start)
        is_old = k.as_value(1, I1) if self.early else w.start + t.keys <= known(k, self.a, w.segment)
        with k.when(is_old):
            chunks.copy(w.start, k.number(0), skips=self.early)
        k.wait()
        if not self.early:
            with k.when(is_old ^ 1):
                chunks.copy(w.start, k.number(0))
        commit_copies(k)
        chunks.look_up(w.start + t.keys)
        self.prepare()
        stage = k.variable(I32, 0)
        with k.loop(w.start, w.limit, t.keys) as base:
            wait_copies(k, 0)
            k.barrier()
            following, other = base + t.keys, 1 - stage.get()
            with k.when(following < w.limit):
                chunks.copy(following, other)
                chunks.look_up(following + t.keys)
            commit_copies(k)
            start = chunks.stage(stage.get())
            self.scores(start, base)
            k.barrier()
            top = self.weigh()
            k.barrier()
            self.results.add(base + t.keys, top, *self.weighted(k.at(start, I8, t.operand)))
            stage.set(other)
        if self.early:
            self.write_new()

    def _run_converted(self) -> None:
        k, t, w, chunks = self.k, self.t, self.w, self.chunks
        k.wait()
        self.prepare()
        with k.loop(w.start, w.limit, t.keys) as base:
            k.barrier()
            chunks.look_up(base)
            chunks.convert(base, 0)
            k.barrier()
            self.scores(chunks.memory, base)
            k.barrier()
            top = self.weigh()
            chunks.convert(base, 1)
            k.barrier()
            self.results.add(base + t.keys, top, *self.weighted(chunks.memory))


def attention(
    k: Code, a: Attention, t: Tiles, keys: Cache, values: Cache, segment: Segment, row: Value, part: Value,
    share: Share | None = None, before: Before = Before(), early: bool = False,
) -> None:  # fmt: skip
    """The kernel; the block has one of the `Attention.parts` of a row, or a share of it."""
    with k.when(segment.found):
        work = Work(k, a, t, segment, row, part, share)
        with k.when(work.begin < work.stop):
            Block(work, keys, values, before, early).run()
