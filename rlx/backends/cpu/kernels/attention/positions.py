"""Positions of an attention kernel: which ones the rows of a unit see, where they lie, and the mask of the scores."""

from __future__ import annotations

from dataclasses import replace

from llvmlite import ir

from rlx.backends.cpu import vmath
from rlx.backends.cpu.kernels.attention.scratch import Scratch
from rlx.backends.cpu.kernels.attention.shape import CHUNK, KEY_TILES, Ahead, Chunk, Chunks, Shape, Unit
from rlx.backends.cpu.tiles import I32, I32X16, I64, LANES, Emitter, Index
from rlx.ir.dtypes import F32


class Positions:
    """The positions that rows see, and their places.

    Args:
        row_bytes: bytes of a head's keys or values at one position.
    """

    def __init__(self, e: Emitter, shape: Shape, row_bytes: int) -> None:
        self.e, self.shape, self.row_bytes = e, shape, row_bytes

    def unit(self, unit: ir.Value, tiles: ir.Value) -> Unit:
        """A unit by its number; `tiles` is the number of tiles of rows."""
        e, shape = self.e, self.shape
        # The last rows see the most positions. They are the first units, so that the longest work starts first.
        tile = e.b.sub(e.b.sub(tiles, e.i64(1)), e.b.srem(unit, tiles))
        row = e.b.mul(tile, e.i64(shape.row_tile))
        rows: Index = e.smin(shape.row_tile, e.b.sub(e.args["seq"], row))
        position = e.b.add(e.args["past"], row)
        first, last = self.first_seen(position), self.last_seen(row, rows)
        if self.shape.mask == "visible":
            last = e.smax(last, first)  # no row may see a position
        rows = shape.row_tile if shape.row_tile == shape.rows_static else rows
        end = e.mul_add(rows, shape.group)
        return Unit(e.b.sdiv(unit, tiles), row, rows, 0, end, position, first, last, e.args.get("pages"))

    def first_seen(self, position: ir.Value) -> ir.Value:
        """The first position that a query sees, rounded down to a chunk."""
        e, window = self.e, self.shape.window
        if window is None:
            return e.i64(0)
        return e.b.and_(e.smax(e.b.sub(position, e.i64(window - 1)), 0), e.i64(-CHUNK))

    def last_seen(self, row: ir.Value, rows: ir.Value) -> ir.Value:
        """The end of the positions that any of `rows` rows from `row` on sees."""
        e = self.e
        length = e.b.add(e.args["past"], e.args["seq"])
        if self.shape.mask == "causal":
            return e.b.add(e.b.add(e.args["past"], row), rows)
        if self.shape.mask == "around":
            assert self.shape.window is not None
            end = e.b.add(e.b.add(e.args["past"], row), e.b.add(rows, e.i64(self.shape.window - 1)))
            return e.smin(end, length)
        if self.shape.mask != "visible":
            return length
        with e.loop(0, rows, 1, [e.i64(-1)]) as r:
            r.values = [e.smax(r.values[0], self.visible_to(e.b.add(row, r.i)))]
        return e.smin(e.b.add(r.results[0], e.i64(1)), length)

    def visible_to(self, row: ir.Value) -> ir.Value:
        """The last position that a row sees, as the caller says."""
        return self.e.b.sext(self.e.load(I32, self.e.at(self.e.args["visible"], (row, 4)), 4), I64)

    def chunk(self, unit: Unit, chunks: Chunks, slot: Index) -> Chunk:
        """Chunk number `slot` of `chunks`."""
        start = self.e.i64(self.e.mul_add(slot, CHUNK, chunks.first))
        return Chunk(slot, start, self.place(unit, start))

    def ahead(self, unit: Unit, chunk: Chunk, held: int) -> Ahead:
        """The keys that are needed next, to be prefetched while the values of a chunk are added.

        With many rows, those of the next chunk. With one row, those of the chunk `held` later, because the chunks
        between are scored already; and after the last ones those of the next head, which a worker takes next.
        """
        e = self.e
        following = e.b.add(chunk.start, e.i64(CHUNK * held))
        if unit.rows != 1:
            return Ahead(self.cache("k", unit, self.place(unit, following)), CHUNK, CHUNK - 1, whole=True)
        there = e.b.icmp_signed("<", following, unit.last)
        start = e.b.select(there, following, e.i64(e.mul_add(chunk.slot, CHUNK, unit.first)))
        others = e.b.icmp_signed("<", e.b.add(unit.head, e.i64(1)), e.i64(self.shape.kv_heads))
        head = e.b.select(e.b.or_(there, e.b.not_(others)), unit.head, e.b.add(unit.head, e.i64(1)))
        tiles = e.b.ashr(e.b.add(e.b.sub(unit.last, start), e.i64(LANES - 1)), e.i64(4))
        rows = e.b.mul(e.clamp(tiles, 0, KEY_TILES), e.i64(LANES))
        rows = e.b.select(e.b.or_(there, others), rows, e.i64(0))
        keys = self.cache("k", replace(unit, head=head), self.place(unit, start))
        return Ahead(keys, rows, e.smax(e.b.sub(rows, e.i64(1)), 0), whole=False)

    def place(self, unit: Unit, start: ir.Value) -> ir.Value:
        """The place in the caches of the chunk that starts at a position. Past the end it may be any place."""
        e = self.e
        if self.shape.paged:
            page = e.b.lshr(e.smin(start, e.b.sub(unit.last, e.i64(1))), e.i64(6))
            return e.b.shl(e.b.sext(e.load(I32, e.at(unit.pages, (page, 4)), 4), I64), e.i64(6))
        return start if self.shape.window is None else e.b.srem(start, e.args["ctx"])

    def keys(self, unit: Unit, chunk: Chunk, tile: Index, count: int) -> list[ir.Value]:
        """Addresses of `count` tiles of keys of a chunk, from `tile` on.

        The cache may end after the last position. A tile past the last one is replaced by the last one, and masked.
        """
        e = self.e
        first = e.b.ashr(chunk.place, e.i64(4))
        last = e.b.ashr(e.b.sub(e.b.sub(unit.last, e.i64(1)), chunk.start), e.i64(4))
        chosen = [e.b.add(first, e.smin(e.mul_add(1, i, tile), last)) for i in range(count)]
        return [e.at(self.cache("k", unit), (place, LANES * self.row_bytes)) for place in chosen]

    def cache(self, name: str, unit: Unit, place: Index = 0) -> ir.Value:
        """Address of a head's keys or values at a place of the cache."""
        e, row_bytes = self.e, self.row_bytes
        return e.at(e.args[name], (e.b.mul(unit.head, e.args["ctx"]), row_bytes), (place, row_bytes))


class Mask:
    """Final scores from raw ones: scaled, capped, biased, and -inf where a row does not see a position."""

    def __init__(self, e: Emitter, shape: Shape, positions: Positions, scratch: Scratch) -> None:
        self.e, self.shape, self.positions, self.scratch = e, shape, positions, scratch

    def scores(self, unit: Unit, chunk: Chunk, query: ir.Value) -> list[ir.Value]:
        """A query's final scores of a chunk: the raw scores from scratch memory, scaled, capped, biased and masked."""
        scores = [self._capped(score) for score in self.scratch.load_scores(chunk, query)]
        if self.shape.bias is not None:
            scores = self._biased(unit, chunk, query, scores)
        return self._masked(unit, chunk, query, scores)

    def apply(self, unit: Unit, chunk: Chunk, query: ir.Value) -> None:
        """Masks a query's raw scores of a chunk in scratch memory."""
        e = self.e
        position, end = self._limits(unit, chunk, query)
        hides = e.b.icmp_signed("<", end, e.i64(CHUNK - 1))
        if self.shape.window is not None:
            hides = e.b.or_(hides, e.b.icmp_signed(">=", position, e.i64(self.shape.window)))
        with e.when(hides):
            scores = self.scratch.load_scores(chunk, query)
            self.scratch.store_scores(self._masked(unit, chunk, query, scores), chunk, query)

    def _limits(self, unit: Unit, chunk: Chunk, query: ir.Value) -> tuple[ir.Value, ir.Value]:
        """The position of a query and the last position that it may see, both relative to a chunk."""
        e = self.e
        row, _ = self.scratch.row_and_head(unit, query)
        place = e.b.add(unit.position, row)
        position = e.b.sub(place, chunk.start)
        if self.shape.mask == "causal":
            return position, position
        last = e.b.sub(unit.last, e.i64(1))
        if self.shape.mask == "visible":
            last = e.smin(last, self.positions.visible_to(e.b.add(unit.row, row)))
        if self.shape.mask == "around":
            assert self.shape.window is not None
            last = e.smin(last, e.b.add(place, e.i64(self.shape.window - 1)))
        return position, e.b.sub(last, chunk.start)

    def _masked(self, unit: Unit, chunk: Chunk, query: ir.Value, scores: list[ir.Value]) -> list[ir.Value]:
        """A query's scores of a chunk, with -inf for positions that it does not see."""
        position, end = self._limits(unit, chunk, query)
        return [self._visible(score, position, end, tile) for tile, score in enumerate(scores)]

    def _capped(self, score: ir.Value) -> ir.Value:
        """Scales and caps a score."""
        score = self.e.b.fmul(score, self.e.f32(self.shape.scale))
        return score if self.shape.softcap is None else vmath.softcap(self.e, score, self.shape.softcap)

    def _biased(self, unit: Unit, chunk: Chunk, query: ir.Value, scores: list[ir.Value]) -> list[ir.Value]:
        """A query's scores of a chunk plus its bias. The bias of positions after the last one is not read."""
        e, heads = self.e, self.shape.bias
        row, head = self.scratch.row_and_head(unit, query)
        row = e.b.add(unit.row, row)
        line = row if heads == 1 else e.mul_add(row, self.shape.heads, head)
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
