"""The products of `bf16.py` as dot products: 4 queries times four tiles, 4 x 4 vectors of sums with AVX-512.

The registers have room for 6 queries. As measured, 6 are not faster, and they do not divide usual numbers of queries.
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from rlx.backends.cpu import dots
from rlx.backends.cpu.isa.amx import BYTES, ROW_BYTES, ROWS
from rlx.backends.cpu.kernels.attention.bf16 import STEPS, ConvertedAttention
from rlx.backends.cpu.kernels.attention.shape import CHUNK, KEY_TILES, Chunk, Chunks, Shape
from rlx.backends.cpu.target import Target
from rlx.backends.cpu.tiles import BF16X32, Emitter, Index
from rlx.errors import CompileError

_ABREAST = 5  # most vectors of values that are multiplied at once


def check_dots(target: Target) -> None:
    """Raises `CompileError` unless the target has dot products of bf16."""
    if not target.has_bf16_dots:
        hint = "Leave the products in f32."
        raise CompileError("the target has no dot products of bf16", where=f"target {target.level}", hint=hint)


class DottedAttention(ConvertedAttention):
    """Generates an attention kernel with bf16 dot products.

    Raises:
        CompileError: the target has no bf16 dot products, or the shape does not fit.
    """

    together = 4

    def __init__(self, e: Emitter, shape: Shape) -> None:
        check_dots(e.target)
        super().__init__(e, shape)

    def _score_together(self, chunk: Chunk, query: ir.Value) -> None:
        e = self.e
        whole, rest = divmod(self.shape.head_dim // 2, ROWS)

        def product(step: Index, lines: int, sums: Sequence[ir.Value]) -> list[ir.Value]:
            left = e.at(self.scratch.query, (query, self.query_bytes), (step, ROW_BYTES))
            return self._products(left, self.query_bytes, e.at(self.keys, (step, KEY_TILES * BYTES)), sums, lines)

        with e.loop(0, whole, 1, [e.f32(0.0)] * (self.together * KEY_TILES)) as s:
            s.values = product(s.i, ROWS, s.values)
        totals = product(whole, rest, s.results) if rest else s.results
        for i, total in enumerate(totals):  # the scores of a query are contiguous
            e.store(total, e.at(self.scratch.scores_of(chunk, query), 64 * i), 64)

    def _mix_together(self, chunks: Chunks, query: ir.Value) -> None:
        vectors = self.shape.vectors
        abreast = -(-vectors // -(-vectors // _ABREAST))  # nearly equal groups: one of few vectors would wait for sums
        whole = vectors // abreast * abreast
        with self.e.loop(0, whole, abreast) as v:
            self._mix_vectors_together(chunks, query, v.i, abreast)
        if vectors > whole:
            self._mix_vectors_together(chunks, query, whole, vectors - whole)

    def _mix_vectors_together(self, chunks: Chunks, query: ir.Value, first: Index, count: int) -> None:
        """Adds `count` vectors of the weighted values to the mixes, from vector `first` on."""
        e = self.e
        places, mixes = self.scratch.shrunk(query, self.together, first, count)
        with e.loop(0, chunks.count, 1, mixes) as slot:
            with e.loop(0, STEPS, 1, slot.values) as step:
                left = self._weight_row(slot.i, query, e.mul_add(step.i, ROW_BYTES))
                right = self._value_tile(slot.i, step.i, first)
                step.values = self._products(left, 2 * CHUNK, right, step.values)
            slot.values = step.results
        for mix, place in zip(slot.results, places, strict=True):
            e.store(mix, place, 64)

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
