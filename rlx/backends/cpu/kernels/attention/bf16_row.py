"""The products of `bf16_dots.py`, in the same order, for a single row: keys and values are converted in registers."""

from __future__ import annotations

from llvmlite import ir

from rlx.backends.cpu import dots
from rlx.backends.cpu.kernels.attention.bf16 import RoundedAttention
from rlx.backends.cpu.kernels.attention.bf16_dots import check_dots
from rlx.backends.cpu.kernels.attention.shape import CHUNK, Chunk, Chunks, Shape, Unit
from rlx.backends.cpu.tiles import BF16X32, Emitter, Index


class DottedRow(RoundedAttention):
    """Generates an attention kernel with bf16 dot products for few queries.

    Raises:
        CompileError: the target has no bf16 dot products, or the shape does not fit.
    """

    def __init__(self, e: Emitter, shape: Shape) -> None:
        check_dots(e.target)
        super().__init__(e, shape)

    def _score_tiles(self, unit: Unit, chunk: Chunk, query: ir.Value, count: int, first: Index, tiles: int) -> None:
        e, pair_bytes = self.e, 2 * self.cache.vector_bytes
        keys, step = self.positions.keys(unit, chunk, first, tiles), tiles * pair_bytes
        queries = [e.at(self.scratch.query, (query, self.query_bytes), self.query_bytes * i) for i in range(count)]
        values = self._values_of(unit, chunk, first)
        with e.loop(0, self.shape.head_dim // 2, 1, [e.f32(0.0)] * (count * tiles)) as d:
            e.prefetch(e.at(values, (d.i, step)), step, level=2)
            starts = [e.at(key, (d.i, pair_bytes)) for key in keys]
            pairs = [self._pairs(start, e.at(start, self.cache.vector_bytes)) for start in starts]
            d.values = self._dots(pairs, [e.at(q, (d.i, 4)) for q in queries], d.values)
        self._store_tiles(d.results, chunk, query, first, tiles)

    def _dots(self, pairs: list[ir.Value], places: list[ir.Value], sums: list[ir.Value]) -> list[ir.Value]:
        """`sums` plus the products of the pair at each place with each vector of pairs."""
        e = self.e
        terms = [(pair, e.b.bitcast(e.splat_i32(place), BF16X32)) for place in places for pair in pairs]
        return [dots.dot_bf16(e, total, *term) for term, total in zip(terms, sums, strict=True)]

    def _mix_vectors(
        self,
        unit: Unit,
        chunks: Chunks,
        query: ir.Value,
        count: int,
        first: Index,
        vectors: int,
        mask: ir.Value | None,
    ) -> None:
        e = self.e
        places, mixes = self.scratch.shrunk(query, count, first, vectors)
        with e.loop(0, chunks.count, 1, mixes) as slot:
            chunk = self.positions.chunk(unit, chunks, slot.i)
            rows = e.smin(CHUNK, e.b.sub(unit.last, chunk.start))
            even = e.b.and_(rows, e.i64(-2))
            ahead = self.positions.ahead(unit, chunk, self.held)

            def weights(position: ir.Value, slot: ir.Value = slot.i) -> list[ir.Value]:
                start = self._weight_row(slot, query, e.mul_add(position, 2))
                return [e.at(start, 2 * CHUNK * i) for i in range(count)]

            with e.loop(0, even, 2, slot.values) as t:
                self._fetch(ahead, first, vectors, t.i, 2)
                starts = self._value_places(unit, chunk, t.i, first, vectors)
                pairs = [self._pairs(start, e.at(start, self.cache.row_bytes), mask) for start in starts]
                t.values = self._dots(pairs, weights(t.i), t.values)
            with e.loop(even, rows, 2, t.results) as last:  # at most once: a position without another one
                lone = [self._lone(start, mask) for start in self._value_places(unit, chunk, last.i, first, vectors)]
                last.values = self._dots(lone, weights(last.i), last.values)
            self._fetch_rest(ahead, first, vectors, even)
            slot.values = last.results
        self.scratch.store(slot.results, places)

    def _value_places(self, unit: Unit, chunk: Chunk, row: ir.Value, first: Index, vectors: int) -> list[ir.Value]:
        """Addresses of some vectors of a value of the chunk."""
        e, nbytes = self.e, self.cache.vector_bytes
        start = e.at(self.positions.cache("v", unit, chunk.place), (row, self.cache.row_bytes), (first, nbytes))
        return [e.at(start, v * nbytes) for v in range(vectors)]
