"""The products of `bf16.py` on AMX tile registers: 32 queries times two tiles, 2 x 2 tiles of sums."""

from __future__ import annotations

from llvmlite import ir

from rlx.backends.cpu.isa.amx import BYTES, COUNT, ROW_BYTES, ROWS
from rlx.backends.cpu.kernels.attention.bf16 import STEPS, ConvertedAttention
from rlx.backends.cpu.kernels.attention.shape import CHUNK, KEY_TILES, Chunk, Chunks, Shape, Unit
from rlx.backends.cpu.tiles import Emitter, Index

_SUMS, _LEFT, _RIGHT = (0, 1, 2, 3), (4, 5), (6, 7)  # tile registers: sums by row and column, the two operands


class TiledAttention(ConvertedAttention):
    """Generates an attention kernel for targets with bf16 tiles."""

    together = ROWS * len(_LEFT)

    def __init__(self, e: Emitter, shape: Shape) -> None:
        super().__init__(e, shape)
        self.tiles = e.isa.tiles(e)

    def _write_tiles(self) -> None:
        self.tiles.configure([ROWS] * COUNT)
        super()._write_tiles()
        self.tiles.release()

    def _score_together(self, chunk: Chunk, query: ir.Value) -> None:
        e = self.e
        for first in range(0, KEY_TILES, len(_RIGHT)):
            for c in _SUMS:
                self.tiles.zero(c)
            with e.loop(0, self.steps) as s:
                left = e.at(self.scratch.query, (query, self.query_bytes), (s.i, ROW_BYTES))
                right = e.at(self.keys, (s.i, KEY_TILES * BYTES), first * BYTES)
                self._product(left, self.query_bytes, right, len(_RIGHT))
            self._sums(e.at(self.scratch.scores_of(chunk, query), 64 * first), 4 * CHUNK, self.tiles.store, len(_RIGHT))

    def _mix(self, unit: Unit, chunks: Chunks) -> None:
        """Rescales the mixes in memory first, because tile registers cannot be multiplied by `shrink`."""
        e, vectors = self.e, self.shape.vectors
        with e.loop(unit.start, unit.end) as query:
            for place, mix in zip(*self.scratch.shrunk(query.i, 1, 0, vectors), strict=True):
                e.store(mix, place, 64)
        super()._mix(unit, chunks)

    def _mix_together(self, chunks: Chunks, query: ir.Value) -> None:
        vectors = self.shape.vectors
        whole = vectors // len(_RIGHT) * len(_RIGHT)
        with self.e.loop(0, whole, len(_RIGHT)) as v:
            self._mix_columns(chunks, query, v.i, len(_RIGHT))
        if vectors > whole:
            self._mix_columns(chunks, query, whole, vectors - whole)

    def _mix_columns(self, chunks: Chunks, query: ir.Value, first: Index, columns: int) -> None:
        """Adds `columns` vectors of the weighted values to the mixes, from vector `first` on."""
        e, stride = self.e, 64 * self.shape.vectors
        place = self.scratch.vector(self.scratch.mix, query, first)
        self._sums(place, stride, self.tiles.load, columns)
        with e.loop(0, chunks.count) as slot:
            for step in range(STEPS):
                left = self._weight_row(slot.i, query, step * ROW_BYTES)
                self._product(left, 2 * CHUNK, self._value_tile(slot.i, step, first), columns)
        self._sums(place, stride, self.tiles.store, columns)

    def _product(self, left: ir.Value, stride: int, right: ir.Value, columns: int) -> None:
        """sums += 32 rows of `left`, `stride` bytes apart, times one or two tiles of `right`."""
        e, tiles = self.e, self.tiles
        for j, b in enumerate(_RIGHT[:columns]):
            tiles.load(b, e.at(right, j * BYTES), ROW_BYTES)
        for i, a in enumerate(_LEFT):
            tiles.load(a, e.at(left, i * ROWS * stride), stride)
            for j, b in enumerate(_RIGHT[:columns]):
                tiles.dot_bf16(_SUMS[i * len(_RIGHT) + j], a, b)

    def _sums(self, place: ir.Value, stride: int, move: object, columns: int) -> None:
        """Loads or stores the tiles of sums of one or two columns; rows are `stride` bytes apart in memory."""
        for number, c in enumerate(_SUMS):
            i, j = divmod(number, len(_RIGHT))
            if j < columns:
                move(c, self.e.at(place, i * ROWS * stride + j * ROW_BYTES), stride)  # type: ignore[operator]
