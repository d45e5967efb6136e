"""Linear layers on tensor cores: x W^T with weights of any type, and the same for experts.

The weights are the operand with 16 rows, the rows of x the one with 8 columns. Both are bf16. x is the sum of two of
them, within 2^-17, and so are weights of f32 and f16; codes of quantized weights are exact. Products are summed in f32:
per scale of the weights first, then times the scale.

The k of a row are cut into `SLICES` ranges. The sum of each range is computed by itself, and then all are added in
order. So a result has the same bits whoever computes the ranges: with few rows one warp each, with many rows one warp
all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rlx.backends.cuda.code import F32, I16, THREADS, WARPS, Code, Operand, Value, Variable
from rlx.backends.cuda.kernels.matrix import Group, Matrix
from rlx.backends.cuda.layouts import DEPTH, ROWS, Form
from rlx.backends.cuda.numbers import UNARY, bf16_parts, rounded

#: The registers of a unit, and its scales and lows.
Loaded: TypeAlias = tuple[list[Value], list[list[tuple[Value, Value]]]]

SLICES = 8
_PAD = 16  # elements between rows of x in shared memory, so that the lanes of a warp read different banks
_QUAD = 4  # elements of x that a thread brings at a time
_ENOUGH_BLOCKS = 128  # about as many as a large card has multiprocessors
_MOST_GROUPS = 64  # of a slice of a single row in shared memory
_LOADS = 4  # of 16 bytes that a lane has under way for a matrix


@dataclass(frozen=True)
class Shape:
    """How the work is shared.

    Attributes:
        rows: of x that a block computes, at least the 8 of a product.
        stored: of them in shared memory: a single row stands for all 8, whose results are not written.
        tiles: of the weights that a block computes, each in `WARPS / tiles` warps.
        groups: times 32 k of each slice that are brought to shared memory at a time.
    """

    rows: int
    stored: int
    tiles: int
    groups: int

    @property
    def at_once(self) -> int:
        """Slices that are computed at a time."""
        return WARPS // self.tiles


def shape_of(rows: int, n: int, width: int) -> Shape:
    """The shape for calls of up to so many rows of a layer with `n` outputs and `width` inputs."""
    if rows > 64:
        own = 64 if -(-n // (ROWS * WARPS)) * -(-rows // 64) >= _ENOUGH_BLOCKS else 32
        return Shape(own, own, WARPS, 4)
    if rows == 1:
        groups = 2 * -(-width // (2 * DEPTH * SLICES))  # a whole slice; even, for units of 64 k
        return Shape(8, 1, 1, min(groups, _MOST_GROUPS))
    return next(Shape(n, n, 1, groups) for n, groups in ((8, 4), (16, 2), (32, 2)) if n >= min(rows, 32))


@dataclass
class Operands:
    """Where a block finds its operands and puts its results.

    Attributes:
        weights: one matrix, or two if the layer is gated.
        row: the address of row i of the block in x, in elements; i32.
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


class Linear:
    """A linear layer in a kernel.

    Args:
        form: of the weights.
        n, width: outputs and inputs of the layer.
        shape: how the work is shared.
        gated: the activation of gate weights.
        out: type of the results, "f32" or "bf16".
    """

    def __init__(
        self, code: Code, form: Form, n: int, width: int, shape: Shape, gated: str | None = None, out: str = "f32"
    ) -> None:
        self.code, self.form, self.n, self.width, self.shape, self.gated, self.out = (
            code, form, n, width, shape, gated, out,
        )  # fmt: skip
        self.parts = 2 if gated else 1
        self.residual: Variable | None = None  # of a single row, what a thread adds
        self.units = form.units(width)
        self.sums = max(form.scales, 1) if form.lows else 0  # of x, for each 32 k
        self.step = shape.groups * DEPTH // form.unit  # units of a slice that are in shared memory
        self.stride = shape.groups * DEPTH + _PAD
        x_bytes = shape.at_once * 2 * shape.stored * self.stride * 2
        sum_bytes = shape.at_once * shape.groups * self.sums * shape.stored * 4
        result_bytes = self.parts * WARPS * ROWS * (shape.rows + 1) * 4
        self.place = code.share(max(x_bytes + sum_bytes, result_bytes))
        self.sum_place = code.at(self.place, "i8", x_bytes)

    def emit(self, at: Operands) -> None:
        """The whole computation of a block."""
        k, shape = self.code, self.shape
        matrices = [Matrix(k, base, self.form, self.n, self.width) for base in at.weights]
        columns = shape.rows // 8
        self.residual = k.variable(F32, 0.0) if at.residual is not None and shape.stored == 1 else None
        own = k.warp % shape.at_once
        tile = k.smaller(at.tile + k.warp // shape.at_once, -(-self.n // ROWS) - 1)
        sums = [self._zeros(columns) for _ in matrices]
        if shape.at_once == SLICES:
            self._accumulate(at, matrices, tile, k.number(0), own, sums)
            self._write(at, sums)
            return
        totals = [self._zeros(columns) for _ in matrices]
        with k.loop(0, SLICES, shape.at_once) as first:
            for some in sums:
                for value in some:
                    value.set(0.0)
            self._accumulate(at, matrices, tile, first, own, sums)
            for total, some in zip(totals, sums, strict=True):
                for a, b in zip(total, some, strict=True):
                    a.set(a.get() + b.get())
        self._write(at, totals)

    def _zeros(self, columns: int) -> list[Variable]:
        return [self.code.variable(F32, 0.0) for _ in range(4 * columns)]

    def _slice(self, number: Operand) -> Value:
        """The first unit of a slice."""
        return (self.code.number(number) * self.units) // SLICES

    def _accumulate(
        self, at: Operands, matrices: Sequence[Matrix], tile: Value, first: Value, own: Value,
        sums: list[list[Variable]],
    ) -> None:  # fmt: skip
        """Adds the products of slice `first + own`; `own` counts the warps of a tile."""
        k, longest = self.code, -(-self.units // SLICES)
        begin, end = self._slice(first + own), self._slice(first + own + 1)
        chunk = max(1, min(_LOADS // self.form.loads, self.step))
        with k.loop(0, -(-longest // self.step)) as number:
            start = begin + number * self.step
            stop = k.smaller(start + self.step, end)
            loaded = self._load(matrices, tile, start, chunk)
            k.wait()
            self._fetch_residual(at)
            k.barrier()
            self._bring(at, first, number * self.step)
            k.barrier()
            self._add(matrices, loaded, own, start, start, stop, sums)
            with k.loop(start + chunk, stop, chunk) as unit:
                self._add(matrices, self._load(matrices, tile, unit, chunk), own, unit, start, stop, sums)

    def _fetch_residual(self, at: Operands) -> None:
        """Of a single row, begins to load what a thread adds to its result."""
        k = self.code
        if self.residual is None:
            return
        column = at.tile * ROWS + k.thread
        with k.when((k.thread < ROWS) & (column < self.n)):
            self.residual.set(k.load(at.residual or at.x, F32, at.place(k.number(0), column)))

    def _load(self, matrices: Sequence[Matrix], tile: Value, unit: Value, chunk: int) -> list[list[Loaded]]:
        """Begins to load some units, for each matrix; those after the last are the last."""
        k = self.code
        places = [k.smaller(unit + i, self.units - 1) for i in range(chunk)]
        return [[(m.load(tile, place), m.numbers(tile, place)) for m in matrices] for place in places]

    def _add(
        self, matrices: Sequence[Matrix], loaded: list[list[Loaded]], own: Value, unit: Value, start: Value,
        stop: Value, sums: list[list[Variable]],
    ) -> None:  # fmt: skip
        """Adds the products of loaded units from `unit` on, of which those before `stop` count."""
        k = self.code
        for i, some in enumerate(loaded):
            with k.when(unit + i < stop):
                for matrix, (words, numbers), own_sums in zip(matrices, some, sums, strict=True):
                    for q, group in enumerate(matrix.unpacked(words, numbers)):
                        place = (unit + i - start) * (self.form.unit // DEPTH) + q
                        self._multiply(group, own, place, own_sums)

    def _bring(self, at: Operands, first: Value, unit: Value) -> None:
        """Brings some units of x, from unit `unit` of each slice on, to shared memory as two bf16 parts."""
        k, shape = self.code, self.shape
        quads = shape.groups * DEPTH // _QUAD
        with k.loop(k.thread, shape.at_once * shape.stored * quads, THREADS) as item:
            quad, row, own = item % quads, (item // quads) % shape.stored, item // (quads * shape.stored)
            begin, end = self._slice(own + first), self._slice(own + first + 1)
            column = (begin + unit) * self.form.unit + quad * _QUAD
            inside = column < end * self.form.unit
            numbers = self._numbers(at, row, column, inside)
            high, low = zip(*(bf16_parts(k, number) for number in numbers), strict=True)
            for part, some in enumerate((high, low)):
                place = ((own * 2 + part) * shape.stored + row) * self.stride + quad * _QUAD
                k.store(k.at(self.place, I16, place), k.vector(some), align=8)
            if self.sums:
                self._sum(numbers, own, row, quad)

    def _numbers(self, at: Operands, row: Value, column: Value, inside: Value) -> list[Value]:
        """Four numbers of a row, or zeros."""
        k = self.code
        found = [k.variable(F32, 0.0) for _ in range(_QUAD)]
        whole = self.width % _QUAD == 0
        with k.when(inside & at.valid(row) & (column < self.width)):
            start = at.row(row) + column
            if whole:
                for place, number in zip(found, k.lanes(k.load(k.at(at.x, F32, start), "<4 x float>")), strict=True):
                    place.set(number)
            else:
                for i, place in enumerate(found):
                    with k.when(column + i < self.width):
                        place.set(k.load(at.x, F32, start + i))
        return [place.get() for place in found]

    def _sum(self, numbers: Sequence[Value], own: Value, row: Value, quad: Value) -> None:
        """Writes the sums of x over the k of each scale, which lows are multiplied with."""
        k, per = self.code, DEPTH // _QUAD // self.sums  # quads of a sum
        total = (numbers[0] + numbers[1]) + (numbers[2] + numbers[3])
        for distance in (1, 2, 4):
            if distance < per:
                total = total + k.exchanged(total, distance)
        with k.when((quad % per).equals(0)):
            place = (own * (self.shape.groups * self.sums) + quad // per) * self.shape.stored + row
            k.store(self.sum_place, total, place)

    def _multiply(self, group: Group, own: Value, number: Value, sums: list[Variable]) -> None:
        """Adds the products of 16 rows of the weights and all rows of x, for 32 k."""
        k, shape = self.code, self.shape
        g, t = k.lane >> 2, k.lane & 3
        for column in range(shape.rows // 8):
            results = sums[4 * column : 4 * column + 4]
            x = [[self._x(own, part, g + 8 * column, number, h, t) for part in range(2)] for h in range(2)]
            if not group.scales:
                values = [result.get() for result in results]
                for h in range(2):
                    values = self._products(group.parts[h], x[h], values)
                for result, value in zip(results, values, strict=True):
                    result.set(value)
                continue
            zero = [k.f32(0.0)] * 4
            by_scale = [self._products(group.parts[0], x[0], zero)]
            if len(group.scales) == 1:
                by_scale = [self._products(group.parts[1], x[1], by_scale[0])]
            else:
                by_scale.append(self._products(group.parts[1], x[1], zero))
            for s, (values, scale) in enumerate(zip(by_scale, group.scales, strict=True)):
                low = group.lows[s] if group.lows else None
                totals = self._sums_of(own, number, s, column, t) if low else []
                for i, (result, value) in enumerate(zip(results, values, strict=True)):
                    found = k.fma(value, scale[i // 2], result.get())
                    result.set(k.fma(-low[i // 2], totals[i % 2], found) if low else found)

    def _x(self, own: Value, part: int, row: Value, number: Value, h: int, t: Value) -> list[Value]:
        start = own * 2 + part if self.shape.stored == 1 else (own * 2 + part) * self.shape.stored + row
        place = start * self.stride + number * DEPTH + (t * 4 + 16 * h)
        return self.code.lanes(self.code.load(self.code.at(self.place, I16, place), "<2 x i32>"))

    def _sums_of(self, own: Value, number: Value, s: int, column: int, t: Value) -> list[Value]:
        k = self.code
        place = (own * (self.shape.groups * self.sums) + number * self.sums + s) * self.shape.stored
        if self.shape.stored == 1:
            return [k.load(self.sum_place, F32, place)] * 2
        return k.lanes(k.load(k.at(self.sum_place, F32, place + t * 2 + 8 * column), "<2 x float>"))

    def _products(self, weights: Sequence[list[Value]], x: Sequence[list[Value]], sums: list[Value]) -> list[Value]:
        """Adds the products of the parts, but not that of the low parts of both."""
        for i, some in enumerate(weights):
            for j, other in enumerate(x):
                if i + j < 2:
                    sums = product(self.code, some, other, sums)
        return sums

    def _write(self, at: Operands, sums: list[list[Variable]]) -> None:
        """Adds the slices and writes the results."""
        k, shape = self.code, self.shape
        stride, g, t = shape.rows + 1, k.lane >> 2, k.lane & 3
        k.barrier()
        for part, some in enumerate(sums):
            for i, value in enumerate(some):
                feature, row = g + 8 * (i // 2 % 2), t * 2 + (i % 2 + 8 * (i // 4))
                k.store(self.place, value.get(), ((k.warp + part * WARPS) * ROWS + feature) * stride + row)
        k.barrier()
        wide = shape.tiles * ROWS
        with k.loop(k.thread, wide * shape.stored, THREADS) as item:
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
        for warp in warps:
            place = ((warp + part * WARPS) * ROWS + feature % ROWS) * (shape.rows + 1) + row
            value = k.load(self.place, F32, place)
            found = value if shape.at_once == 1 else found + value
        return found

    def _finish(self, at: Operands, row: Value, column: Value, values: list[Value]) -> None:
        k = self.code
        if at.bias:
            values = [v + k.load(b, F32, column, constant=True) for v, b in zip(values, at.bias, strict=True)]
        result = UNARY[self.gated](k, values[0]) * values[1] if self.gated else values[0]
        place = at.place(row, column)
        if self.residual is not None:
            result = result + self.residual.get()
        elif at.residual is not None:
            result = result + k.load(at.residual, F32, place)
        k.store(at.out, rounded(result, self.out), place)


def product(k: Code, a: Sequence[Value], b: Sequence[Value], c: Sequence[Value]) -> list[Value]:
    """c + a b of 16 x 16 and 16 x 8 numbers of bf16, by a warp (mma.sync m16n8k16)."""
    name = "llvm.nvvm.mma.m16n8k16.row.col.bf16"
    k.declared.add(f"declare {{float, float, float, float}} @{name}({', '.join(['i32'] * 6 + ['float'] * 4)})")
    given = ", ".join(f"{v.type} {v.text}" for v in (*a, *b, *c))
    found = k.op(f"call {{float, float, float, float}} @{name}({given})", "{float, float, float, float}")
    return [k.op(f"extractvalue {found.type} {found.text}, {i}", F32) for i in range(4)]

