"""Attention on tile registers: products of bf16 for the rows of a prompt.

    for group of up to 4 chunks of 64 positions that some row of the unit sees:
        for chunk:
            keys, values = the chunk's, rounded to bf16, as tiles: pairs of elements, pairs of positions
            for 32 queries:
                scores = queries . keys                 # 2 x 2 tiles of sums at a time, 32 elements of the head a step
        for query: weights of the group's scores, as in `attention.py`, rounded to bf16; mix = mix * shrink
        for 32 queries:
            mix += weights . values                     # 32 positions a step, the sums of all chunks in registers

Queries, keys, values and weights are rounded; sums, softmax and the mix stay f32. What is before, between and after the
products is `attention.py`'s: chunks, masks, the online softmax, but a group is weighed at once. Groups lie at multiples
of their length, so what a row's group is depends on nothing else. A unit has more queries, because they share the
conversion of keys and values. Rows of tiles behind the last query hold anything and reach nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from llvmlite import ir

from rlx.codegen import dots, vmath
from rlx.codegen.amx import BYTES, COUNT, DEPTH, ROW_BYTES, ROWS, Tiles
from rlx.codegen.kernels.attention import KEY_TILES, AttentionWriter
from rlx.codegen.kernels.attention_shape import CHUNK, Chunk, Shape, Unit
from rlx.codegen.tiles import F32X16, LANES, Emitter
from rlx.errors import CompileError
from rlx.ir.dtypes import BF16, F16, DType

_SUMS, _LEFT, _RIGHT = (0, 1, 2, 3), (4, 5), (6, 7)  # tile registers: sums by row and column, the two operands
_TOGETHER = ROWS * len(_LEFT)  # queries of a register tile
_STEPS = CHUNK // DEPTH  # of a chunk's values


def fits(head_dim: int, kv_dtype: DType) -> bool:
    """Whether tiles serve: whole steps of the head, and caches of numbers that hold no more than 16 bits."""
    return head_dim % DEPTH == 0 and kv_dtype in (F16, BF16)


@dataclass(frozen=True)
class Held:
    """A chunk of the group in scratch memory.

    Attributes:
        scores: f32[queries, 64], plain at first, then as they are seen.
        weights: bf16[queries, 64].
        values: tiles, those of 32 positions after one another.
    """

    chunk: Chunk
    scores: ir.Value
    weights: ir.Value
    values: ir.Value


class TiledAttention(AttentionWriter):
    """The kernel while it is written. Units: `units(..., tiled=True)`.

    Raises:
        CompileError: a shape that does not fit, or one whose number of rows is known.
    """

    tiled = True
    held = 4

    def __init__(self, e: Emitter, shape: Shape) -> None:
        if shape.rows_static is not None or not fits(shape.head_dim, shape.dtype):
            what = f"heads of {shape.head_dim} over {shape.dtype} caches do not fit tiles"
            raise CompileError(what, where="attention")
        super().__init__(e, shape)
        self.tiles = Tiles(e)
        self.steps = shape.head_dim // DEPTH
        self.query_bytes = 2 * shape.head_dim
        self.weights = e.stack(2 * self._room() * CHUNK * self.held)
        self.keys = e.stack(self.steps * KEY_TILES * BYTES)  # [step][16 positions][16 pairs of elements]
        self.value_bytes = _STEPS * shape.vectors * BYTES  # of a chunk: [step][16 elements][16 pairs of positions]
        self.values = e.stack(self.value_bytes * self.held)

    def _room(self) -> int:
        return -(-super()._room() // _TOGETHER) * _TOGETHER

    def _write_tiles(self) -> None:
        self.tiles.configure([ROWS] * COUNT)
        super()._write_tiles()
        self.tiles.release()

    def _start(self, unit: Unit) -> None:
        super()._start(unit)
        e, vectors = self.e, self.shape.vectors
        with e.loop(0, unit.queries) as query:
            for v in range(0, vectors, 2):
                pair = [e.load(F32X16, self._vector(self.query, query.i, v + i), 64) for i in (0, 1)]
                # A row of bf16 is half as long, and lies before what is still to be read.
                e.store(dots.bf16_row(e, *pair), e.at(self.query, (query.i, self.query_bytes), 2 * LANES * v), 64)

    def _run(self, unit: Unit) -> None:
        e, length = self.e, CHUNK * self.held
        self._start(unit)
        with e.loop(e.b.and_(unit.first, e.i64(-length)), unit.last, length) as group:
            last = e.smin(e.b.add(group.i, e.i64(length)), unit.last)
            self._add_group(unit, e.smax(group.i, unit.first), last)

    def _add_group(self, unit: Unit, first: ir.Value, last: ir.Value) -> None:
        """The share of the positions [first, last) of the sums of all queries."""
        e = self.e
        with e.loop(first, last, CHUNK) as c:
            held = self._held(first, c.i)
            self._convert_keys(unit, held.chunk)
            self._convert_values(unit, held)
            with e.loop(0, unit.queries, _TOGETHER) as query:
                self._score_together(held, query.i)
        with e.loop(0, unit.queries) as query:
            self._weigh_group(unit, first, last, query.i)
        with e.loop(0, unit.queries, _TOGETHER) as query:
            self._mix_together(first, last, query.i)

    def _held(self, first: ir.Value, start: ir.Value) -> Held:
        """The chunk from a position on, of the group whose chunks begin at `first`."""
        e, room = self.e, self._room()
        slot = e.b.lshr(e.b.sub(start, first), e.i64(CHUNK.bit_length() - 1))
        return Held(
            self._chunk(start),
            e.at(self.scores, (slot, 4 * room * CHUNK)),
            e.at(self.weights, (slot, 2 * room * CHUNK)),
            e.at(self.values, (slot, self.value_bytes)),
        )

    # --- operands -----------------------------------------------------------------------------------------------------

    def _convert_keys(self, unit: Unit, chunk: Chunk) -> None:
        e, pair_bytes = self.e, 2 * self.cache.vector_bytes
        keys = self._chosen_keys(unit, chunk, range(KEY_TILES))
        with e.loop(0, self.steps) as step, e.loop(0, ROWS) as row:
            target = e.at(self.keys, (step.i, KEY_TILES * BYTES), (row.i, ROW_BYTES))
            for tile, key in enumerate(keys):
                even = e.at(key, (step.i, ROWS * pair_bytes), (row.i, pair_bytes))
                pairs = self._pairs(even, e.at(even, self.cache.vector_bytes))
                e.store(pairs, e.at(target, tile * BYTES), 64)

    def _convert_values(self, unit: Unit, held: Held) -> None:
        """Positions past the last one are zeros: what lies there is not read, and may be no number."""
        e, row_bytes = self.e, self.cache.row_bytes
        start, count = self._values(unit, held.chunk.place), e.smin(CHUNK, e.b.sub(unit.last, held.chunk.start))
        whole = e.b.and_(count, e.i64(-2))
        with e.loop(0, whole, 2) as position:
            first = e.at(start, (position.i, row_bytes))
            self._store_values(
                held, position.i, [self._pairs(*pair) for pair in self._both(first, e.at(first, row_bytes))]
            )
        with e.when(e.b.icmp_signed("<", whole, count)):
            row, nothing = e.at(start, (whole, row_bytes)), e.f32(0.0)
            lone = [e.load_as_f32(self.shape.dtype, place) for place, _ in self._both(row, row)]
            self._store_values(held, whole, [dots.bf16_rounded(e, values, nothing) for values in lone])
        with e.loop(e.b.and_(e.b.add(count, e.i64(1)), e.i64(-2)), CHUNK, 2) as position:
            zeros = dots.bf16_rounded(e, e.f32(0.0), e.f32(0.0))
            self._store_values(held, position.i, [zeros] * self.shape.vectors)

    def _both(self, first: ir.Value, second: ir.Value) -> list[tuple[ir.Value, ir.Value]]:
        """The addresses of the vectors of two rows of values."""
        places = [v * self.cache.vector_bytes for v in range(self.shape.vectors)]
        return [(self.e.at(first, at), self.e.at(second, at)) for at in places]

    def _store_values(self, held: Held, position: ir.Value, pairs: list[ir.Value]) -> None:
        """The values of two positions, as a row of each tile of their step."""
        e = self.e
        step = e.b.lshr(position, e.i64(5))
        row = e.b.lshr(e.b.and_(position, e.i64(DEPTH - 1)), e.i64(1))
        target = e.at(held.values, (step, self.shape.vectors * BYTES), (row, ROW_BYTES))
        for v, pair in enumerate(pairs):
            e.store(pair, e.at(target, v * BYTES), 64)

    def _pairs(self, even: ir.Value, odd: ir.Value) -> ir.Value:
        """16 numbers of a cache and 16 others, side by side in bf16."""
        e, dtype = self.e, self.shape.dtype
        return dots.bf16_rounded(e, e.load_as_f32(dtype, even), e.load_as_f32(dtype, odd))

    # --- products -----------------------------------------------------------------------------------------------------

    def _score_together(self, held: Held, query: ir.Value) -> None:
        """The plain scores of 32 queries with the chunk."""
        e = self.e
        for first in range(0, KEY_TILES, len(_RIGHT)):
            for c in _SUMS:
                self.tiles.zero(c)
            with e.loop(0, self.steps) as s:
                left = e.at(self.query, (query, self.query_bytes), (s.i, ROW_BYTES))
                right = e.at(self.keys, (s.i, KEY_TILES * BYTES), first * BYTES)
                self._product(left, self.query_bytes, right)
            self._sums(e.at(held.scores, (query, 4 * CHUNK), 64 * first), 4 * CHUNK, self.tiles.store)

    def _mix_together(self, first: ir.Value, last: ir.Value, query: ir.Value) -> None:
        """Adds the group's values, weighted, to the mixes of 32 queries."""
        e, vectors = self.e, self.shape.vectors
        with e.loop(0, vectors, len(_RIGHT)) as v:
            place = self._vector(self.mix, query, v.i)
            self._sums(place, 64 * vectors, self.tiles.load)
            with e.loop(first, last, CHUNK) as c:
                held = self._held(first, c.i)
                for step in range(_STEPS):
                    left = e.at(held.weights, (query, 2 * CHUNK), step * ROW_BYTES)
                    self._product(left, 2 * CHUNK, e.at(held.values, (v.i, BYTES), step * vectors * BYTES))
            self._sums(place, 64 * vectors, self.tiles.store)

    def _product(self, left: ir.Value, stride: int, right: ir.Value) -> None:
        """sums += 32 rows of `left`, which lie `stride` bytes apart, times two tiles."""
        e, tiles = self.e, self.tiles
        for j, b in enumerate(_RIGHT):
            tiles.load(b, e.at(right, j * BYTES), ROW_BYTES)
        for i, a in enumerate(_LEFT):
            tiles.load(a, e.at(left, i * ROWS * stride), stride)
            for j, b in enumerate(_RIGHT):
                tiles.dot_bf16(_SUMS[i * len(_RIGHT) + j], a, b)

    def _sums(self, place: ir.Value, stride: int, move: object) -> None:
        """Loads or stores the four sums, whose rows lie `stride` bytes apart."""
        for number, c in enumerate(_SUMS):
            i, j = divmod(number, len(_RIGHT))
            move(c, self.e.at(place, i * ROWS * stride + j * ROW_BYTES), stride)  # type: ignore[operator]

    # --- weights ------------------------------------------------------------------------------------------------------

    def _weigh_group(self, unit: Unit, first: ir.Value, last: ir.Value, query: ir.Value) -> None:
        """A query's scores of the group -> weights relative to the largest score so far."""
        e = self.e
        places = [e.at(base, (query, 64)) for base in (self.largest, self.total)]
        before, total = (e.load(F32X16, place, 64) for place in places)
        with e.loop(first, last, CHUNK, [before]) as c:
            held = self._held(first, c.i)
            scores = self._seen_scores(unit, held.chunk, query, held.scores)
            self._keep(scores, held.scores, query)
            c.values = [e.max(self._largest(scores), c.values[0])]
        largest = e.reduce_max(c.results[0])
        shrink = vmath.exp(e, e.b.fsub(before, largest))
        with e.loop(first, last, CHUNK, [e.b.fmul(total, shrink)]) as c:
            c.values = [self._weigh_chunk(self._held(first, c.i), query, largest, c.values[0])]
        for value, place in zip((largest, c.results[0]), places, strict=True):
            e.store(value, place, 64)
        self._rescale(query, shrink)

    def _weigh_chunk(self, held: Held, query: ir.Value, largest: ir.Value, total: ir.Value) -> ir.Value:
        """A query's weights of a chunk; returns the total with them."""
        e = self.e
        weights = [vmath.exp(e, e.b.fsub(score, largest)) for score in self._kept(held.scores, query)]
        for i in range(0, KEY_TILES, 2):
            place = e.at(held.weights, (query, 2 * CHUNK), 2 * LANES * i)
            e.store(dots.bf16_row(e, *weights[i : i + 2]), place, 64)
        for weight in weights:
            total = e.b.fadd(total, weight)
        return total

    def _rescale(self, query: ir.Value, factor: ir.Value) -> None:
        """What was mixed before, relative to the largest score of now."""
        e = self.e
        for v in range(self.shape.vectors):
            place = self._vector(self.mix, query, v)
            e.store(e.b.fmul(e.load(F32X16, place, 64), factor), place, 64)
