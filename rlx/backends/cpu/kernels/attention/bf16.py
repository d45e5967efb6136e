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
the products. `bf16_tiles.py` and `bf16_dots.py` implement the products for many rows, over keys and values that are
converted once for all queries. In both, a tile is 16 lines of 64 bytes. A line holds 16 pairs: two elements of 16 keys,
or 16 elements of two values. `bf16_row.py` has the products of `bf16_dots.py`, in the same order, for a single row.

Weights are computed together for the chunks between two multiples of 256 positions. So the grouping depends only on the
positions. A unit has more queries than in f32, because they share the conversion of keys and values. Queries are
multiplied in groups of `together`. Unused places of the last group hold arbitrary data, and their results are not used.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from functools import reduce
from typing import ClassVar

from llvmlite import ir

from rlx.backends.cpu import dots, vmath
from rlx.backends.cpu.isa.amx import BYTES, DEPTH, ROW_BYTES, ROWS
from rlx.backends.cpu.kernels.attention.attention import AttentionWriter
from rlx.backends.cpu.kernels.attention.shape import CHUNK, KEY_TILES, Chunk, Chunks, Shape, Unit
from rlx.backends.cpu.tiles import F32X16, LANES, Emitter, Index
from rlx.errors import CompileError
from rlx.ir.dtypes import BF16, F16, DType

_LOG2_E = 1 / math.log(2)

STEPS = CHUNK // DEPTH  # tiles per vector of a chunk's values


def fits(head_dim: int, kv_dtype: DType) -> bool:
    """Whether bf16 products are possible: heads of whole pairs, and caches of f16 or bf16."""
    return head_dim % 2 == 0 and kv_dtype in (F16, BF16)


class RoundedAttention(AttentionWriter):
    """Generates an attention kernel with bf16 products: what all of them share.

    Raises:
        CompileError: the shape does not fit.
    """

    bf16 = True
    held = 4

    def __init__(self, e: Emitter, shape: Shape) -> None:
        if not fits(shape.head_dim, shape.dtype):
            what = f"heads of {shape.head_dim} over {shape.dtype} caches do not fit tiles"
            raise CompileError(what, where="attention")
        super().__init__(e, shape)
        self.steps = -(-shape.head_dim // DEPTH)
        self.query_bytes = 2 * DEPTH * self.steps
        self.weights = e.stack(2 * self._room() * CHUNK * self.held)

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
            self._add(unit, Chunks(first, e.b.udiv(e.b.add(left, e.i64(CHUNK - 1)), e.i64(CHUNK))))

    def _weigh(self, unit: Unit, chunks: Chunks, query: ir.Value) -> None:
        """As for f32, but with a polynomial for weights that are rounded, and without a pass that scales the scores."""
        e, shape = self.e, self.shape
        plain = shape.softcap is None and shape.bias is None and shape.scale > 0
        factor = shape.scale if plain else 1.0  # of the scores in scratch memory
        places = [e.at(base, (query, 64)) for base in (self.scratch.largest, self.scratch.shrink, self.scratch.total)]
        before, total = (e.load(F32X16, place, 64) for place in places[::2])
        with e.loop(0, chunks.count, 1, [e.f32(float("-inf"))]) as slot:
            chunk = self.positions.chunk(unit, chunks, slot.i)
            if plain:
                self.mask.apply(unit, chunk, query)
            else:
                self.scratch.store_scores(self.mask.scores(unit, chunk, query), chunk, query)
            slot.values = [e.max(self._largest(self.scratch.load_scores(chunk, query)), slot.values[0])]
        largest = e.max(e.b.fmul(e.reduce_max(slot.results[0]), e.f32(factor)), before)
        shrink = vmath.exp_of_negative(e, e.b.fsub(before, largest))
        offset = e.b.fmul(largest, e.f32(-_LOG2_E))
        with e.loop(0, chunks.count, 1, [e.b.fmul(total, shrink)]) as slot:
            chunk = self.positions.chunk(unit, chunks, slot.i)
            powers = [e.fma(s, e.f32(factor * _LOG2_E), offset) for s in self.scratch.load_scores(chunk, query)]
            weights = [vmath.exp2_of_few_bits(e, power) for power in powers]
            self._keep_weights(weights, chunk, query)
            slot.values = [reduce(e.b.fadd, weights, slot.values[0])]
        for value, place in zip((largest, shrink, slot.results[0]), places, strict=True):
            e.store(value, place, 64)

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


class ConvertedAttention(RoundedAttention, ABC):
    """Generates a kernel for many rows, which share converted keys and values. Units: `units(..., bf16=True)`.

    Raises:
        CompileError: the shape does not fit, or has `rows_static`.
    """

    together: ClassVar[int]  # queries that are multiplied at once

    def __init__(self, e: Emitter, shape: Shape) -> None:
        if shape.rows_static is not None:
            raise CompileError("keys are not converted for a number of rows that is known", where="attention")
        super().__init__(e, shape)
        self.keys = e.stack(self.steps * KEY_TILES * BYTES)  # [step][tile]
        self.value_bytes = STEPS * shape.vectors * BYTES  # of a chunk: [step][vector]
        self.values = e.stack(self.value_bytes * self.held)

    def _write_tiles(self) -> None:
        """Clears the pairs after the last of a head, in tiles of keys. Nothing writes there later."""
        e, pairs = self.e, self.shape.head_dim // 2
        for line in range(pairs, self.steps * ROWS):
            step, row = divmod(line, ROWS)
            for tile in range(KEY_TILES):
                e.store(e.f32(0.0), e.at(self.keys, (step * KEY_TILES + tile) * BYTES + row * ROW_BYTES), 64)
        super()._write_tiles()

    def _room(self) -> int:
        return -(-super()._room() // self.together) * self.together

    def _score(self, unit: Unit, chunk: Chunk) -> None:
        self._convert_keys(unit, chunk)
        self._convert_values(unit, chunk)
        with self.e.loop(unit.start, unit.end, self.together) as query:
            self._score_together(chunk, query.i)

    def _mix(self, unit: Unit, chunks: Chunks) -> None:
        with self.e.loop(unit.start, unit.end, self.together) as query:
            self._mix_together(chunks, query.i)

    @abstractmethod
    def _score_together(self, chunk: Chunk, query: ir.Value) -> None:
        """Computes the raw scores of `together` queries, from `query` on, for a chunk."""

    @abstractmethod
    def _mix_together(self, chunks: Chunks, query: ir.Value) -> None:
        """Adds the weighted values of the chunks to the mixes of `together` queries, from `query` on."""

    # --- operands -----------------------------------------------------------------------------------------------------

    def _value_tile(self, slot: Index, step: Index, vector: Index) -> ir.Value:
        """Address of the tile with a vector of the values of 32 positions of a chunk."""
        return self.e.at(self.values, (slot, self.value_bytes), (step, self.shape.vectors * BYTES), (vector, BYTES))

    def _convert_keys(self, unit: Unit, chunk: Chunk) -> None:
        e, pair_bytes = self.e, 2 * self.cache.vector_bytes
        keys = self.positions.keys(unit, chunk, 0, KEY_TILES)

        def convert(step: Index, rows: int) -> None:
            with e.loop(0, rows) as row:
                target = e.at(self.keys, (step, KEY_TILES * BYTES), (row.i, ROW_BYTES))
                for tile, key in enumerate(keys):
                    even = e.at(key, (step, ROWS * pair_bytes), (row.i, pair_bytes))
                    pairs = self._pairs(even, e.at(even, self.cache.vector_bytes))
                    e.store(pairs, e.at(target, tile * BYTES), 64)

        whole, rest = divmod(self.shape.head_dim // 2, ROWS)
        with e.loop(0, whole) as step:
            convert(step.i, ROWS)
        if rest:
            convert(whole, rest)

    def _convert_values(self, unit: Unit, chunk: Chunk) -> None:
        """Converts the values of a chunk. Positions past the last one become zeros; their memory is not read."""
        e, row_bytes = self.e, self.cache.row_bytes
        start, count = self.positions.cache("v", unit, chunk.place), e.smin(CHUNK, e.b.sub(unit.last, chunk.start))
        whole = e.b.and_(count, e.i64(-2))
        with e.loop(0, whole, 2) as position:
            first = e.at(start, (position.i, row_bytes))
            both = self._both(first, e.at(first, row_bytes))
            pairs = [self._pairs(*pair, self.scratch.mask(v)) for v, pair in enumerate(both)]
            self._store_values(chunk, position.i, pairs)
        with e.when(e.b.icmp_signed("<", whole, count)):
            row = e.at(start, (whole, row_bytes))
            places = enumerate(self._both(row, row))
            self._store_values(chunk, whole, [self._lone(place, self.scratch.mask(v)) for v, (place, _) in places])
        with e.loop(e.b.and_(e.b.add(count, e.i64(1)), e.i64(-2)), CHUNK, 2) as position:
            zeros = dots.bf16_rounded(e, e.f32(0.0), e.f32(0.0))
            self._store_values(chunk, position.i, [zeros] * self.shape.vectors)

    def _both(self, first: ir.Value, second: ir.Value) -> list[tuple[ir.Value, ir.Value]]:
        """Pairs of addresses: the vectors of two rows of values."""
        places = [v * self.cache.vector_bytes for v in range(self.shape.vectors)]
        return [(self.e.at(first, at), self.e.at(second, at)) for at in places]

    def _store_values(self, chunk: Chunk, position: ir.Value, pairs: list[ir.Value]) -> None:
        """Stores the values of two positions, as a line of each tile of their step."""
        e = self.e
        step = e.b.lshr(position, e.i64(5))
        row = e.b.lshr(e.b.and_(position, e.i64(DEPTH - 1)), e.i64(1))
        target = e.at(self._value_tile(chunk.slot, step, 0), (row, ROW_BYTES))
        for v, pair in enumerate(pairs):
            e.store(pair, e.at(target, v * BYTES), 64)
