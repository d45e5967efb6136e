"""Attention with bf16 products.

    for up to 4 chunks of 64 positions that some row of the unit sees:
        for chunk:
            keys, values = those of the chunk, rounded to bf16, as tiles: pairs of elements, pairs of positions
            for some queries:
                scores = queries . keys
        for query: weights of all their scores, as in `attention.py`, by a short polynomial, rounded to bf16
        for some queries:
            mix = mix * shrink + weights . values       # the sums of all chunks in registers

Queries, keys, values and weights are rounded to bf16; sums, softmax and the mix stay f32. A product takes 32 elements
of a head, so queries and keys end with zeros where the head is no multiple of 32. `attention.py` has the code around
the products. `TiledAttention` (AMX tile registers) and `DottedAttention` (dot products) are for many rows, over keys
and values that are `Converted` once for all queries. In both, a tile is 16 lines of 64 bytes. A line holds 16 pairs:
two elements of 16 keys, or 16 elements of two values. `DottedRow` has the products of `DottedAttention`, in the same
order, for a single row: it converts keys and values in registers.

Weights are computed together for the chunks between two multiples of 256 positions. So the grouping depends only on the
positions. A unit has more queries than in f32, because they share the conversion of keys and values. Queries are
multiplied in groups of `together`. Unused places of the last group hold arbitrary data, and their results are not used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import ClassVar

from llvmlite import ir

from rlx.backends.cpu import dots, vmath
from rlx.backends.cpu.isa.amx import BYTES, COUNT, DEPTH, ROW_BYTES, ROWS
from rlx.backends.cpu.kernels.attention.attention import AttentionWriter
from rlx.backends.cpu.kernels.attention.shape import CHUNK, KEY_TILES, Chunk, Chunks, Shape, Unit
from rlx.backends.cpu.tiles import BF16X32, F32X16, LANES, Emitter, Index
from rlx.errors import CompileError
from rlx.ir.dtypes import BF16, F16, DType

_LOG2_E = 1 / math.log(2)

STEPS = CHUNK // DEPTH  # tiles per vector of a chunk's values
_SUMS, _LEFT, _RIGHT = (0, 1, 2, 3), (4, 5), (6, 7)  # tile registers: sums by row and column, the two operands
_ABREAST = 5  # most vectors of values that are multiplied at once by dot products


def fits(head_dim: int, kv_dtype: DType) -> bool:
    """Whether bf16 products are possible: heads of whole pairs, and caches of f16 or bf16."""
    return head_dim % 2 == 0 and kv_dtype in (F16, BF16)


class RoundedAttention(AttentionWriter):
    """Generates an attention kernel with bf16 products: what all of them share.

    Attributes:
        together: queries that are multiplied at once, over keys and values that are converted before; units are those
            of `units(..., bf16=True)`. 1 for those that convert in registers.
        needs_dots: whether the products are dot products of bf16, which not every target has.

    Raises:
        CompileError: the shape does not fit.
    """

    bf16 = True
    held = 4
    together: ClassVar[int] = 1
    needs_dots: ClassVar[bool] = False

    def __init__(self, e: Emitter, shape: Shape) -> None:
        if self.needs_dots and not e.target.has_bf16_dots:
            hint, where = "Leave the products in f32.", f"target {e.target.level}"
            raise CompileError("the target has no dot products of bf16", where=where, hint=hint)
        if shape.rows_static is not None and self.together > 1:
            raise CompileError("keys are not converted for a number of rows that is known", where="attention")
        if not fits(shape.head_dim, shape.dtype):
            what = f"heads of {shape.head_dim} over {shape.dtype} caches do not fit tiles"
            raise CompileError(what, where="attention")
        super().__init__(e, shape)
        self.steps = -(-shape.head_dim // DEPTH)
        self.query_bytes = 2 * DEPTH * self.steps
        self.weights = e.stack(2 * self._room() * CHUNK * self.held)
        self.converted = Converted(self) if self.together > 1 else None

    def _room(self) -> int:
        return -(-super()._room() // self.together) * self.together

    def _write_tiles(self) -> None:
        if self.converted is not None:
            self.converted.clear()
        super()._write_tiles()

    def start(self, unit: Unit) -> None:
        super().start(unit)
        e, vectors, scratch = self.e, self.shape.vectors, self.scratch
        with e.loop(unit.start, unit.end) as query:
            for v in range(0, vectors, 2):
                pair = [e.load(F32X16, scratch.vector(scratch.query, query.i, at), 64) for at in range(v, vectors)[:2]]
                pair += [e.f32(0.0)] * (2 - len(pair))
                # In place: a bf16 row is half as long, so it only overwrites queries that have been read.
                place = (query.i, self.query_bytes)
                e.store(dots.bf16_row(e, *pair), e.at(scratch.query, place, 2 * LANES * v), 64)

    def walk(self, unit: Unit) -> None:
        e, length = self.e, CHUNK * self.held
        with e.loop(e.b.and_(unit.first, e.i64(-length)), unit.last, length) as start:
            first = e.smax(start.i, unit.first)
            left = e.b.sub(e.smin(e.b.add(start.i, e.i64(length)), unit.last), first)
            self._add(unit, Chunks(first, e.ceil_div(left, CHUNK)))

    def _score(self, unit: Unit, chunk: Chunk) -> None:
        if self.converted is None:
            super()._score(unit, chunk)
            return
        self.converted.convert_keys(unit, chunk)
        self.converted.convert_values(unit, chunk)
        with self.e.loop(unit.start, unit.end, self.together) as query:
            self._score_together(self.converted, chunk, query.i)

    def _mix(self, unit: Unit, chunks: Chunks) -> None:
        if self.converted is None:
            super()._mix(unit, chunks)
            return
        with self.e.loop(unit.start, unit.end, self.together) as query:
            self._mix_together(self.converted, chunks, query.i)

    def _score_together(self, rows: Converted, chunk: Chunk, query: ir.Value) -> None:
        """Computes the raw scores of `together` queries, from `query` on, for a chunk."""
        raise NotImplementedError

    def _mix_together(self, rows: Converted, chunks: Chunks, query: ir.Value) -> None:
        """Adds the weighted values of the chunks to the mixes of `together` queries, from `query` on."""
        raise NotImplementedError

    def _largest_and_weights(
        self, unit: Unit, chunks: Chunks, query: ir.Value, before: ir.Value
    ) -> tuple[ir.Value, Callable[[list[ir.Value]], list[ir.Value]]]:
        """As for f32, but with a polynomial for weights that are rounded, and without a pass that scales the scores."""
        e, shape = self.e, self.shape
        plain = shape.softcap is None and shape.bias is None and shape.scale > 0
        factor = shape.scale if plain else 1.0  # of the scores in scratch memory
        with e.loop(0, chunks.count, 1, [e.f32(float("-inf"))]) as slot:
            chunk = self.positions.chunk(unit, chunks, slot.i)
            if plain:
                self.mask.apply(unit, chunk, query)
            else:
                self.scratch.store_scores(self.mask.scores(unit, chunk, query), chunk, query)
            slot.values = [e.max(self._largest(self.scratch.load_scores(chunk, query)), slot.values[0])]
        largest = e.max(e.b.fmul(e.reduce_max(slot.results[0]), e.f32(factor)), before)
        offset = e.b.fmul(largest, e.f32(-_LOG2_E))

        def weights(scores: list[ir.Value]) -> list[ir.Value]:
            powers = [e.fma(score, e.f32(factor * _LOG2_E), offset) for score in scores]
            return [vmath.exp2_of_few_bits(e, power) for power in powers]

        return largest, weights

    def _keep_weights(self, weights: list[ir.Value], chunk: Chunk, query: ir.Value) -> None:
        for i in range(0, KEY_TILES, 2):
            place = self._weight_row(chunk.slot, query, 2 * LANES * i)
            self.e.store(dots.bf16_row(self.e, *weights[i : i + 2]), place, 64)

    def _weight_row(self, slot: Index, query: ir.Value, offset: Index) -> ir.Value:
        """Address of a query's weights of a chunk, bf16[64], plus `offset` bytes."""
        return self.e.at(self.weights, (slot, 2 * CHUNK * self._room()), (query, 2 * CHUNK), offset)

    def _pairs(self, even: ir.Value, odd: ir.Value, mask: ir.Value | None = None) -> ir.Value:
        """16 numbers of a cache and 16 others, interleaved as bf16 pairs; zeros outside the mask."""
        e, dtype = self.e, self.shape.dtype
        if dtype is BF16:
            return dots.paired(e, *(e.load_bits(place, mask) for place in (even, odd)))
        return dots.bf16_rounded(e, e.load_as_f32(dtype, even, mask), e.load_as_f32(dtype, odd, mask))

    def _lone(self, even: ir.Value, mask: ir.Value | None = None) -> ir.Value:
        """16 numbers of a cache and 16 zeros, interleaved as bf16 pairs; zeros outside the mask."""
        return dots.bf16_rounded(self.e, self.e.load_as_f32(self.shape.dtype, even, mask), self.e.f32(0.0))


class Converted:
    """The keys and values of chunks as bf16 tiles in stack memory, which all queries of a unit share.

    Args:
        writer: the kernel that multiplies them.
    """

    def __init__(self, writer: RoundedAttention) -> None:
        self.writer, self.e, self.shape = writer, writer.e, writer.shape
        self.keys = self.e.stack(writer.steps * KEY_TILES * BYTES)  # [step][tile]
        self.value_bytes = STEPS * self.shape.vectors * BYTES  # of a chunk: [step][vector]
        self.values = self.e.stack(self.value_bytes * writer.held)

    def clear(self) -> None:
        """Clears the pairs after the last of a head, in tiles of keys. Nothing writes there later."""
        e, pairs = self.e, self.shape.head_dim // 2
        for line in range(pairs, self.writer.steps * ROWS):
            step, row = divmod(line, ROWS)
            for tile in range(KEY_TILES):
                e.store(e.f32(0.0), e.at(self.keys, (step * KEY_TILES + tile) * BYTES + row * ROW_BYTES), 64)

    def value_tile(self, slot: Index, step: Index, vector: Index) -> ir.Value:
        """Address of the tile with a vector of the values of 32 positions of a chunk."""
        return self.e.at(self.values, (slot, self.value_bytes), (step, self.shape.vectors * BYTES), (vector, BYTES))

    def convert_keys(self, unit: Unit, chunk: Chunk) -> None:
        e, pair_bytes = self.e, 2 * self.writer.cache.vector_bytes
        keys = self.writer.positions.keys(unit, chunk, 0, KEY_TILES)

        def convert(step: Index, rows: int) -> None:
            with e.loop(0, rows) as row:
                target = e.at(self.keys, (step, KEY_TILES * BYTES), (row.i, ROW_BYTES))
                for tile, key in enumerate(keys):
                    even = e.at(key, (step, ROWS * pair_bytes), (row.i, pair_bytes))
                    pairs = self.writer._pairs(even, e.at(even, self.writer.cache.vector_bytes))
                    e.store(pairs, e.at(target, tile * BYTES), 64)

        whole, rest = divmod(self.shape.head_dim // 2, ROWS)
        with e.loop(0, whole) as step:
            convert(step.i, ROWS)
        if rest:
            convert(whole, rest)

    def convert_values(self, unit: Unit, chunk: Chunk) -> None:
        """Converts the values of a chunk. Positions past the last one become zeros; their memory is not read."""
        e, writer, row_bytes = self.e, self.writer, self.writer.cache.row_bytes
        start, count = writer.positions.cache("v", unit, chunk.place), e.smin(CHUNK, e.b.sub(unit.last, chunk.start))
        whole = e.b.and_(count, e.i64(-2))
        with e.loop(0, whole, 2) as position:
            first = e.at(start, (position.i, row_bytes))
            both = self._both(first, e.at(first, row_bytes))
            pairs = [writer._pairs(*pair, writer.scratch.mask(v)) for v, pair in enumerate(both)]
            self._store_values(chunk, position.i, pairs)
        with e.when(e.b.icmp_signed("<", whole, count)):
            row = e.at(start, (whole, row_bytes))
            places = enumerate(self._both(row, row))
            self._store_values(chunk, whole, [writer._lone(place, writer.scratch.mask(v)) for v, (place, _) in places])
        with e.loop(e.b.and_(e.b.add(count, e.i64(1)), e.i64(-2)), CHUNK, 2) as position:
            zeros = dots.bf16_rounded(e, e.f32(0.0), e.f32(0.0))
            self._store_values(chunk, position.i, [zeros] * self.shape.vectors)

    def _both(self, first: ir.Value, second: ir.Value) -> list[tuple[ir.Value, ir.Value]]:
        """Pairs of addresses: the vectors of two rows of values."""
        places = [v * self.writer.cache.vector_bytes for v in range(self.shape.vectors)]
        return [(self.e.at(first, at), self.e.at(second, at)) for at in places]

    def _store_values(self, chunk: Chunk, position: ir.Value, pairs: list[ir.Value]) -> None:
        """Stores the values of two positions, as a line of each tile of their step."""
        e = self.e
        step = e.b.lshr(position, e.i64(5))
        row = e.b.lshr(e.b.and_(position, e.i64(DEPTH - 1)), e.i64(1))
        target = e.at(self.value_tile(chunk.slot, step, 0), (row, ROW_BYTES))
        for v, pair in enumerate(pairs):
            e.store(pair, e.at(target, v * BYTES), 64)


class TiledAttention(RoundedAttention):
    """Generates an attention kernel for targets with bf16 tiles: 32 queries times two tiles, 2 x 2 tiles of sums."""

    together = ROWS * len(_LEFT)

    def __init__(self, e: Emitter, shape: Shape) -> None:
        super().__init__(e, shape)
        self.tiles = e.isa.tiles(e)

    def _write_tiles(self) -> None:
        self.tiles.configure([ROWS] * COUNT)
        super()._write_tiles()
        self.tiles.release()

    def _score_together(self, rows: Converted, chunk: Chunk, query: ir.Value) -> None:
        e = self.e
        for first in range(0, KEY_TILES, len(_RIGHT)):
            for c in _SUMS:
                self.tiles.zero(c)
            with e.loop(0, self.steps) as s:
                left = e.at(self.scratch.query, (query, self.query_bytes), (s.i, ROW_BYTES))
                right = e.at(rows.keys, (s.i, KEY_TILES * BYTES), first * BYTES)
                self._product(left, self.query_bytes, right, len(_RIGHT))
            self._sums(e.at(self.scratch.scores_of(chunk, query), 64 * first), 4 * CHUNK, self.tiles.store, len(_RIGHT))

    def _mix(self, unit: Unit, chunks: Chunks) -> None:
        """Rescales the mixes in memory first, because tile registers cannot be multiplied by `shrink`."""
        e, vectors = self.e, self.shape.vectors
        with e.loop(unit.start, unit.end) as query:
            places, mixes = self.scratch.shrunk(query.i, 1, 0, vectors)
            self.scratch.store(mixes, places)
        super()._mix(unit, chunks)

    def _mix_together(self, rows: Converted, chunks: Chunks, query: ir.Value) -> None:
        vectors = self.shape.vectors
        whole = vectors // len(_RIGHT) * len(_RIGHT)
        with self.e.loop(0, whole, len(_RIGHT)) as v:
            self._mix_columns(rows, chunks, query, v.i, len(_RIGHT))
        if vectors > whole:
            self._mix_columns(rows, chunks, query, whole, vectors - whole)

    def _mix_columns(self, rows: Converted, chunks: Chunks, query: ir.Value, first: Index, columns: int) -> None:
        """Adds `columns` vectors of the weighted values to the mixes, from vector `first` on."""
        e, stride = self.e, 64 * self.shape.vectors
        place = self.scratch.vector(self.scratch.mix, query, first)
        self._sums(place, stride, self.tiles.load, columns)
        with e.loop(0, chunks.count) as slot:
            for step in range(STEPS):
                left = self._weight_row(slot.i, query, step * ROW_BYTES)
                self._product(left, 2 * CHUNK, rows.value_tile(slot.i, step, first), columns)
        self._sums(place, stride, self.tiles.store, columns)

    def _product(self, left: ir.Value, stride: int, right: ir.Value, columns: int) -> None:
        """sums += 32 rows of `left`, `stride` bytes apart, times one or two tiles of `right`."""
        e, tiles, used = self.e, self.tiles, _RIGHT[:columns]
        for j, b in enumerate(used):
            tiles.load(b, e.at(right, j * BYTES), ROW_BYTES)
            tiles.space()
        for i, a in enumerate(_LEFT):
            tiles.load(a, e.at(left, i * ROWS * stride), stride)
            tiles.space()
        for i, a in enumerate(_LEFT):
            for j, b in enumerate(used):
                tiles.dot_bf16(_SUMS[i * len(_RIGHT) + j], a, b)
                tiles.space()

    def _sums(self, place: ir.Value, stride: int, move: object, columns: int) -> None:
        """Loads or stores the tiles of sums of one or two columns; rows are `stride` bytes apart in memory."""
        for number, c in enumerate(_SUMS):
            i, j = divmod(number, len(_RIGHT))
            if j < columns:
                move(c, self.e.at(place, i * ROWS * stride + j * ROW_BYTES), stride)  # type: ignore[operator]
                self.tiles.space()


class DottedAttention(RoundedAttention):
    """Generates an attention kernel with bf16 dot products: 4 queries times four tiles, 4 x 4 vectors of sums.

    With AVX-512 the registers have room for 6 queries. As measured, 6 are not faster, and they do not divide usual
    numbers of queries.

    Raises:
        CompileError: the target has no bf16 dot products, or the shape does not fit.
    """

    needs_dots, together = True, 4

    def _score_together(self, rows: Converted, chunk: Chunk, query: ir.Value) -> None:
        e = self.e
        whole, rest = divmod(self.shape.head_dim // 2, ROWS)

        def product(step: Index, lines: int, sums: Sequence[ir.Value]) -> list[ir.Value]:
            left = e.at(self.scratch.query, (query, self.query_bytes), (step, ROW_BYTES))
            return self._products(left, self.query_bytes, e.at(rows.keys, (step, KEY_TILES * BYTES)), sums, lines)

        with e.loop(0, whole, 1, [e.f32(0.0)] * (self.together * KEY_TILES)) as s:
            s.values = product(s.i, ROWS, s.values)
        totals = product(whole, rest, s.results) if rest else s.results
        e.store_row(totals, self.scratch.scores_of(chunk, query))  # those of a query are contiguous

    def _mix_together(self, rows: Converted, chunks: Chunks, query: ir.Value) -> None:
        vectors = self.shape.vectors
        abreast = -(-vectors // -(-vectors // _ABREAST))  # nearly equal groups: one of few vectors would wait for sums
        whole = vectors // abreast * abreast
        with self.e.loop(0, whole, abreast) as v:
            self._mix_vectors_together(rows, chunks, query, v.i, abreast)
        if vectors > whole:
            self._mix_vectors_together(rows, chunks, query, whole, vectors - whole)

    def _mix_vectors_together(self, rows: Converted, chunks: Chunks, query: ir.Value, first: Index, count: int) -> None:
        """Adds `count` vectors of the weighted values to the mixes, from vector `first` on."""
        e = self.e
        places, mixes = self.scratch.shrunk(query, self.together, first, count)
        with e.loop(0, chunks.count, 1, mixes) as slot:
            with e.loop(0, STEPS, 1, slot.values) as step:
                left = self._weight_row(slot.i, query, e.mul_add(step.i, ROW_BYTES))
                right = rows.value_tile(slot.i, step.i, first)
                step.values = self._products(left, 2 * CHUNK, right, step.values)
            slot.values = step.results
        self.scratch.store(slot.results, places)

    def _products(
        self, left: ir.Value, stride: int, right: ir.Value, sums: Sequence[ir.Value], lines: int = ROWS
    ) -> list[ir.Value]:
        """`sums` plus rows of `left` times the first lines of tiles of `right`: one tile for each sum of a query.

        Sums are ordered query by query. The rows of `left` are `stride` bytes apart.
        """
        e, tiles, totals = self.e, len(sums) // self.together, list(sums)
        most = max(1, e.target.vector_room * 5 // 8 // self.together)  # tiles whose sums stay in registers
        for first in range(0, tiles, most):
            count = min(most, tiles - first)
            own = [i * tiles + tile for i in range(self.together) for tile in range(first, first + count)]
            with e.loop(0, lines, 1, [totals[i] for i in own]) as line:
                starts = [e.at(right, (line.i, ROW_BYTES), (first + tile) * BYTES) for tile in range(count)]
                vectors = [e.load(BF16X32, start, 64) for start in starts]
                places = [e.at(left, (line.i, 4), i * stride) for i in range(self.together)]
                pairs = [e.b.bitcast(e.splat_i32(place), BF16X32) for place in places for _ in range(count)]
                terms = zip(line.values, vectors * self.together, pairs, strict=True)
                line.values = [dots.dot_bf16(e, total, vector, pair) for total, vector, pair in terms]
            for i, total in zip(own, line.results, strict=True):
                totals[i] = total
        return totals


class DottedRow(RoundedAttention):
    """Generates an attention kernel with bf16 dot products for few queries.

    Raises:
        CompileError: the target has no bf16 dot products, or the shape does not fit.
    """

    needs_dots = True

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
