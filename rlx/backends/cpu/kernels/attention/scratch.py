"""Scratch memory of an attention kernel, on the stack: a copy of the queries of a unit, their scores and their sums."""

from __future__ import annotations

from llvmlite import ir

from rlx.backends.cpu.kernels.attention.shape import CHUNK, KEY_TILES, Chunk, Shape, Unit
from rlx.backends.cpu.kernels.attention.split import added
from rlx.backends.cpu.tiles import F32X16, LANES, Emitter, Index
from rlx.backends.cpu.tiles.builder import is_zero
from rlx.ir.dtypes import ACTIVATIONS, F32

_NO_SCORE = -1e30  # below any score, and finite: the difference of two of these is 0, not NaN


class Scratch:
    """Scratch memory per query.

    Args:
        room: number of queries that there is room for.
        held: chunks whose weights are computed together.

    Attributes:
        query: a copy of the query.
        scores: its scores, which the weights replace later.
        mix: the mix of values.
        largest, shrink, total: the largest score, the factor that rescales earlier sums, and the total of the weights.
            These are vectors. Their lanes are equal except for the total, whose lanes are partial sums.
        before: the sums of the pieces before the current one: largest score, total, mix. None if a unit has one piece.
        tail: elements of the last vector of a head if it is partial, else 0.
    """

    def __init__(self, e: Emitter, shape: Shape, room: int, held: int) -> None:
        self.e, self.shape, self.room = e, shape, room
        self.query = e.stack(64 * room * shape.vectors)
        self.scores = e.stack(4 * room * CHUNK * held)
        self.mix = e.stack(64 * room * shape.vectors)
        self.largest, self.shrink, self.total = (e.stack(64 * room) for _ in range(3))
        has_pieces = shape.split is not None and not shape.shared
        self.before = e.stack(64 * room * (2 + shape.vectors)) if has_pieces else None
        self.tail = shape.head_dim % LANES
        self.tail_mask = e.tail_mask(e.i64(self.tail)) if self.tail else None

    def sum_places(self, query: ir.Value) -> list[ir.Value]:
        """Addresses of a query's sums: largest score, total, mix."""
        places = [self.e.at(base, (query, 64)) for base in (self.largest, self.total)]
        return places + [self.vector(self.mix, query, v) for v in range(self.shape.vectors)]

    def sums(self, query: ir.Value) -> list[ir.Value]:
        """A query's sums."""
        return [self.e.load(F32X16, place, 64) for place in self.sum_places(query)]

    def sums_before(self, query: ir.Value) -> ir.Value:
        """Address of a query's sums over the pieces before."""
        return self.e.at(self.before, (query, 64 * (2 + self.shape.vectors)))

    def store(self, values: list[ir.Value], places: list[ir.Value]) -> None:
        for value, place in zip(values, places, strict=True):
            self.e.store(value, place, 64)

    def clear(self, unit: Unit) -> None:
        """Clears the sums."""
        with self.e.loop(unit.start, unit.end) as query:
            largest, *rest = self.sum_places(query.i)
            self.e.store(self.e.f32(_NO_SCORE), largest, 64)
            self.store([self.e.f32(0.0)] * len(rest), rest)

    def add_before(self, unit: Unit) -> None:
        """Adds the sums of the pieces before to those of the current one."""
        with self.e.loop(unit.start, unit.end) as query:
            earlier = self.e.load_row(self.sums_before(query.i), 2 + self.shape.vectors)
            self.store(added(self.e, earlier, self.sums(query.i)), self.sum_places(query.i))

    def keep_sums(self, unit: Unit) -> None:
        """Makes the current sums those of the pieces before."""
        with self.e.loop(unit.start, unit.end) as query:
            self.e.store_row(self.sums(query.i), self.sums_before(query.i))

    def scores_of(self, chunk: Chunk, query: ir.Value) -> ir.Value:
        """Address in scratch memory of a query's scores for a chunk, which the weights replace later."""
        return self.e.at(self.scores, (chunk.slot, 4 * CHUNK * self.room), (query, 4 * CHUNK))

    def load_scores(self, chunk: Chunk, query: ir.Value) -> list[ir.Value]:
        """A query's scores for a chunk."""
        return self.e.load_row(self.scores_of(chunk, query), KEY_TILES)

    def store_scores(self, values: list[ir.Value], chunk: Chunk, query: ir.Value) -> None:
        """The inverse of `load_scores`."""
        self.e.store_row(values, self.scores_of(chunk, query))

    def shrunk(self, query: ir.Value, count: int, first: Index, vectors: int) -> tuple[list[ir.Value], list[ir.Value]]:
        """Vectors of the mixes of `count` queries: their addresses, and their values times the factor of `_weigh`."""
        e = self.e
        start = self.vector(self.mix, query, first)
        places = [e.at(start, 64 * (self.shape.vectors * i + v)) for i in range(count) for v in range(vectors)]
        shrink = e.load_row(e.at(self.shrink, (query, 64)), count)
        return places, [e.b.fmul(e.load(F32X16, p, 64), shrink[i // vectors]) for i, p in enumerate(places)]

    def element(self, base: ir.Value, unit: Unit, query: ir.Value, nbytes: int = 4) -> ir.Value:
        """Address of a query's head in an array [seq, heads, head_dim] of elements of `nbytes` bytes."""
        e, shape = self.e, self.shape
        row, head = self.row_and_head(unit, query)
        row = e.b.add(unit.row, row)
        return e.at(base, (row, nbytes * shape.heads * shape.head_dim), (head, nbytes * shape.head_dim))

    def row_and_head(self, unit: Unit, query: ir.Value) -> tuple[ir.Value, Index]:
        """The row of a query, counted from the first of its unit, and the number of its head."""
        e, group = self.e, self.e.i64(self.shape.group)
        own = query if is_zero(unit.start) else e.b.sub(query, e.i64(unit.start))
        return e.b.sdiv(own, group), e.mul_add(unit.head, self.shape.group, e.b.srem(own, group))

    def vector(self, base: ir.Value, query: ir.Value, v: Index) -> ir.Value:
        """Address of a vector of a query's head in scratch memory."""
        return self.e.at(base, (query, 64 * self.shape.vectors), (v, 64))

    def mask(self, v: int) -> ir.Value | None:
        return self.tail_mask if v == self.shape.vectors - 1 else None

    def copy_queries(self, unit: Unit) -> None:
        """Copies the queries to scratch memory."""
        e = self.e
        with e.loop(unit.start, unit.end) as query:
            source = self.element(e.args["q"], unit, query.i)
            for v in range(self.shape.vectors):
                value = e.load_as_f32(F32, e.at(source, 64 * v), self.mask(v))
                e.store(value, self.vector(self.query, query.i, v), 64)

    def finish(self, unit: Unit) -> None:
        """Writes the results: the mixes divided by the totals."""
        e, dtype = self.e, ACTIVATIONS[self.shape.out]
        with e.loop(unit.start, unit.end) as query:
            if self.shape.sinks:
                self._add_sink(unit, query.i)
            total = e.reduce_add(e.load(F32X16, e.at(self.total, (query.i, 64)), 64))
            target = self.element(e.args["out"], unit, query.i, dtype.nbytes)
            for v in range(self.shape.vectors):
                mixed = e.load(F32X16, self.vector(self.mix, query.i, v), 64)
                place = e.at(target, dtype.row_bytes(LANES) * v)
                e.store_from_f32(dtype, e.b.fdiv(mixed, total), place, self.mask(v))

    def _add_sink(self, unit: Unit, query: ir.Value) -> None:
        """Adds the sink of a query's head to its sums, as the score of a position whose value is 0."""
        e, (_, head) = self.e, self.row_and_head(unit, query)
        score = e.splat_f32(e.at(e.args["sinks"], (head, 4)))
        one = ir.Constant(F32X16, [1.0] + [0.0] * (LANES - 1))  # the lanes of a total are partial sums
        sink = [score, one, *[e.f32(0.0)] * self.shape.vectors]
        self.store(added(e, self.sums(query), sink), self.sum_places(query))
