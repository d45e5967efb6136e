"""The scores that the softmax of an attention kernel takes: scaled, capped, biased, and -inf where masked."""

from __future__ import annotations

from llvmlite import ir

from rlx.backends.cpu import vmath
from rlx.backends.cpu.kernels.attention.positions import Positions
from rlx.backends.cpu.kernels.attention.scratch import Scratch
from rlx.backends.cpu.kernels.attention.shape import CHUNK, KEY_TILES, Chunk, Shape, Unit
from rlx.backends.cpu.tiles import I32, I32X16, LANES, Emitter
from rlx.ir.dtypes import F32


class Seen:
    """Final scores from raw ones."""

    def __init__(self, e: Emitter, shape: Shape, positions: Positions, scratch: Scratch) -> None:
        self.e, self.shape, self.positions, self.scratch = e, shape, positions, scratch

    def scores(self, unit: Unit, chunk: Chunk, query: ir.Value) -> list[ir.Value]:
        """A query's final scores of a chunk: the raw scores from scratch memory, scaled, capped, biased and masked."""
        scores = [self._capped(score) for score in self.scratch.load_scores(chunk, query)]
        if self.shape.bias is not None:
            scores = self._biased(unit, chunk, query, scores)
        return self._masked(unit, chunk, query, scores)

    def mask(self, unit: Unit, chunk: Chunk, query: ir.Value) -> None:
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
        row = e.b.add(unit.row, e.b.sdiv(query, e.i64(self.shape.group)))
        position = e.b.sub(e.b.add(e.args["past"], row), chunk.start)
        if self.shape.mask == "causal":
            return position, position
        last = e.b.sub(unit.last, e.i64(1))
        last = e.smin(last, self.positions.visible_to(row)) if self.shape.mask == "visible" else last
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
