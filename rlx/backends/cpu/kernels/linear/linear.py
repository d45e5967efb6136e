"""Linear layers: out[rows, n] = x[rows, k] times packed W[n, k] transposed, with bias, gate and residual fused.

    for macro tile of rows, 48 or 144 by default:
        for group of units in begin .. end:             # a unit: 16 rows of W, the 16 lanes of a result vector
            if there are enough rows to share it:
                for chunk of 256 k:
                    unpack the chunk of W into scratch memory, unless it is multiplied as it is packed
                    for tile of rows: total[tile] += part of the chunk, and prefetch the next weights
            for the remaining rows (in decode the only row, elsewhere all rows where that is faster):
                for chunk of 256 k: total += part of the chunk, W streamed and unpacked in registers
            out = gate(total + bias) ... + residual

    part, int8 activations:    for sub-block of 32 k: part += int8 dots * weight scale * activation scale
    part, f32 activations:     for k: part += dequantized weight * activation
    part, bf16 activations:    for pair of k: part += bf16 dots of weights in bf16

The order of each sum does not depend on the number of rows, the tile of the result, the split of the units or the
target's tuning. So the bits of a result never depend on them either. With f32 activations the weights are dequantized
exactly. On targets with tile registers `tiles.py` multiplies bf16 activations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd

from llvmlite import ir

from rlx.backends.cpu import dots
from rlx.backends.cpu.kernel import Kernel, once
from rlx.backends.cpu.kernels.linear import narrow, unpack
from rlx.backends.cpu.kernels.linear import tiles as linear_tiles
from rlx.backends.cpu.kernels.linear.multiply import Rows, Shape, Sub, Sums
from rlx.backends.cpu.kernels.linear.narrow import Narrow
from rlx.backends.cpu.kernels.linear.stream import StreamWriter, most_integers, parts
from rlx.backends.cpu.kernels.linear.tile_step import BLOCKS
from rlx.backends.cpu.kernels.linear.unpack import CHUNK, GROUPS, SUB
from rlx.backends.cpu.layouts import BLOCK_ROWS, PACKINGS
from rlx.backends.cpu.target import Target
from rlx.backends.cpu.tiles import BF16X32, F32X16, I8X64, I32X16, Emitter, Index
from rlx.errors import CompileError, ShapeError
from rlx.ir.dtypes import BF16, F16, DType

#: The functions that a gated linear may apply to its gate.
GATES = ("silu", "gelu_tanh", "gelu_erf")

#: Rows in tile registers up to which the last workers of a call are waited for longer than larger ranges save.
FEW_IN_TILES = 64

_FEW_ROWS = 32  # with fewer, tiles over codes prefetch a part of the next weights, and the hardware the rest
_FEWEST_RANGES = 16  # of a call with one row, before a range is more than one unit for the sake of several streams
_TERMS = 1 << 18  # most bytes of stack for the rows' terms: very wide layers have smaller macro tiles


def units(n: int) -> int:
    """Number of work units of a linear with `n` results per row: blocks of 16."""
    return -(-n // BLOCK_ROWS)


def together(act: str, k: int, n: int, matrices: int, target: Target, *, single: bool = False) -> int:
    """Units that are computed at once, with 1 or 2 matrices. Fewer units take as long."""
    if linear_tiles.fits(act, k, target):
        return BLOCKS // matrices
    if single:  # memory is read faster in several streams, but workers without a range would not read at all
        streams = parts(target, matrices)
        return streams if units(n) >= _FEWEST_RANGES * streams else 1
    never_unpacks = act == "q8a" and target.tuning.unpack_from_int8 > target.tuning.macro_rows_int8
    return 1 if never_unpacks else max(1, _blocks(target) // matrices)


def _blocks(target: Target) -> int:
    """Row blocks of a tile over unpacked weights."""
    return 2 if target.vectors == "avx512" else 1


def macro_rows(k: int, act: str, target: Target) -> int | None:
    """Rows of a unit, if units are per macro tile of rows; None if each unit has all rows."""
    return linear_tiles.macro_rows(k, target) if linear_tiles.fits(act, k, target) else None


@once
def linear(
    dtype: DType,
    n: int,
    k: int,
    act: str,
    target: Target,
    *,
    residual: bool = False,
    bias: bool = False,
    gated: str | None = None,
    single: bool = False,
    out: str = "f32",
) -> Kernel:
    """A kernel for out = x W^T, or gate(x Wg^T) * (x Wu^T) if gated.

    A bias is added to each product, the residual to the result.

    Buffers: `x` (q8a rows, or f32 or bf16 [rows, k]), `w` (packed [n, k]), `w_up` if gated, `bias` f32[n] and `bias_up`
    if gated, `residual` f32[rows, n], `out` f32 or bf16 [rows, n]. `residual` may be the same buffer as an f32 `out`;
    nothing else may overlap `out`. Extents: `rows` unless `single`, and `n`. Linears with equal k and different n share
    their code, like Q, K, V and the head. Units: `units(n)`, per macro tile if `macro_rows` is not None. Ranges with an
    even number of units are fastest.

    Args:
        dtype: a type of `layouts.PACKED_DTYPES`.
        act: type of the activations, which determines the arithmetic:
            `f32`: weights are dequantized exactly.
            `q8a`: integer dot products, for weights with integer codes only.
            `bf16`: only if the target multiplies bf16, and an even k. f16 weights are rounded to bf16. Tile registers
            take all block types, too, which they round.
        gated: None, `silu`, `gelu_tanh` or `gelu_erf`.
        single: there is exactly one row, as in decode; the kernel then contains only the streaming code.
        out: type of the results, `f32` or `bf16`, rounded to nearest even.

    Raises:
        CompileError: an option is out of its range.
        ShapeError: k does not fit the type's blocks.
    """
    in_tiles = linear_tiles.fits(act, k, target)
    check(dtype, k, act, gated, target, in_tiles)
    ragged, signed = n % BLOCK_ROWS > 0, target.isa.signed_codes
    shape = Shape(dtype, k, act, residual, bias, gated, ragged=ragged, single=single, out=out, signed=signed)
    e = Emitter(target, shape.buffers, shape.extents)
    (linear_tiles.TileWriter if in_tiles else LinearWriter)(e, shape).write()
    return e.finish(f"linear_{dtype}_{act}", _outline(shape))


@dataclass(frozen=True)
class _Tiles:
    """Sizes of register tiles: as many sums as the registers hold.

    Attributes:
        shared: sizes of tiles over unpacked weights, in rows, largest first. All are multiples of the smallest. The
            remaining rows, fewer than the smallest size, are streamed.
        streamed: sizes of tiles over streamed weights, in rows, largest first.
        blocks: row blocks of a tile over unpacked weights.
        least: with fewer rows, all rows are streamed: unpacking to memory would cost more than reading weights again
            from the cache.
    """

    shared: tuple[int, ...]
    streamed: tuple[int, ...]
    blocks: int
    least: int = 0


def _tiles(target: Target, shape: Shape, products: Narrow | None) -> _Tiles:
    wide, tuning = target.vectors == "avx512", target.tuning
    if shape.integer:
        streamed = tuple(rows for rows in (8, 4, 3, 2, 1) if rows <= most_integers(target))
        fewer = target.vectors != "generic" and target.isa.sums_pairs and not wide  # sums of pairs take registers, too
        rows = tuning.tile_rows_int8 * 2 // 3 if fewer else tuning.tile_rows_int8
        if target.isa.product_rows:
            rows = products.rows if products else most_integers(target)
        return _Tiles((rows,), streamed, _blocks(target), tuning.unpack_from_int8)
    rows = max(1, tuning.tile_rows_float * min(target.vector_room, 16) // 16)
    if not wide:
        return _Tiles((rows,) if rows % 2 else (rows, rows // 2), (1,), 1)
    shared = (rows, 2) if rows > 2 else (2,)
    if shape.format is None:
        return _Tiles(shared, (8, 4, 2, 1), 2, tuning.unpack_from_plain)
    return _Tiles(shared, (1,), 2)


@dataclass(frozen=True)
class _Scratch:
    """Stack memory: an unpacked chunk of a tile's blocks, the totals f32[macro rows, sums, 16], the rows' terms."""

    chunk: ir.Value | None
    totals: ir.Value
    terms: ir.Value | None
    records: ir.Value | None  # of narrow tiles


@dataclass(frozen=True)
class _Following:
    """The part of the next weights that a tile prefetches while it is multiplied.

    Attributes:
        places: where the part begins in each block.
        nbytes: its size in bytes, a run-time value.
    """

    places: Sequence[ir.Value]
    nbytes: ir.Value


@dataclass(frozen=True)
class _Shared:
    """Blocks whose sums are in registers together, and the rows that share them, as run-time values.

    Attributes:
        macro: the first row.
        rows: the number of rows.
        unit: the first unit of the blocks' group.
        first: the index of the first block's total among the totals of a row.
        blocks: the addresses of the blocks.
    """

    macro: ir.Value
    rows: ir.Value
    unit: ir.Value
    first: int
    blocks: Sequence[ir.Value]


class LinearWriter(StreamWriter):
    """Generates a linear kernel. `experts.py` has a subclass with other addresses of rows and blocks."""

    def __init__(self, e: Emitter, shape: Shape) -> None:
        super().__init__(e, shape)
        tuning, multiply = e.target.tuning, self.multiply
        most = tuning.macro_rows_int8 if shape.integer else tuning.macro_rows_float
        is_narrow = shape.integer and not shape.single and e.isa.product_rows > 0
        products = Narrow(e, multiply) if is_narrow else None
        fits = products and products.group_bytes + products.rows * multiply.term_bytes <= _TERMS
        self.products = products if fits else None  # very wide layers do not use them
        self.tiles = tiles = _tiles(e.target, shape, self.products)
        step, of_records = tiles.shared[0], self.products.group_bytes if self.products else 0
        fitting = min(most // step, _TERMS // max(1, step * multiply.term_bytes + of_records))
        self.macro_rows = max(1, fitting) * step
        scales = shape.format.vectors if shape.format else 0
        signed = shape.integer and shape.format is not None and shape.format.row.signed
        self.magnitudes = e.isa.moves_signs and signed  # signs of unpacked codes lie apart
        more = GROUPS + shape.format.row.parts if shape.format and self.magnitudes else 0
        integers = GROUPS + scales + more  # vectors of a sub-block of unpacked codes
        self.sub_bytes = 64 * (integers if shape.integer else SUB // shape.pair)  # of unpacked weights
        self.sub_bytes = self.products.sub_bytes if self.products else self.sub_bytes
        self.numbers_at = self.sub_bytes * CHUNK // SUB  # the numbers of a superblock, if they are applied late
        heads = multiply.format.row.head * (self.products.together if self.products else 1) if multiply.late else 0
        self.chunk_bytes = self.numbers_at + 64 * heads
        self.float_step = gcd(shape.k // shape.pair, 4)  # k or pairs of k of a loop over float activations
        steps = CHUNK // (SUB if shape.integer else self.float_step * shape.pair)  # of a tile
        few = tiles.least or _FEW_ROWS if shape.format is None else _FEW_ROWS
        steps *= max(1, few // tiles.shared[0])
        self.step_lines = -(-unpack.chunk_bytes(shape.dtype) // (64 * steps))  # most that each step prefetches
        terms = e.stack(self.macro_rows * multiply.term_bytes) if multiply.terms_a_sub else None
        self.group = max(1, tiles.blocks // len(shape.weights))  # units that are multiplied together
        self.sums = self.group * len(shape.weights)  # sums of a row for a group
        totals = e.stack(64 * self.macro_rows * self.sums)
        records = e.stack(self.macro_rows // step * of_records) if self.products else None
        unpacked = None if shape.as_packed else e.stack(tiles.blocks * self.chunk_bytes)
        self.scratch = _Scratch(unpacked, totals, terms, records)

    def write(self) -> None:
        if self.shape.single:
            self._write_single()
        else:
            self._write_rows()

    def _write_single(self) -> None:
        """The kernel for one row: streams the weights of all units."""
        e, first = self.e, self.e.i64(0)
        if self.scratch.terms:
            self.multiply.write_terms(e.args["x"], self.scratch.terms)
        self.stream_units(self._rows(first, first, 1), e.args["begin"], e.args["end"])

    def _write_rows(self) -> None:
        e = self.e
        self.write_starts()
        with e.loop(0, e.args["rows"], self.macro_rows) as m:
            count = e.smin(self.macro_rows, e.b.sub(e.args["rows"], m.i))
            if self.scratch.terms:
                with e.loop(0, count) as r:
                    self._prepare_row(e.at(e.args["x"], (e.b.add(m.i, r.i), self.shape.row_bytes)), r.i)
            self._macro_tile(m.i, count, e.args["begin"], e.args["end"])

    def write_starts(self) -> None:
        """Stores what the sums of narrow tiles start with, once a call."""
        if self.products:
            with self.e.loop(0, CHUNK // SUB) as s:
                self.products.write_starts(self.e.at(self.scratch.chunk, (s.i, self.sub_bytes)))

    def _prepare_row(self, x: ir.Value, row: ir.Value) -> None:
        """Stores what the macro tile's row `row`, which lies at `x`, needs besides its codes."""
        if self.scratch.terms:
            self.multiply.write_terms(x, self.e.at(self.scratch.terms, (row, self.multiply.term_bytes)))

    def _macro_tile(self, macro: ir.Value, count: ir.Value, begin: ir.Value, end: ir.Value) -> None:
        """Multiplies `count` rows, from `macro` on, by the units [begin, end)."""
        e = self.e
        if self.tiles.least > self.macro_rows:  # weights are never unpacked to memory
            with e.loop(begin, end) as unit:
                self._streamed_rows(macro, e.i64(0), count, unit.i)
            return
        done = self._shared_count(count)
        self._write_records(macro, done)
        with e.loop(begin, end, self.group) as u:
            last = e.smin(e.b.add(u.i, e.i64(self.group)), end)
            self._shared_rows(macro, done, u.i, last)
            with e.loop(u.i, last) as v:
                place = e.at(self.scratch.totals, (e.b.sub(v.i, u.i), 64 * len(self.shape.weights)))
                if self.products:
                    self.products.order_totals(self.scratch.totals, done, self.sums)
                self._finish_rows(place, self.sums, done, macro, v.i)
                self._streamed_rows(macro, done, count, v.i)

    def _rows(self, macro: ir.Value, row: ir.Value, count: int) -> Rows:
        """`count` rows of the macro tile that begins at `macro`, from its row `row` on."""
        e = self.e
        first = e.at(e.args["x"], (e.b.add(macro, row), self.shape.row_bytes))
        return Rows([e.at(first, i * self.shape.row_bytes) for i in range(count)], self._prepared(row))

    def _prepared(self, row: ir.Value) -> ir.Value | None:
        """Address of what `_prepare_row` stored for a row: its terms."""
        terms = self.scratch.terms
        return terms and self.e.at(terms, (row, self.multiply.term_bytes))

    # --- weights unpacked once for many rows --------------------------------------------------------------------------

    def _shared_count(self, count: ir.Value) -> ir.Value:
        """Number of the rows of a macro tile that fill tiles over unpacked weights."""
        e, tiles = self.e, self.tiles
        smallest = tiles.shared[-1]
        done = e.b.sub(count, e.b.urem(count, e.i64(smallest)))
        if self.products:  # three rows are worth a tile; the results of its other rows are not used
            more = e.b.add(count, e.i64(smallest - 3))
            done = e.smin(count, e.b.sub(more, e.b.urem(more, e.i64(smallest))))
        if tiles.least:
            done = e.b.select(e.b.icmp_signed("<", count, e.i64(tiles.least)), e.i64(0), done)
        return done

    def _write_records(self, macro: ir.Value, done: ir.Value) -> None:
        """Copies the activations for narrow tiles, if the target uses them."""
        e, products = self.e, self.products
        if products is None:
            return
        size, last = products.rows, e.b.sub(done, e.i64(1))
        with e.loop(0, done, size) as r:
            rows = [e.smin(e.b.add(r.i, e.i64(i)), last) for i in range(size)]
            x = [self._rows(macro, row, 1).x[0] for row in rows]
            group = self._group(r.i)
            with e.loop(0, self.shape.k // SUB) as s:
                products.write_record(Rows(x, self._prepared(r.i)), s.i, e.at(group, (s.i, products.record_bytes)))

    def _group(self, row: ir.Value) -> ir.Value:
        """Address of the records of the rows from `row` on, a multiple of a tile's rows."""
        assert self.products is not None and self.scratch.records is not None
        number = self.e.b.udiv(row, self.e.i64(self.products.rows))
        return self.e.at(self.scratch.records, (number, self.products.group_bytes))

    def _shared_rows(self, macro: ir.Value, done: ir.Value, unit: ir.Value, last: ir.Value) -> None:
        """Computes the totals of `done` rows, which fill tiles, for the units [unit, last)."""
        e, tiles = self.e, self.tiles
        second = e.b.sub(last, e.i64(1))  # if there is no second unit, the first one is computed twice
        group = [unit, second][: self.group]
        blocks = [self._block(name, u) for u in group for name in self.shape.weights]
        with e.when(e.b.icmp_signed(">", done, e.i64(0))):
            # A register may hold sums of two rows.
            used = e.b.add(done, e.b.and_(done, e.i64(1))) if self.products else done
            with e.loop(0, e.b.mul(used, e.i64(self.sums))) as z:
                e.store(e.f32(0.0), e.at(self.scratch.totals, (z.i, 64)), 64)
            with e.loop(0, self.shape.chunks) as c:
                for first in range(0, len(blocks), tiles.blocks):
                    self._shared_chunk(_Shared(macro, done, unit, first, blocks[first : first + tiles.blocks]), c.i)

    def _shared_chunk(self, shared: _Shared, chunk: ir.Value) -> None:
        """Adds a chunk of a tile's blocks to the totals of all rows, and prefetches the next chunk."""
        e, tiles = self.e, self.tiles
        starts = [self.chunk(block, chunk) for block in shared.blocks]
        places = starts if self.shape.as_packed else self._unpack(starts, chunk)
        if self.products:
            with e.loop(0, shared.rows, self.products.rows) as r:
                totals = e.at(self.scratch.totals, 64 * shared.first, (r.i, 64 * self.sums))
                self._narrow_tile(self.products, self._group(r.i), chunk, totals)
            return
        following = [self._following(block, chunk) for block in shared.blocks]
        of_row = e.ceil_div(e.i64(unpack.chunk_bytes(self.shape.dtype)), shared.rows)  # bytes to prefetch for a row

        def tile(rows: int, row: ir.Value) -> None:
            part = _Following([e.at(place, (row, of_row)) for place in following], e.b.mul(of_row, e.i64(rows)))
            for i in range(rows):
                self._fetch_results(e.b.add(e.b.add(shared.macro, row), e.i64(i)), shared.unit, self.group)
            totals = e.at(self.scratch.totals, 64 * shared.first, (row, 64 * self.sums))
            if self.shape.integer and tiles.blocks == 1:  # few lines for a tile, and a step of few instructions
                lines = e.ceil_div(part.nbytes, 64)
                with e.loop(0, lines) as line:
                    self._fetch(part, line.i, lines)
                part = _Following([], part.nbytes)
            self._shared_tile(self._rows(shared.macro, row, rows), places, chunk, totals, part)

        e.tiled(0, shared.rows, tiles.shared, tile)

    def _following(self, block: ir.Value, chunk: ir.Value) -> ir.Value:
        """Address of the chunk that is unpacked next: the next one of the block, or the first one of the next group."""
        e, following = self.e, self.e.b.add(chunk, self.e.i64(1))
        more = e.b.icmp_signed("<", following, e.i64(self.shape.chunks))
        return e.b.select(more, self.chunk(block, following), e.at(block, self.group * self.shape.block_bytes))

    def _fetch(self, following: _Following, step: ir.Value, steps: Index) -> None:
        """Prefetches what step `step` of `steps` prefetches of a tile's part of the next weights.

        Spread over the steps, prefetches and arithmetic overlap. Many at once would fill the queue of the first-level
        cache, behind which the activations wait. That cache has no room for the next plain weights beside the ones that
        are multiplied.
        """
        e, level, lines = self.e, 1 if self.shape.format else 2, self.step_lines
        pace = e.smin(e.ceil_div(following.nbytes, steps), 64 * lines)
        places = [e.at(place, e.b.mul(step, pace)) for place in following.places]
        for place in places:
            e.prefetch(place, 64, level)
        if lines > 1:  # only few rows need more
            with e.when(e.b.icmp_signed(">", pace, e.i64(64))):
                for place in places:
                    e.prefetch(e.at(place, 64), 64 * (lines - 1), level)

    def _unpack(self, starts: Sequence[ir.Value], chunk: ir.Value) -> list[ir.Value]:
        """Unpacks a chunk of each block to scratch memory: codes and scales, f32 weights [256, 16], or bf16 pairs.

        Returns the addresses.
        """
        e, format_ = self.e, self.shape.format
        targets = [e.at(self.scratch.chunk, i * self.chunk_bytes) for i in range(len(starts))]
        for start, target in zip(starts, targets, strict=True):
            if format_ is None:
                with e.loop(0, self.multiply.steps(chunk, self.read_steps * self.shape.pair)) as s:
                    values = self.load_steps(e.at(start, (s.i, self.read_bytes)))
                    e.store_row(values, e.at(target, (s.i, 64 * self.read_steps)))
                continue
            header = format_.chunk(e, start)
            if self.multiply.late:
                e.store_row(self.products.numbers(header) if self.products else header, e.at(target, self.numbers_at))
                header = []
            with e.loop(0, self.multiply.steps(chunk, SUB)) as s:
                place = unpack.sub_block(e, format_, start, s.i)
                codes, scales = format_.codes(e, place), format_.scales(e, header, place)
                if self.products:
                    self.products.write_weights(codes, scales, e.at(target, (s.i, self.sub_bytes)))
                    continue
                if self.shape.integer:
                    vectors = codes + scales if not self.magnitudes else self._magnitudes(codes, scales)
                else:
                    vectors = unpack.weights_f32(e, format_, codes, scales)
                e.store_row(vectors, e.at(target, (s.i, self.sub_bytes)))
        return targets

    def _magnitudes(self, codes: Sequence[ir.Value], scales: Sequence[ir.Value]) -> list[ir.Value]:
        """Signed codes of a sub-block -> what is stored: magnitudes, the scales, signs, the starts of sums."""
        e, format_ = self.e, self.multiply.format
        size = GROUPS // format_.row.parts
        parts = [dots.magnitudes(e, codes[i : i + size]) for i in range(0, GROUPS, size)]
        origin = e.i32(0 if self.multiply.zero else self.multiply.origin)  # else it is part of the terms
        sizes, signs = ([vector for part in parts for vector in part[i]] for i in (0, 1))
        return [*sizes, *scales, *signs, *(e.b.add(part[2], origin) for part in parts)]

    def _shared_tile(
        self, rows: Rows, places: Sequence[ir.Value], chunk: ir.Value, totals: ir.Value, following: _Following
    ) -> None:
        """Adds a chunk of some rows to their totals. `places` are the addresses of the blocks' chunks."""
        e, blocks, multiply = self.e, len(places), self.multiply

        def total(i: int) -> ir.Value:
            return e.at(totals, 64 * (i // blocks * self.sums + i % blocks))

        count = rows.count * blocks
        if self.shape.integer:
            zeros = multiply.zeros(rows, blocks) * multiply.part_sets
            sums = [e.load(F32X16, total(i), 64) for i in range(count)] if multiply.carries else zeros
            part = self._shared_integers(rows, places, chunk, following, sums)
        else:
            part = self._shared_floats(rows, places, chunk, following)
        numbers = [self._numbers(place) for place in places]
        for i in range(count):
            place = total(i)
            e.store(multiply.add_part(i, part, numbers[i % blocks], e.load(F32X16, place, 64)), place, 64)

    def _numbers(self, chunk: ir.Value) -> list[ir.Value]:
        """The numbers of an unpacked superblock, if they are applied late."""
        e, multiply = self.e, self.multiply
        count = multiply.format.row.head if multiply.late else 0
        return [e.load(F32X16, e.at(chunk, self.numbers_at + 64 * v), 16) for v in range(count)]

    def _narrow_tile(self, products: Narrow, group: ir.Value, chunk: ir.Value, totals: ir.Value) -> None:
        """The same for a tile of narrow registers."""
        e, multiply, weights = self.e, self.multiply, self.scratch.chunk
        count = multiply.format.row.head if multiply.late else 0
        with e.loop(0, BLOCK_ROWS // narrow.WIDTH) as half:
            first = e.at(weights, (half.i, products.width_bytes))
            tile = products.totals(e.at(totals, (half.i, 4 * narrow.WIDTH)), 64 * self.sums)
            parts = products.add_chunk(chunk, first, self.sub_bytes, group, tile)
            numbers = [products.of_weights(e.at(first, self.numbers_at), v) for v in range(count)]
            products.store_totals(parts, numbers, tile)

    def _shared_integers(
        self, rows: Rows, places: Sequence[ir.Value], chunk: ir.Value, following: _Following, sums: Sums
    ) -> Sums:
        """Adds the integer products of a chunk to `sums`."""
        e, steps = self.e, self.multiply.steps(chunk, SUB)
        with e.loop(0, steps, 1, sums) as s:
            self._fetch(following, s.i, steps)
            subs = [self._scratch_sub(e.at(place, (s.i, self.sub_bytes))) for place in places]
            s.values = self.multiply.integer_step(subs, rows, e.mul_add(chunk, CHUNK // SUB, s.i), s.values)
        return s.results

    def _shared_floats(self, rows: Rows, places: Sequence[ir.Value], chunk: ir.Value, following: _Following) -> Sums:
        """The float sums of a chunk: those of the even steps, then those of the odd ones.

        One after the other, a tile has twice as many rows as registers would hold sums of both. So the weights, which
        fill the first-level cache, are read half as often.
        """
        e, pair, type_ = self.e, self.shape.pair, F32X16 if self.shape.pair == 1 else BF16X32
        step, zeros = self.float_step, self.multiply.zeros(rows, len(places))
        steps, parities = self.multiply.steps(chunk, step * pair), min(2, step)  # an odd number of steps: all are even
        sums = [zeros, zeros]
        for parity in range(parities):
            part = replace(following, places=following.places[parity::parities])
            with e.loop(0, steps, 1, zeros) as s:
                self._fetch(part, s.i, steps)
                first = e.mul_add(e.mul_add(chunk, CHUNK // (step * pair), s.i), step)
                for i in range(parity, step, 2):
                    weights = [e.load(type_, e.at(p, 64 * i, (s.i, 64 * step))) for p in places]
                    s.values = self.multiply.float_step(i, weights, rows, first, s.values)
            sums[parity] = s.results
        return self.multiply.add(*sums)

    def _scratch_sub(self, place: ir.Value) -> Sub:
        e, format_ = self.e, self.multiply.format

        end = GROUPS + format_.vectors

        def codes(group: Index) -> ir.Value:
            return e.load(I8X64, e.at(place, (group, 64)), 64)

        def signs(group: Index) -> ir.Value:
            return e.load(I8X64, e.at(place, (group, 64), 64 * end), 64)

        def scales() -> list[ir.Value]:
            return e.load_row(e.at(place, 64 * GROUPS), format_.vectors)

        if not self.magnitudes:
            early = scales()
            return Sub(codes, lambda: early, in_memory=True)
        starts = e.load_row(e.at(place, 64 * (end + GROUPS)), format_.row.parts, I32X16)
        return Sub(codes, scales, in_memory=True, sign=signs, starts=starts)

    def _streamed_rows(self, macro: ir.Value, done: ir.Value, count: ir.Value, unit: ir.Value) -> None:
        """Multiplies the rows from `done` on, which do not fill a tile over unpacked weights, by a unit."""

        def tile(rows: int, row: ir.Value) -> None:
            self.streamed_tile(self._rows(macro, row, rows), self.e.b.add(macro, row), [unit])

        self.e.tiled(done, count, self.tiles.streamed, tile)


def check(dtype: DType, k: int, act: str, gated: str | None, target: Target, in_tiles: bool) -> None:
    """Checks the options of `linear`.

    Raises:
        CompileError: an option is out of its range.
        ShapeError: k does not fit the type's blocks.
    """
    if dtype not in PACKINGS:
        raise CompileError(f"no linear kernel reads {dtype} weights", hint=f"It reads {', '.join(map(str, PACKINGS))}.")
    rounds = dtype in (BF16, F16) or (in_tiles and dtype.is_quantized)
    fits = {"f32": True, "q8a": dtype.has_integer_codes, "bf16": rounds}
    if not fits.get(act):
        raise CompileError(f"no linear kernel multiplies {dtype} weights with {act} activations")
    if act == "bf16" and not (target.has_bf16_dots or in_tiles):
        hint = "Leave the activations in f32."
        raise CompileError("the target has no dot products of bf16", where=f"target {target.level}", hint=hint)
    if gated not in (None, *GATES):
        raise CompileError(f"unknown gate {gated!r}", hint=f"Gates: {', '.join(GATES)}.")
    if k <= 0 or k % PACKINGS[dtype].superblock:
        what = f"a {dtype} weight has rows of {k} numbers, which is no multiple of {PACKINGS[dtype].superblock}"
        hint = "Take F16 or F32, which may have any number; or add a zero to each row, and to the inputs."
        raise ShapeError(what, hint=hint)
    if act == "bf16" and k % 2:
        raise ShapeError(f"k = {k} is odd: bf16 activations are taken in pairs")


def _outline(shape: Shape) -> str:
    """The readable outline of the kernel."""
    product = "dot(x[row], w[i])" + " + bias[i]" * shape.bias
    if shape.gated:
        product = f"{shape.gated}({product}) * (dot(x[row], w_up[i])" + " + bias_up[i]" * shape.bias + ")"
    inner = {"q8a": "int8 dots a 32 k, scaled in f32", "bf16": "dots of 2 k, summed in f32"}.get(
        shape.act, "f32, weights dequantized exactly"
    )
    return (
        f"# x {shape.act}[rows, {shape.k}], w {shape.dtype} packed [n, {shape.k}]\n"
        f"# {inner}; summed in chunks of {CHUNK} k\n"
        f"for unit in range(begin, end):\n    for row in range({1 if shape.single else 'rows'}):\n"
        "        for i in range(16 * unit, min(16 * unit + 16, n)):  # 16 lanes\n"
        f"            out[row, i] = {product}{' + residual[row, i]' * shape.residual}\n"
    )
