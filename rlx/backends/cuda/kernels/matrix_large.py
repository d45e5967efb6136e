"""Linear layers of many rows on tensor cores: x W^T.

A block has some tiles of 16 rows of the weights, and some rows of x in bf16, or parts of them that another kernel
stored (`row_parts.py`). Both come to shared memory in chunks of 64 k, some of which are under way while one is
multiplied. A warp has one or two tiles, which it copies for itself, and scales in registers (`weight_chunks.py`). Four
warps multiply together where the card can (wgmma, sm_90a): they read x from shared memory themselves, and while they
multiply 32 k, each lane makes its operands of the next ones.

Products are added in the order of k. So a row has the same bits whatever the other rows are. In shared memory, the 16
bytes c of row r of a chunk lie at c xor r % 8.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from rlx.backends.cuda.code import F32, I8, I32, I64, THREADS, WARPS, Code, Operand, Value, Variable, set_all
from rlx.backends.cuda.kernels.large_shape import ATOM, LINE, Shape, most_bytes
from rlx.backends.cuda.kernels.matrix import Matrix
from rlx.backends.cuda.kernels.row_parts import CHUNK, COPIED, Parts
from rlx.backends.cuda.kernels.tensor_cores import (
    arrive,
    await_products,
    begin_products,
    commit_copies,
    copy_async,
    fence_copies,
    finish_products,
    init_barriers,
    matrices,
    matrix_descriptor,
    product,
    wait_barrier,
    wait_copies,
)
from rlx.backends.cuda.kernels.weight_chunks import Weights, operands
from rlx.backends.cuda.layouts import DEPTH, ROWS, Form
from rlx.backends.cuda.numbers import UNARY, rounded

_STRIDE = ROWS + 4  # words from row to row of these in shared memory


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
        x: in bf16, or its parts.
        rows: of the block.
        out: memory.
        tile: the first tile of the weights.
        bias, residual: memory, if there are any.
        aligned: whether results of four outputs side by side lie at multiples of four.
    """

    weights: list[Value]
    x: Value
    rows: Rows
    out: Value
    tile: Value
    bias: list[Value]
    residual: Value | None
    aligned: bool


@dataclass(frozen=True)
class Job:
    """32 k of a tile of the warp: in a unit of a chunk."""

    tile: int
    unit: int
    q: int


@dataclass(frozen=True)
class Pair:
    """What is multiplied.

    Attributes:
        weights: registers of 16 rows and 16 k.
        part: of x.
        step: which 16 k of the chunk.
    """

    weights: list[Value]
    part: int
    step: int


#: The sums of a lane: for each tile of the warp, for each eight rows of x.
Sums: TypeAlias = list[list[list[Variable]]]

#: Gives what the scales of a chunk, and of the next one, are made of.
Scales: TypeAlias = Callable[[], list[list[list[Any]]]]

#: Begins to bring what is needed some chunks after one.
Bring: TypeAlias = Callable[[Value], None]


class Large:
    """The kernel.

    Args:
        form: of the weights.
        n: outputs of the layer.
        parts: how x lies in memory.
        shape: how the work is shared.
        stages: chunks in shared memory.
        gated: the activation of gate weights.
        out: type of the results, "f32" or "bf16".
    """

    def __init__(
        self, code: Code, form: Form, n: int, parts: Parts, shape: Shape, stages: int, gated: str | None = None,
        out: str = "f32",
    ) -> None:  # fmt: skip
        self.code, self.form, self.n, self.parts, self.shape, self.stages, self.gated, self.out = (
            code, form, n, parts, shape, stages, gated, out,
        )  # fmt: skip
        self.part_bytes = shape.rows * LINE
        self.memory = code.share(stages * parts.count * self.part_bytes, align=ATOM)
        self.line, self.rank = code.warp % shape.lines, code.warp // shape.lines

    def emit(self, at: Operands) -> None:
        """The whole computation of a block."""
        k, ahead = self.code, self.stages - 1 - self.shape.lag
        weights = self._weights(at)
        sums, numbers = self._zeros(), [weights.numbers(self._chunk(i)) for i in range(2)]
        soon = [[k.variable(value.type, value) for value in _flat(some)] for some in numbers]
        for i in range(ahead):
            weights.bring(self._chunk(i), k.number(i))
        k.wait()
        rows = self._rows_of(at)
        for i in range(ahead):
            self._bring(rows, self._chunk(i), k.number(i))
            commit_copies(k)
        stage = k.variable(I32, 0)

        def numbers_now() -> list[list[list[Any]]]:
            return [_shaped(numbers[0], [variable.get() for variable in each]) for each in soon]

        def bring(number: Value) -> None:
            """Begins to bring a chunk, and the scales of another one."""
            later = _flat(weights.numbers(k.smaller(number + 2, self.parts.chunks - 1)))
            with k.when(number + ahead < self.parts.chunks):
                following = _wrapped(k, stage.get() + ahead, self.stages)
                weights.bring(number + ahead, following)
                self._bring(rows, number + ahead, following)
            commit_copies(k)
            set_all(soon[0], [variable.get() for variable in soon[1]])
            set_all(soon[1], later)

        loop = self._together if self.shape.together else self._alone
        loop(weights, numbers_now, bring, stage, sums)
        self._write(at, sums)
        if self.shape.together:
            k.resident = self.shape.resident
            k.shared = max(k.shared, most_bytes(self.shape, k.features.shared, 1) + 16)

    def _chunk(self, number: int) -> Value:
        """The number of a chunk, or of the last one."""
        return self.code.number(min(number, self.parts.chunks - 1))

    def _weights(self, at: Operands) -> Weights:
        """The tiles of the warp. If the layer is gated, half of the warps have gates, and half what they are for."""
        k, count, last = self.code, self.shape.lines // len(at.weights), -(-self.n // ROWS) - 1
        both = [Matrix(k, base, self.form, self.n, self.parts.width) for base in at.weights]
        own = both[0] if len(both) == 1 else Matrix.one_of(self.line < count, *both)
        first = at.tile + self.line % count * self.shape.each
        tiles = [k.smaller(first + i, last) for i in range(self.shape.each)]
        return Weights(k, own, tiles, self.stages)

    def _alone(self, weights: Weights, numbers: Scales, bring: Bring, stage: Variable, sums: Sums) -> None:
        """Warps that multiply alone."""
        k = self.code
        with k.loop(0, self.parts.chunks) as number:
            now = numbers()[0]
            wait_copies(k, self.stages - 2)
            k.barrier()
            bring(number)
            base = self._x_of(stage.get())
            for job in self._jobs():
                self._add_alone(self._pairs(weights, job, stage.get(), now), base, sums[job.tile])
            stage.set(_wrapped(k, stage.get() + 1, self.stages))

    def _together(self, weights: Weights, numbers: Scales, bring: Bring, stage: Variable, sums: Sums) -> None:
        """Warps of which four multiply together.

        They multiply while the operands of the next products are made, also those of the next chunk. No products are
        under way where the loop begins again.
        """
        k, (first, *others), left = self.code, self._jobs(), self.stages - 3
        barriers, parity = init_barriers(k, self.stages), k.variable(I32, 0)
        k.barrier()
        self._have_copied(barriers, stage.get(), left)
        wait_barrier(k, k.at(barriers, I64, stage.get()), parity.get())
        ready = self._pairs(weights, first, stage.get(), numbers()[0])
        registers = {id(pair.weights): [k.variable(I32, word) for word in pair.weights] for pair in ready}
        with k.loop(0, self.parts.chunks) as number:
            now, after = numbers()
            base = self._x_of(stage.get())
            words = {which: [word.get() for word in some] for which, some in registers.items()}
            pairs = [replace(pair, weights=words[id(pair.weights)]) for pair in ready]
            self._begin(pairs, base, sums[first.tile])
            following = _wrapped(k, stage.get() + 1, self.stages)
            bring(number)
            self._have_copied(barriers, following, left)
            for job in others:
                before, pairs = pairs, self._pairs(weights, job, stage.get(), now)
                self._begin(pairs, base, sums[job.tile])
                await_products(k, 1, _registers(before))
            parity.set(k.select(following.equals(0), parity.get() ^ 1, parity.get()))
            stage.set(following)
            wait_barrier(k, k.at(barriers, I64, following), parity.get())
            before, pairs = pairs, self._pairs(weights, first, following, after)
            await_products(k, 0, _registers(before))
            new = {id(old.weights): pair.weights for old, pair in zip(ready, pairs, strict=True)}
            for which, some in registers.items():
                set_all(some, new[which])
        for own in sums:
            set_all(_flat(own), finish_products(k, [value.get() for value in _flat(own)]))

    def _zeros(self) -> list[list[list[Variable]]]:
        """For each tile of a warp, for each eight rows of x."""
        k, shape = self.code, self.shape
        return [[[k.variable(F32, 0.0) for _ in range(4)] for _ in range(shape.columns)] for _ in range(shape.each)]

    def _rows_of(self, at: Operands) -> list[tuple[Value, Value, Value]]:
        """For each time that a thread copies, its 16 bytes of the first chunk, where they go, and how many are read.

        Of rows that are not valid none are: if they all read one row, blocks would wait for the memory that has it.
        """
        k, per_row = self.code, CHUNK // COPIED
        found = []
        for i in range(self.shape.rows * per_row // THREADS):
            row, piece = (k.thread + i * THREADS) // per_row, k.thread % per_row
            source = k.at(at.x, I8, at.rows.row(row).to(I64) * self.parts.nbytes + (piece * 16).to(I64))
            read = k.select(at.rows.valid(row), 16, 0)
            found.append((source, row * LINE + (piece ^ (row & 7)) * 16, read))
        return found

    def _bring(self, rows: list[tuple[Value, Value, Value]], number: Value, stage: Value) -> None:
        """Begins to copy a chunk of x to shared memory."""
        k, p = self.code, self.parts
        base = k.at(self.memory, I8, stage * (p.count * self.part_bytes))
        # What is copied of a row is all of it or none.
        inside = None if p.whole else number * CHUNK + k.thread % (CHUNK // COPIED) * COPIED < p.width
        for source, place, read in rows:
            kept = read if inside is None else k.select(inside, read, 0)
            for part in range(p.count):
                own = k.at(source, I8, (number * LINE + part * p.padded * 2).to(I64))
                copy_async(k, k.at(base, I8, place + part * self.part_bytes), own, kept)

    def _have_copied(self, barriers: Value, stage: Value, left: int) -> None:
        """This warp's copies of a chunk are there, so that nobody waits long for them.

        Args:
            left: how many chunks are under way after it.
        """
        wait_copies(self.code, left)
        fence_copies(self.code)
        arrive(self.code, self.code.at(barriers, I64, stage))

    def _x_of(self, stage: Value) -> Value:
        """Where a chunk of x is."""
        return self.code.at(self.memory, I8, stage * (self.parts.count * self.part_bytes))

    # -- products -----------------------------------------------------------------------------------------------------

    def _jobs(self) -> list[Job]:
        """What is multiplied at a time of a chunk."""
        units, groups = range(CHUNK // self.form.unit), range(self.form.unit // DEPTH)
        return [Job(tile, unit, q) for unit in units for q in groups for tile in range(self.shape.each)]

    def _pairs(self, weights: Weights, job: Job, stage: Value, numbers: list[list[Any]]) -> list[Pair]:
        """The products of a job; those of two later parts are too small."""
        most, place = self.parts.count, 2 * (job.unit * (self.form.unit // DEPTH) + job.q)
        group = weights.group(job.tile, job.unit, job.q, stage, numbers)
        return [
            Pair(part, j, place + half)
            for half, parts in enumerate(operands(self.code, group, most))
            for i, part in enumerate(parts)
            for j in range(min(most, max(most, 2) - i))
        ]

    def _begin(self, pairs: list[Pair], base: Value, sums: list[list[Variable]]) -> None:
        """By four warps."""
        k = self.code
        given = [(each.weights, (each.step * 32 + each.part * self.part_bytes) // 16) for each in pairs]
        x = matrix_descriptor(k, k.at(base, I8, self.rank * (self.shape.columns * ATOM)), ATOM)
        values = [value.get() for value in _flat(sums)]
        set_all(_flat(sums), begin_products(k, given, x, 8 * self.shape.columns, values))

    def _add_alone(self, pairs: list[Pair], base: Value, sums: list[list[Variable]]) -> None:
        """By a warp."""
        for first in range(0, self.shape.columns, 2):
            places = {(each.part, each.step) for each in pairs}
            x = {(part, step): self._x(base, part, first, step) for part, step in sorted(places)}
            for c, own in enumerate(sums[first : first + 2]):
                values = [value.get() for value in own]
                for each in pairs:
                    values = product(self.code, each.weights, x[each.part, each.step][2 * c : 2 * c + 2], values)
                set_all(own, values)

    def _row(self, column: int) -> Operand:
        """The first row of eight that a warp has."""
        return self.rank * (self.shape.columns * 8) + 8 * column

    def _x(self, base: Value, part: int, column: int, step: int) -> list[Value]:
        """Operands of twice eight rows and 16 k."""
        k = self.code
        row = self._row(column) + ((k.lane & 7) + (k.lane >> 4) * 8)
        piece = (((k.lane >> 3) & 1) + 2 * step) ^ (row & 7)
        return matrices(k, k.at(base, I8, row * LINE + piece * 16 + part * self.part_bytes))

    # -- results ------------------------------------------------------------------------------------------------------

    def _write(self, at: Operands, sums: Sums) -> None:
        """Results go through shared memory, so that a lane has four outputs of a row.

        If the layer is gated, those of gates and of what they are for meet there; each of both warps writes half.
        """
        k, count = self.code, self.shape.lines // len(at.weights)
        room = self.stages * self.parts.count * self.part_bytes // (WARPS * 8 * _STRIDE * 4)
        # How many are written at a time: a power of two that divides all.
        columns = min(self.shape.columns & -self.shape.columns, 1 << room.bit_length() - 1)
        size = columns * 8 * _STRIDE  # words of a warp
        own = k.at(self.memory, F32, k.warp * size)
        gates = k.at(self.memory, F32, (k.warp - self.line + self.line % count) * size)
        half = self.line // count * (columns // 2)
        k.barrier()  # all have read what lay there
        for tile, some in enumerate(sums):
            first = (at.tile + self.line % count * self.shape.each + tile) * ROWS
            biases = self._biases(at, first)
            for column in range(0, self.shape.columns, columns):
                self._leave(own, some[column : column + columns], biases)
                if self.gated is None:
                    k.sync_warp()
                    for c in range(columns):
                        row, place = self._place(k.number(c))
                        self._write_four(at, row + self._row(column), first, self._read(own, place))
                    k.sync_warp()
                    continue
                k.barrier()
                for c in range(columns // 2):
                    row, place = self._place(half + c)
                    both = zip(self._read(gates, place), self._read(gates, place + count * size), strict=True)
                    values = [UNARY[self.gated](k, gate) * value for gate, value in both]
                    self._write_four(at, row + self._row(column), first, values)
                k.barrier()

    def _leave(self, own: Value, some: list[list[Variable]], biases: list[Value]) -> None:
        """Stores results of the warp in shared memory."""
        k = self.code
        for c, four in enumerate(some):
            for i, variable in enumerate(four):
                row, output = (k.lane & 3) * 2 + (i % 2 + 8 * c), (k.lane >> 2) + 8 * (i // 2)
                value = variable.get() + biases[i // 2] if biases else variable.get()
                k.store(own, value, row * _STRIDE + output)

    def _place(self, column: Value) -> tuple[Value, Value]:
        """A row of the lane in eight of those in shared memory, and where its four results are."""
        k = self.code
        row = column * 8 + (k.lane >> 2)
        return row, row * _STRIDE + (k.lane & 3) * 4

    def _biases(self, at: Operands, first: Value) -> list[Value]:
        """Those of the two outputs of the lane, if there are any."""
        k = self.code
        if not at.bias:
            return []
        bias = at.bias[0]
        if len(at.bias) == 2:
            bias = k.select(self.line < self.shape.lines // 2, *at.bias)
        places = [k.smaller(first + ((k.lane >> 2) + 8 * half), self.n - 1) for half in range(2)]
        return [k.load(bias, F32, place, constant=True) for place in places]

    def _read(self, place: Value, index: Value) -> list[Value]:
        k = self.code
        return k.lanes(k.load(k.at(place, F32, index), "<4 x float>"))

    def _write_four(self, at: Operands, row: Value, first: Value, values: list[Value]) -> None:
        """Four outputs of a tile, of a row of the block."""
        k, column = self.code, first + (self.code.lane & 3) * 4
        with k.when(at.rows.valid(row) & (column < self.n)):
            start = at.rows.start(row) + column
            if at.aligned:
                self._store(at, start, values)
                return
            for i, value in enumerate(values):
                with k.when(column + i < self.n):
                    self._store(at, start + i, [value])

    def _store(self, at: Operands, place: Value, values: list[Value]) -> None:
        """Some outputs of a row."""
        k, several = self.code, len(values) > 1
        if at.residual is not None:
            more = k.load(k.at(at.residual, F32, place), "<4 x float>" if several else F32)
            values = [a + b for a, b in zip(values, k.lanes(more) if several else [more], strict=True)]
        values = [rounded(value, self.out) for value in values]
        k.store(k.at(at.out, values[0].type, place), k.vector(values) if several else values[0])


def _registers(pairs: Sequence[Pair]) -> list[Value]:
    """Those of the weights."""
    return list({word.text: word for pair in pairs for word in pair.weights}.values())


def _wrapped(k: Code, stage: Value, stages: int) -> Value:
    return k.select(stage >= stages, stage - stages, stage)


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
