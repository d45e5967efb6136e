"""Linear layers of one row, or of up to `FEW`: a block computes some tiles of the weights, one after the other.

Each of its warps has one of the `SLICES` ranges of k, whose weights come through a ring (`weight_ring.py`). Products
and sums are those of `linear.py`, in the same order, so that a row has the same bits alone and among others. Tensor
cores multiply eight rows of x in the time of one.

A multiprocessor has room for two blocks, and a layer has two for each. So all multiprocessors get as many; blocks
of the next kernel, which fill their rings meanwhile, come where one has ended. With more room than a kernel needs,
some multiprocessors would have several blocks of it and others none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    Value,
    Variable,
)
from rlx.backends.cuda.kernels.linear import SLICES, Layer, Operands
from rlx.backends.cuda.kernels.matrix import Matrix
from rlx.backends.cuda.kernels.parts import NBYTES, QUAD, QUADS, count_of, loaded, place, split, summed, sums_of
from rlx.backends.cuda.kernels.rows import Normed
from rlx.backends.cuda.kernels.weight_ring import Piece, Ring
from rlx.backends.cuda.layouts import DEPTH, ROWS, Form
from rlx.backends.cuda.numbers import pair_parts

FEW = 8  # rows that tensor cores multiply together
WIDEST = 1 << 14  # inputs of a row that are in shared memory
_FIT = 2  # blocks of a multiprocessor
_PIECE = 2048  # bytes of codes of the pieces of all matrices
_STAGES = 2  # pieces of a ring at least, or they are made smaller
_TOGETHER = 4  # products that are under way before the first is scaled
_BROUGHT = 12  # times four numbers of x that a thread loads before it uses them
_FEW_ROWS = 56 << 10  # bytes of x of several rows at most: rings get short, and each block reads all of x
_EARLY = 48 << 10  # bytes of the weights of a block that it begins to copy before it waits


@dataclass(frozen=True)
class RowShape:
    """How the work is shared.

    Attributes:
        tiles: of a block, which are `blocks` apart.
        blocks: of the layer.
        least, shared: bytes of shared memory of a block at least, and at most if its ring is long enough then.
        most: the same at most.
    """

    tiles: int
    blocks: int
    least: int
    shared: int
    most: int


def row_shape(form: Form, n: int, width: int, parts: int, among: int = 0, shared: int = 227 << 10) -> RowShape:
    """The shape of a layer.

    Args:
        parts: matrices: 2 if the layer is gated.
        among: bytes of all matrices whose blocks run side by side; 0 if each block has one tile.
        shared: bytes of shared memory that a block of the target can have.
    """
    tiles, whole = -(-n // ROWS), shared + RESERVED
    own = max(1, -(-among * tiles // (_FIT * TYPICAL_MULTIPROCESSORS * parts * form.places(n, width)[2])))
    least = whole // (_FIT + 1) - RESERVED + 16 if among else 0  # for one block more there is no room
    return RowShape(own, -(-tiles // own), least, whole // _FIT - RESERVED, shared)


def fits(form: Form, width: int, parts: int, shared: int, *, rounded: bool, rows: int = 1) -> bool:
    """Whether a block has room for x and the shortest ring; for several rows, whether it is worth it.

    Args:
        parts: matrices: 2 if the layer is gated.
        shared: bytes of shared memory that a block can have.
        rounded: whether x is in bf16.
    """
    groups, piece = -(-form.groups(width) // 4) * 4, Piece(form, 1, even=False)
    x, results = rows * groups * (count_of(rounded) * NBYTES + 4 * sums_of(form)), rows * 2 * parts * WARPS * ROWS * 4
    ring = WARPS * parts * (piece.nbytes + piece.numbers_bytes)
    if rows > 1 and (x > _FEW_ROWS or _FIT * (x + results + ring + RESERVED) > shared + RESERVED):
        return False
    return width <= WIDEST and x + results + ring <= shared


def _divisor(count: int, most: int) -> int:
    """How many of `count` are taken at a time: a divisor if one is near the most, so that none is left over."""
    found = next(n for n in range(min(most, count), 0, -1) if count % n == 0)
    return found if 2 * found > most or count <= most else -(-count // -(-count // most))


class RowLinear(Layer):
    """A linear layer of few rows in a kernel.

    Args:
        form: of the weights.
        n, width: outputs and inputs of the layer.
        shape: how the work is shared.
        gated: the activation of gate weights.
        out: type of the results, "f32" or "bf16".
        rounded: whether x is in bf16.
        take: gets each result and its number in place of memory.
        eps: of the norm of x, if each block normalizes x, by the weight among the pointers "norm" if there is one.
        rows: at most: 1 or `FEW`.
    """

    def __init__(
        self, code: Code, form: Form, n: int, width: int, shape: RowShape, gated: str | None = None, out: str = "f32",
        rounded: bool = False, take: Callable[[Value, Value], None] | None = None, eps: float | None = None,
        rows: int = 1,
    ) -> None:  # fmt: skip
        super().__init__(code, form, n, width, gated, out, rounded, alike=rows == 1)
        self.eps, self.rows = eps, rows
        self.shape, self.take, self.groups = shape, take, form.groups(width)
        self.quads = -(-self.groups // 4) * 32 * rows  # times four elements of x, for whole warps
        self.record = self.count * rows * NBYTES  # bytes of 32 k of x: [part][row]
        self.place = code.share(self.quads // (QUADS * rows) * self.record)
        self.sum_place = code.share(self.quads // QUADS * self.sums * 4)
        self.results = code.share(2 * self.parts * WARPS * rows * ROWS * 4)

    def emit(self, at: Operands) -> None:
        """The whole computation of a block."""
        k, shape, units, self.at = self.code, self.shape, self.units, at
        matrices = [Matrix(k, base, self.form, self.n, self.width) for base in at.weights]
        self.begin, self.end = self.slice(k.warp), self.slice(k.warp + 1)
        self.piece, stages = self._cut()
        longest, whole = -(-units // SLICES), self._whole(self.piece.units)
        self.pieces = -(-longest // self.piece.units)
        count = shape.tiles * self.pieces
        self.ring = Ring(k, matrices, self.piece, stages)
        k.shared = max(k.shared, shape.least)
        k.resident = _FIT
        sums = [{i: k.variable(F32, 0.0) for i in self.dots.kept} for _ in matrices]
        self.added = [k.variable(F32, 0.0) for _ in range(self.parts * bool(at.bias) + (at.residual is not None))]
        early = min(stages, max(1, _EARLY // self.ring.nbytes))
        self._fill(at, 0, early)
        norm = None
        if self.eps is not None:
            norm = Normed(k, at.x, k.pointers.get("norm"), at.row(k.number(0)), self.width, self.eps)
        k.wait()
        if norm:
            self._bring_normed(norm)
        else:
            self._bring_row(at)
        k.barrier()
        self._fill(at, early, stages)
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
            for variable in chain.from_iterable(each.values() for each in sums):
                variable.set(0.0)

    def _cut(self) -> tuple[Piece, int]:
        """What is copied at a time, and how many of these a ring has."""
        longest, taken = -(-self.form.units(self.width) // SLICES), self.code.shared
        most = max(1, _PIECE // (self.parts * self.form.code_bytes))
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

    def _fill(self, at: Operands, first: int, stop: int) -> None:
        """Begins to copy some of the first pieces."""
        for i in range(first, stop):
            self._begin(at, self.code.number(i), self.code.number(i))
            self.ring.end()

    def _begin(self, at: Operands, item: Value, slot: Value) -> None:
        k, pieces = self.code, self.pieces
        tile = k.smaller(self._tile(at, item // pieces), -(-self.n // ROWS) - 1)
        self.ring.begin(slot, tile, self.begin + item % pieces * self.piece.units)

    def _tile(self, at: Operands, number: Value) -> Value:
        return at.tile + number * self.shape.blocks

    def _fetch(self, at: Operands, number: Value) -> None:
        """Begins to load what a thread adds to its result."""
        k, (row, column, held) = self.code, self._result(at, number)
        if not self.added:
            return
        with k.when(held):
            for variable, bias in zip(self.added, at.bias, strict=False):
                variable.set(k.load(bias, F32, column, constant=True))
            if at.residual is not None:
                self.added[-1].set(k.load(at.residual, F32, at.place(row, column)))

    def _result(self, at: Operands, number: Value) -> tuple[Value, Value, Value]:
        """The row and the column of the result of a thread, and whether it has one."""
        k = self.code
        row, column = k.thread // ROWS, self._tile(at, number) * ROWS + k.thread % ROWS
        return row, column, (k.thread < self.rows * ROWS) & (column < self.n) & at.valid(row)

    # -- x ------------------------------------------------------------------------------------------------------------

    def _bring_row(self, at: Operands) -> None:
        """Brings x to shared memory: of each 32 k all rows."""
        k = self.code
        each = min(_BROUGHT, -(-self.quads // THREADS))
        with k.loop(0, self.quads, each * THREADS) as start:
            quads = [start + k.thread + i * THREADS for i in range(each)]
            found = [self._quad(at, quad) for quad in quads]
            for quad, numbers in zip(quads, found, strict=True):
                whole = self.quads % (each * THREADS) == 0
                with k.guarded(None if whole else quad < self.quads):
                    self._put(numbers, quad)

    def _bring_normed(self, norm: Normed) -> None:
        """The same, normalized."""
        k = self.code
        for quad, numbers in zip(norm.fours, norm.values(), strict=True):
            if self.rounded:
                numbers = [pair_parts(k, numbers[i], numbers[i + 1], "bf16", 1)[0] for i in (0, 2)]
            with k.guarded(quad < self.quads if self.quads % THREADS else None):
                self._put(numbers, quad)

    def _quad(self, at: Operands, quad: Value) -> list[Value]:
        """Four numbers of x, or zeros beyond its end and if it is not to be computed."""
        group, row, own = quad // (QUADS * self.rows), quad // QUADS % self.rows, quad % QUADS
        column, start = (group * QUADS + own) * QUAD, at.row(self.code.select(at.valid(row), row, 0))
        return loaded(self.code, at.x, start, column, self.width, at.valid(row), self.rounded)

    def _put(self, numbers: Sequence[Value], quad: Value) -> None:
        """Stores the parts of four numbers, and the sums that lows are multiplied with."""
        k, rows, group, row = self.code, self.rows, quad // (QUADS * self.rows), quad // QUADS % self.rows
        parts, start = split(k, numbers, quad, self.form, self.rounded), group * self.record + row * NBYTES
        for part, words in enumerate(parts):
            k.store(k.at(self.place, I8, start + (place(quad) + part * (rows * NBYTES))), k.vector(words), align=8)
        if self.sums:
            total, each = summed(k, parts, quad, self.form), QUADS // self.sums
            with k.when((quad % each).equals(0)):
                k.store(self.sum_place, total, (group * self.sums + quad % QUADS // each) * rows + row)

    # -- products -----------------------------------------------------------------------------------------------------

    def _add(self, slot: Value, unit: Value, stop: Value | None, sums: list[dict[int, Variable]]) -> None:
        """Adds the products of pieces from unit `unit` on, of which units before `stop` count, or all."""
        k, per, ring = self.code, self.form.unit // DEPTH, self.ring
        numbers = ring.take(slot, unit)
        if stop:
            ring.keep(numbers)
        together = 1 if stop else max(1, _TOGETHER // (per * len(sums)))
        for start in range(0, self.piece.units, together):
            some = range(start, min(start + together, self.piece.units))
            with k.guarded(unit + start < stop if stop else None):
                parts = [(part, i, ring.unit(slot, part, i)) for i in some for part in range(len(sums))]
                groups = [(part, i * per + q, ring.operands(part, words, q))
                          for part, i, words in parts for q in range(per)]  # fmt: skip
                x = [self._row(unit * per, number) for _, number, _ in groups]
                found = [self.products(group, words) for (_, _, group), (words, _) in zip(groups, x, strict=True)]
                if not stop and not start:
                    ring.keep(numbers)  # while the first products are under way
                for (part, number, _), (_, totals), products in zip(groups, x, found, strict=True):
                    self.add_products(products, ring.numbers(part, number), totals, sums[part])

    def _row(self, first: Value, number: int) -> tuple[list[list[Value]], list[list[Value]]]:
        """Of x the 32 k `number` after `first`: the registers of each part, and its sums."""
        k, (own, own_sum), each = self.code, self.dots.lanes(), 4 * self.rows
        start = k.at(k.at(self.place, I8, first * self.record + own), I8, number * self.record)
        x = [self.dots.x(k.at(start, I8, part * self.rows * NBYTES)) for part in range(self.count)]
        sums = k.at(k.at(self.sum_place, I8, first * (self.sums * each) + own_sum), I8, number * self.sums * each)
        return x, [self.dots.totals(k.at(sums, I8, s * each)) for s in range(self.sums)]

    # -- results ------------------------------------------------------------------------------------------------------

    def _finish_tile(self, at: Operands, number: Value, sums: list[dict[int, Variable]]) -> None:
        """Adds the ranges and writes the results of a tile."""
        k, each, t = self.code, self.rows * ROWS, self.code.lane & 3
        base, size, alone = number % 2 * (self.parts * WARPS * each), WARPS * each, self.rows == 1
        results = [self.dots.results(own) for own in sums]
        with k.guarded(t.equals(0) if alone else None):
            for part, result in enumerate(results):
                to = base + k.warp * each + (k.lane >> 2) + part * size
                for i in (0, 2) if alone else range(4):
                    row = 0 if alone else t * 2 + i % 2
                    k.store(self.results, result(i), to + row * ROWS + 8 * (i // 2))
        k.barrier()
        row, column, held = self._result(at, number)
        with k.when(held):
            values = []
            for part in range(self.parts):
                total = k.f32(0.0)
                for warp in range(WARPS):
                    total = total + k.load(self.results, F32, base + k.thread + (part * size + warp * each))
                values.append(total)
            bias = [variable.get() for variable in self.added[: len(at.bias)]]
            residual = None if at.residual is None else self.added[-1].get()
            found = self.result(values, bias, residual)
            if self.take:
                self.take(found, column)
            else:
                k.store(at.out, found, at.place(row, column))
