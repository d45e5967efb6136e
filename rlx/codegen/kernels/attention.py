"""Attention over a KV cache: causal, with grouped query heads, optional sliding window and score softcap.

A unit is a tile of rows of one KV head; the query heads of its group are further rows of the same tile, so keys and
values are read once for all of them. Softmax runs online over chunks of 64 positions, so scratch memory is the same
for any context:

    queries = copy of the unit's rows; largest = -1e30; total = 0; mix = 0
    for chunk of 64 positions that some row sees:
        scores = queries . keys                         # lanes are positions: keys lie in tiles of 16
        for query:
            score = softcap(score * scale), -inf where masked
            new = max(largest, scores); shrink = exp(largest - new); largest = new
            weights = exp(scores - new); total = total * shrink + sum(weights)
        mix = mix * shrink + weights . values           # lanes are elements of the head
    out = mix / total

Chunks lie at multiples of 64 whatever the tile, so a row's bits depend neither on the rows beside it nor on the split.

With a window the caches may be rings, where position t lies at t modulo ctx, a multiple of 64: a chunk is then in one
piece. Its positions before the window may have been overwritten; they are masked like those of any chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

from llvmlite import ir

from rlx.codegen import vmath
from rlx.codegen.kernel import Kernel
from rlx.codegen.target import Target
from rlx.codegen.tiles import F32X16, I32, I32X16, LANES, Emitter, Index
from rlx.errors import CompileError
from rlx.ir.dtypes import BF16, F16, F32, DType

CHUNK = 64  # positions whose scores are held at once
_KEY_TILES = CHUNK // LANES
_QUERIES = 32  # queries (rows times heads of a group) of a unit, about
_NO_SCORE = -1e30  # below any score, and finite: the difference of two of them is 0


def row_tile(heads: int, kv_heads: int, head_dim: int, rows_static: int | None = None) -> int:
    """Rows of a unit: there are ceil(seq / row_tile) * kv_heads units."""
    most = max(1, _QUERIES // (heads // kv_heads))
    return most if rows_static is None else min(most, rows_static)


def units(seq: int, heads: int, kv_heads: int, head_dim: int, rows_static: int | None = None) -> int:
    """Work units for `seq` rows."""
    return -(-seq // row_tile(heads, kv_heads, head_dim, rows_static)) * kv_heads


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
) -> Kernel:
    """A kernel for attention of `seq` rows at positions past .. past + seq, whose keys and values are in the cache.

    Row r sees positions t <= past + r and, with a window, past + r - t < window.

    Buffers: `q` f32[seq, heads, head_dim]; `k` in key tiles [kv_heads, ctx / 16, head_dim, 16]; `v` in rows [kv_heads,
    ctx, head_dim]; `out` f32[seq, heads, head_dim], which must not overlap the others. Keys past the last position may
    hold anything; values past it are not read. A NaN among the values reaches every row of the units that read it.
    Extents: `seq`, `past`, `ctx` (a multiple of 16). Units: see `units`. With a window `past + seq` may exceed ctx, if
    ctx is a multiple of 64 and at least seq + window - 1: position t is then read at t modulo ctx.

    Args:
        kv_dtype: type of both caches: f32, f16 or bf16.
        scale: factor of the scores, before the cap.
        softcap: c for c * tanh(score / c), None for none.
        rows_static: `seq`, where it is known: the code then holds no more than that takes.

    Raises:
        CompileError: an option out of its range.
    """
    if heads % kv_heads or heads <= 0:
        raise CompileError(f"{heads} query heads are no multiple of {kv_heads} KV heads", where="attention")
    if kv_dtype not in (F32, F16, BF16):
        raise CompileError(f"no attention kernel reads {kv_dtype} caches", hint="Caches are f32, f16 or bf16.")
    if window is not None and window < 1:
        raise CompileError(f"a window of {window} positions", where="attention")
    shape = _Shape(heads, kv_heads, head_dim, kv_dtype, scale, window, softcap, rows_static)
    e = Emitter(target, ["q", "k", "v", "out"], ["seq", "past", "ctx"])
    _Attention(e, shape).write()
    return e.finish(f"attention_{kv_dtype}", _outline(shape))


@dataclass(frozen=True)
class _Shape:
    heads: int
    kv_heads: int
    head_dim: int
    dtype: DType
    scale: float
    window: int | None
    softcap: float | None
    rows_static: int | None

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.heads // self.kv_heads

    @property
    def row_tile(self) -> int:
        return row_tile(self.heads, self.kv_heads, self.head_dim, self.rows_static)

    @property
    def vectors(self) -> int:
        """Vectors of a head, the last one possibly partial."""
        return -(-self.head_dim // LANES)


@dataclass(frozen=True)
class _Unit:
    """One unit at run time.

    Attributes:
        head: its KV head.
        row, rows: its rows are [row, row + rows).
        queries: rows times group.
        first, last: the positions it sees are [first, last); `first` is rounded down to a chunk.
    """

    head: ir.Value
    row: ir.Value
    rows: ir.Value
    queries: ir.Value
    first: ir.Value
    last: ir.Value


@dataclass(frozen=True)
class _Chunk:
    """64 positions at run time.

    Attributes:
        start: the first of them.
        place: where they begin in the caches.
        following: where the next 64 begin.
    """

    start: ir.Value
    place: ir.Value
    following: ir.Value


class _Attention:
    """An attention kernel while it is written."""

    def __init__(self, e: Emitter, shape: _Shape) -> None:
        self.e, self.shape = e, shape
        self.size = 4 if shape.dtype is F32 else 2  # bytes of a cached number
        queries = shape.row_tile * shape.group
        # For each query: a copy of it, the scores of a chunk, the mix of values; and as vectors of 16 equal lanes, but
        # for the total, the largest score, the factor that shrinks what came before, the total of the weights.
        self.query = e.stack(64 * queries * shape.vectors)
        self.scores = e.stack(4 * queries * CHUNK)
        self.mix = e.stack(64 * queries * shape.vectors)
        self.largest, self.shrink, self.total = (e.stack(64 * queries) for _ in range(3))
        self.tail = shape.head_dim % LANES
        self.tail_mask = e.tail_mask(e.i64(self.tail)) if self.tail else None

    def write(self) -> None:
        e = self.e
        tiles = e.b.sdiv(e.b.add(e.args["seq"], e.i64(self.shape.row_tile - 1)), e.i64(self.shape.row_tile))
        with e.loop(e.args["begin"], e.args["end"]) as u:
            unit = self._unit(u.i, tiles)
            self._start(unit)
            with e.loop(unit.first, unit.last, CHUNK) as c:
                self._add(unit, _Chunk(c.i, self._place(c.i), self._place(e.b.add(c.i, e.i64(CHUNK)))))
            self._finish(unit)

    def _add(self, unit: _Unit, chunk: _Chunk) -> None:
        """The chunk's share of the sums of all queries."""
        e = self.e
        e.tiled(0, unit.queries, self._sizes(), lambda n, query: self._score(unit, chunk, query, n))
        with e.loop(0, unit.queries) as query:
            self._weigh(unit, chunk, query.i)
        e.tiled(0, unit.queries, self._sizes(), lambda n, query: self._mix(unit, chunk, query, n))

    def _place(self, start: ir.Value) -> ir.Value:
        """Where the chunk from a position on lies in the caches."""
        return start if self.shape.window is None else self.e.b.srem(start, self.e.args["ctx"])

    def _unit(self, unit: ir.Value, tiles: ir.Value) -> _Unit:
        e, shape = self.e, self.shape
        # The last rows see the most positions: they go first, so that no worker starts on them when others are done.
        tile = e.b.sub(e.b.sub(tiles, e.i64(1)), e.b.srem(unit, tiles))
        row = e.b.mul(tile, e.i64(shape.row_tile))
        rows = e.smin(shape.row_tile, e.b.sub(e.args["seq"], row))
        position = e.b.add(e.args["past"], row)
        first = e.i64(0)
        if shape.window is not None:
            first = e.b.and_(e.smax(e.b.sub(position, e.i64(shape.window - 1)), 0), e.i64(-CHUNK))
        queries = e.b.mul(rows, e.i64(shape.group))
        return _Unit(e.b.sdiv(unit, tiles), row, rows, queries, first, e.b.add(position, rows))

    def _sizes(self) -> tuple[int, ...]:
        """Queries of a tile: what the registers hold, and what is left over."""
        sizes = {"avx512": (6, 2, 1), "avx2": (3, 1), "generic": (2, 1)}[self.e.target.level]
        if self.shape.rows_static is None:
            return sizes
        left, used = self.shape.row_tile * self.shape.group, []
        for size in sizes:
            if left >= size:
                used.append(size)
                left %= size
        return tuple(used) if self.shape.rows_static == self.shape.row_tile else sizes

    # --- before and after ---------------------------------------------------------------------------------------------

    def _start(self, unit: _Unit) -> None:
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

    def _finish(self, unit: _Unit) -> None:
        e = self.e
        with e.loop(0, unit.queries) as query:
            total = e.reduce_add(e.load(F32X16, e.at(self.total, (query.i, 64)), 64))
            target = self._element(e.args["out"], unit, query.i)
            for v in range(self.shape.vectors):
                mixed = e.load(F32X16, self._vector(self.mix, query.i, v), 64)
                e.store_from_f32(F32, e.b.fdiv(mixed, total), e.at(target, 64 * v), self._mask(v))

    def _element(self, base: ir.Value, unit: _Unit, query: ir.Value) -> ir.Value:
        """Address of a query's head in f32[seq, heads, head_dim]."""
        e, shape = self.e, self.shape
        row = e.b.add(unit.row, e.b.sdiv(query, e.i64(shape.group)))
        member = e.b.srem(query, e.i64(shape.group))
        head = e.mul_add(unit.head, shape.group, member)
        return e.at(base, (row, 4 * shape.heads * shape.head_dim), (head, 4 * shape.head_dim))

    def _vector(self, base: ir.Value, query: ir.Value, v: Index) -> ir.Value:
        """Address of a vector of a query's head in scratch memory."""
        return self.e.at(base, (query, 64 * self.shape.vectors), (v, 64))

    def _mask(self, v: int) -> ir.Value | None:
        return self.tail_mask if v == self.shape.vectors - 1 else None

    # --- scores -------------------------------------------------------------------------------------------------------

    def _score(self, unit: _Unit, chunk: _Chunk, query: ir.Value, count: int) -> None:
        """The plain scores of `count` queries with the 64 positions of a chunk."""
        narrow = {"avx512": _KEY_TILES, "avx2": 2, "generic": 1}[self.e.target.level]
        together = narrow if count > 1 else _KEY_TILES
        for first in range(0, _KEY_TILES, together):
            self._score_tiles(unit, chunk, query, count, range(first, first + together))

    def _score_tiles(self, unit: _Unit, chunk: _Chunk, query: ir.Value, count: int, tiles: range) -> None:
        e, shape = self.e, self.shape
        size = LANES * self.size  # bytes of one element of 16 keys
        first = e.b.ashr(chunk.place, e.i64(4))
        last = e.b.ashr(e.b.sub(e.b.sub(unit.last, e.i64(1)), chunk.start), e.i64(4))
        # The cache ends somewhere behind the last position: tiles past it are read as the last one, and masked.
        chosen = [e.b.add(first, e.smin(tile, last)) for tile in tiles]
        keys = [e.at(self._keys(unit), (tile, shape.head_dim * size)) for tile in chosen]
        # What comes next is fetched meanwhile: values here, the next chunk's keys while values are mixed.
        values = e.at(self._values(unit, chunk.place), tiles.start * shape.head_dim * size)
        with e.loop(0, shape.head_dim, 1, [e.f32(0.0)] * (count * len(tiles))) as d:
            e.prefetch(e.at(values, (d.i, len(tiles) * size)), len(tiles) * size)
            vectors = [e.load_as_f32(shape.dtype, e.at(key, (d.i, size))) for key in keys]
            sums = []
            for i in range(count):
                x = e.splat_f32(e.at(self._vector(self.query, query, 0), 64 * shape.vectors * i, (d.i, 4)))
                sums += [e.fma(x, v, s) for v, s in zip(vectors, d.values[i * len(tiles) :][: len(tiles)], strict=True)]
            d.values = sums
        for i in range(count):
            for j, tile in enumerate(tiles):
                place = e.at(self.scores, (query, 4 * CHUNK), 4 * CHUNK * i + 64 * tile)
                e.store(d.results[i * len(tiles) + j], place, 64)

    def _keys(self, unit: _Unit) -> ir.Value:
        """Address of a head's keys."""
        return self._cache("k", unit)

    def _values(self, unit: _Unit, place: ir.Value) -> ir.Value:
        """Address of a head's values from a place on."""
        return self.e.at(self._cache("v", unit), (place, self.shape.head_dim * self.size))

    def _cache(self, name: str, unit: _Unit) -> ir.Value:
        rows = self.e.b.mul(unit.head, self.e.args["ctx"])
        return self.e.at(self.e.args[name], (rows, self.shape.head_dim * self.size))

    # --- weights ------------------------------------------------------------------------------------------------------

    def _weigh(self, unit: _Unit, chunk: _Chunk, query: ir.Value) -> None:
        """A query's scores of a chunk -> weights relative to the largest score so far."""
        e = self.e
        row = e.b.add(unit.row, e.b.sdiv(query, e.i64(self.shape.group)))
        position = e.b.sub(e.b.add(e.args["past"], row), chunk.start)  # relative to the chunk
        places = [e.at(self.scores, (query, 4 * CHUNK), 64 * tile) for tile in range(_KEY_TILES)]
        scores = [self._visible(e.load(F32X16, p, 64), position, tile) for tile, p in enumerate(places)]
        before = e.load(F32X16, e.at(self.largest, (query, 64)), 64)
        pairs = [e.max(scores[i], scores[i + 1]) for i in range(0, _KEY_TILES, 2)]
        largest = e.max(e.reduce_max(e.max(*pairs)), before)
        shrink = vmath.exp(e, e.b.fsub(before, largest))
        total = e.b.fmul(e.load(F32X16, e.at(self.total, (query, 64)), 64), shrink)
        for score, place in zip(scores, places, strict=True):
            weight = vmath.exp(e, e.b.fsub(score, largest))
            total = e.b.fadd(total, weight)
            e.store(weight, place, 64)
        for base, value in ((self.largest, largest), (self.shrink, shrink), (self.total, total)):
            e.store(value, e.at(base, (query, 64)), 64)

    def _visible(self, score: ir.Value, position: ir.Value, tile: int) -> ir.Value:
        """Scale, cap and mask of the scores of 16 positions; `position` is the query's, seen from the chunk's start."""
        e, shape = self.e, self.shape
        score = e.b.fmul(score, e.f32(shape.scale))
        if shape.softcap is not None:
            score = vmath.softcap(e, score, shape.softcap)
        lanes = ir.Constant(I32X16, list(range(LANES * tile, LANES * (tile + 1))))
        here = e.splat(e.b.trunc(e.clamp(position, -1, 2 * CHUNK), I32))
        seen = e.b.icmp_signed("<=", lanes, here)
        if shape.window is not None:
            oldest = e.splat(e.b.trunc(e.clamp(e.b.sub(position, e.i64(shape.window)), -1, 2 * CHUNK), I32))
            seen = e.b.and_(seen, e.b.icmp_signed(">", lanes, oldest))
        return e.b.select(seen, score, e.f32(float("-inf")))

    # --- values -------------------------------------------------------------------------------------------------------

    def _mix(self, unit: _Unit, chunk: _Chunk, query: ir.Value, count: int) -> None:
        """Adds the chunk's values, weighted, to the mixes of `count` queries."""
        e, vectors = self.e, self.shape.vectors
        most = {"avx512": 4, "avx2": 2 if count > 1 else 4, "generic": 1}[e.target.level]
        full = (vectors - 1 if self.tail else vectors) // most * most
        with e.loop(0, full, most) as v:
            self._mix_vectors(unit, chunk, query, count, v.i, most, None)
        whole = vectors - 1 if self.tail else vectors
        if whole > full:
            self._mix_vectors(unit, chunk, query, count, full, whole - full, None)
        if self.tail:
            self._mix_vectors(unit, chunk, query, count, whole, 1, self.tail_mask)

    def _mix_vectors(
        self,
        unit: _Unit,
        chunk: _Chunk,
        query: ir.Value,
        count: int,
        first: Index,
        vectors: int,
        mask: ir.Value | None,
    ) -> None:
        e, shape, size = self.e, self.shape, self.size
        start = e.at(self._values(unit, chunk.place), (first, LANES * size))
        following = e.at(self._keys(unit), (chunk.following, shape.head_dim * size), (first, CHUNK * LANES * size))
        places = [
            e.at(self._vector(self.mix, query, first), 64 * (shape.vectors * i + v))
            for i in range(count)
            for v in range(vectors)
        ]
        shrink = [e.load(F32X16, e.at(self.shrink, (query, 64), 64 * i), 64) for i in range(count)]
        mixes = [e.b.fmul(e.load(F32X16, p, 64), shrink[i // vectors]) for i, p in enumerate(places)]
        with e.loop(0, e.smin(CHUNK, e.b.sub(unit.last, chunk.start)), 1, mixes) as t:
            row = e.at(start, (t.i, shape.head_dim * size))
            e.prefetch(e.at(following, (t.i, vectors * LANES * size)), vectors * LANES * size)
            values = [e.load_as_f32(shape.dtype, e.at(row, LANES * size * v), mask) for v in range(vectors)]
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


def _outline(shape: _Shape) -> str:
    """What a person reads instead of the vector code."""
    seen = "t <= past + row" + (f" and past + row - t < {shape.window}" if shape.window is not None else "")
    score = f"dot(q[row, head], k[head // {shape.group}, t]) * {shape.scale!r}"
    if shape.softcap is not None:
        score = f"{shape.softcap!r} * tanh({score} / {shape.softcap!r})"
    return (
        f"# {shape.heads} heads of {shape.head_dim} on {shape.kv_heads} KV heads, {shape.dtype} cache\n"
        f"for unit in range(begin, end):  # {shape.row_tile} rows of one KV head\n"
        f"    for row, head in unit:\n"
        f"        weight = softmax([{score} for t if {seen}])  # online, chunks of {CHUNK} positions\n"
        f"        out[row, head] = sum(weight[t] * v[head // {shape.group}, t])\n"
    )
