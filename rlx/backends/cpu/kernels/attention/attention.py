"""Attention over a KV cache: four kinds of masks, grouped query heads, optional sliding window and score softcap.

A unit is a tile of rows of one KV head. All query heads of the group belong to the tile, so the kernel reads keys and
values once for all of them. A query is one row of one query head. The softmax is computed online over chunks of 64
positions, so the size of scratch memory does not depend on the context:

    queries = copy of the unit's rows
    for piece of positions that some row sees:
        largest = -1e30; total = 0; mix = 0
        for chunk of 64 positions:
            scores = queries . keys                     # lanes are positions: keys lie in tiles of 16
            for query:
                score = softcap(score * scale) + bias, -inf where masked
                new = max(largest, scores); shrink = exp(largest - new); largest = new
                weights = exp(scores - new); total = total * shrink + sum(weights)
            mix = mix * shrink + weights . values       # lanes are elements of the head
        add largest, total and mix to those of the pieces before
    out = mix / (total + exp(sink - largest))           # with sinks, else mix / total

Chunks start at multiples of 64, and pieces where the shape says. So the bits of a row depend neither on the other rows
nor on the split of the units.

With a window the caches may be rings: position t is stored at t modulo ctx. ctx is a multiple of 64, so a chunk is
contiguous. Positions of a chunk before the window may have been overwritten; they are masked.

With pages (`rlx.ir.segments`) the chunk that starts at position t lies where page t / 64 of the sequence is: one load
for 64 positions.

`cache.py` reads the types of caches, `positions.py` says which positions a unit sees and where they lie, and masks the
scores, `scratch.py` holds queries, scores and sums, `split.py` cuts the positions into pieces, `rows.py` is the kernel
for one row, or one row each of several sequences, and `bf16.py` has bf16 products.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from typing import ClassVar

from llvmlite import ir

from rlx.backends.cpu import vmath
from rlx.backends.cpu.kernel import Kernel, once
from rlx.backends.cpu.kernels.attention.cache import cache_reader
from rlx.backends.cpu.kernels.attention.positions import Mask, Positions
from rlx.backends.cpu.kernels.attention.rows import Rows
from rlx.backends.cpu.kernels.attention.scratch import Scratch
from rlx.backends.cpu.kernels.attention.shape import CHUNK, KEY_TILES, Ahead, Chunk, Chunks, Shape, Unit
from rlx.backends.cpu.kernels.attention.split import Pieces, Split
from rlx.backends.cpu.target import Target
from rlx.backends.cpu.tiles import F32X16, LANES, Emitter, Index
from rlx.errors import CompileError
from rlx.ir.dtypes import DType
from rlx.ir.infer import MASKS


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
    mask: str = "causal",
    bias: int | None = None,
    out: str = "f32",
    sinks: bool = False,
    paged: bool = False,
    columns: int = 0,
    writer: type[AttentionWriter] | None = None,
) -> Kernel:
    """A kernel for attention of `seq` rows at positions past .. past + seq, whose keys and values are in the cache.

    Row r sees positions t <= past + r and, with a window, past + r - t < window. With another mask it sees t < past +
    seq ("around": also t - past - r < window), or t <= visible[r], and the window applies only to positions before its
    own.

    Buffers:
        q: f32[seq, heads, head_dim].
        k: key tiles [kv_heads, ctx / 16, head_dim, 16] (for blocks see `cache.py`). Keys past the last
            position may hold anything.
        v: rows [kv_heads, ctx, head_dim] (for blocks see `cache.py`). Values past the last position are not
            read. A NaN among the values reaches every row of the units that read it.
        sinks: only with `sinks`: f32[heads], a score more in each softmax, without a value.
        bias: only with `bias`: f32[seq, bias, past + seq]. A row whose bias masks all positions is NaN.
        visible: only with that mask: i32[seq], the last position that a row sees. A row that sees none is NaN.
        pages: only with `paged`: i32[at least ceil((past + seq) / 64)], the page table.
        scratch: only for a single row with `split`: `scratch_bytes` per unit.
        out: f32 or bf16 [seq, heads, head_dim]. It must not overlap the others.
        segments: only with `columns`: those of the rows, of which each is one of a sequence of its own (`rows.py`).

    Extents: `seq`, `past`, `ctx` (at least past + seq, rounded up to 16). With a window, `past + seq` may exceed ctx if
    ctx is a multiple of 64 and at least seq + window - 1: position t is then read at t modulo ctx.

    Units: see `units`. A single row with `split` has kv_heads times its parts; units without a piece do nothing.

    Args:
        kv_dtype: type of both caches: f32, f16, bf16, q8_0 or q4_0.
        scale: factor of the scores, before the cap.
        softcap: c for c * tanh(score / c), None for no cap.
        rows_static: the value of `seq` if it is known at compile time; the code is then specialized for it.
        split: how the positions are cut into pieces; None for a single piece.
        mask: what a row sees: `causal`, `none`, `around`, `visible`, or `bias`.
        bias: number of heads of the bias, 1 (shared by all) or `heads`, for that mask only. The bias is added to the
            scores after the cap.
        out: type of the result, `f32` or `bf16`, rounded to nearest even.
        sinks: whether each query head has a further score.
        paged: whether the caches are pools of pages, which a table finds. Windows do not wrap then.
        columns: those of `segments`, if the kernel takes a row each of several sequences; else 0. Such a kernel has a
            single row, pages, a split, a causal mask and no window.
        writer: class that generates the kernel. `TiledAttention` and `DottedAttention` have bf16 products, for shapes
            that `attention_bf16.fits` accepts.

    Raises:
        CompileError: an option is out of its range.
    """
    if heads % kv_heads or heads <= 0:
        raise CompileError(f"{heads} query heads are no multiple of {kv_heads} KV heads", where="attention")
    if window is not None and window < 1:
        raise CompileError(f"a window of {window} positions", where="attention")
    if mask not in MASKS or (bias is None) == (mask == "bias") or bias not in (None, 1, heads):
        what = f"the mask {mask!r} with a bias of {bias} heads for {heads} query heads"
        raise CompileError(what, where="attention", hint=f"Masks: {', '.join(MASKS)}.")
    writer = writer or AttentionWriter
    sizes, bf16 = (heads, kv_heads, head_dim), writer.bf16
    shape = Shape(
        *sizes, kv_dtype, scale, window, softcap, rows_static, split, mask, bias, bf16, out, sinks, paged, columns
    )
    masking = [mask] if mask in ("bias", "visible") else []
    optional = [*["sinks"] * sinks, *masking, *["pages"] * paged, *["scratch"] * shape.shared]
    table, several = (["segments"], ["width", "rows", "shared"]) if columns else ([], [])
    e = Emitter(target, ["q", "k", "v", *optional, "out", *table], ["seq", "past", "ctx", *several])
    writer(e, shape).write()
    return e.finish(f"attention_{kv_dtype}", shape.outline())


class AttentionWriter:
    """Generates an attention kernel with f32 products."""

    bf16: ClassVar[bool] = False
    held: ClassVar[int] = 1  # chunks whose weights are computed together

    def __init__(self, e: Emitter, shape: Shape) -> None:
        self.e, self.shape = e, shape
        self.cache = cache_reader(e, shape.dtype, shape.head_dim)
        self.scratch = Scratch(e, shape, self._room(), self.held)
        self.positions = Positions(e, shape, self.cache.row_bytes)
        self.mask = Mask(e, shape, self.positions, self.scratch)
        self.pieces = Pieces(e, shape.split) if shape.split else None

    def _room(self) -> int:
        """Number of queries that scratch memory has room for."""
        return max(self.shape.row_tile, self.shape.joined) * self.shape.group

    def write(self) -> None:
        if self.shape.split is not None and self.shape.shared:
            Rows(self, self.shape.split).write()
        else:
            self._write_tiles()

    def _write_tiles(self) -> None:
        e = self.e
        tiles = e.b.sdiv(e.b.add(e.args["seq"], e.i64(self.shape.row_tile - 1)), e.i64(self.shape.row_tile))
        with e.loop(e.args["begin"], e.args["end"]) as u:
            unit = self.positions.unit(u.i, tiles)
            self.start(unit)
            if self.pieces is None:
                self._run(unit)
            else:
                self._run_pieces(unit, self.pieces)
            self.scratch.finish(unit)

    def _run_pieces(self, unit: Unit, pieces: Pieces) -> None:
        """Computes the sums over the positions of a unit, piece by piece."""
        e = self.e
        final = e.b.sub(unit.last, e.i64(1))
        if self.shape.mask == "visible":
            final = e.smax(final, unit.first)  # rows that see no position have a piece, too
        first, last = pieces.number(unit.first), pieces.number(final)
        with e.loop(first, e.b.add(last, e.i64(1))) as p:
            self._run(self._piece(unit, pieces, p.i))
            with e.when(e.b.icmp_signed(">", p.i, first)):
                self.scratch.add_before(unit)
            with e.when(e.b.icmp_signed("<", p.i, last)):
                self.scratch.keep_sums(unit)

    def _piece(self, unit: Unit, pieces: Pieces, number: ir.Value) -> Unit:
        """The unit with the positions of a piece only."""
        e = self.e
        return replace(unit, first=e.smax(pieces.first(number), unit.first), last=e.smin(pieces.end(number), unit.last))

    def _run(self, unit: Unit) -> None:
        """Computes the sums over the positions of a unit, without those before."""
        self.scratch.clear(unit)
        self.walk(unit)

    def walk(self, unit: Unit) -> None:
        """Adds the positions of a unit to its sums."""
        with self.e.loop(unit.first, unit.last, CHUNK) as c:
            self._add(unit, Chunks(c.i, 1))

    def _add(self, unit: Unit, chunks: Chunks) -> None:
        """Adds some chunks to the sums of all queries."""
        e = self.e
        with e.loop(0, chunks.count) as slot:
            self._score(unit, self.positions.chunk(unit, chunks, slot.i))
        with e.loop(unit.start, unit.end) as query:
            self._weigh(unit, chunks, query.i)
        self._mix(unit, chunks)

    def _sizes(self, unit: Unit) -> tuple[int, ...]:
        """Sizes of tiles of queries, largest first: as many as the registers hold, then smaller ones for the rest."""
        sizes = (6, 2, 1) if self.cache.widest * (6 + 1) < self.e.target.vector_room else (2, 1)
        if not isinstance(unit.rows, int):
            return sizes
        queries = unit.rows * self.shape.group  # tiles are equal in size, because each one loads all keys
        size = -(-queries // -(-queries // sizes[0]))
        return (size, queries % size) if queries % size else (size,)

    def _abreast(self, count: int) -> int:
        """Number of vectors of keys or values loaded at once: registers hold them and `count` sums for each."""
        held = count + 1 if count > 1 else 1  # for one query, a loaded vector is used once and needs no register
        return max(n for n in (1, 2, 4, 8) if n <= self.cache.widest or n * held < self.e.target.vector_room)

    def start(self, unit: Unit) -> None:
        """Copies the queries to scratch memory."""
        self.scratch.copy_queries(unit)

    def _score(self, unit: Unit, chunk: Chunk) -> None:
        """Computes the raw scores of all queries for the positions of a chunk."""
        e, last = self.e, self.e.b.sub(unit.last, chunk.start)
        needed = e.smin(e.b.ashr(e.b.add(last, e.i64(LANES - 1)), e.i64(4)), KEY_TILES)

        def score(count: int, query: ir.Value) -> None:
            together = min(KEY_TILES, self._abreast(count))
            if unit.rows == 1:  # a short chunk counts: there is no other row that sees more of it
                sizes = [size for size in (4, 2, 1) if size <= together]
                e.tiled(0, needed, sizes, lambda size, first: self._score_tiles(unit, chunk, query, count, first, size))
                return
            for first in range(0, KEY_TILES, together):
                self._score_tiles(unit, chunk, query, count, first, together)

        e.tiled(unit.start, unit.end, self._sizes(unit), score)

    def _score_tiles(self, unit: Unit, chunk: Chunk, query: ir.Value, count: int, first: Index, tiles: int) -> None:
        """Computes the raw scores of `count` queries for some tiles of 16 positions of a chunk."""
        e, scratch = self.e, self.scratch
        keys = self.positions.keys(unit, chunk, first, tiles)
        queries = [e.at(scratch.vector(scratch.query, query, 0), 64 * self.shape.vectors * i) for i in range(count)]
        # Prefetches the values of the same positions. `_mix_vectors` prefetches the next keys.
        results = self.cache.dots(keys, queries, self._values_of(unit, chunk, first))
        self._store_tiles(results, chunk, query, first, tiles)

    def _values_of(self, unit: Unit, chunk: Chunk, tile: Index) -> ir.Value:
        """Address of the values of a tile of 16 positions of a chunk."""
        return self.e.at(self.positions.cache("v", unit, chunk.place), (tile, LANES * self.cache.row_bytes))

    def _store_tiles(self, scores: list[ir.Value], chunk: Chunk, query: ir.Value, first: Index, tiles: int) -> None:
        """Stores the raw scores of some queries, from `query` on, for some tiles of a chunk."""
        e, base = self.e, self.e.at(self.scratch.scores_of(chunk, query), (first, 64))
        for i, score in enumerate(scores):
            e.store(score, e.at(base, 4 * CHUNK * (i // tiles) + 64 * (i % tiles)), 64)

    def _weigh(self, unit: Unit, chunks: Chunks, query: ir.Value) -> None:
        """Turns a query's scores of some chunks into weights, relative to the largest score so far."""
        e = self.e
        places = [e.at(base, (query, 64)) for base in (self.scratch.largest, self.scratch.shrink, self.scratch.total)]
        before, total = (e.load(F32X16, place, 64) for place in places[::2])
        largest, weigh = self._largest_and_weights(unit, chunks, query, before)
        shrink = vmath.exp_of_negative(e, e.b.fsub(before, largest))
        with e.loop(0, chunks.count, 1, [e.b.fmul(total, shrink)]) as slot:
            chunk = self.positions.chunk(unit, chunks, slot.i)
            weights = weigh(self.scratch.load_scores(chunk, query))
            self._keep_weights(weights, chunk, query)
            slot.values = [reduce(e.b.fadd, weights, slot.values[0])]
        self.scratch.store([largest, shrink, *slot.results], places)

    def _largest_and_weights(
        self, unit: Unit, chunks: Chunks, query: ir.Value, before: ir.Value
    ) -> tuple[ir.Value, Callable[[list[ir.Value]], list[ir.Value]]]:
        """Leaves a query's scores in scratch memory; the largest of these and those before, and what weighs some."""
        e = self.e
        with e.loop(0, chunks.count, 1, [before]) as slot:
            chunk = self.positions.chunk(unit, chunks, slot.i)
            scores = self.mask.scores(unit, chunk, query)
            self.scratch.store_scores(scores, chunk, query)
            slot.values = [e.max(self._largest(scores), slot.values[0])]
        largest = e.reduce_max(slot.results[0])

        def weights(scores: list[ir.Value]) -> list[ir.Value]:
            powers = [e.b.fsub(score, largest) for score in scores]
            return [vmath.exp_of_negative(e, power) for power in powers]

        return largest, weights

    def _largest(self, scores: list[ir.Value]) -> ir.Value:
        """The lanewise maximum of a chunk's scores."""
        return self.e.max(*(self.e.max(scores[i], scores[i + 1]) for i in range(0, KEY_TILES, 2)))

    def _keep_weights(self, weights: list[ir.Value], chunk: Chunk, query: ir.Value) -> None:
        self.scratch.store_scores(weights, chunk, query)

    def _mix(self, unit: Unit, chunks: Chunks) -> None:
        """Adds the weighted values of the chunks to the mixes of all queries."""
        e, whole = self.e, self.shape.head_dim // LANES

        def mix(count: int, query: ir.Value) -> None:
            most = self._abreast(count)
            full = whole // most * most
            with e.loop(0, full, most) as v:
                self._mix_vectors(unit, chunks, query, count, v.i, most, None)
            if whole > full:
                self._mix_vectors(unit, chunks, query, count, full, whole - full, None)
            if self.scratch.tail:
                self._mix_vectors(unit, chunks, query, count, whole, 1, self.scratch.tail_mask)

        e.tiled(unit.start, unit.end, self._sizes(unit), mix)

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
        """Adds some vectors of the weighted values to the mixes of `count` queries. Here there is one chunk."""
        e, cache, chunk = self.e, self.cache, self.positions.chunk(unit, chunks, 0)
        start, length = self.positions.cache("v", unit, chunk.place), e.smin(CHUNK, e.b.sub(unit.last, chunk.start))
        ahead = self.positions.ahead(unit, chunk, self.held)
        places, mixes = self.scratch.shrunk(query, count, first, vectors)
        with e.loop(0, length, 1, mixes) as t:
            self._fetch(ahead, first, vectors, t.i)
            values = cache.values(e.at(start, (t.i, cache.row_bytes)), first, vectors, mask)
            mixes = []
            for i in range(count):
                weight = e.splat_f32(e.at(self.scratch.scores_of(chunk, query), 4 * CHUNK * i, (t.i, 4)))
                mixes += [
                    e.fma(weight, value, mix)
                    for value, mix in zip(values, t.values[i * vectors :][:vectors], strict=True)
                ]
            t.values = mixes
        self._fetch_rest(ahead, first, vectors, length)
        self.scratch.store(t.results, places)

    def _fetch(self, ahead: Ahead, first: Index, vectors: int, t: ir.Value, count: int = 1) -> None:
        """Prefetches a part of the next keys, with `count` positions of some vectors of values from position `t` on."""
        e, nbytes = self.e, vectors * self.cache.vector_bytes
        start = e.at(ahead.keys, (e.b.mul(e.i64(first), e.i64(ahead.rows)), self.cache.vector_bytes))
        e.prefetch(e.at(start, (t if ahead.whole else e.smin(t, ahead.final), nbytes)), count * nbytes, level=2)

    def _fetch_rest(self, ahead: Ahead, first: Index, vectors: int, t: ir.Value) -> None:
        """Prefetches the parts from position `t` on."""
        if not ahead.whole:
            with self.e.loop(t, ahead.rows) as rest:
                self._fetch(ahead, first, vectors, rest.i)
