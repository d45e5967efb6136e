"""Linear layers of many rows on tensor cores: x W^T.

Two kernels: the first writes x as parts of bf16, with its sums where the weights have lows: one part of an x that is
bf16, else two, within 2^-17, or three, within 2^-25. The second has a tile of
weights and a tile of x for each block. Both come to shared memory in chunks of 64 k, some of which are under way while
one is multiplied. A warp has one or two tiles of 16 rows of the weights, which it copies for itself, as tensor cores
take them. Four warps multiply together where the card can (wgmma, sm_90a): they read x from shared memory themselves.

Products are added in the order of k: of each 32 k first, times their scale, where the weights have one. So a row has
the same bits whatever the other rows are.

The parts have of each 16 k first 0, 1, 4, 5, 8, 9, 12, 13, then the others: so a lane has the same four k as in the
tiles of the weights. In shared memory, the 16 bytes c of row r of a chunk lie at c xor r % 8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rlx.backends.cuda.code import F32, I8, I16, I32, I64, THREADS, WARP, WARPS, Code, Operand, Value, Variable
from rlx.backends.cuda.kernels.matrix import Group, Matrix
from rlx.backends.cuda.kernels.tensor_cores import (
    begin_products,
    commit_copies,
    copy_async,
    fence_copies,
    finish_products,
    matrices,
    matrix_descriptor,
    product,
    wait_copies,
)
from rlx.backends.cuda.layouts import DEPTH, ROWS, Form
from rlx.backends.cuda.numbers import UNARY, pair_parts, rounded

CHUNK = 64  # k of a chunk
_LINE = 2 * CHUNK  # bytes of a row of a chunk
_ATOM = 8 * _LINE  # bytes of eight rows
SPLIT = 16  # elements of x that a thread of the first kernel has
_COPIED = 8  # elements of x that a thread copies at a time
_STAGES = 3  # chunks in shared memory, or 2
_FOUR = "<4 x i32>"
_ENOUGH_BLOCKS = 128  # about as many as a large card has multiprocessors


@dataclass(frozen=True)
class Shape:
    """How the work is shared.

    Attributes:
        lines: of warps; each has other weights.
        columns: of eight rows of x that a warp has.
        each: tiles of the weights that a warp has.
        together: whether four warps multiply together.
    """

    lines: int
    columns: int
    each: int = 2
    together: bool = False

    @property
    def rows(self) -> int:
        """Rows of x of a block."""
        return WARPS // self.lines * self.columns * 8

    def tiles(self, parts: int) -> int:
        """Tiles of a weight in a block, of which a layer has one, or two if it is gated."""
        return self.lines * self.each // parts


def shape_of(rows: int, n: int, parts: int, together: bool, scaled: bool) -> Shape:
    """The shape for calls of up to so many rows of a layer with `n` outputs.

    Args:
        parts: 2 if the layer is gated.
        together: whether the card lets four warps multiply together.
        scaled: whether the weights have scales. They are unpacked for twice as many rows then: an H100 multiplies 8B's
            Q8_0 half as fast again, and BF16 a sixth slower.
    """
    shapes = [Shape(4, 4), Shape(2, 2)]
    if together:
        columns = (8, 4) if parts == 2 else (16, 8, 4) if scaled else (8, 4)
        shapes = [Shape(8, each, parts, True) for each in columns]
    for shape in shapes:
        if -(-n // (shape.tiles(parts) * ROWS)) * -(-rows // shape.rows) >= _ENOUGH_BLOCKS:
            return shape
    return shapes[-1]


def shape_of_experts(units: int, experts: int, parts: int, together: bool) -> Shape:
    """The shape for calls of up to so many pairs of a row and an expert."""
    few = units <= 32 * experts
    if together:
        return Shape(8, 4 if few else 8, parts, True)
    return Shape(4, 2) if few else Shape(4, 4)


@dataclass(frozen=True)
class Parts:
    """How the first kernel stores rows of x: its parts, and the sums over the k of each scale, if there are lows.

    Attributes:
        width: of x.
        sums: for each 32 k, 0 if there are no lows.
        count: of parts: 1 if x is bf16, 2 or 3 if it is f32.
    """

    width: int
    sums: int
    count: int

    @property
    def padded(self) -> int:
        """Elements of a part of a row."""
        return -(-self.width // CHUNK) * CHUNK

    @property
    def nbytes(self) -> int:
        """Bytes of a row: the parts, then two sums for each 32 k, of which the second is used if there are two."""
        return self.sums_place + (self.padded // DEPTH * 8 if self.sums else 0)

    @property
    def sums_place(self) -> int:
        """Bytes of a row before the sums."""
        return self.count * self.padded * 2


def parts_of(width: int, form: Form, count: int = 2) -> Parts:
    """How rows of x are stored for a layer."""
    return Parts(width, max(form.scales, 1) if form.lows else 0, count)


def write_parts(k: Code, p: Parts, rows: Operand, out: Value) -> None:
    """The first kernel: 16 elements for each thread.

    Args:
        out: where the rows go.
    """
    x = k.pointers["x"]
    per_row = p.padded // SPLIT
    item = k.block * THREADS + k.thread
    row, column = item // per_row, item % per_row * SPLIT
    inside = row < rows
    numbers = [k.variable(F32, 0.0) for _ in range(SPLIT)]
    with k.when(inside & (column < p.width)):
        source = k.at(x, I16 if p.count == 1 else F32, row * p.width + column)
        _load_row(k, source, column, p, numbers)
    values = [number.get() for number in numbers]
    pairs = [pair_parts(k, values[i], values[i + 1], "bf16", p.count) for i in range(0, SPLIT, 2)]
    at = k.at(out, I8, row.to(I64) * p.nbytes)
    with k.when(inside):
        for part in range(p.count):
            for half in range(2):
                words = k.vector([pair[part] for pair in pairs[half::2]])
                k.store(k.at(at, I8, (column * 2 + (part * p.padded * 2 + 16 * half)).to(I64)), words)
    if p.sums:
        _write_sums(k, p, at, column, values, inside)


def _load_row(k: Code, x: Value, column: Value, p: Parts, numbers: Sequence[Variable]) -> None:
    """Sixteen elements of a row, as f32; bf16 are the upper half of such a number."""
    if p.width % SPLIT == 0:
        for i in range(0, SPLIT, 4):
            if p.count == 1:
                words = k.lanes(k.load(k.at(x, I16, i), "<2 x i32>"))
                loaded = [half.bits(F32) for word in words for half in (word << 16, word & -0x10000)]
            else:
                loaded = k.lanes(k.load(k.at(x, F32, i), "<4 x float>"))
            for variable, value in zip(numbers[i : i + 4], loaded, strict=True):
                variable.set(value)
        return
    for i, variable in enumerate(numbers):
        with k.when(column + i < p.width):
            one = (k.load(x, I16, i).to(I32) << 16).bits(F32) if p.count == 1 else k.load(x, F32, i)
            variable.set(one)


def _write_sums(k: Code, p: Parts, at: Value, column: Value, values: Sequence[Value], inside: Value) -> None:
    """In the order of `linear.py`: four by four, then pairs of these, and so on."""
    quads = [(values[i] + values[i + 1]) + (values[i + 2] + values[i + 3]) for i in range(0, SPLIT, 4)]
    total = (quads[0] + quads[1]) + (quads[2] + quads[3])
    group, part = column // DEPTH, column % DEPTH // SPLIT
    if p.sums == 1:
        total, inside = total + k.exchanged(total, 1), inside & part.equals(0)
    with k.when(inside):
        k.store(at, total, group * 2 + part + p.sums_place // 4)


@dataclass
class Rows:
    """The rows of a block.

    Attributes:
        row: row i of the block -> its row of x; of those that are not valid, any.
        valid: whether row i of the block is to be computed.
        start: row i of the block -> where its results go, in elements.
        matrix: which matrix is theirs, if there are several.
        some: whether there are any.
    """

    row: Callable[[Value], Value]
    valid: Callable[[Value], Value]
    start: Callable[[Value], Value]
    matrix: Value | None = None
    some: Value | None = None


@dataclass
class Operands:
    """Where a block finds its operands and puts its results.

    Attributes:
        weights: one matrix, or two if the layer is gated.
        x: what the first kernel wrote.
        rows: of the block.
        out: memory.
        tile: the first tile of the weights.
        bias, residual: memory, if there are any.
    """

    weights: list[Value]
    x: Value
    rows: Rows
    out: Value
    tile: Value
    bias: list[Value]
    residual: Value | None


def stages_of(form: Form, shape: Shape, shared: int, count: int = 2) -> int:
    """How many chunks of x and the weights a block has in shared memory; 0 if it has not the room.

    Two blocks of a multiprocessor hide more than a third chunk of one.

    Args:
        shared: bytes of shared memory that a block can have.
        count: of parts of x.
    """
    nbytes = shape.rows * (count * _LINE + 16) + WARPS * shape.each * _codes(form)
    for room in (shared // 2, shared):
        if (found := min(_STAGES, (room - _ATOM) // nbytes)) > 1:
            return found
    return 0


def _codes(form: Form) -> int:
    """Bytes of a chunk of a tile, without scales."""
    return CHUNK // form.unit * form.loads * WARP * 16


class Weights:
    """The tiles of a warp, whose codes come to shared memory in chunks.

    Args:
        pairs: matrix and tile of each.
        stages: chunks in shared memory.
        units: of a row.
    """

    def __init__(
        self, code: Code, form: Form, pairs: Sequence[tuple[Matrix, Value]], stages: int, units: int
    ) -> None:  # fmt: skip
        self.code, self.form, self.pairs, self.units = code, form, pairs, units
        self.memory = code.share(stages * WARPS * len(pairs) * _codes(form))

    def _units(self, number: Value) -> list[Value]:
        """The units of a chunk; those after the last are the last, which zeros of x are multiplied with."""
        per_chunk = CHUNK // self.form.unit
        return [self.code.smaller(number * per_chunk + i, self.units - 1) for i in range(per_chunk)]

    def numbers(self, number: Value) -> list[list[Any]]:
        """Begins to load the scales of a chunk: for each unit, for each tile."""
        return [[matrix.numbers(tile, unit) for matrix, tile in self.pairs] for unit in self._units(number)]

    def _words(self, stage: Value, tile: int, unit: int, load: int) -> Value:
        """Where 16 bytes of the lane lie."""
        k = self.code
        place = (stage * WARPS + k.warp) * len(self.pairs) + tile
        own = k.lane * 16 + (unit * self.form.loads + load) * WARP * 16
        return k.at(self.memory, I8, place * _codes(self.form) + own)

    def bring(self, number: Value, stage: Value) -> None:
        """Begins to copy the codes of a chunk to shared memory."""
        k, loads = self.code, self.form.loads
        for tile, (matrix, place) in enumerate(self.pairs):
            for i, unit in enumerate(self._units(number)):
                first = (place * self.units + unit) * loads * WARP + k.lane
                for load in range(loads):
                    source = k.at(matrix.base, _FOUR, first + load * WARP)
                    copy_async(k, self._words(stage, tile, i, load), source)

    def unpacked(self, tile: int, unit: int, stage: Value, numbers: list[list[Any]]) -> Iterator[Group]:
        """The groups of a tile in a unit of a chunk."""
        k, loads = self.code, range(self.form.loads)
        words = [w for i in loads for w in k.lanes(k.load(self._words(stage, tile, unit, i), _FOUR))]
        return self.pairs[tile][0].unpacked(words, numbers[unit][tile])


class Large:
    """The second kernel.

    Args:
        form: of the weights.
        n, width: outputs and inputs of the layer.
        shape: how the work is shared.
        stages: chunks in shared memory.
        gated: the activation of gate weights.
        out: type of the results, "f32" or "bf16".
        count: of parts of x.
    """

    def __init__(
        self, code: Code, form: Form, n: int, width: int, shape: Shape, stages: int, gated: str | None = None,
        out: str = "f32", count: int = 2,
    ) -> None:  # fmt: skip
        self.code, self.form, self.n, self.width, self.shape, self.stages, self.gated, self.out = (
            code, form, n, width, shape, stages, gated, out,
        )  # fmt: skip
        self.stored = parts_of(width, form, count)
        self.chunks = self.stored.padded // CHUNK
        self.part_bytes = shape.rows * _LINE
        self.stage = count * self.part_bytes
        self.memory = code.share(stages * self.stage, align=_ATOM)
        self.sums = code.share(stages * shape.rows * 16) if self.stored.sums else self.memory
        self.line, self.rank = code.warp % shape.lines, code.warp // shape.lines

    def emit(self, at: Operands) -> None:
        """The whole computation of a block."""
        k = self.code
        last = -(-self.n // ROWS) - 1
        both = [Matrix(k, base, self.form, self.n, self.width) for base in at.weights]
        first = at.tile + self.line * (self.shape.each // len(both))
        pairs = [(both[i % len(both)], k.smaller(first + i // len(both), last)) for i in range(self.shape.each)]
        weights = Weights(k, self.form, pairs, self.stages, self.form.units(self.width))
        last_chunk = self.chunks - 1
        sums, numbers = self._zeros(), [weights.numbers(k.number(min(i, last_chunk))) for i in range(2)]
        ahead = [[k.variable(value.type, 0) for value in _flat(numbers[0])] for _ in range(2)]
        for variables, values in zip(ahead, numbers, strict=True):
            _set(variables, _flat(values))
        for i in range(self.stages - 1):
            weights.bring(k.number(min(i, last_chunk)), k.number(i))
        k.wait()
        rows = self._rows_of(at)
        for i in range(self.stages - 1):
            self._bring(at, rows, k.number(min(i, last_chunk)), k.number(i))
            commit_copies(k)
        stage = k.variable(I32, 0)
        with k.loop(0, self.chunks) as number:
            now = _shaped(numbers[0], [variable.get() for variable in ahead[0]])
            later = _flat(weights.numbers(k.smaller(number + 2, last_chunk)))
            wait_copies(k, self.stages - 2)
            if self.shape.together:
                fence_copies(k)
            k.barrier()
            with k.when(number + (self.stages - 1) < self.chunks):
                following = _wrapped(k, stage.get() + (self.stages - 1), self.stages)
                weights.bring(number + (self.stages - 1), following)
                self._bring(at, rows, number + (self.stages - 1), following)
            commit_copies(k)
            if self.shape.together:
                self._add_together(weights, now, stage.get(), sums)
            else:
                self._add_chunk(weights, now, stage.get(), sums)
            _set(ahead[0], [variable.get() for variable in ahead[1]])
            _set(ahead[1], later)
            stage.set(_wrapped(k, stage.get() + 1, self.stages))
        self._write(at, sums)

    def _zeros(self) -> list[list[list[Variable]]]:
        """For each tile of a warp, for each eight rows of x."""
        k, shape = self.code, self.shape
        return [[[k.variable(F32, 0.0) for _ in range(4)] for _ in range(shape.columns)] for _ in range(shape.each)]

    # -- what comes ---------------------------------------------------------------------------------------------------

    def _rows_of(self, at: Operands) -> list[tuple[Value, Value]]:
        """For each time that a thread copies, its row of x, and where it goes in a chunk, in bytes."""
        k, per_row = self.code, CHUNK // _COPIED
        found = []
        for i in range(-(-self.shape.rows * per_row // THREADS)):
            item = k.thread + i * THREADS
            row = k.smaller(item // per_row, self.shape.rows - 1)
            place = row * _LINE + ((item % per_row) ^ (row & 7)) * 16
            found.append((k.at(at.x, I8, at.rows.row(row).to(I64) * self.stored.nbytes), place))
        return found

    def _bring(self, at: Operands, rows: list[tuple[Value, Value]], number: Value, stage: Value) -> None:
        """Begins to copy a chunk of x to shared memory."""
        k, p = self.code, self.stored
        base = k.at(self.memory, I8, stage * self.stage)
        column = number * CHUNK + k.thread % (CHUNK // _COPIED) * _COPIED
        for source, place in rows:
            for part in range(p.count):
                target = k.at(base, I8, place + part * self.part_bytes)
                copy_async(k, target, k.at(source, I8, (column * 2 + part * p.padded * 2).to(I64)))
        if p.sums:
            row, group = k.thread // 2, k.thread % 2
            with k.when(row < self.shape.rows):
                source = k.at(at.x, I8, at.rows.row(row).to(I64) * p.nbytes)
                target = k.at(self.sums, I8, (stage * (self.shape.rows * 2) + k.thread) * 8)
                place = (number * (CHUNK // DEPTH) + group) * 8 + p.sums_place
                copy_async(k, target, k.at(source, I8, place.to(I64)), size=8)

    # -- products -----------------------------------------------------------------------------------------------------

    def _add_chunk(
        self, weights: Weights, now: list[list[Any]], stage: Value, sums: list[list[list[Variable]]]
    ) -> None:  # fmt: skip
        for i in range(len(now)):
            groups = [list(weights.unpacked(tile, i, stage, now)) for tile in range(self.shape.each)]
            for q in range(self.form.unit // DEPTH):
                self._add_group([each[q] for each in groups], stage, i * (self.form.unit // DEPTH) + q, sums)

    def _add_group(self, groups: list[Group], stage: Value, place: int, sums: list[list[list[Variable]]]) -> None:
        """Adds the products of 32 k."""
        base = self.code.at(self.memory, I8, stage * self.stage)
        for first in range(0, self.shape.columns, 2):
            columns = (first, first + 1)
            if not groups[0].scales:
                start = [[[v.get() for v in own[c]] for c in columns] for own in sums]
                found = self._products(groups, base, columns, [2 * place, 2 * place + 1], start)
                for own, values in zip(sums, found, strict=True):
                    _set(_flat(own[first : first + 2]), _flat(values))
                continue
            for s, some in enumerate(self._steps(place)):
                found = self._products(groups, base, columns, some, None)
                for group, own, values in zip(groups, sums, found, strict=True):
                    for c, four in zip(columns, values, strict=True):
                        self._scaled(group, s, four, own[c], self._sums_of(stage, place, s, c))

    def _steps(self, place: int) -> list[list[int]]:
        """The times 16 k of 32 k, for each of their scales."""
        both = [2 * place, 2 * place + 1]
        return [both] if self.form.scales < 2 else [both[:1], both[1:]]

    def _products(
        self, groups: list[Group], base: Value, columns: Sequence[int], steps: Sequence[int],
        start: list[list[list[Value]]] | None,
    ) -> list[list[list[Value]]]:  # fmt: skip
        """The products of all tiles with some columns, over some times 16 k; added to `start`, if it is there."""
        k = self.code
        zero = [k.f32(0.0)] * 4
        found = start or [[zero for _ in columns] for _ in groups]
        for step in steps:
            x = [self._x(base, part, columns[0], step) for part in range(self.stored.count)]
            for i in range(len(groups[0].parts[step % 2])):
                for j in self._with(i):
                    for tile, group in enumerate(groups):
                        for c in range(len(columns)):
                            right = x[j][2 * c : 2 * c + 2]
                            found[tile][c] = product(k, group.parts[step % 2][i], right, found[tile][c])
        return found

    def _add_together(
        self, weights: Weights, now: list[list[Any]], stage: Value, sums: list[list[list[Variable]]]
    ) -> None:  # fmt: skip
        """Adds a chunk by four warps. While they multiply, the products before are scaled."""
        k, n = self.code, 8 * self.shape.columns
        place = k.at(self.memory, I8, stage * self.stage + self.rank * (self.shape.columns * _ATOM))
        x, begun = matrix_descriptor(k, place, _ATOM), list[tuple[Callable[[Any], None], list[Value]]]()

        def finish(left: int) -> None:
            done, values = begun.pop(0)
            done(finish_products(k, values, left))

        for job in self._jobs(weights, now, stage, sums):
            begun.append((job[0], begin_products(k, job[1], x, n, job[2])))
            if len(begun) > 1:
                finish(1)
        while begun:
            finish(len(begun) - 1)

    def _jobs(
        self, weights: Weights, now: list[list[Any]], stage: Value, sums: list[list[list[Variable]]]
    ) -> Iterator[tuple[Callable[[Any], None], list[tuple[list[Value], int]], list[Value] | None]]:
        """What four warps multiply at a time: what to do with the results, the operands, and what they are added to."""
        if not self.form.scales:
            for tile, own in enumerate(sums):
                parts = [
                    pair
                    for i in range(len(now))
                    for group in weights.unpacked(tile, i, stage, now)
                    for step in (2 * i, 2 * i + 1)
                    for pair in self._operands(group, step)
                ]
                yield partial(_set, _flat(own)), parts, [value.get() for value in _flat(own)]
            return
        for i in range(len(now)):
            for tile, own in enumerate(sums):
                for q, group in enumerate(weights.unpacked(tile, i, stage, now)):
                    place = i * (self.form.unit // DEPTH) + q
                    for s, steps in enumerate(self._steps(place)):
                        parts = [pair for step in steps for pair in self._operands(group, step)]
                        yield partial(self._scale, group, s, own, stage, place), parts, None

    def _operands(self, group: Group, step: int) -> list[tuple[list[Value], int]]:
        parts = group.parts[step % 2]
        return [(part, (step * 32 + j * self.part_bytes) // 16) for i, part in enumerate(parts) for j in self._with(i)]

    def _with(self, part: int) -> range:
        """The parts of x that a part of the weights is multiplied with: products of two later parts are too small."""
        return range(min(self.stored.count, max(self.stored.count, 2) - part))

    def _scale(
        self, group: Group, s: int, own: list[list[Variable]], stage: Value, place: int, values: list[Value]
    ) -> None:  # fmt: skip
        for c, variables in enumerate(own):
            self._scaled(group, s, values[4 * c : 4 * c + 4], variables, self._sums_of(stage, place, s, c))

    def _scaled(
        self, group: Group, s: int, values: list[Value], sums: list[Variable], totals: list[Value]
    ) -> None:  # fmt: skip
        k, scale = self.code, group.scales[s]
        for i, (variable, value) in enumerate(zip(sums, values, strict=True)):
            found = k.fma(value, scale[i // 2], variable.get())
            variable.set(k.fma(-group.lows[s][i // 2], totals[i % 2], found) if group.lows else found)

    def _row(self, column: int) -> Operand:
        """The first row of eight that a warp has."""
        return self.rank * (self.shape.columns * 8) + 8 * column

    def _x(self, base: Value, part: int, column: int, step: int) -> list[Value]:
        """Operands of twice eight rows and 16 k."""
        k = self.code
        row = self._row(column) + ((k.lane & 7) + (k.lane >> 4) * 8)
        piece = (((k.lane >> 3) & 1) + 2 * step) ^ (row & 7)
        return matrices(k, k.at(base, I8, row * _LINE + piece * 16 + part * self.part_bytes))

    def _sums_of(self, stage: Value, place: int, s: int, column: int) -> list[Value]:
        """The sums of x of the lane's two rows."""
        if not self.stored.sums:
            return []
        k = self.code
        row = stage * self.shape.rows + self._row(column) + (k.lane & 3) * 2
        return [k.load(self.sums, F32, (row + i) * 4 + (place * 2 + s)) for i in range(2)]

    # -- results ------------------------------------------------------------------------------------------------------

    def _write(self, at: Operands, totals: list[list[list[Variable]]]) -> None:
        k = self.code
        shown = 1 if self.gated else len(totals)
        own = [(tile, half) for tile in range(shown) for half in range(2)]
        columns = [(at.tile + self.line * shown + tile) * ROWS + (k.lane >> 2) + 8 * half for tile, half in own]
        inside = [k.smaller(column, self.n - 1) for column in columns]
        biases = [[k.load(b, F32, column, constant=True) for b in at.bias] for column in inside]
        for c in range(self.shape.columns):
            for j in range(2):
                row = self._row(c) + (k.lane & 3) * 2 + j
                with k.when(at.rows.valid(row)):
                    start = at.rows.start(row)
                    for (tile, half), column, bias in zip(own, columns, biases, strict=True):
                        values = [some[c][2 * half + j].get() for some in (totals if self.gated else totals[tile:])]
                        with k.when(column < self.n):
                            self._finish(at, start + column, values, bias)

    def _finish(self, at: Operands, place: Value, values: list[Value], bias: list[Value]) -> None:
        k = self.code
        if bias:
            values = [v + b for v, b in zip(values, bias, strict=False)]
        result = UNARY[self.gated](k, values[0]) * values[1] if self.gated else values[0]
        if at.residual is not None:
            result = result + k.load(at.residual, F32, place)
        k.store(at.out, rounded(result, self.out), place)


def _wrapped(k: Code, stage: Value, stages: int) -> Value:
    return k.select(stage >= stages, stage - stages, stage)


def _set(variables: Sequence[Variable], values: Sequence[Value]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.set(value)


def _flat(some: Any) -> list[Any]:
    """The leaves of nested lists and tuples."""
    if isinstance(some, (list, tuple)):
        return [leaf for each in some for leaf in _flat(each)]
    return [some]


def _shaped(like: Any, leaves: list[Any]) -> Any:
    """Nested as another, with other leaves, which are used up."""
    if isinstance(like, (list, tuple)):
        return type(like)([_shaped(each, leaves) for each in like])
    return leaves.pop(0)
