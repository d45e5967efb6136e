"""Attention over a KV cache: causal or with a bias, grouped query heads, optional sliding window and score softcap.

A unit is a tile of rows of one KV head; the query heads of its group are further rows of the same tile, so keys and
values are read once for all of them. Softmax runs online over chunks of 64 positions, so scratch memory is the same
for any context:

    queries = copy of the unit's rows; largest = -1e30; total = 0; mix = 0
    for chunk of 64 positions that some row sees:
        scores = queries . keys                         # lanes are positions: keys lie in tiles of 16
        for query:
            score = softcap(score * scale) + bias, -inf where masked
            new = max(largest, scores); shrink = exp(largest - new); largest = new
            weights = exp(scores - new); total = total * shrink + sum(weights)
        mix = mix * shrink + weights . values           # lanes are elements of the head
    out = mix / total

Chunks lie at multiples of 64 whatever the tile, so a row's bits depend neither on the rows beside it nor on the split.

With a window the caches may be rings, where position t lies at t modulo ctx, a multiple of 64: a chunk is then in one
piece. Its positions before the window may have been overwritten; they are masked like those of any chunk.

What a cache's type changes is in `attention_cache.py`; a single row may be cut into ranges, see `attention_split.py`.
"""

from __future__ import annotations

from typing import ClassVar

from llvmlite import ir

from rlx.codegen import vmath
from rlx.codegen.kernel import Kernel, once
from rlx.codegen.kernels.attention_cache import cache_reader
from rlx.codegen.kernels.attention_shape import CHUNK, Chunk, Shape, Unit
from rlx.codegen.kernels.attention_split import Range, Slots, Split, range_of
from rlx.codegen.target import Target
from rlx.codegen.tiles import F32X16, I32, I32X16, LANES, Emitter, Index
from rlx.errors import CompileError
from rlx.ir.dtypes import ACTIVATIONS, F32, DType

KEY_TILES = CHUNK // LANES
_NO_SCORE = -1e30  # below any score, and finite: the difference of two of them is 0


@once
def attention(
    heads: int,
    kv_heads: int,
    head_dim: int,
    target: Target,
    *,
    kv_dtype: DType,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    rows_static: int | None = None,
    split: Split | None = None,
    bias: int | None = None,
    out: str = "f32",
    writer: type[AttentionWriter] | None = None,
) -> Kernel:
    """A kernel for attention of `seq` rows at positions past .. past + seq, whose keys and values are in the cache.

    Row r sees positions t <= past + r and, with a window, past + r - t < window. With a bias it sees t < past + seq,
    and the window holds for those before it.

    Buffers: `q` f32[seq, heads, head_dim]; `k` in key tiles [kv_heads, ctx / 16, head_dim, 16]; `v` in rows [kv_heads,
    ctx, head_dim] (for blocks see `attention_cache.py`); with `bias` `bias` f32[seq, bias, past + seq]; with `split`
    `scratch`, `scratch_bytes` a unit; `out` f32 or bf16 [seq, heads, head_dim], which must not overlap the others. Keys
    past the last position may hold anything; values past it are not read. A NaN among the values reaches every row of
    the units that read it, and a row whose bias closes everything is NaN. Extents: `seq`, `past`, `ctx` (a multiple of
    16).
    Units: see `units`; with `split`, kv_heads times its parts, of which those past the row's ranges do nothing. With a
    window `past + seq` may exceed ctx, if ctx is a multiple of 64 and at least seq + window - 1: position t is then
    read at t modulo ctx.

    Args:
        kv_dtype: type of both caches: f32, f16, bf16, q8_0 or q4_0.
        scale: factor of the scores, before the cap.
        softcap: c for c * tanh(score / c), None for none.
        rows_static: `seq`, where it is known: the code then holds no more than that takes.
        split: how a single row is cut into ranges; needs `rows_static` of 1.
        bias: heads of what is added to the scores after the cap: 1, for all, or `heads`; None for causal attention.
        out: what the result is written as, `f32` or `bf16`, to nearest even.
        writer: what writes the products: `TiledAttention` has them on tile registers, for what it `fits`.

    Raises:
        CompileError: an option out of its range.
    """
    if heads % kv_heads or heads <= 0:
        raise CompileError(f"{heads} query heads are no multiple of {kv_heads} KV heads", where="attention")
    if window is not None and window < 1:
        raise CompileError(f"a window of {window} positions", where="attention")
    if split is not None and rows_static != 1:
        raise CompileError("ranges of positions are for single rows", where="attention", hint="Give rows_static=1.")
    if bias not in (None, 1, heads):
        raise CompileError(f"a bias of {bias} heads for {heads} query heads", where="attention")
    writer = writer or AttentionWriter
    shape = Shape(
        heads, kv_heads, head_dim, kv_dtype, scale, window, softcap, rows_static, split, bias, writer.tiled, out
    )
    optional = [*["bias"] * (bias is not None), *["scratch"] * (split is not None)]
    e = Emitter(target, ["q", "k", "v", *optional, "out"], ["seq", "past", "ctx"])
    writer(e, shape).write()
    return e.finish(f"attention_{kv_dtype}", shape.outline())


class AttentionWriter:
    """An attention kernel while it is written; products are of f32."""

    tiled: ClassVar[bool] = False
    held: ClassVar[int] = 1  # chunks whose scores are in scratch memory

    def __init__(self, e: Emitter, shape: Shape) -> None:
        self.e, self.shape = e, shape
        self.cache = cache_reader(e, shape.dtype, shape.head_dim)
        queries = self._room()
        # For each query: a copy of it, the scores of a chunk, the mix of values; and as vectors of 16 equal lanes, but
        # for the total, the largest score, the factor that shrinks what came before, the total of the weights.
        self.query = e.stack(64 * queries * shape.vectors)
        self.scores = e.stack(4 * queries * CHUNK * self.held)
        self.mix = e.stack(64 * queries * shape.vectors)
        self.largest, self.shrink, self.total = (e.stack(64 * queries) for _ in range(3))
        self.tail = shape.head_dim % LANES
        self.tail_mask = e.tail_mask(e.i64(self.tail)) if self.tail else None

    def _room(self) -> int:
        """Queries that scratch memory is for."""
        return self.shape.row_tile * self.shape.group

    def write(self) -> None:
        if self.shape.split is not None:
            self._write_ranges(self.shape.split)
        else:
            self._write_tiles()

    def _write_tiles(self) -> None:
        e = self.e
        tiles = e.b.sdiv(e.b.add(e.args["seq"], e.i64(self.shape.row_tile - 1)), e.i64(self.shape.row_tile))
        with e.loop(e.args["begin"], e.args["end"]) as u:
            unit = self._unit(u.i, tiles)
            self._run(unit)
            self._finish(unit)

    def _run(self, unit: Unit) -> None:
        """The sums over a unit's positions."""
        e = self.e
        self._start(unit)
        with e.loop(unit.first, unit.last, CHUNK) as c:
            self._add(unit, self._chunk(c.i))

    def _chunk(self, start: ir.Value) -> Chunk:
        """The chunk from a position on."""
        return Chunk(start, self._place(start), self._place(self.e.b.add(start, self.e.i64(CHUNK))))

    def _write_ranges(self, how: Split) -> None:
        """One row; a unit is a range of the positions of a KV head, the first ranges of all heads first."""
        e, kv_heads = self.e, self.e.i64(self.shape.kv_heads)
        slots = Slots(e, self.shape.kv_heads, self.shape.group, self.shape.vectors)
        one, last = e.i64(1), e.b.add(e.args["past"], e.i64(1))
        with e.loop(e.args["begin"], e.args["end"]) as u:
            part, head = e.b.udiv(u.i, kv_heads), e.b.urem(u.i, kv_heads)
            own = range_of(e, how, part, self._first_seen(e.args["past"]), last, CHUNK)
            unit = Unit(head, e.i64(0), one, e.i64(self.shape.group), own.first, own.last)
            with e.when(e.b.icmp_signed("<", own.first, own.last)):
                self._run(unit)
                with e.b.if_else(e.b.icmp_signed("==", own.active, one)) as (alone, shared):
                    with alone:
                        self._finish(unit)
                    with shared:
                        self._hand_in(unit, own, slots)

    def _hand_in(self, unit: Unit, own: Range, slots: Slots) -> None:
        """The range's sums to where the others find them; the last range adds up."""
        e, vectors = self.e, range(self.shape.vectors)
        with e.loop(0, unit.queries) as query:
            places = [e.at(base, (query.i, 64)) for base in (self.largest, self.total)]
            places += [self._vector(self.mix, query.i, v) for v in vectors]
            slots.put(unit.head, own.part, query.i, [e.load(F32X16, place, 64) for place in places])
        with e.when(slots.is_last(unit.head, own.active)):
            with e.loop(0, unit.queries) as query:
                total, *mixes = slots.added(unit.head, own.active, query.i, _NO_SCORE)
                e.store(total, e.at(self.total, (query.i, 64)), 64)
                for v, mix in zip(vectors, mixes, strict=True):
                    e.store(mix, self._vector(self.mix, query.i, v), 64)
            self._finish(unit)

    def _add(self, unit: Unit, chunk: Chunk) -> None:
        """The chunk's share of the sums of all queries."""
        e = self.e
        e.tiled(0, unit.queries, self._sizes(), lambda n, query: self._score(unit, chunk, query, n))
        with e.loop(0, unit.queries) as query:
            self._weigh(unit, chunk, query.i)
        e.tiled(0, unit.queries, self._sizes(), lambda n, query: self._mix(unit, chunk, query, n))

    def _place(self, start: ir.Value) -> ir.Value:
        """Where the chunk from a position on lies in the caches."""
        return start if self.shape.window is None else self.e.b.srem(start, self.e.args["ctx"])

    def _unit(self, unit: ir.Value, tiles: ir.Value) -> Unit:
        e, shape = self.e, self.shape
        # The last rows see the most positions: they go first, so that no worker starts on them when others are done.
        tile = e.b.sub(e.b.sub(tiles, e.i64(1)), e.b.srem(unit, tiles))
        row = e.b.mul(tile, e.i64(shape.row_tile))
        rows = e.smin(shape.row_tile, e.b.sub(e.args["seq"], row))
        position = e.b.add(e.args["past"], row)
        queries = e.b.mul(rows, e.i64(shape.group))
        first = self._first_seen(position)
        last = e.b.add(position, rows) if shape.bias is None else e.b.add(e.args["past"], e.args["seq"])
        return Unit(e.b.sdiv(unit, tiles), row, rows, queries, first, last)

    def _first_seen(self, position: ir.Value) -> ir.Value:
        """The first position that a query sees, rounded down to a chunk."""
        e, window = self.e, self.shape.window
        if window is None:
            return e.i64(0)
        return e.b.and_(e.smax(e.b.sub(position, e.i64(window - 1)), 0), e.i64(-CHUNK))

    def _sizes(self) -> tuple[int, ...]:
        """Queries of a tile: what the registers hold, and what is left over."""
        sizes = (6, 2, 1) if self.cache.widest * (6 + 1) < self.e.target.vector_room else (2, 1)
        if self.shape.rows_static != self.shape.row_tile:
            return sizes
        queries = self.shape.row_tile * self.shape.group  # of every unit: equal tiles, since each loads all keys
        size = -(-queries // -(-queries // sizes[0]))
        return (size, queries % size) if queries % size else (size,)

    def _abreast(self, count: int) -> int:
        """How many vectors of keys or values are taken at once: registers hold them and their sums, `count` of each."""
        held = count + 1 if count > 1 else 1  # what serves one query only is used and gone
        return max(n for n in (1, 2, 4, 8) if n <= self.cache.widest or n * held < self.e.target.vector_room)

    # --- before and after ---------------------------------------------------------------------------------------------

    def _start(self, unit: Unit) -> None:
        """Copies the queries side by side and clears the sums."""
        e = self.e
        with e.loop(0, unit.queries) as query:
            source = self._element(e.args["q"], unit, query.i)
            for v in range(self.shape.vectors):
                e.store(
                    e.load_as_f32(F32, e.at(source, 64 * v), self._mask(v)), self._vector(self.query, query.i, v), 64
                )
                e.store(e.f32(0.0), self._vector(self.mix, query.i, v), 64)
            e.store(e.f32(_NO_SCORE), e.at(self.largest, (query.i, 64)), 64)
            e.store(e.f32(0.0), e.at(self.total, (query.i, 64)), 64)

    def _finish(self, unit: Unit) -> None:
        e, dtype = self.e, ACTIVATIONS[self.shape.out]
        with e.loop(0, unit.queries) as query:
            total = e.reduce_add(e.load(F32X16, e.at(self.total, (query.i, 64)), 64))
            target = self._element(e.args["out"], unit, query.i, dtype.nbytes)
            for v in range(self.shape.vectors):
                mixed = e.load(F32X16, self._vector(self.mix, query.i, v), 64)
                place = e.at(target, dtype.row_bytes(LANES) * v)
                e.store_from_f32(dtype, e.b.fdiv(mixed, total), place, self._mask(v))

    def _element(self, base: ir.Value, unit: Unit, query: ir.Value, nbytes: int = 4) -> ir.Value:
        """Address of a query's head in numbers [seq, heads, head_dim] of `nbytes` bytes."""
        e, shape = self.e, self.shape
        row = e.b.add(unit.row, e.b.sdiv(query, e.i64(shape.group)))
        member = e.b.srem(query, e.i64(shape.group))
        head = e.mul_add(unit.head, shape.group, member)
        return e.at(base, (row, nbytes * shape.heads * shape.head_dim), (head, nbytes * shape.head_dim))

    def _vector(self, base: ir.Value, query: ir.Value, v: Index) -> ir.Value:
        """Address of a vector of a query's head in scratch memory."""
        return self.e.at(base, (query, 64 * self.shape.vectors), (v, 64))

    def _mask(self, v: int) -> ir.Value | None:
        return self.tail_mask if v == self.shape.vectors - 1 else None

    # --- scores -------------------------------------------------------------------------------------------------------

    def _score(self, unit: Unit, chunk: Chunk, query: ir.Value, count: int) -> None:
        """The plain scores of `count` queries with the 64 positions of a chunk."""
        together = min(KEY_TILES, self._abreast(count))
        for first in range(0, KEY_TILES, together):
            self._score_tiles(unit, chunk, query, count, range(first, first + together))

    def _score_tiles(self, unit: Unit, chunk: Chunk, query: ir.Value, count: int, tiles: range) -> None:
        e, row_bytes = self.e, self.cache.row_bytes
        keys = self._chosen_keys(unit, chunk, tiles)
        queries = [e.at(self._vector(self.query, query, 0), 64 * self.shape.vectors * i) for i in range(count)]
        # What comes next is fetched meanwhile: values here, the next chunk's keys while values are mixed.
        values = e.at(self._values(unit, chunk.place), tiles.start * LANES * row_bytes)
        results = self.cache.dots(keys, queries, values)
        for i in range(count):
            for j, tile in enumerate(tiles):
                place = e.at(self.scores, (query, 4 * CHUNK), 4 * CHUNK * i + 64 * tile)
                e.store(results[i * len(tiles) + j], place, 64)

    def _chosen_keys(self, unit: Unit, chunk: Chunk, tiles: range) -> list[ir.Value]:
        """Addresses of a chunk's tiles of keys. The cache ends somewhere behind the last position: tiles past it are
        read as the last one, and masked.
        """
        e = self.e
        first = e.b.ashr(chunk.place, e.i64(4))
        last = e.b.ashr(e.b.sub(e.b.sub(unit.last, e.i64(1)), chunk.start), e.i64(4))
        chosen = [e.b.add(first, e.smin(tile, last)) for tile in tiles]
        return [e.at(self._keys(unit), (tile, LANES * self.cache.row_bytes)) for tile in chosen]

    def _keys(self, unit: Unit) -> ir.Value:
        """Address of a head's keys."""
        return self._cache("k", unit)

    def _values(self, unit: Unit, place: ir.Value) -> ir.Value:
        """Address of a head's values from a place on."""
        return self.e.at(self._cache("v", unit), (place, self.cache.row_bytes))

    def _cache(self, name: str, unit: Unit) -> ir.Value:
        rows = self.e.b.mul(unit.head, self.e.args["ctx"])
        return self.e.at(self.e.args[name], (rows, self.cache.row_bytes))

    # --- weights ------------------------------------------------------------------------------------------------------

    def _weigh(self, unit: Unit, chunk: Chunk, query: ir.Value) -> None:
        """A query's scores of a chunk -> weights relative to the largest score so far."""
        e = self.e
        scores = self._seen_scores(unit, chunk, query, self.scores)
        before = e.load(F32X16, e.at(self.largest, (query, 64)), 64)
        largest = e.max(e.reduce_max(self._largest(scores)), before)
        shrink = vmath.exp(e, e.b.fsub(before, largest))
        total = e.b.fmul(e.load(F32X16, e.at(self.total, (query, 64)), 64), shrink)
        weights = [vmath.exp(e, e.b.fsub(score, largest)) for score in scores]
        for weight in weights:
            total = e.b.fadd(total, weight)
        self._keep(weights, self.scores, query)
        for base, value in ((self.largest, largest), (self.shrink, shrink), (self.total, total)):
            e.store(value, e.at(base, (query, 64)), 64)

    def _largest(self, scores: list[ir.Value]) -> ir.Value:
        """The largest of a chunk's scores in each lane."""
        return self.e.max(*(self.e.max(scores[i], scores[i + 1]) for i in range(0, KEY_TILES, 2)))

    def _seen_scores(self, unit: Unit, chunk: Chunk, query: ir.Value, base: ir.Value) -> list[ir.Value]:
        """A query's scores of a chunk, with all that is done to them; its plain ones are in scratch memory."""
        e = self.e
        row = e.b.add(unit.row, e.b.sdiv(query, e.i64(self.shape.group)))
        position = e.b.sub(e.b.add(e.args["past"], row), chunk.start)  # relative to the chunk
        scores = [self._capped(score) for score in self._kept(base, query)]
        if self.shape.bias is not None:
            scores = self._biased(unit, chunk, query, scores)
        end = position if self.shape.bias is None else e.b.sub(e.b.sub(unit.last, e.i64(1)), chunk.start)
        return [self._visible(score, position, end, tile) for tile, score in enumerate(scores)]

    def _kept(self, base: ir.Value, query: ir.Value) -> list[ir.Value]:
        """What is kept for a query and the 64 positions of a chunk: scores, and later what was made of them."""
        return [self.e.load(F32X16, self.e.at(base, (query, 4 * CHUNK), 64 * tile), 64) for tile in range(KEY_TILES)]

    def _keep(self, values: list[ir.Value], base: ir.Value, query: ir.Value) -> None:
        """The inverse of `_kept`."""
        for tile, value in enumerate(values):
            self.e.store(value, self.e.at(base, (query, 4 * CHUNK), 64 * tile), 64)

    def _capped(self, score: ir.Value) -> ir.Value:
        """Scale and cap."""
        score = self.e.b.fmul(score, self.e.f32(self.shape.scale))
        return score if self.shape.softcap is None else vmath.softcap(self.e, score, self.shape.softcap)

    def _biased(self, unit: Unit, chunk: Chunk, query: ir.Value, scores: list[ir.Value]) -> list[ir.Value]:
        """A query's scores of a chunk plus its bias, of which the positions behind the last are not touched."""
        e, heads, group = self.e, self.shape.bias, self.e.i64(self.shape.group)
        row, member = e.b.add(unit.row, e.b.sdiv(query, group)), e.b.srem(query, group)
        line = row if heads == 1 else e.mul_add(row, self.shape.heads, e.mul_add(unit.head, group, member))
        length = e.b.add(e.args["past"], e.args["seq"])
        place = e.at(e.args["bias"], (line, e.b.mul(length, e.i64(4))), (chunk.start, 4))
        left = e.b.sub(unit.last, chunk.start)
        masks = [e.tail_mask(e.b.sub(left, e.i64(LANES * tile))) for tile in range(KEY_TILES)]
        added = [e.load_as_f32(F32, e.at(place, 64 * tile), mask) for tile, mask in enumerate(masks)]
        return [e.b.fadd(score, bias) for score, bias in zip(scores, added, strict=True)]

    def _visible(self, score: ir.Value, position: ir.Value, end: ir.Value, tile: int) -> ir.Value:
        """The scores of 16 positions, -inf for those that the query does not see. `position` is the query's, `end` the
        last one that it may see, both counted from the chunk's start.
        """
        e, window = self.e, self.shape.window
        lanes = ir.Constant(I32X16, list(range(LANES * tile, LANES * (tile + 1))))
        here = e.splat(e.b.trunc(e.clamp(end, -1, 2 * CHUNK), I32))
        seen = e.b.icmp_signed("<=", lanes, here)
        if window is not None:
            oldest = e.splat(e.b.trunc(e.clamp(e.b.sub(position, e.i64(window)), -1, 2 * CHUNK), I32))
            seen = e.b.and_(seen, e.b.icmp_signed(">", lanes, oldest))
        return e.b.select(seen, score, e.f32(float("-inf")))

    # --- values -------------------------------------------------------------------------------------------------------

    def _mix(self, unit: Unit, chunk: Chunk, query: ir.Value, count: int) -> None:
        """Adds the chunk's values, weighted, to the mixes of `count` queries."""
        e, most, whole = self.e, self._abreast(count), self.shape.head_dim // LANES
        full = whole // most * most
        with e.loop(0, full, most) as v:
            self._mix_vectors(unit, chunk, query, count, v.i, most, None)
        if whole > full:
            self._mix_vectors(unit, chunk, query, count, full, whole - full, None)
        if self.tail:
            self._mix_vectors(unit, chunk, query, count, whole, 1, self.tail_mask)

    def _mix_vectors(
        self,
        unit: Unit,
        chunk: Chunk,
        query: ir.Value,
        count: int,
        first: Index,
        vectors: int,
        mask: ir.Value | None,
    ) -> None:
        e, shape, cache = self.e, self.shape, self.cache
        start, ahead = self._values(unit, chunk.place), vectors * cache.vector_bytes
        following = e.at(self._keys(unit), (chunk.following, cache.row_bytes), (first, CHUNK * cache.vector_bytes))
        places = [
            e.at(self._vector(self.mix, query, first), 64 * (shape.vectors * i + v))
            for i in range(count)
            for v in range(vectors)
        ]
        shrink = [e.load(F32X16, e.at(self.shrink, (query, 64), 64 * i), 64) for i in range(count)]
        mixes = [e.b.fmul(e.load(F32X16, p, 64), shrink[i // vectors]) for i, p in enumerate(places)]
        with e.loop(0, e.smin(CHUNK, e.b.sub(unit.last, chunk.start)), 1, mixes) as t:
            e.prefetch(e.at(following, (t.i, ahead)), ahead)
            values = cache.values(e.at(start, (t.i, cache.row_bytes)), first, vectors, mask)
            mixes = []
            for i in range(count):
                weight = e.splat_f32(e.at(self.scores, (query, 4 * CHUNK), 4 * CHUNK * i, (t.i, 4)))
                mixes += [
                    e.fma(weight, value, mix)
                    for value, mix in zip(values, t.values[i * vectors :][:vectors], strict=True)
                ]
            t.values = mixes
        for mix, place in zip(t.results, places, strict=True):
            e.store(mix, place, 64)
