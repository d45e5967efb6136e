"""Linear layers on tile registers: bf16 activations times weights of any type, which become bf16.

    for macro tile of rows that has units in begin .. end:      # a unit: its rows times one row block of W
        for pair of row blocks of W:
            for panel of at most 4096 k, one in most layers:
                unpack the panel of both blocks, every weight rounded to bf16
                for 32 rows:
                    2 x 2 tiles of sums += their activations times the panel, 32 k at a time
                    after the last panel: out = gate(total + bias) ... + residual

A macro tile has as many rows as the second cache holds. All its units come before those of the next one, so a worker
that fetches range after range finds them there. The sums of 32 rows and 32 columns stay in registers for a whole panel.
Rows that do not fill 16 get tiles of their own height, so nothing is read past the last row.

An int8 product would need each tile of sums scaled every 32 k, which costs more than unpacking saves once there are
more than a few rows; and bf16 rounds activations less than int8 does.

Every result is summed in the same order whatever the number of rows and the split of the units. `linear.py` sums in
another one, and rounds other numbers, so a program of one row and a program of many agree within rounding only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from llvmlite import ir

from rlx.codegen import dots
from rlx.codegen.amx import BYTES, COUNT, DEPTH, ROW_BYTES, ROWS, Tiles
from rlx.codegen.kernels import unpack
from rlx.codegen.kernels.multiply import Multiplier, Shape
from rlx.codegen.kernels.results import ResultWriter
from rlx.codegen.kernels.unpack import CHUNK, SUB
from rlx.codegen.layouts import BLOCK_ROWS
from rlx.codegen.target import Target
from rlx.codegen.tiles import Emitter
from rlx.ir.dtypes import BF16

#: Rows of the register tile, and bytes of a row's sums.
PAIR, TOTALS = 2 * ROWS, 2 * ROW_BYTES

_BLOCKS = 2  # row blocks of a panel: of two units, or the two matrices of a gated linear
_SUMS, _X, _W = (0, 1, 2, 3), (4, 5), (6, 7)  # tile registers: sums by row and block, activations, weights
_PANEL = 4096  # k of a panel at most: 256 KiB of the second cache
_FEWEST, _MOST = 4 * PAIR, 16 * PAIR  # rows of a macro tile: unpacking is shared by them, their totals are scratch


def macro_rows(k: int, target: Target) -> int:
    """Rows of a macro tile, whose activations are read again for each pair of blocks.

    There are ceil(rows / macro_rows) * ceil(n / 16) units.
    """
    return max(_FEWEST, min(_MOST, target.tuning.macro_bytes_tiles // BF16.row_bytes(k) // PAIR * PAIR))


def fits(act: str, k: int, target: Target) -> bool:
    """Whether tiles serve a linear: bf16 rows of whole tiles."""
    return act == "bf16" and target.has_bf16_tiles and k % DEPTH == 0


@dataclass(frozen=True)
class Piece:
    """What is multiplied at once: the rows of a macro tile times a panel of one or two row blocks.

    Attributes:
        x: the panel of the first row.
        totals: the sums of the first row: 16 of each block, those of the next row after them.
        row: number of the first row.
        count: how many rows there are.
        unit, last: the units [unit, last) whose blocks they are.
        panel: the panel's number.
    """

    x: ir.Value
    totals: ir.Value
    row: ir.Value
    count: ir.Value
    unit: ir.Value
    last: ir.Value
    panel: ir.Value


@dataclass(frozen=True)
class Strides:
    """Bytes from a tile of activations to the tile of the next 32 k and of the next 16 rows, and between its rows."""

    step: int
    tile: int
    row: int


class TileWriter(ResultWriter):
    """A linear kernel on tiles while it is written. `expert_tiles.py` has one that copies its rows together first."""

    def __init__(self, e: Emitter, shape: Shape, widest: int = _PANEL) -> None:
        """`widest`: k of a panel at most, a multiple of 256."""
        super().__init__(e, shape)
        self.tiles = Tiles(e)
        self.multiply = Multiplier(e, e.target, shape)
        self.panels = -(-shape.k // widest)
        self.panel_chunks = -(-shape.chunks // self.panels)
        self.panel_steps = self.panel_chunks * CHUNK // DEPTH
        self.panel = e.stack(self.panel_steps * _BLOCKS * BYTES)
        self.strides = Strides(ROW_BYTES, ROWS * shape.row_bytes, shape.row_bytes)

    def write(self) -> None:
        e, most = self.e, macro_rows(self.shape.k, self.e.target)
        rows = e.i64(1) if self.shape.single else e.args["rows"]
        blocks = e.b.udiv(e.b.add(e.args["n"], e.i64(BLOCK_ROWS - 1)), e.i64(BLOCK_ROWS))
        totals = e.stack((most if self.panels > 1 else PAIR) * TOTALS)
        with e.cut(blocks) as (number, first, last):
            macro = e.b.mul(number, e.i64(most))
            count = e.smin(most, e.b.sub(rows, macro))
            with self.loop_units(first, last) as (unit, end), e.loop(0, self.panels) as p:
                x = e.at(e.args["x"], (macro, self.shape.row_bytes), (p.i, self.panel_steps * ROW_BYTES))
                self.multiply_piece(Piece(x, totals, macro, count, unit, end, p.i))
        self.tiles.release()

    @contextmanager
    def loop_units(self, first: ir.Value, last: ir.Value) -> Iterator[tuple[ir.Value, ir.Value]]:
        """The units [first, last), so many at a time that two blocks go together: the first of them, and the end."""
        e, together = self.e, _BLOCKS // len(self.shape.weights)
        with e.loop(first, last, together) as u:
            yield u.i, e.smin(e.b.add(u.i, e.i64(together)), last)

    def multiply_piece(self, piece: Piece) -> None:
        """Adds the products of a piece to its totals, and writes the results after the last panel."""
        self._unpack(piece)
        self._multiply(piece)

    # --- weights ------------------------------------------------------------------------------------------------------

    def _unpack(self, at: Piece) -> None:
        """The panel of both blocks: for each 32 k a tile of each. A lone unit leaves the other block's as it was."""
        e, names = self.e, self.shape.weights
        with e.loop(at.unit, at.last) as v:
            for j, name in enumerate(names):
                place = e.at(self.panel, (e.b.sub(v.i, at.unit), len(names) * BYTES), j * BYTES)
                self._unpack_block(self._block(name, v.i), at.panel, place)

    def _unpack_block(self, block: ir.Value, panel: ir.Value, target: ir.Value) -> None:
        e, format_ = self.e, self.shape.format
        first = e.b.mul(panel, e.i64(self.panel_chunks))
        with e.loop(0, e.smin(self.panel_chunks, e.b.sub(e.i64(self.shape.chunks), first))) as c:
            chunk = e.b.add(first, c.i)
            start = e.at(block, (chunk, unpack.chunk_bytes(self.shape.dtype)))
            header = format_.chunk(e, start) if format_ else []
            with e.loop(0, self.multiply.steps(chunk, SUB)) as s:
                step = e.mul_add(c.i, CHUNK // SUB, s.i)
                for i, pairs in enumerate(self._weights(start, header, s.i)):
                    e.store(pairs, e.at(target, (step, _BLOCKS * BYTES), ROW_BYTES * i), 64)

    def _weights(self, chunk: ir.Value, header: list[ir.Value], s: ir.Value) -> list[ir.Value]:
        """Sub-block `s` of a chunk as bf16: 16 vectors of 16 pairs."""
        e, format_ = self.e, self.shape.format
        if format_ is None:
            nbytes = unpack.chunk_bytes(self.shape.dtype) * SUB // CHUNK
            place = e.at(chunk, (s, nbytes))
            e.prefetch(e.at(place, e.target.tuning.prefetch), nbytes)
            return [dots.bf16_pairs(e, e.at(place, at)) for at in range(0, nbytes, ROW_BYTES)]
        place = unpack.sub_block(e, format_, chunk, s)
        e.prefetch(e.at(place, e.target.tuning.prefetch), format_.row.stride)
        weights = unpack.weights_f32(e, format_, format_.codes(e, place), format_.scales(e, header, place))
        return [dots.bf16_rounded(e, *pair) for pair in zip(weights[::2], weights[1::2], strict=True)]

    # --- sums ---------------------------------------------------------------------------------------------------------

    def _multiply(self, at: Piece) -> None:
        """The rows of the macro tile times the panel."""
        e = self.e
        rest = e.b.urem(at.count, e.i64(PAIR))
        full = e.b.sub(at.count, rest)
        with e.when(e.b.icmp_signed(">", full, e.i64(0))):
            self._configure(e.i64(ROWS), e.i64(ROWS))
            with e.loop(0, full, PAIR) as row:
                self._product(at, row.i, e.i64(PAIR), _X)
        with e.when(e.b.icmp_signed(">", rest, e.i64(ROWS))):
            self._configure(e.i64(ROWS), e.b.sub(rest, e.i64(ROWS)))
            self._product(at, full, rest, _X)
        few = e.b.and_(e.b.icmp_signed(">", rest, e.i64(0)), e.b.icmp_signed("<=", rest, e.i64(ROWS)))
        with e.when(few):
            self._configure(rest, rest)
            self._product(at, full, rest, _X[:1])

    def _configure(self, *heights: ir.Value) -> None:
        """The rows of the first and of the second tile of activations, and with them of the sums."""
        full = self.e.i64(ROWS)
        self.tiles.configure([h for h in heights for _ in _W] + list(heights) + [full] * (COUNT - _W[0]))

    def _product(self, at: Piece, row: ir.Value, count: ir.Value, parts: Sequence[int]) -> None:
        """`count` rows from `row` of the macro tile on, for which the tiles `parts` of activations are configured."""
        e, tiles, strides = self.e, self.tiles, self.strides
        x = e.at(at.x, (row, strides.tile // ROWS))
        totals = e.at(at.totals, (row, TOTALS)) if self.panels > 1 else at.totals
        sums = [(i, j, _SUMS[i * _BLOCKS + j]) for i in range(len(parts)) for j in range(_BLOCKS)]
        places = [e.at(totals, i * ROWS * TOTALS + j * ROW_BYTES) for i, j, _ in sums]
        self._start(at.panel, [c for *_, c in sums], places)
        with e.loop(0, self.steps(at.panel)) as s:
            w = e.at(self.panel, (s.i, _BLOCKS * BYTES))
            for i, part in enumerate(parts):
                tiles.load(part, e.at(x, (s.i, strides.step), i * strides.tile), strides.row)
                for j in range(_BLOCKS):
                    if i == 0:
                        tiles.load(_W[j], e.at(w, j * BYTES), ROW_BYTES)
                    tiles.dot_bf16(_SUMS[i * _BLOCKS + j], part, _W[j])
        for (*_, c), place in zip(sums, places, strict=True):
            tiles.store(c, place, TOTALS)
        with e.when(e.b.icmp_signed("==", at.panel, e.i64(self.panels - 1))), e.loop(at.unit, at.last) as v:
            place = e.at(totals, (e.b.sub(v.i, at.unit), len(self.shape.weights) * ROW_BYTES))
            self._finish_rows(place, _BLOCKS, count, e.b.add(at.row, row), v.i)

    def _start(self, panel: ir.Value, sums: Sequence[int], places: Sequence[ir.Value]) -> None:
        """Zeros, or what the panels before have left."""
        e, tiles = self.e, self.tiles
        for c in sums:
            tiles.zero(c)
        if self.panels > 1:
            with e.when(e.b.icmp_signed(">", panel, e.i64(0))):
                for c, place in zip(sums, places, strict=True):
                    tiles.load(c, place, TOTALS)

    def steps(self, panel: ir.Value) -> ir.Value:
        """Steps of 32 k of a panel: the last one may be short."""
        e, steps = self.e, self.panel_steps
        return e.smin(steps, e.b.sub(e.i64(self.shape.k // DEPTH), e.b.mul(panel, e.i64(steps))))
