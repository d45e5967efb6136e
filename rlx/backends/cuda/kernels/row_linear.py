"""Linear layers of one row: a block computes some tiles of the weights, one after the other.

Each of its warps has one of the `SLICES` ranges of k. Weights never change, so a warp loads the first ones before the
kernel before it ends, and the next ones while it multiplies. The products and sums are those of `linear.py`, in the
same order, so that a row has the same bits alone and among others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

from rlx.backends.cuda.code import F32, I8, THREADS, WARPS, Code, Value, Variable
from rlx.backends.cuda.kernels.linear import SLICES, Linear, Loaded, Operands, Shape
from rlx.backends.cuda.kernels.matrix import Group, Matrix
from rlx.backends.cuda.kernels.parts import STEP, sums_of_products
from rlx.backends.cuda.layouts import DEPTH, ROWS, Form
from rlx.backends.cuda.numbers import UNARY, rounded

WIDEST = 1 << 14  # inputs of a row that are in shared memory
_BLOCKS = 264  # of a layer at most: about two for each multiprocessor of a large card
_PLACE = 128  # bytes of 32 k of x in shared memory: its parts, then zeros
_HELD = 64  # registers of weights that a thread loads at once, if they are all it has
_AHEAD = 40  # the same if it loads the next ones meanwhile


@dataclass(frozen=True)
class RowShape:
    """How the work is shared.

    Attributes:
        tiles: of a block, which are `blocks` apart.
        blocks: of the layer.
        chunks: in which a warp loads the weights of its range of a tile.
        units: of a chunk.
    """

    tiles: int
    blocks: int
    chunks: int
    units: int


def row_shape(form: Form, n: int, width: int, parts: int, *, one_tile: bool = False) -> RowShape:
    """The shape of a layer.

    Args:
        parts: matrices: 2 if the layer is gated.
        one_tile: of each block.
    """
    tiles, longest = -(-n // ROWS), -(-form.units(width) // SLICES)
    own = 1 if one_tile else -(-tiles // _BLOCKS)
    registers = parts * (4 * form.loads + _numbers(form))
    most = _HELD // registers
    if own > 1 or longest > most:
        most = _AHEAD // registers
    units = _divisor(longest, max(1, most))
    return RowShape(own, -(-tiles // own), -(-longest // units), units)


def _divisor(count: int, most: int) -> int:
    """How many of `count` are taken at a time: a divisor if one is near the most, so that none is left over."""
    found = next(n for n in range(min(most, count), 0, -1) if count % n == 0)
    return found if 2 * found > most or count <= most else -(-count // -(-count // most))


def _numbers(form: Form) -> int:
    """Registers of what the scales and lows of a unit are made of."""
    if form.row is None:
        return 0
    return form.unit // DEPTH * -(-form.row.field_bytes // 2) + form.row.head


class RowLinear(Linear):
    """A linear layer of one row in a kernel.

    Args:
        form: of the weights.
        n, width: outputs and inputs of the layer.
        shape: how the work is shared.
        gated: the activation of gate weights.
        out: type of the results, "f32" or "bf16".
        take: gets each result and its number in place of memory.
    """

    def __init__(
        self, code: Code, form: Form, n: int, width: int, shape: RowShape, gated: str | None = None, out: str = "f32",
        take: Callable[[Value, Value], None] | None = None,
    ) -> None:  # fmt: skip
        self.own, self.take = shape, take or self._store
        super().__init__(code, form, n, width, Shape(1, 1, 1), gated, out)
        self.begin, self.end = self._slice(code.warp), self._slice(code.warp + 1)

    def share(self) -> None:
        code = self.code
        self.quads = -(-self.form.groups(self.width) // 4) * 32  # times four elements of x, for whole warps
        self.place = code.share(self.quads // 8 * _PLACE)
        self.step_place = code.share(self.quads // 8 * 4)
        self.sum_place = code.share(self.quads // 8 * self.sums * 4)
        self.results = code.share(2 * self.parts * WARPS * ROWS * 4)

    def emit(self, at: Operands) -> None:
        """The whole computation of a block."""
        k, own = self.code, self.own
        matrices = [Matrix(k, base, self.form, self.n, self.width) for base in at.weights]
        sums = [[k.variable(F32, 0.0) for _ in range(2 if self.x.ints else 4)] for _ in matrices]
        self.added = [k.variable(F32, 0.0) for _ in range(self.parts * bool(at.bias) + (at.residual is not None))]
        loaded = self._chunk(matrices, at, k.number(0))
        if own.tiles * own.chunks == 1:
            k.wait()
            self._fetch(at, k.number(0))
            self._bring_row(at)
            k.barrier()
            k.let_next()
            self._add_chunk(matrices, loaded, self.begin, sums)
            self._finish_tile(at, k.number(0), sums)
            return
        held = [k.variable(value.type, value) for value in _flat(loaded)]
        k.wait()
        self._bring_row(at)
        k.barrier()
        k.let_next()
        with k.loop(0, own.tiles * own.chunks) as item:
            now = _shaped(loaded, [each.get() for each in held])
            tile = item // own.chunks
            self._fetch(at, tile)
            with k.when(item + 1 < own.tiles * own.chunks):
                for variable, value in zip(held, _flat(self._chunk(matrices, at, item + 1)), strict=True):
                    variable.set(value)
            self._add_chunk(matrices, now, self.begin + item % own.chunks * own.units, sums)
            with k.when((item % own.chunks).equals(own.chunks - 1)):
                self._finish_tile(at, tile, sums)
                for variable in chain.from_iterable(sums):
                    variable.set(0.0)

    def _tile(self, at: Operands, number: Value) -> Value:
        return at.tile + number * self.own.blocks

    def _chunk(self, matrices: Sequence[Matrix], at: Operands, item: Value) -> list[list[Loaded]]:
        """Begins to load the weights of a chunk."""
        tile = self.code.smaller(self._tile(at, item // self.own.chunks), -(-self.n // ROWS) - 1)
        first = self.begin + item % self.own.chunks * self.own.units
        return self._load([(matrix, tile) for matrix in matrices], first, self.own.units)

    def _fetch(self, at: Operands, number: Value) -> None:
        """Begins to load what a thread adds to its result."""
        k = self.code
        column = self._tile(at, number) * ROWS + k.thread
        if not self.added:
            return
        with k.when((k.thread < ROWS) & (column < self.n)):
            for variable, bias in zip(self.added, at.bias, strict=False):
                variable.set(k.load(bias, F32, column, constant=True))
            if at.residual is not None:
                self.added[-1].set(k.load(at.residual, F32, at.place(k.number(0), column)))

    def _add_chunk(
        self, matrices: Sequence[Matrix], loaded: list[list[Loaded]], first: Value, sums: list[list[Variable]]
    ) -> None:
        zero, units = self.code.number(0), self.units // SLICES
        whole = self.units % SLICES == 0 and units % self.own.units == 0
        self._add(matrices, loaded, zero, first, zero, None if whole else self.end, sums)

    # -- x ------------------------------------------------------------------------------------------------------------

    def _bring_row(self, at: Operands) -> None:
        """Brings x to shared memory."""
        k = self.code
        quads = [k.thread + start for start in range(0, self.quads, THREADS)]
        for first in range(0, len(quads), 4):
            some = quads[first : first + 4]
            zero, always = k.number(0), k.as_value(1, "i1")
            found = [self._numbers(at, zero, quad * 4, always) for quad in some]
            for quad, numbers in zip(some, found, strict=True):
                with k.when(quad < self.quads):
                    self._put(numbers, zero, zero, quad)

    def _put(self, numbers: Sequence[Value], own: Value, row: Value, quad: Value) -> None:
        k, group = self.code, quad >> 3
        parts, step = self.x.split(k, numbers)
        empty = [[k.number(0)] * len(parts[0])] * (_PLACE // self.x.nbytes - len(parts))
        for part, words in enumerate([*parts, *empty]):
            place = group * _PLACE + (self.x.place(quad) + part * self.x.nbytes)
            k.store(k.at(self.place, I8, place), k.vector(words), align=4 * len(words))
        if step is not None:
            with k.when((quad & 7).equals(0)):
                k.store(self.step_place, step, group)
        if self.sums:
            self._sum(numbers, own, row, quad)

    # -- products -----------------------------------------------------------------------------------------------------

    def _multiply(self, group: Group, own: Value, number: Value, sums: list[Variable]) -> None:
        """Adds the products for 32 k: the parts of x are the columns, whose results t = 0 and t = 1 have."""
        k, words = self.code, self.x.nbytes // 16
        part, t = k.lane >> 2 & (_PLACE // self.x.nbytes - 1), k.lane & 3
        place = number * _PLACE + part * self.x.nbytes + t * (4 * words)
        x = k.lanes(k.load(k.at(self.place, I8, place), f"<{words} x i32>"))
        if not self.x.ints:
            self._multiply_floats(group, x, sums)
            return
        factor = k.select(t.equals(0), k.f32(1.0), k.f32(STEP**2))
        step = k.load(self.step_place, F32, number) * factor
        for s, scale in enumerate(group.scales):
            found = sums_of_products(k, *self._half(group, x, s))
            for i, result in enumerate(sums):
                value = k.fma(found[2 * i + 1], STEP, found[2 * i])
                result.set(k.fma(value, step * scale[i], result.get()))
        for s, low in enumerate(group.lows):
            total = k.load(self.sum_place, F32, number * self.sums + s)
            total = k.select(t.equals(0), total, k.f32(0.0))
            for i, result in enumerate(sums):
                result.set(k.fma(-low[i], total, result.get()))

    def _rows(self, sums: list[Variable]) -> list[Value]:
        """The sums of the two rows of a lane with t = 0."""
        if self.x.ints:
            return [each.get() + self.code.exchanged(each.get(), 1) for each in sums]
        return [sums[0].get() + sums[1].get(), sums[2].get() + sums[3].get()]

    # -- results ------------------------------------------------------------------------------------------------------

    def _finish_tile(self, at: Operands, number: Value, sums: list[list[Variable]]) -> None:
        """Adds the ranges and writes the results of a tile."""
        k, size = self.code, WARPS * ROWS
        base = number % 2 * (self.parts * size)
        rows = [self._rows(some) for some in sums]
        with k.when((k.lane & 3).equals(0)):
            for part, (first, second) in enumerate(rows):
                place = base + k.warp * ROWS + (k.lane >> 2) + part * size
                k.store(self.results, first, place)
                k.store(self.results, second, place + 8)
        k.barrier()
        column = self._tile(at, number) * ROWS + k.thread
        with k.when((k.thread < ROWS) & (column < self.n) & at.valid(k.number(0))):
            values = []
            for part in range(self.parts):
                total = k.f32(0.0)
                for warp in range(WARPS):
                    total = total + k.load(self.results, F32, base + k.thread + (part * size + warp * ROWS))
                values.append(total)
            self.at = at
            self.take(self._result(at, values), column)

    def _store(self, result: Value, column: Value) -> None:
        k = self.code
        k.store(self.at.out, rounded(result, self.out), self.at.place(k.number(0), column))

    def _result(self, at: Operands, values: list[Value]) -> Value:
        if at.bias:
            values = [value + bias.get() for value, bias in zip(values, self.added, strict=False)]
        result = UNARY[self.gated](self.code, values[0]) * values[1] if self.gated else values[0]
        return result if at.residual is None else result + self.added[-1].get()


def _flat(loaded: list[list[Loaded]]) -> list[Value]:
    return [value for some in loaded for words, numbers in some for value in (*words, *(x for n in numbers for x in n))]


def _shaped(like: list[list[Loaded]], values: Sequence[Value]) -> list[list[Loaded]]:
    """The inverse of `_flat`."""
    given = iter(values)
    return [
        [([next(given) for _ in words], [[next(given) for _ in n] for n in numbers]) for words, numbers in some]
        for some in like
    ]
