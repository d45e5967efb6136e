"""Linear layers on tile registers: bf16 activations times weights of any type, converted to bf16.

    for macro tile of rows that has units in begin .. end:      # a unit: its rows times one row block of W
        for pair of row blocks of W:
            for panel of at most 4096 k, one in most layers:
                for 32 rows:
                    for 32 k:
                        2 x 2 tiles of sums += their activations times the weights
                        the first time, between these: unpack both blocks some steps ahead, rounded to bf16
                        meanwhile: out = gate(total + bias) ... + residual of the 32 rows before

A macro tile has at most as many rows as fill half of the L2 cache, and all have about as many. Units are ordered by
macro tile first, so a worker that takes range after range finds the activations in that cache. The sums of 32 rows and
32 columns stay in registers for a whole panel.
A remainder uses tiles with its number of rows, so nothing is read past the last row; up to 16 rows take no second tile
of activations, and a single block no second one of weights. If k is no multiple of 32, the last step is short: the ends
of rows are copied with zeros after them, and so are weights.

Products occupy the tile unit and leave the vector units idle. So these unpack weights during the products of the first
32 rows, and write results a few rows at a time during the products of the next 32 rows. `tile_step.py` has the order.
Weights of bf16 are used where they lie. No more than 32 rows, as in a batch, need no whole panel: a ring of eight steps
stays in the L1 cache. `halves.py` unpacks where the target multiplies f16, and `pairs.py` elsewhere.

int8 products are not used here. They would have to scale each tile of sums every 32 k, which costs more than unpacking
saves. Also, bf16 rounds activations less than int8 does. Over quantized weights, vector code is faster for up to eight
rows (docs/batch.md).

The order of each sum does not depend on the number of rows or the split of the units. `linear.py` sums in another order
and rounds different values. So a program of one row and a program of many rows agree only within rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from llvmlite import ir

from rlx.backends.cpu import dots
from rlx.backends.cpu.isa.amx import BYTES, COUNT, DEPTH, ROW_BYTES, ROWS
from rlx.backends.cpu.kernels.linear import halves, unpack
from rlx.backends.cpu.kernels.linear.multiply import Multiplier, ResultWriter, Shape
from rlx.backends.cpu.kernels.linear.pairs import pairs_bf16
from rlx.backends.cpu.kernels.linear.tile_step import BLOCKS, SUMS, Operand, Strides, TileSteps, W, X
from rlx.backends.cpu.kernels.linear.unpack import CHUNK, SUB
from rlx.backends.cpu.layouts import BLOCK_ROWS, PACKINGS
from rlx.backends.cpu.target import Target
from rlx.backends.cpu.tiles import F32X16, I64, LANES, POINTER, Emitter, Index
from rlx.ir.dtypes import BF16

#: Rows of the 2 x 2 register tile, and bytes of a row of its sums.
PAIR, TOTALS = 2 * ROWS, 2 * ROW_BYTES

_AHEAD, _RING = 4, 8  # steps that unpacking is ahead of products; steps of the panel in use for at most 32 rows
_PANEL = 4096  # most k of a panel: 256 KiB of the L2 cache
_FEWEST, _MOST = 4 * PAIR, 16 * PAIR  # rows of a macro tile: more share the unpacking, but need more scratch memory


def macro_rows(k: int, target: Target) -> int:
    """Rows of a macro tile. Their activations are read again for each pair of blocks.

    There are ceil(rows / macro_rows) * ceil(n / 16) units.
    """
    return max(_FEWEST, min(_MOST, target.tuning.macro_bytes_tiles // BF16.row_bytes(k) // PAIR * PAIR))


def fits(act: str, k: int, target: Target) -> bool:
    """Whether a linear can use tiles: bf16 activations on a target with bf16 tiles, and an even k."""
    return act == "bf16" and target.has_bf16_tiles and k % 2 == 0


@dataclass(frozen=True)
class Piece:
    """One multiplication step: the rows of a macro tile times a panel of one or two row blocks.

    Attributes:
        x: address of the panel in the first row.
        totals: address of the sums, row by row: 16 per block.
        row: number of the first row.
        count: number of rows.
        unit, last: the blocks are those of the units [unit, last).
        panel: number of the panel.
    """

    x: ir.Value
    totals: ir.Value
    row: ir.Value
    count: ir.Value
    unit: ir.Value
    last: ir.Value
    panel: ir.Value


class Delayed:
    """Sums of some rows whose results are written later: the state of a kernel at run time, in stack memory."""

    def __init__(self, writer: TileWriter) -> None:
        self.writer, self.e = writer, writer.e
        self._totals, self._row, self._count, self._unit, self._last = (self.e.stack(8) for _ in range(5))
        self._factors = self.e.stack(BLOCKS * ROW_BYTES)
        self._set(self._count, self.e.i64(0))

    def put(
        self,
        totals: ir.Value,
        row: ir.Value,
        count: ir.Value,
        unit: ir.Value,
        last: ir.Value,
        factors: Sequence[ir.Value],
    ) -> None:
        """`count` rows from `row` on, whose sums for the units [unit, last) are at `totals`, `TOTALS` bytes a row.

        The sums of each block are multiplied by its factors, if there are any.
        """
        self.e.store_row(factors, self._factors)
        state = ((self._totals, totals), (self._row, row), (self._count, count), (self._unit, unit), (self._last, last))
        for place, value in state:
            self._set(place, value)

    def write(self, first: Index, stop: Index) -> None:
        """Writes the results of the rows [first, stop), as far as there are so many."""
        e, products = self.e, len(self.writer.shape.weights)
        row, count, unit, last = (e.load(I64, place, 8) for place in (self._row, self._count, self._unit, self._last))
        with e.loop(first, e.smin(stop, count)) as r:
            sums = e.at(e.load(POINTER, self._totals, 8), (r.i, TOTALS))
            for block in range(0, BLOCKS, products):
                number = e.b.add(unit, e.i64(block // products))
                with e.when(e.b.icmp_signed("<", number, last)):
                    places = [e.at(sums, ROW_BYTES * j) for j in range(block, block + products)]
                    found = [e.load(F32X16, place, 64) for place in places]
                    if self.writer.in_halves:
                        factors = [e.load(F32X16, e.at(self._factors, ROW_BYTES * j), 64) for j in range(BLOCKS)]
                        found = [e.b.fmul(s, f) for s, f in zip(found, factors[block:], strict=False)]
                    self.writer.finish(e.b.add(row, r.i), number, found)

    def clear(self) -> None:
        """Forgets the rows."""
        self._set(self._count, self.e.i64(0))

    def flush(self) -> None:
        """Writes all results."""
        self.write(0, PAIR)
        self.clear()

    def _set(self, place: ir.Value, value: ir.Value) -> None:
        self.e.store(value, place, 8)


class TileWriter(ResultWriter):
    """Generates a linear kernel on tiles. `experts/rows.py` has a subclass that gathers its rows first."""

    def __init__(self, e: Emitter, shape: Shape, widest: int = _PANEL) -> None:
        """`widest` is the most k of a panel, a multiple of 256."""
        super().__init__(e, shape)
        self.tiles = e.isa.tiles(e)
        self.multiply = Multiplier(e, e.target, shape)
        self.panels = -(-shape.k // widest)
        self.panel_chunks = -(-shape.chunks // self.panels)
        self.panel_steps = self.panel_chunks * CHUNK // DEPTH
        self.tail = shape.k % DEPTH  # k of the last step, if it is a short one
        self.as_packed = shape.dtype is BF16 and not self.tail  # packed weights are tiles already
        self.in_halves = halves.serves(e, shape.format)
        self.references = e.stack(2 * BLOCKS * ROW_BYTES) if self.in_halves else None  # and their inverses
        self.panel = None if self.as_packed else e.stack(self.panel_steps * BLOCKS * BYTES)
        self.ends = e.stack(macro_rows(shape.k, e.target) * ROW_BYTES) if self.tail else None
        self.delayed = Delayed(self)
        fewest = shape.k // DEPTH - (self.panels - 1) * self.panel_steps  # steps of the last panel
        self.results_a_step = -(-PAIR // fewest) if fewest else 0
        self.strides = Strides(ROW_BYTES, ROWS * shape.row_bytes, shape.row_bytes)

    def write(self) -> None:
        e, most = self.e, macro_rows(self.shape.k, self.e.target)
        rows = e.i64(1) if self.shape.single else e.args["rows"]
        blocks = e.ceil_div(e.args["n"], BLOCK_ROWS)
        totals = e.stack((most if self.panels > 1 else PAIR) * TOTALS)
        pairs, macros = (e.ceil_div(rows, size) for size in (PAIR, most))

        def first_row(number: ir.Value) -> ir.Value:
            """Of a macro tile. All of them have about as many rows, so that workers get equal shares."""
            return e.b.mul(e.b.udiv(e.b.mul(number, pairs), macros), e.i64(PAIR))

        with e.cut(blocks) as (number, first, last):
            macro = first_row(number)
            count = e.b.sub(e.smin(rows, first_row(e.b.add(number, e.i64(1)))), macro)
            self._copy_ends(macro, count)
            self.configure(count)
            with self.loop_units(first, last) as (unit, end), e.loop(0, self.panels) as p:
                x = e.at(e.args["x"], (macro, self.shape.row_bytes), (p.i, self.panel_steps * ROW_BYTES))
                self.multiply_piece(Piece(x, totals, macro, count, unit, end, p.i))
        self.delayed.flush()
        self.tiles.release()

    @contextmanager
    def loop_units(self, first: ir.Value, last: ir.Value) -> Iterator[tuple[ir.Value, ir.Value]]:
        """A loop over the units [first, last), two row blocks at a time. Yields the first unit and the end."""
        e, together = self.e, BLOCKS // len(self.shape.weights)
        with e.loop(first, last, together) as u:
            yield u.i, e.smin(e.b.add(u.i, e.i64(together)), last)

    def configure(self, count: ir.Value) -> None:
        """Configures the tiles for the first rows of a macro tile of `count` rows."""
        self._configure(self.e.smin(PAIR, count))

    def multiply_piece(self, piece: Piece) -> None:
        """Adds the products of a piece to its totals. After the last panel these go to `delayed`."""
        e = self.e
        weights, few = self._operands(piece), e.b.icmp_signed("<=", piece.count, e.i64(PAIR))
        if self.in_halves:
            self._find_references(piece)
        self._product(piece, weights, e.i64(0), e.smin(PAIR, piece.count), unpacks=True)
        with e.when(e.b.not_(few)):
            rest = e.b.urem(piece.count, e.i64(PAIR))
            full = e.b.sub(piece.count, rest)
            with e.loop(PAIR, full, PAIR) as row:
                self._product(piece, weights, row.i, PAIR)
            with e.when(e.b.icmp_signed(">", rest, e.i64(0))):
                self._configure(rest)
                self._product(piece, weights, full, rest)
                self._configure(e.i64(PAIR))

    def _copy_ends(self, macro: ir.Value, count: ir.Value) -> None:
        """Copies the last, short step of the rows of a macro tile, with zeros after it."""
        e = self.e
        if self.ends is None:
            return
        with e.loop(0, count) as r:
            row = e.at(e.args["x"], (e.b.add(macro, r.i), self.shape.row_bytes), 2 * (self.shape.k - self.tail))
            for first in range(0, DEPTH, LANES):
                mask = e.tail_mask(e.i64(max(0, self.tail - first)))
                place = e.at(self.ends, (r.i, ROW_BYTES), 2 * first)
                e.store(e.load_bits(e.at(row, 2 * first), mask), place)

    # --- weights ------------------------------------------------------------------------------------------------------

    def _operands(self, at: Piece) -> list[Operand]:
        e = self.e
        if self.as_packed:
            return self._packed_operands(at)
        few = e.b.icmp_signed("<=", at.count, e.i64(PAIR))
        wrap = e.b.select(few, e.i64(_RING - 1), e.i64(-1))
        return [Operand(e.at(self.panel, j * BYTES), BLOCKS * BYTES, wrap) for j in range(BLOCKS)]

    def _unpack_step(self, at: Piece, weights: Sequence[Operand], step: ir.Value, number: int) -> Iterator[None]:
        """Unpacks 32 k of block `number`, or prefetches weights that are multiplied as they are packed.

        That takes 16 steps, between which the caller may emit other code.
        """
        e, place = self.e, weights[number].tile(self.e, step)
        if self.as_packed:
            for i in range(ROWS):
                e.prefetch(e.at(place, e.target.tuning.prefetch + ROW_BYTES * i), ROW_BYTES)
                yield
            return
        whole = e.mul_add(at.panel, self.panel_steps, step)
        chunk, sub = e.b.udiv(whole, e.i64(CHUNK // SUB)), e.b.urem(whole, e.i64(CHUNK // SUB))
        start = e.at(self._blocks(at)[number], (chunk, unpack.chunk_bytes(self.shape.dtype)))
        for i, pairs in self._weights(start, sub, number):
            e.store(pairs, e.at(place, ROW_BYTES * i), 64)
            yield

    def _find_references(self, at: Piece) -> None:
        """Stores the reference of each row of both blocks, then their inverses."""
        e, format_ = self.e, self.shape.format
        assert format_ is not None
        row, nbytes = format_.row, unpack.chunk_bytes(self.shape.dtype)
        for j, block in enumerate(self._blocks(at)):
            with e.loop(0, self.shape.k // SUB, row.subs if row.head else 1, [e.f32(0.0)]) as s:
                chunk = e.at(block, (e.b.udiv(s.i, e.i64(CHUNK // SUB)), nbytes))
                sub = unpack.sub_block(e, format_, chunk, e.b.urem(s.i, e.i64(CHUNK // SUB)))
                header = format_.chunk(e, chunk) if row.head else format_.scales(e, [], sub)
                s.values = [e.max(halves.bound(e, format_, header), s.values[0])]
            for i, number in enumerate(halves.references(e, s.results[0])):
                e.store(number, e.at(self.references, (i * BLOCKS + j) * ROW_BYTES), 64)

    def _factors(self) -> list[ir.Value]:
        """What sums of both blocks are multiplied by."""
        return self.e.load_row(self.references, BLOCKS) if self.in_halves else []

    def _unpack_tails(self, at: Piece, weights: Sequence[Operand]) -> None:
        for block, w in zip(self._blocks(at), weights, strict=True):
            self._unpack_tail(block, w)

    def _blocks(self, at: Piece) -> list[ir.Value]:
        """Addresses of the weights of both blocks. A single unit stands for the other one, too."""
        e, names = self.e, self.shape.weights
        other = e.smin(e.b.add(at.unit, e.i64(1)), e.b.sub(at.last, e.i64(1)))
        units = (at.unit,) if len(names) == BLOCKS else (at.unit, other)
        return [self._block(name, unit) for unit in units for name in names]

    def _unpack_tail(self, block: ir.Value, w: Operand) -> None:
        """Unpacks the last, short step of a block, with zeros after it. Only plain weights have one."""
        e, dtype, whole = self.e, self.shape.dtype, self.shape.k - self.tail
        target = w.tile(e, e.i64(whole // DEPTH - (self.panels - 1) * self.panel_steps))
        for i in range(ROWS):
            place = e.at(block, PACKINGS[dtype].nbytes * (whole + 2 * i) // PACKINGS[dtype].superblock)
            pairs = dots.bf16_pairs(e, dtype, place) if 2 * i < self.tail else e.f32(0.0)
            e.store(pairs, e.at(target, ROW_BYTES * i), 64)

    def _packed_operands(self, at: Piece) -> list[Operand]:
        """The blocks of a panel where they lie."""
        offset = (at.panel, self.panel_steps * BYTES)
        return [Operand(self.e.at(block, offset), BYTES, self.e.i64(-1)) for block in self._blocks(at)]

    def _next_blocks(self, at: Piece) -> list[ir.Value]:
        """Addresses of the weights after those of a piece, which are prefetched meanwhile."""
        e, names = self.e, self.shape.weights
        units = [e.b.add(at.last, e.i64(i)) for i in range(BLOCKS // len(names))]
        return [self._block(name, unit) for unit in units for name in names]

    def _is_last(self, panel: ir.Value) -> ir.Value:
        return self.e.b.icmp_signed("==", panel, self.e.i64(self.panels - 1))

    def _weights(self, chunk: ir.Value, s: ir.Value, number: int) -> Iterator[tuple[int, ir.Value]]:
        """Sub-block `s` of a chunk of block `number` as bf16: 16 vectors of 16 pairs, each with its number."""
        e, dtype, format_ = self.e, self.shape.dtype, self.shape.format
        nbytes = format_.row.stride if format_ else unpack.chunk_bytes(dtype) * SUB // CHUNK
        place = unpack.sub_block(e, format_, chunk, s) if format_ else e.at(chunk, (s, nbytes))
        e.prefetch(e.at(place, e.target.tuning.prefetch), nbytes)
        if format_ and self.in_halves:
            inverse = e.load(F32X16, e.at(self.references, (BLOCKS + number) * ROW_BYTES), 64)
            return halves.pairs(e, format_, place, format_.chunk(e, chunk), inverse)
        if format_:
            return pairs_bf16(e, format_, place, format_.chunk(e, chunk))
        return ((i, dots.bf16_pairs(e, dtype, e.at(place, i * nbytes // ROWS))) for i in range(ROWS))

    # --- sums ---------------------------------------------------------------------------------------------------------

    def _configure(self, count: ir.Value) -> None:
        """Configures both tiles of activations, and the tiles of sums that belong to them, for 1 to 32 rows."""
        e, full = self.e, self.e.i64(ROWS)
        heights = e.smin(ROWS, count), e.b.select(self._is_more(count), e.b.sub(count, full), e.i64(1))
        self.tiles.configure([h for h in heights for _ in W] + list(heights) + [full] * (COUNT - W[0]))

    def _is_more(self, count: ir.Value) -> ir.Value:
        """Whether rows fill more than one tile."""
        return self.e.b.icmp_signed(">", count, self.e.i64(ROWS))

    def _product(
        self, at: Piece, weights: Sequence[Operand], row: ir.Value, count: Index, *, unpacks: bool = False
    ) -> None:
        """Multiplies at most 32 rows of the macro tile, from `row` on.

        If it also `unpacks` the panel, that is some steps ahead: vector units unpack while the tile unit multiplies.
        """
        e, tiles, strides = self.e, self.tiles, self.strides
        x = e.at(at.x, (row, strides.tile // ROWS))
        totals = e.at(at.totals, (row, TOTALS)) if self.panels > 1 else at.totals
        places = [e.at(totals, i * ROWS * TOTALS + j * ROW_BYTES) for i in range(len(X)) for j in range(BLOCKS)]
        self._start(at.panel, places)
        steps = self.steps(at.panel)
        second = (
            None if len(self.shape.weights) == BLOCKS else e.b.icmp_signed("<", e.b.add(at.unit, e.i64(1)), at.last)
        )
        tile_steps = TileSteps(e, tiles, None if isinstance(count, int) else self._is_more(count), second)
        if unpacks:
            self._unpack_and_multiply(at, weights, x, steps, tile_steps)
        else:
            for own in tile_steps.cases():
                with e.loop(0, steps) as s:
                    self._meanwhile(at, row, s.i)
                    own.at_once(own.operations(e.at(x, (s.i, strides.step)), strides, weights, s.i))
        if self.ends is not None:
            with e.when(self._is_last(at.panel)):
                if unpacks:
                    self._unpack_tails(at, weights)
                x = e.at(self.ends, (row, ROW_BYTES))
                tile_steps.at_once(tile_steps.operations(x, Strides(0, BYTES, ROW_BYTES), weights, steps))
        self.delayed.clear()
        for c, place in zip(SUMS, places, strict=True):
            tiles.store(c, place, TOTALS)
        with e.when(self._is_last(at.panel)):
            self.delayed.put(totals, e.b.add(at.row, row), e.i64(count), at.unit, at.last, self._factors())
            if not self.results_a_step:
                self.delayed.flush()

    def _meanwhile(self, at: Piece, row: ir.Value | None, step: ir.Value) -> None:
        """Writes a few results of the rows before. With a `row`, prefetches a line of each of the next blocks."""
        e, count = self.e, self.results_a_step
        first = e.b.mul(step, e.i64(count))
        self.delayed.write(first, e.b.add(first, e.i64(count)))
        if row is None:
            return
        group = e.b.sub(e.b.udiv(row, e.i64(PAIR)), e.i64(1))
        line = e.b.add(e.b.mul(group, e.i64(self.panel_steps)), step)
        with e.when(e.b.icmp_signed("<", line, e.i64(-(-self.shape.block_bytes // ROW_BYTES)))):
            for block in self._next_blocks(at):
                e.prefetch(e.at(block, (line, ROW_BYTES)), ROW_BYTES, level=2)

    def _unpack_and_multiply(
        self, at: Piece, weights: Sequence[Operand], x: ir.Value, steps: ir.Value, tile_steps: TileSteps
    ) -> None:
        """Unpacks the panel, and multiplies what was unpacked some steps before, by turns of a few instructions."""
        e, strides = self.e, self.strides
        with e.loop(0, steps) as s:
            self._meanwhile(at, None, s.i)
            step = e.b.sub(s.i, e.i64(_AHEAD))
            operations = tile_steps.operations(e.at(x, (step, strides.step)), strides, weights, step)
            begun = e.b.icmp_signed(">=", step, e.i64(0))
            tile_steps.by_turns(operations, begun, partial(self._unpack_step, at, weights, s.i))
        with e.loop(e.smax(0, e.b.sub(steps, e.i64(_AHEAD))), steps) as s:
            tile_steps.at_once(tile_steps.operations(e.at(x, (s.i, strides.step)), strides, weights, s.i))

    def _start(self, panel: ir.Value, places: Sequence[ir.Value]) -> None:
        """Initializes the sums: zeros for the first panel, else the totals of the earlier panels."""
        e, tiles = self.e, self.tiles
        for c in SUMS:
            tiles.zero(c)
        if self.panels > 1:
            with e.when(e.b.icmp_signed(">", panel, e.i64(0))):
                for c, place in zip(SUMS, places, strict=True):
                    tiles.load(c, place, TOTALS)

    def steps(self, panel: ir.Value) -> ir.Value:
        """Number of whole steps of 32 k in a panel; the last panel may have fewer."""
        e, steps = self.e, self.panel_steps
        return e.smin(steps, e.b.sub(e.i64(self.shape.k // DEPTH), e.b.mul(panel, e.i64(steps))))
