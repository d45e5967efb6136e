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
    out = mix / total

Chunks start at multiples of 64, and pieces where the shape says. So the bits of a row depend neither on the other rows
nor on the split of the units.

With a window the caches may be rings: position t is stored at t modulo ctx. ctx is a multiple of 64, so a chunk is
contiguous. Positions of a chunk before the window may have been overwritten; they are masked.

With pages (`rlx.ir.pages`) the chunk that starts at position t lies where page t / 64 of the sequence is: one load for
64 positions.

`cache.py` reads the types of caches, `split.py` cuts the positions into pieces, and `bf16.py` has bf16 products.
"""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from typing import ClassVar

from llvmlite import ir

from rlx.backends.cpu import vmath
from rlx.backends.cpu.kernel import Kernel, once
from rlx.backends.cpu.kernels.attention.cache import cache_reader
from rlx.backends.cpu.kernels.attention.shape import CHUNK, Chunk, Chunks, Shape, Unit
from rlx.backends.cpu.kernels.attention.split import Pieces, Slots, Split, added
from rlx.backends.cpu.target import Target
from rlx.backends.cpu.tiles import F32X16, I32, I32X16, I64, LANES, Emitter, Index
from rlx.errors import CompileError
from rlx.ir.dtypes import ACTIVATIONS, F32, DType
from rlx.ir.infer import MASKS

KEY_TILES = CHUNK // LANES
_NO_SCORE = -1e30  # below any score, and finite: the difference of two of these is 0, not NaN


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
    paged: bool = False,
    writer: type[AttentionWriter] | None = None,
) -> Kernel:
    """A kernel for attention of `seq` rows at positions past .. past + seq, whose keys and values are in the cache.

    Row r sees positions t <= past + r and, with a window, past + r - t < window. With another mask it sees t < past +
    seq, or t <= visible[r], and the window applies only to positions before its own.

    Buffers:
        q: f32[seq, heads, head_dim].
        k: key tiles [kv_heads, ctx / 16, head_dim, 16] (for blocks see `attention_cache.py`). Keys past the last
            position may hold anything.
        v: rows [kv_heads, ctx, head_dim] (for blocks see `attention_cache.py`). Values past the last position are not
            read. A NaN among the values reaches every row of the units that read it.
        bias: only with `bias`: f32[seq, bias, past + seq]. A row whose bias masks all positions is NaN.
        visible: only with that mask: i32[seq], the last position that a row sees. A row that sees none is NaN.
        pages: only with `paged`: i32[at least ceil((past + seq) / 64)], the page table.
        scratch: only for a single row with `split`: `scratch_bytes` per unit.
        out: f32 or bf16 [seq, heads, head_dim]. It must not overlap the others.

    Extents: `seq`, `past`, `ctx` (at least past + seq, rounded up to 16). With a window, `past + seq` may exceed ctx if
    ctx is a multiple of 64 and at least seq + window - 1: position t is then read at t modulo ctx.

    Units: see `units`. A single row with `split` has kv_heads times its parts; units without a piece do nothing.

    Args:
        kv_dtype: type of both caches: f32, f16, bf16, q8_0 or q4_0.
        scale: factor of the scores, before the cap.
        softcap: c for c * tanh(score / c), None for no cap.
        rows_static: the value of `seq` if it is known at compile time; the code is then specialized for it.
        split: how the positions are cut into pieces; None for a single piece.
        mask: what a row sees: `causal`, `none`, `visible`, or `bias`.
        bias: number of heads of the bias, 1 (shared by all) or `heads`, for that mask only. The bias is added to the
            scores after the cap.
        out: type of the result, `f32` or `bf16`, rounded to nearest even.
        paged: whether the caches are pools of pages, which a table finds. Windows do not wrap then.
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
    shape = Shape(*sizes, kv_dtype, scale, window, softcap, rows_static, split, mask, bias, bf16, out, paged)
    masking = [mask] if mask in ("bias", "visible") else []
    optional = [*masking, *["pages"] * paged, *["scratch"] * shape.shared]
    e = Emitter(target, ["q", "k", "v", *optional, "out"], ["seq", "past", "ctx"])
    writer(e, shape).write()
    return e.finish(f"attention_{kv_dtype}", shape.outline())


class AttentionWriter:
    """Generates an attention kernel with f32 products."""

    bf16: ClassVar[bool] = False
    held: ClassVar[int] = 1  # chunks whose weights are computed together

    def __init__(self, e: Emitter, shape: Shape) -> None:
        self.e, self.shape = e, shape
        self.cache = cache_reader(e, shape.dtype, shape.head_dim)
        queries = self._room()
        # Scratch memory per query: a copy of it, its scores, the mix of values; then the largest score, the factor that
        # rescales earlier sums, and the total of the weights. The last three are vectors. Their lanes are equal except
        # for the total, whose lanes are partial sums.
        self.query = e.stack(64 * queries * shape.vectors)
        self.scores = e.stack(4 * queries * CHUNK * self.held)
        self.mix = e.stack(64 * queries * shape.vectors)
        self.largest, self.shrink, self.total = (e.stack(64 * queries) for _ in range(3))
        self.pieces = Pieces(e, shape.split) if shape.split else None
        # The sums of the pieces before the current one, per query: largest score, total, mix.
        self.before = e.stack(64 * queries * (2 + shape.vectors)) if self.pieces and not shape.shared else None
        self.tail = shape.head_dim % LANES
        self.tail_mask = e.tail_mask(e.i64(self.tail)) if self.tail else None

    def _room(self) -> int:
        """Number of queries that scratch memory has room for."""
        return self.shape.row_tile * self.shape.group

    def write(self) -> None:
        if self.shape.split is not None and self.shape.shared:
            self._write_row(self.shape.split)
        else:
            self._write_tiles()

    def _write_tiles(self) -> None:
        e = self.e
        tiles = e.b.sdiv(e.b.add(e.args["seq"], e.i64(self.shape.row_tile - 1)), e.i64(self.shape.row_tile))
        with e.loop(e.args["begin"], e.args["end"]) as u:
            unit = self._unit(u.i, tiles)
            self._start(unit)
            if self.pieces is None:
                self._run(unit)
            else:
                self._run_pieces(unit, self.pieces)
            self._finish(unit)

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
                self._add_before(unit)
            with e.when(e.b.icmp_signed("<", p.i, last)):
                self._keep_sums(unit)

    def _piece(self, unit: Unit, pieces: Pieces, number: ir.Value) -> Unit:
        """The unit with the positions of a piece only."""
        e = self.e
        return replace(unit, first=e.smax(pieces.first(number), unit.first), last=e.smin(pieces.end(number), unit.last))

    def _add_before(self, unit: Unit) -> None:
        """Adds the sums of the pieces before to those of the current one."""
        with self.e.loop(0, unit.queries) as query:
            places = self._sum_places(query.i)
            earlier, current = (self._loaded(each) for each in (self._before_places(query.i), places))
            self._store(added(self.e, earlier, current), places)

    def _keep_sums(self, unit: Unit) -> None:
        """Makes the current sums those of the pieces before."""
        with self.e.loop(0, unit.queries) as query:
            self._store(self._loaded(self._sum_places(query.i)), self._before_places(query.i))

    def _sum_places(self, query: ir.Value) -> list[ir.Value]:
        """Addresses of a query's sums: largest score, total, mix."""
        places = [self.e.at(base, (query, 64)) for base in (self.largest, self.total)]
        return places + [self._vector(self.mix, query, v) for v in range(self.shape.vectors)]

    def _before_places(self, query: ir.Value) -> list[ir.Value]:
        count = 2 + self.shape.vectors
        return [self.e.at(self.before, (query, 64 * count), 64 * i) for i in range(count)]

    def _loaded(self, places: list[ir.Value]) -> list[ir.Value]:
        return [self.e.load(F32X16, place, 64) for place in places]

    def _store(self, values: list[ir.Value], places: list[ir.Value]) -> None:
        for value, place in zip(values, places, strict=True):
            self.e.store(value, place, 64)

    def _run(self, unit: Unit) -> None:
        """Computes the sums over the positions of a unit, without those before."""
        e = self.e
        self._clear(unit)
        with e.loop(unit.first, unit.last, CHUNK) as c:
            self._add(unit, Chunks(c.i, 1))

    def _write_row(self, how: Split) -> None:
        """The kernel for one row. A unit is a part of a KV head, numbered part * kv_heads + head."""
        e, kv_heads, pieces = self.e, self.e.i64(self.shape.kv_heads), Pieces(self.e, how)
        slots = Slots(e, how, self.shape.kv_heads, self.shape.group, self.shape.vectors)
        one, first = e.i64(1), self._first_seen(e.args["past"])
        last = self._last_seen(e.i64(0), one)
        if self.shape.mask == "visible":
            last = e.smax(last, e.b.add(first, one))  # a row that sees none has a piece, too
        numbers = pieces.number(first), pieces.number(e.b.sub(last, one))
        active = e.smin(e.b.add(e.b.sub(numbers[1], numbers[0]), one), how.parts)
        with e.loop(e.args["begin"], e.args["end"]) as u:
            unit = Unit(e.b.urem(u.i, kv_heads), e.i64(0), one, e.i64(self.shape.group), first, last)
            own = pieces.of_part(e.b.udiv(u.i, kv_heads), numbers[0])
            with e.when(e.b.icmp_signed("<=", own, numbers[1])):
                self._start(unit)
                with e.b.if_else(e.b.icmp_signed("==", numbers[0], numbers[1])) as (alone, shared):
                    with alone:
                        self._run(unit)
                        self._finish(unit)
                    with shared:
                        self._share(unit, pieces, slots, (own, *numbers, active))

    def _share(self, unit: Unit, pieces: Pieces, slots: Slots, numbers: tuple[ir.Value, ...]) -> None:
        """Computes the pieces of a unit into scratch memory. The last unit of a head to finish adds up all pieces.

        `numbers`: the unit's first piece; the row's first and last one; the number of units with work.
        """
        e = self.e
        own, first, last, active = numbers
        with e.loop(own, e.b.add(last, e.i64(1)), pieces.how.parts) as p:
            self._run(self._piece(unit, pieces, p.i))
            with e.loop(0, unit.queries) as query:
                slots.put(unit.head, p.i, query.i, self._loaded(self._sum_places(query.i)))
        with e.when(slots.is_last(unit.head, active)):
            with e.loop(0, unit.queries) as query:
                self._store(slots.total(unit.head, first, last, query.i), self._sum_places(query.i))
            self._finish(unit)

    def _add(self, unit: Unit, chunks: Chunks) -> None:
        """Adds some chunks to the sums of all queries."""
        e = self.e
        with e.loop(0, chunks.count) as slot:
            self._score(unit, self._chunk(unit, chunks, slot.i))
        with e.loop(0, unit.queries) as query:
            self._weigh(unit, chunks, query.i)
        self._mix(unit, chunks)

    def _chunk(self, unit: Unit, chunks: Chunks, slot: Index) -> Chunk:
        """Chunk number `slot` of `chunks`."""
        start = self.e.i64(self.e.mul_add(slot, CHUNK, chunks.first))
        following = self.e.b.add(start, self.e.i64(CHUNK))
        return Chunk(slot, start, self._place(unit, start), self._place(unit, following))

    def _place(self, unit: Unit, start: ir.Value) -> ir.Value:
        """The place in the caches of the chunk that starts at a position. Past the end it may be any place."""
        e = self.e
        if self.shape.paged:
            page = e.b.lshr(e.smin(start, e.b.sub(unit.last, e.i64(1))), e.i64(6))
            return e.b.shl(e.b.sext(e.load(I32, e.at(e.args["pages"], (page, 4)), 4), I64), e.i64(6))
        return start if self.shape.window is None else e.b.srem(start, e.args["ctx"])

    def _unit(self, unit: ir.Value, tiles: ir.Value) -> Unit:
        e, shape = self.e, self.shape
        # The last rows see the most positions. They are the first units, so that the longest work starts first.
        tile = e.b.sub(e.b.sub(tiles, e.i64(1)), e.b.srem(unit, tiles))
        row = e.b.mul(tile, e.i64(shape.row_tile))
        rows = e.smin(shape.row_tile, e.b.sub(e.args["seq"], row))
        position = e.b.add(e.args["past"], row)
        queries = e.b.mul(rows, e.i64(shape.group))
        first, last = self._first_seen(position), self._last_seen(row, rows)
        if self.shape.mask == "visible":
            last = e.smax(last, first)  # no row may see a position
        return Unit(e.b.sdiv(unit, tiles), row, rows, queries, first, last)

    def _first_seen(self, position: ir.Value) -> ir.Value:
        """The first position that a query sees, rounded down to a chunk."""
        e, window = self.e, self.shape.window
        if window is None:
            return e.i64(0)
        return e.b.and_(e.smax(e.b.sub(position, e.i64(window - 1)), 0), e.i64(-CHUNK))

    def _last_seen(self, row: ir.Value, rows: ir.Value) -> ir.Value:
        """The end of the positions that any of `rows` rows from `row` on sees."""
        e = self.e
        length = e.b.add(e.args["past"], e.args["seq"])
        if self.shape.mask == "causal":
            return e.b.add(e.b.add(e.args["past"], row), rows)
        if self.shape.mask != "visible":
            return length
        with e.loop(0, rows, 1, [e.i64(-1)]) as r:
            r.values = [e.smax(r.values[0], self._visible_to(e.b.add(row, r.i)))]
        return e.smin(e.b.add(r.results[0], e.i64(1)), length)

    def _visible_to(self, row: ir.Value) -> ir.Value:
        """The last position that a row sees, as the caller says."""
        return self.e.b.sext(self.e.load(I32, self.e.at(self.e.args["visible"], (row, 4)), 4), I64)

    def _sizes(self) -> tuple[int, ...]:
        """Sizes of tiles of queries, largest first: as many as the registers hold, then smaller ones for the rest."""
        sizes = (6, 2, 1) if self.cache.widest * (6 + 1) < self.e.target.vector_room else (2, 1)
        if self.shape.rows_static != self.shape.row_tile:
            return sizes
        queries = self.shape.row_tile * self.shape.group  # tiles are equal in size, because each one loads all keys
        size = -(-queries // -(-queries // sizes[0]))
        return (size, queries % size) if queries % size else (size,)

    def _abreast(self, count: int) -> int:
        """Number of vectors of keys or values loaded at once: registers hold them and `count` sums for each."""
        held = count + 1 if count > 1 else 1  # for one query, a loaded vector is used once and needs no register
        return max(n for n in (1, 2, 4, 8) if n <= self.cache.widest or n * held < self.e.target.vector_room)

    # --- before and after ---------------------------------------------------------------------------------------------

    def _start(self, unit: Unit) -> None:
        """Copies the queries to scratch memory."""
        e = self.e
        with e.loop(0, unit.queries) as query:
            source = self._element(e.args["q"], unit, query.i)
            for v in range(self.shape.vectors):
                value = e.load_as_f32(F32, e.at(source, 64 * v), self._mask(v))
                e.store(value, self._vector(self.query, query.i, v), 64)

    def _clear(self, unit: Unit) -> None:
        """Clears the sums."""
        with self.e.loop(0, unit.queries) as query:
            largest, *rest = self._sum_places(query.i)
            self.e.store(self.e.f32(_NO_SCORE), largest, 64)
            self._store([self.e.f32(0.0)] * len(rest), rest)

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
        """Address of a query's head in an array [seq, heads, head_dim] of elements of `nbytes` bytes."""
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

    def _score(self, unit: Unit, chunk: Chunk) -> None:
        """Computes the raw scores of all queries for the positions of a chunk."""

        def score(count: int, query: ir.Value) -> None:
            together = min(KEY_TILES, self._abreast(count))
            for first in range(0, KEY_TILES, together):
                self._score_tiles(unit, chunk, query, count, range(first, first + together))

        self.e.tiled(0, unit.queries, self._sizes(), score)

    def _score_tiles(self, unit: Unit, chunk: Chunk, query: ir.Value, count: int, tiles: range) -> None:
        e, row_bytes = self.e, self.cache.row_bytes
        keys = self._chosen_keys(unit, chunk, tiles)
        queries = [e.at(self._vector(self.query, query, 0), 64 * self.shape.vectors * i) for i in range(count)]
        # Prefetches the values of the chunk. `_mix_vectors` prefetches the keys of the next chunk.
        values = e.at(self._cache("v", unit, chunk.place), tiles.start * LANES * row_bytes)
        results = self.cache.dots(keys, queries, values)
        for i in range(count):
            for j, tile in enumerate(tiles):
                place = e.at(self._scores(chunk, query), 4 * CHUNK * i + 64 * tile)
                e.store(results[i * len(tiles) + j], place, 64)

    def _chosen_keys(self, unit: Unit, chunk: Chunk, tiles: range) -> list[ir.Value]:
        """Addresses of a chunk's tiles of keys.

        The cache may end after the last position. A tile past the last one is replaced by the last one, and masked.
        """
        e = self.e
        first = e.b.ashr(chunk.place, e.i64(4))
        last = e.b.ashr(e.b.sub(e.b.sub(unit.last, e.i64(1)), chunk.start), e.i64(4))
        chosen = [e.b.add(first, e.smin(tile, last)) for tile in tiles]
        return [e.at(self._cache("k", unit), (tile, LANES * self.cache.row_bytes)) for tile in chosen]

    def _cache(self, name: str, unit: Unit, place: Index = 0) -> ir.Value:
        """Address of a head's keys or values at a place of the cache."""
        e, row_bytes = self.e, self.cache.row_bytes
        return e.at(e.args[name], (e.b.mul(unit.head, e.args["ctx"]), row_bytes), (place, row_bytes))

    # --- weights ------------------------------------------------------------------------------------------------------

    def _weigh(self, unit: Unit, chunks: Chunks, query: ir.Value) -> None:
        """Turns a query's scores of some chunks into weights, relative to the largest score so far."""
        e = self.e
        places = [e.at(base, (query, 64)) for base in (self.largest, self.shrink, self.total)]
        before, total = (e.load(F32X16, place, 64) for place in places[::2])
        with e.loop(0, chunks.count, 1, [before]) as slot:
            chunk = self._chunk(unit, chunks, slot.i)
            scores = self._seen_scores(unit, chunk, query)
            self._keep(scores, chunk, query)
            slot.values = [e.max(self._largest(scores), slot.values[0])]
        largest = e.reduce_max(slot.results[0])
        shrink = vmath.exp(e, e.b.fsub(before, largest))
        with e.loop(0, chunks.count, 1, [e.b.fmul(total, shrink)]) as slot:
            chunk = self._chunk(unit, chunks, slot.i)
            weights = [vmath.exp(e, e.b.fsub(score, largest)) for score in self._kept(chunk, query)]
            self._keep_weights(weights, chunk, query)
            slot.values = [reduce(e.b.fadd, weights, slot.values[0])]
        for value, place in zip((largest, shrink, slot.results[0]), places, strict=True):
            e.store(value, place, 64)

    def _largest(self, scores: list[ir.Value]) -> ir.Value:
        """The lanewise maximum of a chunk's scores."""
        return self.e.max(*(self.e.max(scores[i], scores[i + 1]) for i in range(0, KEY_TILES, 2)))

    def _seen_scores(self, unit: Unit, chunk: Chunk, query: ir.Value) -> list[ir.Value]:
        """A query's final scores of a chunk: the raw scores from scratch memory, scaled, capped, biased and masked."""
        e = self.e
        row = e.b.add(unit.row, e.b.sdiv(query, e.i64(self.shape.group)))
        position = e.b.sub(e.b.add(e.args["past"], row), chunk.start)  # relative to the chunk
        scores = [self._capped(score) for score in self._kept(chunk, query)]
        if self.shape.bias is not None:
            scores = self._biased(unit, chunk, query, scores)
        end = position
        if self.shape.mask != "causal":
            last = e.b.sub(unit.last, e.i64(1))
            last = e.smin(last, self._visible_to(row)) if self.shape.mask == "visible" else last
            end = e.b.sub(last, chunk.start)
        return [self._visible(score, position, end, tile) for tile, score in enumerate(scores)]

    def _scores(self, chunk: Chunk, query: ir.Value) -> ir.Value:
        """Address in scratch memory of a query's scores for a chunk, which the weights replace later."""
        return self.e.at(self.scores, (chunk.slot, 4 * CHUNK * self._room()), (query, 4 * CHUNK))

    def _kept(self, chunk: Chunk, query: ir.Value) -> list[ir.Value]:
        return [self.e.load(F32X16, self.e.at(self._scores(chunk, query), 64 * t), 64) for t in range(KEY_TILES)]

    def _keep(self, values: list[ir.Value], chunk: Chunk, query: ir.Value) -> None:
        for tile, value in enumerate(values):
            self.e.store(value, self.e.at(self._scores(chunk, query), 64 * tile), 64)

    def _keep_weights(self, weights: list[ir.Value], chunk: Chunk, query: ir.Value) -> None:
        self._keep(weights, chunk, query)

    def _capped(self, score: ir.Value) -> ir.Value:
        """Scales and caps a score."""
        score = self.e.b.fmul(score, self.e.f32(self.shape.scale))
        return score if self.shape.softcap is None else vmath.softcap(self.e, score, self.shape.softcap)

    def _biased(self, unit: Unit, chunk: Chunk, query: ir.Value, scores: list[ir.Value]) -> list[ir.Value]:
        """A query's scores of a chunk plus its bias. The bias of positions after the last one is not read."""
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
        """The scores of 16 positions, with -inf for those that the query does not see.

        `position` is the position of the query and `end` the last one that it may see, both relative to the chunk.
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
            if self.tail:
                self._mix_vectors(unit, chunks, query, count, whole, 1, self.tail_mask)

        e.tiled(0, unit.queries, self._sizes(), mix)

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
        e, cache, chunk = self.e, self.cache, self._chunk(unit, chunks, 0)
        start, ahead = self._cache("v", unit, chunk.place), vectors * cache.vector_bytes
        following = e.at(self._cache("k", unit, chunk.following), (first, CHUNK * cache.vector_bytes))
        places, mixes = self._shrunk(query, count, first, vectors)
        with e.loop(0, e.smin(CHUNK, e.b.sub(unit.last, chunk.start)), 1, mixes) as t:
            e.prefetch(e.at(following, (t.i, ahead)), ahead)
            values = cache.values(e.at(start, (t.i, cache.row_bytes)), first, vectors, mask)
            mixes = []
            for i in range(count):
                weight = e.splat_f32(e.at(self._scores(chunk, query), 4 * CHUNK * i, (t.i, 4)))
                mixes += [
                    e.fma(weight, value, mix)
                    for value, mix in zip(values, t.values[i * vectors :][:vectors], strict=True)
                ]
            t.values = mixes
        for mix, place in zip(t.results, places, strict=True):
            e.store(mix, place, 64)

    def _shrunk(self, query: ir.Value, count: int, first: Index, vectors: int) -> tuple[list[ir.Value], list[ir.Value]]:
        """Vectors of the mixes of `count` queries: their addresses, and their values times the factor of `_weigh`."""
        e = self.e
        start = self._vector(self.mix, query, first)
        places = [e.at(start, 64 * (self.shape.vectors * i + v)) for i in range(count) for v in range(vectors)]
        shrink = [e.load(F32X16, e.at(self.shrink, (query, 64), 64 * i), 64) for i in range(count)]
        return places, [e.b.fmul(e.load(F32X16, p, 64), shrink[i // vectors]) for i, p in enumerate(places)]
