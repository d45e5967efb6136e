"""Linear layers of many rows on tensor cores: x W^T.

Two kernels: the first writes x as two bf16 parts, with its sums where the weights have lows. The second has a tile of
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
from typing import Any

from rlx.backends.cuda.code import F32, I8, I32, I64, THREADS, WARP, WARPS, Code, Operand, Value, Variable
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


def shape_of(rows: int, n: int, parts: int, together: bool) -> Shape:
    """The shape for calls of up to so many rows of a layer with `n` outputs.

    Args:
        parts: 2 if the layer is gated.
        together: whether the card lets four warps multiply together.
    """
    shapes = [Shape(4, 4), Shape(2, 2)]
    if together:
        shapes = [Shape(8, 8, 1, True), Shape(8, 4, 1, True)] if parts == 1 else [Shape(8, 4, 2, True)]
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
    """How the first kernel stores rows of x: two parts, and the sums over the k of each scale, if there are lows.

    Attributes:
        width: of x.
        sums: for each 32 k, 0 if there are no lows.
    """

    width: int
    sums: int

    @property
    def padded(self) -> int:
        """Elements of a part of a row."""
        return -(-self.width // CHUNK) * CHUNK

    @property
    def nbytes(self) -> int:
        """Bytes of a row: the parts, then two sums for each 32 k, of which the second is used if there are two."""
        return 2 * self.padded * 2 + (self.padded // DEPTH * 8 if self.sums else 0)


def parts_of(width: int, form: Form) -> Parts:
    """How rows of x are stored for a layer."""
    return Parts(width, max(form.scales, 1) if form.lows else 0)


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
        _load_row(k, k.at(x, F32, row * p.width + column), column, p.width, numbers)
    values = [number.get() for number in numbers]
    pairs = [pair_parts(k, values[i], values[i + 1], "bf16") for i in range(0, SPLIT, 2)]
    at = k.at(out, I8, row.to(I64) * p.nbytes)
    with k.when(inside):
        for part in range(2):
            for half in range(2):
                words = k.vector([pair[part] for pair in pairs[half::2]])
                k.store(k.at(at, I8, (column * 2 + (part * p.padded * 2 + 16 * half)).to(I64)), words)
    if p.sums:
        _write_sums(k, p, at, column, values, inside)


def _load_row(k: Code, x: Value, column: Value, width: int, numbers: Sequence[Variable]) -> None:
    if width % SPLIT == 0:
        for i in range(0, SPLIT, 4):
            loaded = k.lanes(k.load(k.at(x, F32, i), "<4 x float>"))
            for variable, value in zip(numbers[i : i + 4], loaded, strict=True):
                variable.set(value)
        return
    for i, variable in enumerate(numbers):
        with k.when(column + i < width):
            variable.set(k.load(x, F32, i))


def _write_sums(k: Code, p: Parts, at: Value, column: Value, values: Sequence[Value], inside: Value) -> None:
    """In the order of `linear.py`: four by four, then pairs of these, and so on."""
    quads = [(values[i] + values[i + 1]) + (values[i + 2] + values[i + 3]) for i in range(0, SPLIT, 4)]
    total = (quads[0] + quads[1]) + (quads[2] + quads[3])
    group, part = column // DEPTH, column % DEPTH // SPLIT
    if p.sums == 1:
        total, inside = total + k.exchanged(total, 1), inside & part.equals(0)
    with k.when(inside):
        k.store(at, total, group * 2 + part + p.padded)


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


def stages_of(form: Form, shape: Shape, shared: int) -> int:
    """How many chunks of x and the weights a block has in shared memory; 0 if it has not the room.

    Args:
        shared: bytes of shared memory that a block can have.
    """
    nbytes = shape.rows * (2 * _LINE + 16) + WARPS * shape.each * _codes(form)
    found = min(_STAGES, (shared - _ATOM) // nbytes)
    return found if found > 1 else 0


def _codes(form: Form) -> int:
    """Bytes of a chunk of a tile, without scales."""
    return CHUNK // form.unit * form.loads * WARP * 16


class Large:
    """The second kernel.

    Args:
        form: of the weights.
        n, width: outputs and inputs of the layer.
        shape: how the work is shared.
        stages: chunks in shared memory.
        gated: the activation of gate weights.
        out: type of the results, "f32" or "bf16".
    """

    def __init__(
        self, code: Code, form: Form, n: int, width: int, shape: Shape, stages: int, gated: str | None = None,
        out: str = "f32",
    ) -> None:  # fmt: skip
        self.code, self.form, self.n, self.width, self.shape, self.stages, self.gated, self.out = (
            code, form, n, width, shape, stages, gated, out,
        )  # fmt: skip
        self.units, self.stored = form.units(width), parts_of(width, form)
        self.per_chunk, self.chunks = CHUNK // form.unit, self.stored.padded // CHUNK
        self.part_bytes = shape.rows * _LINE
        self.stage, self.tile_bytes = 2 * self.part_bytes, _codes(form)
        self.memory = code.share(stages * self.stage, align=_ATOM)
        self.codes = code.share(stages * WARPS * shape.each * self.tile_bytes)
        self.sums = code.share(stages * shape.rows * 16) if self.stored.sums else self.memory
        self.line, self.rank = code.warp % shape.lines, code.warp // shape.lines
        self.matrices: list[Matrix] = []  # of a warp's tiles

    def emit(self, at: Operands) -> None:
        """The whole computation of a block."""
        k = self.code
        last = -(-self.n // ROWS) - 1
        both = [Matrix(k, base, self.form, self.n, self.width) for base in at.weights]
        first = at.tile + self.line * (self.shape.each // len(both))
        pairs = [(both[i % len(both)], k.smaller(first + i // len(both), last)) for i in range(self.shape.each)]
        self.matrices = [matrix for matrix, _ in pairs]
        sums, numbers = self._zeros(), [self._numbers(pairs, k.number(min(i, self.chunks - 1))) for i in range(2)]
        ahead = [[k.variable(value.type, 0) for value in _flat(numbers[0])] for _ in range(2)]
        for variables, values in zip(ahead, numbers, strict=True):
            for variable, value in zip(variables, _flat(values), strict=True):
                variable.set(value)
        for i in range(self.stages - 1):
            self._bring_weights(pairs, k.number(min(i, self.chunks - 1)), k.number(i))
        k.wait()
        rows = self._rows_of(at)
        for i in range(self.stages - 1):
            self._bring(at, rows, k.number(min(i, self.chunks - 1)), k.number(i))
            commit_copies(k)
        stage = k.variable(I32, 0)
        with k.loop(0, self.chunks) as number:
            now = _shaped(numbers[0], [variable.get() for variable in ahead[0]])
            later = _flat(self._numbers(pairs, k.smaller(number + 2, self.chunks - 1)))
            wait_copies(k, self.stages - 2)
            if self.shape.together:
                fence_copies(k)
            k.barrier()
            with k.when(number + (self.stages - 1) < self.chunks):
                following = self._wrapped(stage.get() + (self.stages - 1))
                self._bring_weights(pairs, number + (self.stages - 1), following)
                self._bring(at, rows, number + (self.stages - 1), following)
            commit_copies(k)
            self._add_chunk(self._weights(now, stage.get()), stage.get(), sums)
            for variable, other in zip(*ahead, strict=True):
                variable.set(other.get())
            for variable, value in zip(ahead[1], later, strict=True):
                variable.set(value)
            stage.set(self._wrapped(stage.get() + 1))
        self._write(at, sums)

    def _wrapped(self, stage: Value) -> Value:
        return self.code.select(stage >= self.stages, stage - self.stages, stage)

    def _zeros(self) -> list[list[list[Variable]]]:
        """For each tile of a warp, for each eight rows of x."""
        k, shape = self.code, self.shape
        return [[[k.variable(F32, 0.0) for _ in range(4)] for _ in range(shape.columns)] for _ in range(shape.each)]

    # -- what comes ---------------------------------------------------------------------------------------------------

    def _units(self, number: Value) -> list[Value]:
        """The units of a chunk; those after the last are the last, which zeros of x are multiplied with."""
        return [self.code.smaller(number * self.per_chunk + i, self.units - 1) for i in range(self.per_chunk)]

    def _numbers(self, pairs: Sequence[tuple[Matrix, Value]], number: Value) -> list[list[Any]]:
        """Begins to load the scales of a chunk: for each unit, for each tile."""
        return [[matrix.numbers(tile, unit) for matrix, tile in pairs] for unit in self._units(number)]

    def _words(self, stage: Value, tile: int, unit: int, load: int) -> Value:
        """Where 16 bytes of the lane lie."""
        k = self.code
        place = (stage * WARPS + k.warp) * self.shape.each + tile
        return k.at(self.codes, I8, place * self.tile_bytes + k.lane * 16 + (unit * self.form.loads + load) * WARP * 16)

    def _bring_weights(self, pairs: Sequence[tuple[Matrix, Value]], number: Value, stage: Value) -> None:
        """Begins to copy the codes of a chunk to shared memory."""
        k, loads = self.code, self.form.loads
        for tile, (matrix, place) in enumerate(pairs):
            for i, unit in enumerate(self._units(number)):
                first = (place * self.units + unit) * loads * WARP + k.lane
                for load in range(loads):
                    source = k.at(matrix.base, "<4 x i32>", first + load * WARP)
                    copy_async(k, self._words(stage, tile, i, load), source)

    def _weights(self, numbers: list[list[Any]], stage: Value) -> list[list[Any]]:
        """The weights of a chunk: for each unit, for each tile, registers and what its scales are made of."""
        k, four = self.code, "<4 x i32>"
        return [
            [
                (
                    [w for i in range(self.form.loads) for w in k.lanes(k.load(self._words(stage, tile, u, i), four))],
                    own,
                )
                for tile, own in enumerate(some)
            ]
            for u, some in enumerate(numbers)
        ]

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
            for part in range(2):
                target = k.at(base, I8, place + part * self.part_bytes)
                copy_async(k, target, k.at(source, I8, (column * 2 + part * p.padded * 2).to(I64)))
        if p.sums:
            row, group = k.thread // 2, k.thread % 2
            with k.when(row < self.shape.rows):
                source = k.at(at.x, I8, at.rows.row(row).to(I64) * p.nbytes)
                target = k.at(self.sums, I8, (stage * (self.shape.rows * 2) + k.thread) * 8)
                place = (number * (CHUNK // DEPTH) + group) * 8 + 4 * p.padded
                copy_async(k, target, k.at(source, I8, place.to(I64)), size=8)

    # -- products -----------------------------------------------------------------------------------------------------

    def _add_chunk(self, now: list[list[Any]], stage: Value, sums: list[list[list[Variable]]]) -> None:
        if self.shape.together:
            self._add_together(now, stage, sums)
            return
        for i, some in enumerate(now):
            groups = [list(matrix.unpacked(*each)) for matrix, each in zip(self.matrices, some, strict=True)]
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
                    for variable, value in zip(_flat(own[first : first + 2]), _flat(values), strict=True):
                        variable.set(value)
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
            x = [self._x(base, part, columns[0], step) for part in range(2)]
            for i in range(len(groups[0].parts[step % 2])):
                for j in range(2 - i):
                    for tile, group in enumerate(groups):
                        for c in range(len(columns)):
                            right = x[j][2 * c : 2 * c + 2]
                            found[tile][c] = product(k, group.parts[step % 2][i], right, found[tile][c])
        return found

    def _add_together(self, now: list[list[Any]], stage: Value, sums: list[list[list[Variable]]]) -> None:
        """Adds a chunk by four warps. While they multiply, the products before are scaled."""
        k, n = self.code, 8 * self.shape.columns
        place = k.at(self.memory, I8, stage * self.stage + self.rank * (self.shape.columns * _ATOM))
        x, begun = matrix_descriptor(k, place, _ATOM), list[tuple[Callable[[Any], None], list[Value]]]()

        def finish(left: int) -> None:
            done, values = begun.pop(0)
            values = finish_products(k, values, left)
            done([values[4 * c : 4 * c + 4] for c in range(self.shape.columns)])

        for job in self._jobs(now, stage, sums):
            begun.append((job[0], begin_products(k, job[1], x, n, job[2])))
            if len(begun) > 1:
                finish(1)
        while begun:
            finish(len(begun) - 1)

    def _jobs(
        self, now: list[list[Any]], stage: Value, sums: list[list[list[Variable]]]
    ) -> Iterator[tuple[Callable[[Any], None], list[tuple[list[Value], int]], list[Value] | None]]:
        """What four warps multiply at a time: what to do with the results, the operands, and what they are added to."""
        if not self.form.scales:
            for tile, own in enumerate(sums):
                parts = [
                    pair
                    for i, some in enumerate(now)
                    for group in self.matrices[tile].unpacked(*some[tile])
                    for step in (2 * i, 2 * i + 1)
                    for pair in self._operands(group, step)
                ]
                yield self._set_of(own), parts, [value.get() for value in _flat(own)]
            return
        for i, some in enumerate(now):
            for tile, own in enumerate(sums):
                for q, group in enumerate(self.matrices[tile].unpacked(*some[tile])):
                    place = i * (self.form.unit // DEPTH) + q
                    for s, steps in enumerate(self._steps(place)):
                        parts = [pair for step in steps for pair in self._operands(group, step)]
                        yield self._scale_of(group, s, own, stage, place), parts, None

    def _operands(self, group: Group, step: int) -> list[tuple[list[Value], int]]:
        parts = group.parts[step % 2]
        return [(part, (step * 32 + j * self.part_bytes) // 16) for i, part in enumerate(parts) for j in range(2 - i)]

    def _set_of(self, own: list[list[Variable]]) -> Callable[[Any], None]:
        def done(values: Any) -> None:
            for variable, value in zip(_flat(own), _flat(values), strict=True):
                variable.set(value)

        return done

    def _scale_of(
        self, group: Group, s: int, own: list[list[Variable]], stage: Value, place: int
    ) -> Callable[[Any], None]:
        def done(values: Any) -> None:
            for c, four in enumerate(values):
                self._scaled(group, s, four, own[c], self._sums_of(stage, place, s, c))

        return done

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
