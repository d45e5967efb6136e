"""Linear layers on tensor cores: x W^T with weights of any type, and the same for experts.

The weights are the operand with 16 rows, the rows of x the one with 8 columns. Both are bf16, or sums of several: codes
of quantized weights are exact in one, x in f32 takes two (`parts.py`). Tensor cores add the products of each 32 k, or
of the k of a scale; times the scale, they are added in f32.

The k of a row are cut into `SLICES` ranges. The sum of each range is computed by itself, and then all are added in
order. So a result has the same bits whoever computes the ranges. With one row (`row_linear.py`) each warp of a block
has one. With several rows a block has one, and its warps compute some tiles of the weights each, so that a block brings
its range of x to shared memory once; the next kernel adds the ranges. Where there are tiles enough, a block computes
all ranges, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from rlx.backends.cuda.code import (
    F32,
    I8,
    I32,
    RESERVED,
    THREADS,
    TYPICAL_MULTIPROCESSORS,
    WARPS,
    Code,
    Operand,
    Value,
    Variable,
)
from rlx.backends.cuda.features import Features
from rlx.backends.cuda.kernels.dots import dots_of, values_of
from rlx.backends.cuda.kernels.matrix import Group, Matrix
from rlx.backends.cuda.kernels.parts import (
    LOWERED,
    NBYTES,
    QUAD,
    QUADS,
    count_of,
    loaded,
    place,
    split,
    summed,
    sums_of,
)
from rlx.backends.cuda.kernels.scales import Numbers
from rlx.backends.cuda.kernels.tensor_cores import commit_copies, wait_copies
from rlx.backends.cuda.layouts import DEPTH, LANES, ROWS, Form
from rlx.backends.cuda.numbers import UNARY, rounded

SLICES = 8


@dataclass
class Operands:
    """Where a block finds its operands and puts its results.

    Attributes:
        weights: one matrix, or two if the layer is gated.
        row: the address of row i of the block in x, in elements; i32.
        valid: whether row i of the block is to be computed.
        place: (row i of the block, column) -> where the result goes, in elements.
        x, out: memory.
        tile: the first tile of the weights, or the number of the block among those with the same rows.
        bias, residual: memory, if there are any.
        passed: memory for the sums of ranges of these rows.
    """

    weights: list[Value]
    x: Value
    out: Value
    row: Callable[[Value], Value]
    valid: Callable[[Value], Value]
    place: Callable[[Value, Value], Value]
    tile: Value
    bias: list[Value]
    residual: Value | None
    passed: Value | None = None


class Layer:
    """A linear layer in a kernel.

    Args:
        form: of the weights.
        n, width: outputs and inputs of the layer.
        gated: the activation of gate weights.
        out: type of the results, "f32" or "bf16".
        rounded: whether x is in bf16.
        alike: whether there is one row of x.
    """

    def __init__(
        self, code: Code, form: Form, n: int, width: int, gated: str | None = None, out: str = "f32",
        rounded: bool = False, *, alike: bool = False,
    ) -> None:  # fmt: skip
        self.code, self.form, self.n, self.width, self.gated, self.out = code, form, n, width, gated, out
        self.dots = dots_of(code, alike=alike)
        self.rounded, self.count = rounded, count_of(rounded)
        self.parts, self.units, self.sums = 2 if gated else 1, form.units(width), sums_of(form)

    def slice(self, number: Value) -> Value:
        """The first unit of a range."""
        return (number * self.units) // SLICES

    def products(self, group: Group, x: Sequence[Sequence[Value]]) -> list[list[Value]]:
        """The products of 16 rows of the weights and 8 rows of x, for the k of each scale of 32 k.

        Args:
            x: the registers of each part of x.
        """
        every = list[list[Value]]()
        for halves in [[0, 1]] if self.form.scales < 2 else [[0], [1]]:
            found = [self.code.f32(0.0)] * self.dots.count
            for h in halves:
                for part in group.parts[h]:
                    for own in x:
                        found = self.dots.add(part, own, h, found)
            every.append(found)
        return every

    def add_products(self, products: Sequence[Sequence[Value]], numbers: Group | Numbers,
                     totals: Sequence[Sequence[Value]], sums: Mapping[int, Variable]) -> None:  # fmt: skip
        """Adds products times their scales.

        Args:
            numbers: with the scales and lows.
            totals: for each scale the sums of x that weights need, of the rows of x that a lane has.
            sums: those that a lane adds up, by number.
        """
        k = self.code
        for s, found in enumerate(products):
            for i, total in sums.items():
                half, row = self.dots.place(i)
                scale = numbers.scales[s][half] if numbers.scales else 1.0
                own = found[i] + totals[s][row] if self.form.offset else found[i]
                value = k.fma(own, scale, total.get())
                total.set(k.fma(-numbers.lows[s][half], totals[s][row], value) if numbers.lows else value)

    def result(self, values: Sequence[Value], bias: Sequence[Value], residual: Value | None) -> Value:
        """A result, of the sum of each matrix and what is added to them."""
        if self.form.raw:
            values = [value * LOWERED for value in values]
        if bias:
            values = [value + each for value, each in zip(values, bias, strict=True)]
        found = UNARY[self.gated](self.code, values[0]) * values[1] if self.gated else values[0]
        return rounded(found if residual is None else found + residual, self.out)


_FULL = 0.8  # of the warps have to have work if a block computes all ranges
_ROOM = 112 << 10  # bytes of shared memory of a block, of which two share a large multiprocessor
_LANES = LANES * 16  # bytes of four f32 of each lane
_BROUGHT = 32  # registers of numbers of x that a thread loads before it uses them
_RING = 64 << 10  # bytes of shared memory for weights at most
_SCALED = 4  # times 8 rows of x at most beside weights with scales, whose sums take most registers
_BY_LANES = 4  # times 8 rows of x at most where lanes add products up: each has 16 sums of 8 rows


@dataclass(frozen=True)
class Shape:
    """How the work is shared.

    Attributes:
        columns: times 8 rows of x that a block computes.
        each: tiles of a matrix that a warp computes at a time: a set.
        blocks: that compute the same rows and ranges.
        ranges: blocks that share sets, `SLICES`, or 1 if a block computes all ranges.
        piece: units of x that are in shared memory at a time.
        pieces: for which there is room.
        slots: units of weights that a warp has under way or uses: a power of two.
        resident: blocks that a multiprocessor has room for: 1 or 2.
    """

    columns: int
    each: int
    blocks: int
    ranges: int
    piece: int
    pieces: int
    slots: int
    resident: int

    def sets(self, n: int) -> int:
        """Those of a matrix."""
        return -(-n // (ROWS * self.each))

    def passed(self, n: int, parts: int) -> int:
        """Bytes of the sums of ranges of the rows of a block, if another kernel adds them."""
        if self.ranges == parts == 1:
            return 0
        return parts * self.sets(n) * self.ranges * self.each * self.columns * _LANES


def shape_of(
    form: Form, rows: int, n: int, width: int, parts: int, features: Features, rounded: bool = False
) -> Shape:  # fmt: skip
    """The shape for calls of up to so many rows of a layer.

    Args:
        parts: matrices: 2 if the layer is gated.
        features: what the card has.
        rounded: whether x is in bf16.
    """
    columns, tiles = -(-min(rows, 64 if features.bf16 else 8 * _BY_LANES) // 8), -(-n // ROWS)
    groups = 2 if columns > _SCALED and rows <= 64 and form.scales else 1
    columns = -(-columns // groups)
    whole = rows > 64 or _used(-(-parts * tiles // (1 if columns > 4 else 2))) >= _FULL
    most = min(_RING, 2 * features.shared // 3)
    fits = 2 * WARPS * 2 * form.unit_bytes <= most and features.bf16
    each = 2 if columns <= 4 and fits and parts * tiles * SLICES >= 4 * TYPICAL_MULTIPROCESSORS * WARPS else 1
    sets, ranges = parts * -(-tiles // each), 1 if whole else SLICES
    most_blocks, blocks = 2 * TYPICAL_MULTIPROCESSORS // groups, -(-sets // WARPS)
    blocks = min(blocks, most_blocks) if whole else -(-blocks // -(-sets * ranges // (most_blocks * WARPS)))
    longest = -(-form.units(width) // SLICES)
    own = form.units(width) if whole else longest
    unit = form.unit // DEPTH * record_bytes(form, columns, rounded)
    ring = WARPS * each * form.unit_bytes
    slots = 4 if 4 * ring <= most else 2
    room = min(_ROOM, features.shared) - slots * ring
    piece, pieces = own, 1
    if own * unit > room:
        piece = max(d for d in range(1, longest + 1) if d == 1 or (longest % d == 0 and 2 * d * unit <= room))
        pieces = 2
    taken = pieces * piece * unit + slots * ring + RESERVED
    resident = 2 if features.bf16 and 2 * taken <= features.shared + RESERVED else 1  # lanes take many registers
    return Shape(columns, each, blocks, ranges, piece, pieces, slots, resident)


def record_bytes(form: Form, columns: int, rounded: bool) -> int:
    """Bytes of 32 k of x in shared memory: [8 rows][part][row g][t][half of the k][4], then sums, [scale][row]."""
    return columns * (8 * count_of(rounded) * NBYTES + 32 * sums_of(form))


def _used(sets: int) -> float:
    """The part of the warps of a card that has work in the last round, and before, if a block computes all ranges."""
    warps = TYPICAL_MULTIPROCESSORS * WARPS
    return sets / (-(-sets // warps) * warps)


class Linear(Layer):
    """A linear layer of several rows: a kernel for the products, and one that adds ranges."""

    def __init__(
        self, code: Code, form: Form, n: int, width: int, shape: Shape, gated: str | None = None, out: str = "f32",
        rounded: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(code, form, n, width, gated, out, rounded)
        self.shape, self.sets, self.tiles = shape, shape.sets(n), -(-n // ROWS)
        self.record = record_bytes(form, shape.columns, rounded)
        self.unit = form.unit // DEPTH * self.record  # bytes of x
        self.slot = shape.each * form.unit_bytes

    def emit(self, at: Operands) -> None:
        """The products of a block."""
        k, shape = self.code, self.shape
        k.resident, self.at = shape.resident, at
        self.x = k.share(shape.pieces * shape.piece * self.unit)
        self.ring = k.at(k.share(WARPS * shape.slots * self.slot), I8, k.warp * (shape.slots * self.slot))
        self.own = at.tile % shape.ranges
        self.begin, self.end = (k.number(0), k.number(self.units)) if shape.ranges == 1 else self._range(self.own)
        block, every = at.tile // shape.ranges, -(-self.parts * self.sets // WARPS)
        first, stride = block * WARPS + k.warp, shape.blocks * WARPS
        self.matrices = [Matrix(k, base, self.form, self.n, self.width) for base in at.weights]
        self.item, self.number = k.variable(I32, 0), k.variable(I32, 0)
        self.next = [k.variable(I32, value) for value in (first, self.begin)]
        for i in range(shape.slots - 1):
            self._copy_next(k.number(i), stride)
        k.wait()
        self._bring(self.begin)
        if shape.pieces == 1:
            k.barrier()
        rounds = (every + shape.blocks - 1 - block) // shape.blocks  # as many for all warps, for their barriers
        with k.loop(0, rounds) as number:
            sums = self._zeros(self.dots.kept)
            if shape.ranges == 1:
                total = self._zeros(range(4))
                with k.loop(0, SLICES) as slice_:
                    self._add_range(*self._range(slice_), sums, stride)
                    for own, some in zip(chain(*total), chain(*sums), strict=True):
                        result = self.dots.results(some)
                        for i, each in own.items():
                            each.set(each.get() + result(i))
                            some[i].set(0.0)
                        for i in self.dots.kept[len(own) :]:
                            some[i].set(0.0)
            else:
                total = sums
                self._add_range(self.begin, self.end, sums, stride)
            self._end(first + number * stride, total)

    def _range(self, number: Value) -> tuple[Value, Value]:
        return self.slice(number), self.slice(number + 1)

    def _zeros(self, kept: Sequence[int]) -> list[list[dict[int, Variable]]]:
        """The sums of a lane, [tile][column]."""
        columns = range(self.shape.columns)
        return [[{i: self.code.variable(F32, 0.0) for i in kept} for _ in columns] for _ in range(self.shape.each)]

    # -- copies to shared memory --------------------------------------------------------------------------------------

    def _copy_next(self, slot: Value, stride: int) -> None:
        """Begins to copy the next unit of the weights, if there is one, which is known by its set and its number."""
        k, shape = self.code, self.shape
        number, unit = (each.get() for each in self.next)
        to, valid = k.at(self.ring, I8, slot * self.slot), number < self.parts * self.sets
        if self.units < SLICES:
            valid = valid & (unit < self.end)
        number_in, matrix = self._of_matrix(k.select(valid, number, 0))
        place = number_in * (shape.each * self.units) + k.select(valid, unit, 0)
        for i in range(shape.each):
            whole = self.tiles % shape.each == 0
            own = valid if whole else valid & (number_in * shape.each + i < self.tiles)
            matrix.copy(k.at(to, I8, i * self.form.unit_bytes), place, i, k.select(own, 16, 0))
        commit_copies(k)
        ends = unit + 1 >= self.end
        self.next[0].set(number + k.select(ends, stride, 0))
        self.next[1].set(k.select(ends, self.begin, unit + 1))

    def _of_matrix(self, number: Value) -> tuple[Value, Matrix]:
        """Of all sets one: its number in its matrix, and this matrix."""
        if self.parts == 1:
            return number, self.matrices[0]
        first = number < self.sets
        return number - self.code.select(first, 0, self.sets), Matrix.one_of(first, *self.matrices)

    # -- x ------------------------------------------------------------------------------------------------------------

    def _bring(self, unit: Value) -> None:
        """Brings a piece of x to shared memory."""
        count = _BROUGHT // (2 if self.rounded else 4)
        for first in range(0, self.items, count):
            some = range(first, min(first + count, self.items))
            self._put(self._fetch(unit, some), self.code.number(0), some)

    @property
    def items(self) -> int:
        """Four numbers of a piece of x for a thread."""
        return -(-self.shape.piece * self.form.unit // QUAD * 8 * self.shape.columns // THREADS)

    def _item(self, number: Operand) -> tuple[Value, Value, Value]:
        """Which of the 32 k of a piece, which row, and which four of the 32 k."""
        k, rows = self.code, 8 * self.shape.columns
        item = k.number(number) * THREADS + k.thread
        return item // (8 * rows), item // 8 % rows, item & 7

    def _fetch(self, unit: Value, some: Sequence[Operand]) -> list[list[Value]]:
        """Begins to load numbers of the piece of x that begins with a unit."""
        k, at, found = self.code, self.at, []
        for group, row, quad in map(self._item, some):
            column = unit * self.form.unit + group * DEPTH + quad * QUAD
            row = k.smaller(row, 8 * self.shape.columns - 1)
            start, valid = at.row(k.select(at.valid(row), row, 0)), at.valid(row)
            found.append(loaded(k, at.x, start, column, self.width, valid, self.rounded))
        return found

    def _put(self, fetched: list[list[Value]], slot: Value, some: Sequence[Operand]) -> None:
        k, columns = self.code, self.shape.columns
        for numbers, (group, row, quad) in zip(fetched, map(self._item, some), strict=True):
            parts = split(k, numbers, quad, self.form, self.rounded)
            total = summed(k, parts, quad, self.form) if self.sums else None
            with k.when(group < self.shape.piece * (self.form.unit // DEPTH)):
                record = slot * (self.shape.piece * self.unit) + group * self.record
                start = record + (row >> 3) * (8 * self.count * NBYTES) + (row & 7) * NBYTES + place(quad)
                for part, words in enumerate(parts):
                    k.store(k.at(self.x, I8, start + part * (8 * NBYTES)), k.vector(words), align=8)
                if total is not None:
                    with k.when((quad % (QUADS // self.sums)).equals(0)):
                        s = quad // (QUADS // self.sums)
                        k.store(k.at(self.x, I8, record + self.sums_at), total, s * (8 * columns) + row)

    @property
    def sums_at(self) -> int:
        """Where the sums of a record begin."""
        return self.shape.columns * 8 * self.count * NBYTES

    # -- products -----------------------------------------------------------------------------------------------------

    def _add_range(self, begin: Value, end: Value, sums: list[list[dict[int, Variable]]], stride: int) -> None:
        """Adds the products of some units."""
        k, shape = self.code, self.shape
        if shape.pieces == 1:
            with k.loop(begin, end) as unit:
                self._add_unit((unit - self.begin) * self.unit, sums, stride)
            return
        some = range(self.items)
        with k.loop(begin, end, shape.piece) as start:
            stop, slot = k.smaller(start + shape.piece, end), self.number.get() & 1
            k.barrier()
            fetched = self._fetch(k.select(stop.equals(self.end), self.begin, stop), some)
            with k.loop(start, stop) as unit:
                self._add_unit((slot * shape.piece + (unit - start)) * self.unit, sums, stride)
            self._put(fetched, 1 - slot, some)
            self.number.set(self.number.get() + 1)

    def _add_unit(self, place: Value, sums: list[list[dict[int, Variable]]], stride: int) -> None:
        """Adds the products of the next unit of the weights, with x from a place in shared memory on."""
        k, slots = self.code, self.shape.slots
        wait_copies(k, slots - 2)
        k.sync_warp()
        item = self.item.get()
        self._copy_next((item + (slots - 1)) & (slots - 1), stride)
        own = k.at(self.ring, I8, (item & (slots - 1)) * self.slot)
        self.item.set(item + 1)
        matrix = self.matrices[0]  # all are stored the same way
        places = [k.at(own, I8, i * self.form.unit_bytes) for i in range(self.shape.each)]
        groups = [list(matrix.unpacked(*matrix.copied(place), raw=True)) for place in places]
        base, totals = (k.at(self.x, I8, place + lane) for lane in self.dots.lanes())
        for q in range(self.form.unit // DEPTH):
            record = q * self.record
            for c in range(self.shape.columns):
                x = [
                    self.dots.x(k.at(base, I8, record + (c * self.count + part) * 8 * NBYTES))
                    for part in range(self.count)
                ]
                at = record + self.sums_at + 32 * c
                lows = [self.dots.totals(k.at(totals, I8, at + s * 32 * self.shape.columns)) for s in range(self.sums)]
                for group, own_sums in zip(groups, sums, strict=True):
                    self.add_products(self.products(group[q], x), group[q], lows, own_sums[c])

    # -- results ------------------------------------------------------------------------------------------------------

    def _end(self, number: Value, sums: list[list[dict[int, Variable]]]) -> None:
        """Writes the results of a set of tiles, or passes on the sums of a range."""
        k, shape = self.code, self.shape
        result = self.dots.results if shape.ranges > 1 else values_of
        values = [[[*map(result(own), range(4))] for own in some] for some in sums]
        with k.when(number < self.parts * self.sets):
            for tile, some in enumerate(values):
                for c, own in enumerate(some):
                    if self.at.passed is None:
                        self._write(number * shape.each + tile, k.number(c), [own])
                    else:
                        k.store(self._passed(number, tile, c, self.own), k.vector(own))

    def _passed(self, number: Value, tile: Operand, c: Operand, slice_: Operand) -> Value:
        """Where a lane has its four sums of a tile of a set and 8 rows."""
        k, shape = self.code, self.shape
        index = ((number * shape.ranges + slice_) * shape.each + tile) * shape.columns + c
        assert self.at.passed is not None
        return k.at(self.at.passed, I8, index * _LANES + k.lane * 16)

    def add_ranges(self, at: Operands) -> None:
        """The kernel after: a warp adds the ranges of a tile and 8 rows."""
        k, shape, self.at = self.code, self.shape, at
        item = at.tile * WARPS + k.warp
        tile, c = item // shape.columns, item % shape.columns
        k.wait()
        with k.when(tile < self.tiles):
            found = []
            for m in range(self.parts):
                number = tile // shape.each + m * self.sets
                places = [self._passed(number, tile % shape.each, c, s) for s in range(shape.ranges)]
                loaded = [k.lanes(k.load(place, "<4 x float>")) for place in places]
                total = [k.f32(0.0)] * 4
                for own in loaded:
                    total = [x + y for x, y in zip(total, own, strict=True)]
                found.append(total)
            self._write(tile, c, found)

    def _write(self, tile: Value, c: Value, values: list[list[Value]]) -> None:
        """Writes the results of a tile for 8 rows."""
        k, at = self.code, self.at
        for half in range(2):
            column = tile * ROWS + ((k.lane >> 2) + 8 * half)
            inside = column < self.n
            rows = [c * 8 + ((k.lane & 3) * 2 + i) for i in range(2)]
            held = [inside & at.valid(row) for row in rows]
            places = [k.select(hold, at.place(row, column), 0) for hold, row in zip(held, rows, strict=True)]
            bias = [k.load(b, F32, k.select(inside, column, 0), constant=True) for b in at.bias]
            residuals = [None if at.residual is None else k.load(at.residual, F32, place) for place in places]
            for i, (hold, to, residual) in enumerate(zip(held, places, residuals, strict=True)):
                result = self.result([own[2 * half + i] for own in values], bias, residual)
                with k.when(hold):
                    k.store(at.out, result, to)
