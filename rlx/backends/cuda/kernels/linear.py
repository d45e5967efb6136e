"""Linear layers on tensor cores: x W^T with weights of any type, and the same for experts.

The weights are the operand with 16 rows, the rows of x the one with 8 columns. Codes of quantized weights are int8,
other weights are sums of bf16, and x is a sum of parts (`parts.py`). Products are summed in f32, of codes per scale
first, then times the scale. The sums of the last part of x stay apart to the end of a range.

With several rows a kernel before splits x into parts, once for all blocks: see `store_parts`.

The k of a row are cut into `SLICES` ranges. The sum of each range is computed by itself, and then all are added in
order. So a result has the same bits whoever computes the ranges: with few rows one warp each, with many rows one warp
all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeAlias

from rlx.backends.cuda.code import F32, I8, I64, THREADS, WARPS, Code, Operand, Value, Variable
from rlx.backends.cuda.kernels.matrix import Group, Matrix
from rlx.backends.cuda.kernels.parts import FLOATS, INTS, STEP, Parts, sums_of_products
from rlx.backends.cuda.layouts import DEPTH, ROWS, Form
from rlx.backends.cuda.numbers import UNARY, rounded

#: The registers of a unit, and what its scales and lows are made of.
Loaded: TypeAlias = tuple[list[Value], list[list[Value]]]

#: A matrix and one of its tiles.
Tile: TypeAlias = tuple[Matrix, Value]

SLICES = 8
_QUAD = 4  # elements of x that a thread brings at a time
_ENOUGH_BLOCKS = 128  # about as many as a large card has multiprocessors
_BROUGHT = 4  # times four elements that a thread loads before it uses them
#: Rows times matrices of a block for which a warp with two tiles is quicker (H100): with fewer their weights have to be
#: under way in more warps, with more a lane has too few registers.
_PAIRED = (16, 32)
_LOADS = 4  # of 16 bytes that a lane has under way for a matrix


@dataclass(frozen=True)
class Shape:
    """How the work is shared.

    Attributes:
        rows: of x that a block computes, at least the 8 of a product.
        tiles: of the weights that warps of a block compute side by side, each in `WARPS / tiles` warps.
        groups: times 32 k of each slice that are brought to shared memory at a time.
        each: tiles that a warp computes, if those of a block compute the same.
    """

    rows: int
    tiles: int
    groups: int
    each: int = 1

    @property
    def at_once(self) -> int:
        """Slices that are computed at a time."""
        return WARPS // self.tiles


#: For few rows and a tile.
ONE_TILE = Shape(8, 1, 4)


def shape_of(rows: int, n: int, parts: int = 1) -> Shape:
    """The shape for calls of up to so many rows of a layer with `n` outputs, or twice as many that are gated."""
    if rows > 64:
        own = 64 if -(-n // (ROWS * WARPS)) * -(-rows // 64) >= _ENOUGH_BLOCKS else 32
        return Shape(own, WARPS, 4)
    own, groups = next((own, groups) for own, groups in ((8, 4), (16, 2), (32, 2)) if own >= min(rows, 32))
    pays = own * parts in _PAIRED and n >= 2 * ROWS * _ENOUGH_BLOCKS
    return Shape(own, 1, groups, 2 if pays else 1)


@dataclass
class Operands:
    """Where a block finds its operands and puts its results.

    Attributes:
        weights: one matrix, or two if the layer is gated.
        row: the address of row i of the block in x, in elements, or in records if x is stored in parts; i32.
        valid: whether row i of the block is to be computed.
        place: (row i of the block, column) -> where the result goes, in elements.
        x, out: memory.
        tile: the first tile of the weights.
        bias, residual: memory, if there are any.
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


def parts_of(form: Form) -> tuple[Parts, int]:
    """The parts of x beside weights of a form, and how many sums of x it needs for each 32 k."""
    return INTS if form.kind in ("codes8", "codes4") else FLOATS, max(form.scales, 1) if form.lows else 0


@dataclass(frozen=True)
class Stored:
    """How x is stored in parts: a record for each 32 k of a row, its parts, then step and sums, if there are any.

    Attributes:
        parts_bytes: of the parts of a record.
        numbers: whether numbers follow, four f32.
        groups: records of a row.
    """

    parts_bytes: int
    numbers: bool
    groups: int

    @staticmethod
    def of(form: Form, width: int) -> Stored:
        """For x of `width` numbers beside weights of a form."""
        x, sums = parts_of(form)
        assert sums <= 3, "a record has room for three sums"
        return Stored(x.count * x.nbytes, x.ints or sums > 0, form.units(width) * (form.unit // DEPTH))

    @property
    def nbytes(self) -> int:
        """Of a record."""
        return self.parts_bytes + 16 * self.numbers

    @property
    def quads(self) -> int:
        """Four numbers of a row each, of which each has a thread."""
        return self.groups * (DEPTH // _QUAD)


def store_parts(k: Code, form: Form, width: int, rows: Operand) -> None:
    """The kernel before: a thread splits four numbers of x, and writes their parts to `parts`."""
    (x, sums), stored = parts_of(form), Stored.of(form, width)
    item = k.block * THREADS + k.thread
    row, quad = item // stored.quads, item % stored.quads
    column, valid = quad * _QUAD, row < rows
    numbers = _loaded(k, k.pointers["x"], row * width, column, width, valid)
    split, step = x.split(k, numbers)
    per = DEPTH // _QUAD // max(sums, 1)  # quads of a sum
    total = (numbers[0] + numbers[1]) + (numbers[2] + numbers[3])
    for distance in (1, 2, 4):
        if distance < per:
            total = total + k.exchanged(total, distance)
    with k.when(valid):
        record = k.at(k.pointers["parts"], I8, (row * stored.groups + (quad >> 3)).to(I64) * stored.nbytes)
        for part, words in enumerate(split):
            place = x.place(quad) + part * x.nbytes
            k.store(k.at(record, I8, place), k.vector(words), align=4 * len(words))
        if step is not None:
            with k.when((quad & 7).equals(0)):
                k.store(record, step, stored.parts_bytes // 4)
        if sums:
            with k.when((quad % per).equals(0)):
                k.store(record, total, (quad & 7) // per + (stored.parts_bytes // 4 + 1))


def _loaded(k: Code, x: Value, row: Value, column: Value, width: int, valid: Value) -> list[Value]:
    """Four numbers of a row from `row` on, or zeros. Something is always loaded, so that several are under way."""
    inside = valid & (column < width)
    start = k.select(inside, row + column, 0)
    if width % _QUAD == 0:
        found = k.lanes(k.load(k.at(x, F32, start), "<4 x float>"))
        return [k.select(inside, number, k.f32(0.0)) for number in found]
    within = [inside & (column + i < width) for i in range(_QUAD)]
    numbers = [k.load(x, F32, k.select(each, start + i, 0)) for i, each in enumerate(within)]
    return [k.select(each, number, k.f32(0.0)) for each, number in zip(within, numbers, strict=True)]


class Linear:
    """A linear layer in a kernel.

    Args:
        form: of the weights.
        n, width: outputs and inputs of the layer.
        shape: how the work is shared.
        gated: the activation of gate weights.
        out: type of the results, "f32" or "bf16".
        stored: whether x is stored in parts.
    """

    def __init__(
        self, code: Code, form: Form, n: int, width: int, shape: Shape, gated: str | None = None, out: str = "f32",
        *, stored: bool = False,
    ) -> None:  # fmt: skip
        self.code, self.form, self.n, self.width, self.shape, self.gated, self.out = (
            code, form, n, width, shape, gated, out,
        )  # fmt: skip
        self.stored = Stored.of(form, width) if stored else None
        self.parts = 2 if gated else 1
        self.units = form.units(width)
        self.x, self.sums = parts_of(form)
        self.share()

    def share(self) -> None:
        """Takes the shared memory that a block needs."""
        code, shape = self.code, self.shape
        self.step = shape.groups * DEPTH // self.form.unit  # units of a slice that are in shared memory
        self.stride = (shape.groups + 1) * self.x.nbytes  # so that the lanes of a warp read different banks
        x_bytes = shape.at_once * self.x.count * shape.rows * self.stride
        step_bytes = shape.at_once * shape.groups * shape.rows * 4
        result_bytes = self.parts * shape.each * WARPS * ROWS * (shape.rows + 1) * 4
        self.place = code.share(max(x_bytes + step_bytes * (self.x.ints + self.sums), result_bytes))
        self.step_place = code.at(self.place, I8, x_bytes)
        self.sum_place = code.at(self.place, I8, x_bytes + step_bytes * self.x.ints)

    def emit(self, at: Operands) -> None:
        """The whole computation of a block."""
        k, shape = self.code, self.shape
        if k.own:
            k.wait()
        columns = shape.rows // 8
        own, first = k.warp % shape.at_once, at.tile + k.warp // shape.at_once
        tiles = [k.smaller(first + i, -(-self.n // ROWS) - 1) for i in range(shape.each)]
        every = [Matrix(k, base, self.form, self.n, self.width) for base in at.weights]
        matrices = [(matrix, tile) for matrix in every for tile in tiles]
        sums = [self._zeros(columns) for _ in matrices]
        if shape.at_once == SLICES:
            self._accumulate(at, matrices, k.number(0), own, sums)
            self._write(at, [self._whole(some) for some in sums])
            return
        totals = [[k.variable(F32, 0.0) for _ in range(4 * columns)] for _ in matrices]
        with k.loop(0, SLICES, shape.at_once) as first:
            for variable in chain.from_iterable(sums):
                variable.set(0.0)
            self._accumulate(at, matrices, first, own, sums)
            for total, some in zip(totals, sums, strict=True):
                for variable, value in zip(total, self._whole(some), strict=True):
                    variable.set(variable.get() + value)
        self._write(at, [[value.get() for value in some] for some in totals])

    def _zeros(self, columns: int) -> list[Variable]:
        """The sums of a range: of each 8 columns 4 of the first parts of x, then 4 of the last one."""
        return [self.code.variable(F32, 0.0) for _ in range(8 * columns)]

    def _whole(self, sums: list[Variable]) -> list[Value]:
        starts = range(0, len(sums), 8)
        return [sums[at + i].get() + sums[at + 4 + i].get() for at in starts for i in range(4)]

    def _slice(self, number: Operand) -> Value:
        """The first unit of a slice."""
        return (self.code.number(number) * self.units) // SLICES

    def _accumulate(
        self, at: Operands, matrices: Sequence[Tile], first: Value, own: Value, sums: list[list[Variable]]
    ) -> None:
        """Adds the products of slice `first + own`; `own` counts the warps of a tile."""
        k, longest, every = self.code, -(-self.units // SLICES), [matrix for matrix, _ in matrices]
        begin, end = self._slice(first + own), self._slice(first + own + 1)
        chunk = max(1, min(_LOADS // self.form.loads, self.step))
        with k.loop(0, -(-longest // self.step)) as number:
            start = begin + number * self.step
            stop = k.smaller(start + self.step, end)
            loaded = self._load(matrices, start, chunk)
            k.wait()
            k.barrier()
            if self.stored:
                self._bring_stored(self.stored, at, first, number * self.step)
            else:
                self._bring(at, first, number * self.step)
            k.barrier()
            self._add(every, loaded, own, start, start, stop, sums)
            with k.loop(start + chunk, stop, chunk) as unit:
                self._add(every, self._load(matrices, unit, chunk), own, unit, start, stop, sums)

    def _load(self, matrices: Sequence[Tile], unit: Value, chunk: int) -> list[list[Loaded]]:
        """Begins to load some units, for each tile; those after the last are the last."""
        k = self.code
        places = [k.smaller(unit + i, self.units - 1) for i in range(chunk)]
        return [[(m.load(tile, place), m.numbers(tile, place)) for m, tile in matrices] for place in places]

    def _add(
        self, matrices: Sequence[Matrix], loaded: list[list[Loaded]], own: Value, unit: Value, start: Value,
        stop: Value | None, sums: list[list[Variable]],
    ) -> None:  # fmt: skip
        """Adds the products of loaded units from `unit` on, of which those before `stop` count, or all."""
        k = self.code
        for i, some in enumerate(loaded):
            with k.guarded(unit + i < stop if stop else None):
                for matrix, (words, numbers), own_sums in zip(matrices, some, sums, strict=True):
                    for q, group in enumerate(matrix.unpacked(words, numbers, self.x.ints)):
                        place = (unit + i - start) * (self.form.unit // DEPTH) + q
                        self._multiply(group, own, place, own_sums)

    def _bring_stored(self, stored: Stored, at: Operands, first: Value, unit: Value) -> None:
        """As `_bring`, of x in parts."""
        k, shape = self.code, self.shape
        pieces, per = stored.parts_bytes // 16, self.x.nbytes // 16

        def place_of(item: Value) -> tuple[Value, Value, Value, Value]:
            """The slice, the row and the 32 k of an item, and where their record lies."""
            group, rest = item % shape.groups, item // shape.groups
            row, own = rest % shape.rows, rest // shape.rows
            begin = (self._slice(own + first) + unit) * (self.form.unit // DEPTH)
            number = at.row(k.select(at.valid(row), row, 0)) + k.smaller(begin + group, stored.groups - 1)
            return own, row, group, number.to(I64) * stored.nbytes

        count = shape.at_once * shape.rows * shape.groups
        some = next(size for size in (_BROUGHT, 3, 2, 1) if size == 1 or count * pieces % (size * THREADS) == 0)
        with k.loop(k.thread, count * pieces, some * THREADS) as start:
            items = [start + i * THREADS for i in range(some)]
            places = [place_of(item // pieces) for item in items]
            loaded = [
                k.load(k.at(at.x, I8, place + (item % pieces * 16).to(I64)), "<4 x i32>", align=16)
                for item, (_, _, _, place) in zip(items, places, strict=True)
            ]
            for item, (own, row, group, _), words in zip(items, places, loaded, strict=True):
                piece = item % pieces
                to = ((own * self.x.count + piece // per) * shape.rows + row) * self.stride + group * self.x.nbytes
                k.store(k.at(self.place, I8, to + piece % per * 16), words, align=16)
        if not stored.numbers:
            return
        with k.loop(k.thread, count, THREADS) as item:
            own, row, group, place = place_of(item)
            found = k.lanes(k.load(k.at(at.x, I8, place + stored.parts_bytes), "<4 x float>", align=16))
            if self.x.ints:
                k.store(self.step_place, found[0], (own * shape.groups + group) * shape.rows + row)
            for s in range(self.sums):
                to = (own * (shape.groups * self.sums) + group * self.sums + s) * shape.rows + row
                k.store(self.sum_place, found[1 + s], to)

    def _bring(self, at: Operands, first: Value, unit: Value) -> None:
        """Brings some units of x, from unit `unit` of each slice on, to shared memory."""
        k, shape = self.code, self.shape
        quads = shape.groups * DEPTH // _QUAD
        count = shape.at_once * shape.rows * quads
        some = _BROUGHT if count % (_BROUGHT * THREADS) == 0 else 1
        with k.loop(k.thread, count, some * THREADS) as start:
            items = [start + i * THREADS for i in range(some)]
            found = [self._quad(at, item, quads, first, unit) for item in items]
            for item, numbers in zip(items, found, strict=True):
                quad, row, own = item % quads, (item // quads) % shape.rows, item // (quads * shape.rows)
                self._put(numbers, own, row, quad)

    def _quad(self, at: Operands, item: Value, quads: int, first: Value, unit: Value) -> list[Value]:
        """Four numbers of x, or zeros beyond what is to be computed."""
        quad, row, own = item % quads, (item // quads) % self.shape.rows, item // (quads * self.shape.rows)
        begin, end = self._slice(own + first), self._slice(own + first + 1)
        column = (begin + unit) * self.form.unit + quad * _QUAD
        return self._numbers(at, row, column, column < end * self.form.unit)

    def _put(self, numbers: Sequence[Value], own: Value, row: Value, quad: Value) -> None:
        k, shape = self.code, self.shape
        parts, step = self.x.split(k, numbers)
        for part, words in enumerate(parts):
            place = ((own * self.x.count + part) * shape.rows + row) * self.stride
            place = place + (quad >> 3) * self.x.nbytes + self.x.place(quad)
            k.store(k.at(self.place, I8, place), k.vector(words), align=4 * len(words))
        if step is not None:
            with k.when((quad & 7).equals(0)):
                k.store(self.step_place, step, (own * shape.groups + (quad >> 3)) * shape.rows + row)
        if self.sums:
            self._sum(numbers, own, row, quad)

    def _numbers(self, at: Operands, row: Value, column: Value, inside: Value) -> list[Value]:
        return _loaded(self.code, at.x, at.row(row), column, self.width, inside & at.valid(row))

    def _sum(self, numbers: Sequence[Value], own: Value, row: Value, quad: Value) -> None:
        """Writes the sums of x over the k of each scale, which lows are multiplied with."""
        k, per = self.code, DEPTH // _QUAD // self.sums  # quads of a sum
        total = (numbers[0] + numbers[1]) + (numbers[2] + numbers[3])
        for distance in (1, 2, 4):
            if distance < per:
                total = total + k.exchanged(total, distance)
        with k.when((quad % per).equals(0)):
            place = (own * (self.shape.groups * self.sums) + quad // per) * self.shape.rows + row
            k.store(self.sum_place, total, place)

    def _multiply(self, group: Group, own: Value, number: Value, sums: list[Variable]) -> None:
        """Adds the products of 16 rows of the weights and all rows of x, for 32 k."""
        k = self.code
        g, t = k.lane >> 2, k.lane & 3
        for column in range(self.shape.rows // 8):
            results = sums[8 * column : 8 * column + 4], sums[8 * column + 4 : 8 * column + 8]
            x = [self._operand(own, part, g + 8 * column, number, t) for part in range(self.x.count)]
            if not self.x.ints:
                for part, some in zip(x, results, strict=True):
                    self._multiply_floats(group, part, some)
                continue
            steps = self._pair(self.step_place, own * self.shape.groups + number, column, t)
            last = [step * STEP**2 for step in steps]
            for s, scale in enumerate(group.scales):
                first, second, third = (sums_of_products(k, *self._half(group, some, s)) for some in x)
                for i, (early, late) in enumerate(zip(*results, strict=True)):
                    value = k.fma(second[i], STEP, first[i])
                    early.set(k.fma(value, steps[i % 2] * scale[i // 2], early.get()))
                    late.set(k.fma(third[i], last[i % 2] * scale[i // 2], late.get()))
            self._take_lows(group, own, number, column, results[0])

    def _half(self, group: Group, x: list[Value], s: int) -> tuple[list[Value], list[Value]]:
        """Codes and x of the k of a scale."""
        return (group.codes, x) if len(group.scales) == 1 else (group.codes[2 * s : 2 * s + 2], x[s : s + 1])

    def _multiply_floats(self, group: Group, x: list[Value], results: list[Variable]) -> None:
        """Adds the products with a part of x."""
        k = self.code
        values = [k.f32(0.0) if group.scales else result.get() for result in results]
        for h, parts in enumerate(group.parts):
            for part in parts:
                values = product(k, part, x[2 * h : 2 * h + 2], values)
        for i, (result, value) in enumerate(zip(results, values, strict=True)):
            result.set(k.fma(value, group.scales[0][i // 2], result.get()) if group.scales else value)

    def _take_lows(self, group: Group, own: Value, number: Value, column: int, results: list[Variable]) -> None:
        k, t = self.code, self.code.lane & 3
        for s, low in enumerate(group.lows):
            place = own * (self.shape.groups * self.sums) + number * self.sums + s
            totals = self._pair(self.sum_place, place, column, t)
            for i, result in enumerate(results):
                result.set(k.fma(-low[i // 2], totals[i % 2], result.get()))

    def _operand(self, own: Value, part: int, row: Value, number: Value, t: Value) -> list[Value]:
        """A part of a row of x for 32 k: the registers of a lane, those of the first half of the k first."""
        k, words = self.code, self.x.nbytes // 16
        place = ((own * self.x.count + part) * self.shape.rows + row) * self.stride
        place = place + number * self.x.nbytes + t * (4 * words)
        return k.lanes(k.load(k.at(self.place, I8, place), f"<{words} x i32>"))

    def _pair(self, base: Value, place: Value, column: int, t: Value) -> list[Value]:
        """Numbers of the two rows of x whose results a lane has."""
        k = self.code
        return k.lanes(k.load(k.at(base, F32, place * self.shape.rows + t * 2 + 8 * column), "<2 x float>"))

    def _write(self, at: Operands, sums: list[list[Value]]) -> None:
        """Adds the slices and writes the results."""
        k, shape = self.code, self.shape
        stride, g, t = shape.rows + 1, k.lane >> 2, k.lane & 3
        k.barrier()
        for part, some in enumerate(sums):  # of each matrix its tiles
            for i, value in enumerate(some):
                feature, row = g + 8 * (i // 2 % 2), t * 2 + (i % 2 + 8 * (i // 4))
                k.store(self.place, value, ((k.warp + part * WARPS) * ROWS + feature) * stride + row)
        k.barrier()
        wide = shape.tiles * shape.each * ROWS
        with k.loop(k.thread, wide * shape.rows, THREADS) as item:
            feature, row = item % wide, item // wide
            column = at.tile * ROWS + feature
            with k.when(at.valid(row) & (column < self.n)):
                values = [self._total(part, feature, row) for part in range(self.parts)]
                self._finish(at, row, column, values)

    def _total(self, part: int, feature: Value, row: Value) -> Value:
        k, shape = self.code, self.shape
        if shape.at_once == 1:
            warps: list[Value] = [feature // ROWS]
        else:
            warps = [k.number(w) for w in range(shape.at_once)]
        found = k.f32(0.0)
        tile = feature // ROWS + part * shape.each if shape.at_once > 1 else k.number(part)
        for warp in warps:
            place = ((warp + tile * WARPS) * ROWS + feature % ROWS) * (shape.rows + 1) + row
            value = k.load(self.place, F32, place)
            found = value if shape.at_once == 1 else found + value
        return found

    def _finish(self, at: Operands, row: Value, column: Value, values: list[Value]) -> None:
        k = self.code
        if at.bias:
            values = [v + k.load(b, F32, column, constant=True) for v, b in zip(values, at.bias, strict=True)]
        result = UNARY[self.gated](k, values[0]) * values[1] if self.gated else values[0]
        place = at.place(row, column)
        if at.residual is not None:
            result = result + k.load(at.residual, F32, place)
        k.store(at.out, rounded(result, self.out), place)


def product(k: Code, a: Sequence[Value], b: Sequence[Value], c: Sequence[Value]) -> list[Value]:
    """c + a b of 16 x 16 and 16 x 8 numbers of bf16, by a warp (mma.sync m16n8k16)."""
    name = "llvm.nvvm.mma.m16n8k16.row.col.bf16"
    k.declared.add(f"declare {{float, float, float, float}} @{name}({', '.join(['i32'] * 6 + ['float'] * 4)})")
    given = ", ".join(f"{v.type} {v.text}" for v in (*a, *b, *c))
    found = k.op(f"call {{float, float, float, float}} @{name}({given})", "{float, float, float, float}")
    return [k.op(f"extractvalue {found.type} {found.text}, {i}", F32) for i in range(4)]
