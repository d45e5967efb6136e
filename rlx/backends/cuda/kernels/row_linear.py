"""Linear layers of one row: a block computes some tiles of the weights, one after the other.

Each of its warps has one of the `SLICES` ranges of k, whose weights come through a ring (`weight_ring.py`). Products
and sums are those of `linear.py`, in the same order, so that a row has the same bits alone and among others.

A multiprocessor has room for the blocks of a layer and for those of the next kernel, which fill their rings meanwhile,
and for no more: so blocks are spread evenly. Of a layer that is read quickly it has one block, so that x is split once;
of a long one it has two, since more warps wait less.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

from rlx.backends.cuda.code import F32, I8, I32, THREADS, WARPS, Code, Value, Variable
from rlx.backends.cuda.kernels.linear import SLICES, Operands, parts_of, product
from rlx.backends.cuda.kernels.matrix import Group, Matrix
from rlx.backends.cuda.kernels.parts import STEP, sums_of_products
from rlx.backends.cuda.kernels.scales import Numbers
from rlx.backends.cuda.kernels.weight_ring import Piece, Ring
from rlx.backends.cuda.layouts import DEPTH, LANES, LOAD, ROWS, Form
from rlx.backends.cuda.numbers import UNARY, rounded

WIDEST = 1 << 14  # inputs of a row that are in shared memory
_BLOCKS = 132  # multiprocessors of a large card
_LONG = 64 << 10  # bytes of weights of each from which on it has two blocks
_FIT = 3  # blocks of a long layer, and the next one, that fit in a multiprocessor
_X_SHARE = 50  # percent of the shared memory of a block that x takes at most if there are two
_X_BYTES = 112  # of 32 k of x in shared memory, about
_RESERVED = 1024  # bytes of shared memory that the card takes for each block
_PIECE = 2048  # bytes of codes of the pieces of all matrices
_STAGES = 2  # pieces of a ring at least, or they are made smaller
_TOGETHER = 4  # products that are under way before the first is scaled
_BROUGHT = 4  # times four numbers of x that a thread loads before it uses them


@dataclass(frozen=True)
class RowShape:
    """How the work is shared.

    Attributes:
        tiles: of a block, which are `blocks` apart.
        blocks: of the layer.
        least, shared: bytes of shared memory of a block at least, and at most if its ring is long enough then.
        most: the same at most.
        resident: blocks that a multiprocessor is to have registers for; 0 if it has enough.
    """

    tiles: int
    blocks: int
    least: int
    shared: int
    most: int
    resident: int


def row_shape(form: Form, n: int, width: int, parts: int, among: int = 0, shared: int = 227 << 10) -> RowShape:
    """The shape of a layer.

    Args:
        parts: matrices: 2 if the layer is gated.
        among: bytes of all matrices whose blocks run side by side; 0 if each block has one tile.
        shared: bytes of shared memory that a block of the target can have.
    """
    tiles, x = -(-n // ROWS), form.groups(width) * _X_BYTES
    whole = shared + _RESERVED
    long = among > _LONG * _BLOCKS and x <= whole // _FIT * _X_SHARE // 100
    own = max(1, -(-among * tiles // ((2 if long else 1) * _BLOCKS * parts * form.places(n, width)[2])))
    fit = _FIT if long else 2
    least = whole // (fit + 1) if among else 0
    return RowShape(own, -(-tiles // own), least, whole // fit - _RESERVED, shared, fit if long else 0)


def _divisor(count: int, most: int) -> int:
    """How many of `count` are taken at a time: a divisor if one is near the most, so that none is left over."""
    found = next(n for n in range(min(most, count), 0, -1) if count % n == 0)
    return found if 2 * found > most or count <= most else -(-count // -(-count // most))


class RowLinear:
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
        self.code, self.form, self.n, self.width, self.shape, self.gated, self.out = (
            code, form, n, width, shape, gated, out,
        )  # fmt: skip
        self.take = take or self._store
        self.parts = 2 if gated else 1
        self.x, self.sums = parts_of(form)
        self.groups = form.groups(width)
        self.quads = -(-self.groups // 4) * 32  # times four elements of x, for whole warps
        self.numbers = self.x.ints + self.sums  # that products with 32 k are multiplied with, of a part of x
        self.stride = 4 * (self.numbers if self.numbers < 3 else 4)
        self.record = self.x.count * self.x.nbytes  # bytes of 32 k of x
        self.place = code.share(self.quads // 8 * self.record)
        self.number_place = code.share(self.quads // 8 * 2 * self.stride)
        self.results = code.share(2 * self.parts * WARPS * ROWS * 4)

    def emit(self, at: Operands) -> None:
        """The whole computation of a block."""
        k, shape, units = self.code, self.shape, self.form.units(self.width)
        matrices = [Matrix(k, base, self.form, self.n, self.width) for base in at.weights]
        self.begin, self.end = (((k.warp + i) * units) // SLICES for i in range(2))
        self.piece, stages = self._cut()
        longest, whole = -(-units // SLICES), self._whole(self.piece.units)
        self.pieces = -(-longest // self.piece.units)
        count = shape.tiles * self.pieces
        self.ring = Ring(k, matrices, self.piece, stages)
        k.shared = max(k.shared, shape.least)
        k.resident = shape.resident
        sums = [[k.variable(F32, 0.0) for _ in range(2 if self.x.ints else 4)] for _ in matrices]
        self.added = [k.variable(F32, 0.0) for _ in range(self.parts * bool(at.bias) + (at.residual is not None))]
        for first in range(stages):
            self._begin(at, k.number(first), k.number(first))
            self.ring.end()
        k.wait()
        self._bring_row(at)
        k.barrier()
        slot = k.variable(I32, 0)
        with k.loop(0, shape.tiles) as tile:
            self._fetch(at, tile)
            with k.loop(0, self.pieces) as number:
                own = slot.get()
                self._add(own, self.begin + number * self.piece.units, None if whole else self.end, sums)
                if count > stages:
                    item = tile * self.pieces + number + stages
                    with k.when(item < count):
                        self._begin(at, item, own)
                self.ring.end()
                slot.set(k.select((own + 1).equals(stages), 0, own + 1))
            self._finish_tile(at, tile, sums)
            for variable in chain.from_iterable(sums):
                variable.set(0.0)

    def _cut(self) -> tuple[Piece, int]:
        """What is copied at a time, and how many of these a ring has."""
        longest, taken = -(-self.form.units(self.width) // SLICES), self.code.shared
        most = max(1, _PIECE // (self.parts * self.form.loads * LANES * LOAD))
        for units in sorted({_divisor(longest, size) for size in range(1, most + 1)}, reverse=True):
            size, block = units * self.form.unit, self.form.block
            piece = Piece(self.form, units, self._whole(units) and (size % block == 0 or block % size == 0))
            count = self.shape.tiles * -(-longest // units)
            stages = Ring.stages_in(self.shape.shared - taken, piece, self.parts)
            if stages >= min(count, _STAGES):
                return piece, min(count, stages)
        return piece, max(1, min(count, _STAGES, Ring.stages_in(self.shape.most - taken, piece, self.parts)))

    def _whole(self, units: int) -> bool:
        """Whether all pieces of so many units are whole."""
        every = self.form.units(self.width)
        return every % SLICES == 0 and every // SLICES % units == 0

    def _begin(self, at: Operands, item: Value, slot: Value) -> None:
        k, pieces = self.code, self.pieces
        tile = k.smaller(self._tile(at, item // pieces), -(-self.n // ROWS) - 1)
        self.ring.begin(slot, tile, self.begin + item % pieces * self.piece.units)

    def _tile(self, at: Operands, number: Value) -> Value:
        return at.tile + number * self.shape.blocks

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

    # -- x ------------------------------------------------------------------------------------------------------------

    def _bring_row(self, at: Operands) -> None:
        """Brings x to shared memory."""
        k = self.code
        each = min(_BROUGHT, -(-self.quads // THREADS))
        with k.loop(0, self.quads, each * THREADS) as start:
            quads = [start + k.thread + i * THREADS for i in range(each)]
            found = [self._quad(at, quad * 4) for quad in quads]
            for quad, numbers in zip(quads, found, strict=True):
                whole = self.quads % (each * THREADS) == 0
                with k.guarded(None if whole else quad < self.quads):
                    self._put(numbers, quad)

    def _quad(self, at: Operands, column: Value) -> list[Value]:
        """Four numbers of x, or zeros beyond its end and if it is not to be computed."""
        k, valid = self.code, at.valid(self.code.number(0))
        start = at.row(k.number(0))
        if self.width % 4 == 0:
            inside = valid if 4 * self.quads == self.width else valid & (column < self.width)
            found = k.lanes(k.load(k.at(at.x, F32, k.select(inside, start + column, 0)), "<4 x float>"))
            return [k.select(inside, number, k.f32(0.0)) for number in found]
        within = [valid & (column + i < self.width) for i in range(4)]
        numbers = [k.load(at.x, F32, k.select(each, start + column + i, 0)) for i, each in enumerate(within)]
        return [k.select(each, number, k.f32(0.0)) for each, number in zip(within, numbers, strict=True)]

    def _put(self, numbers: Sequence[Value], quad: Value) -> None:
        """Stores the parts of four numbers, and the numbers of 32 k: for the first parts, then for the last."""
        k, group = self.code, quad >> 3
        parts, step = self.x.split(k, numbers)
        for part, words in enumerate(parts):
            place = group * self.record + (self.x.place(quad) + part * self.x.nbytes)
            k.store(k.at(self.place, I8, place), k.vector(words), align=4 * len(words))
        totals, zero = self._totals(numbers), k.f32(0.0)
        first = ([] if step is None else [step]) + totals
        last = ([] if step is None else [step * STEP**2]) + [zero] * len(totals)
        if first:
            padding = [zero] * (self.stride // 4 - len(first))
            with k.when((quad & 7).equals(0)):
                for part, some in enumerate((first, last)):
                    place = group * (2 * self.stride) + part * self.stride
                    k.store(k.at(self.number_place, I8, place), k.vector([*some, *padding]), align=self.stride)

    def _totals(self, numbers: Sequence[Value]) -> list[Value]:
        """The sums of x over the k of each scale, which lows are multiplied with, in the first lane of eight."""
        k = self.code
        if not self.sums:
            return []
        total = (numbers[0] + numbers[1]) + (numbers[2] + numbers[3])
        for distance in (1, 2, 4):
            if distance < 8 // self.sums:
                total = total + k.exchanged(total, distance)
        return [total] + [k.exchanged(total, 8 // self.sums * i) for i in range(1, self.sums)]

    # -- products -----------------------------------------------------------------------------------------------------

    def _add(self, slot: Value, unit: Value, stop: Value | None, sums: list[list[Variable]]) -> None:
        """Adds the products of pieces from unit `unit` on, of which units before `stop` count, or all."""
        k, per, ring = self.code, self.form.unit // DEPTH, self.ring
        numbers = ring.take(slot, unit)
        soon = stop is None and self.x.ints
        if not soon:
            ring.keep(numbers)
        together = 1 if stop else max(1, _TOGETHER // (per * len(sums)))
        for start in range(0, self.piece.units, together):
            some = range(start, min(start + together, self.piece.units))
            with k.guarded(unit + start < stop if stop else None):
                parts = [(part, i, ring.unit(slot, part, i)) for i in some for part in range(len(sums))]
                groups = [(part, i * per + q, ring.operands(part, words, q, self.x.ints))
                          for part, i, words in parts for q in range(per)]  # fmt: skip
                x = [self._operand(unit * per, number) for _, number, _ in groups]
                if not self.x.ints:
                    for (part, number, group), own in zip(groups, x, strict=True):
                        self._multiply_floats(group, own, ring.numbers(part, number), sums[part])
                    continue
                found = [self._products(group, own) for (_, _, group), own in zip(groups, x, strict=True)]
                if soon and not start:
                    ring.keep(numbers)  # while the first products are under way
                for (part, number, _), products in zip(groups, found, strict=True):
                    self._scale(products, ring.numbers(part, number), unit * per, number, sums[part])

    def _operand(self, first: Value, number: int) -> list[Value]:
        """Of x the 32 k `number` after `first`: its parts are the columns, the last one of three again as fourth."""
        k, words = self.code, self.x.nbytes // 16
        part, t = k.lane >> 2 & (3 if self.x.ints else 1), k.lane & 3
        part = k.smaller(part, self.x.count - 1)
        place = k.at(self.place, I8, first * self.record + (part * self.x.nbytes + t * (4 * words)))
        return k.lanes(k.load(k.at(place, I8, number * self.record), f"<{words} x i32>", align=4 * words))

    def _products(self, group: Group, x: list[Value]) -> list[list[Value]]:
        """For each scale the sums of products: t = 0 has those with the first two parts of x, t = 1 with the last."""
        if self.form.scales == 1:
            return [sums_of_products(self.code, group.codes, x)]
        return [sums_of_products(self.code, group.codes[2 * s : 2 * s + 2], x[s : s + 1]) for s in range(2)]

    def _scale(
        self, found: list[list[Value]], numbers: Numbers, first: Value, number: int, sums: list[Variable]
    ) -> None:  # fmt: skip
        """Adds the products for 32 k times their scales."""
        k = self.code
        place = k.at(self.number_place, I8, first * (2 * self.stride) + (k.lane & 1) * self.stride)
        place = k.at(place, I8, number * (2 * self.stride))
        second = k.select((k.lane & 1).equals(0), k.f32(STEP), k.f32(0.0))  # the last part has no second one
        step, *totals = k.lanes(k.load(place, f"<{self.stride // 4} x float>", align=self.stride))
        for own, scale in zip(found, numbers.scales, strict=True):
            for i, result in enumerate(sums):
                value = k.fma(own[2 * i + 1], second, own[2 * i])
                result.set(k.fma(value, step * scale[i], result.get()))
        for low, total in zip(numbers.lows, totals, strict=False):
            for i, result in enumerate(sums):
                result.set(k.fma(-low[i], total, result.get()))

    def _multiply_floats(self, group: Group, x: list[Value], numbers: Numbers, sums: list[Variable]) -> None:
        """Adds the products with the parts of x."""
        k, scales = self.code, numbers.scales
        values = [k.f32(0.0) if scales else each.get() for each in sums]
        for h, parts in enumerate(group.parts):
            for part in parts:
                values = product(k, part, x[2 * h : 2 * h + 2], values)
        for i, (result, value) in enumerate(zip(sums, values, strict=True)):
            result.set(k.fma(value, scales[0][i // 2], result.get()) if scales else value)

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
