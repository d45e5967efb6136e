"""Kernels over rows and elements: elementwise ops, norms, reductions, gathers, copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rlx.backends.cuda.code import F32, I1, I32, THREADS, WARPS, Code, Operand, Value
from rlx.backends.cuda.kernels.parts import loaded
from rlx.backends.cuda.numbers import BINARY, UNARY, clamp, exp, rounded, rsqrt, softcap, sqrt_
from rlx.errors import CompileError

_LIMIT = float("inf")
_HELD = 32  # elements of a row that a thread holds at most


def each(k: Code, count: Operand, body: Callable[[Value], None]) -> None:
    """Calls `body` with the number of an element, in one thread each; a block has `THREADS` of `count` elements."""
    i = k.block * THREADS + k.thread
    with k.when(i < count):
        body(i)


def evaluate(k: Code, expr: Any, operands: Sequence[Value]) -> Value:
    """The value of an elementwise expression, see `rlx.ir.meaning.evaluate`.

    Raises:
        CompileError: an op is unknown.
    """
    if isinstance(expr, int):
        return operands[expr]
    op, *rest = expr
    if op == "const":
        return k.f32(float(rest[0]))
    first = evaluate(k, rest[0], operands)
    if op == "scale":
        return first * float(rest[1])
    if op == "softcap":
        return softcap(k, first, float(rest[1]))
    if op == "clamp":
        return clamp(k, first, rest[1], rest[2])
    if op in UNARY:
        return UNARY[op](k, first)
    if op in BINARY:
        return BINARY[op](k, first, evaluate(k, rest[1], operands))
    raise CompileError(f"no elementwise op {op!r}", where=f"expression {expr}")


def elementwise(k: Code, expr: Any, kinds: Sequence[str], count: Operand, width: Operand, out: str) -> None:
    """An expression over all elements. Operands are "full", "row" [width], "column" [rows, 1] or "scalar" [1]."""
    *operands, result = k.pointers.values()

    def body(i: Value) -> None:
        at: dict[str, Operand] = {"full": i, "row": i % width, "column": i // width, "scalar": 0}
        values = [k.load(operand, F32, at[kind]) for operand, kind in zip(operands, kinds, strict=True)]
        found = evaluate(k, expr, values)
        k.store(result, rounded(found, out), i)

    each(k, count, body)


# -- a block for each row ----------------------------------------------------------------------------------------------


def _strided(k: Code, width: Operand, body: Callable[[Value], None]) -> None:
    with k.loop(k.thread, width, THREADS) as i:
        body(i)


def _sum_over(k: Code, width: Operand, value: Callable[[Value], Value]) -> Value:
    total = k.variable(F32, 0.0)
    _strided(k, width, lambda i: total.set(total.get() + value(i)))
    return k.block_sum(total.get())


class Normed:
    """A row that a block normalizes, in registers: x / sqrt(mean(x^2) + eps) [* w].

    A thread has fours of elements side by side, `THREADS` fours apart.

    Args:
        x, weight: memory; the row begins at element `start` of x. There may be no weight.
    """

    def __init__(self, k: Code, x: Value, weight: Value | None, start: Value, width: int, eps: float) -> None:
        self.code, self.x, self.start, self.width, self.eps = k, x, start, width, eps
        self.fours = [k.thread + i * THREADS for i in range(-(-width // (4 * THREADS)))]
        zero = k.number(0)
        self.weights = [self._loaded(weight, zero, four) for four in self.fours] if weight is not None else []

    @staticmethod
    def fits(width: Operand) -> bool:
        """Whether there are registers for a row."""
        return not isinstance(width, Value) and width <= _HELD * THREADS

    def _loaded(self, memory: Value, start: Value, four: Value) -> list[Value]:
        valid = self.code.as_value(1, I1)
        return loaded(self.code, memory, start, four * 4, self.width, valid, rounded=False)

    def values(self) -> list[list[Value]]:
        """The results; beyond the end they are zeros."""
        k = self.code
        found = [self._loaded(self.x, self.start, four) for four in self.fours]
        total = k.f32(0.0)
        for own in found:
            squares = [value * value for value in own]
            total = total + ((squares[0] + squares[1]) + (squares[2] + squares[3]))
        factor = rsqrt(k, k.block_sum(total) / float(self.width) + self.eps)
        found = [[value * factor for value in own] for own in found]
        if not self.weights:
            return found
        return [[x * w for x, w in zip(*both, strict=True)] for both in zip(found, self.weights, strict=True)]


def rms_norm(k: Code, width: Operand, eps: float, out: str) -> None:
    """A row for each block. Rows that fit are read once, into registers."""
    x, *weights, result = k.pointers.values()
    start = k.block * width
    if isinstance(width, Value) or not Normed.fits(width):
        _long_rms_norm(k, width, eps, out)
        return
    norm = Normed(k, x, weights[0] if weights else None, start, int(width), eps)
    k.wait()
    for four, values in zip(norm.fours, norm.values(), strict=True):
        given = [rounded(value, out) for value in values]
        if width % 4 == 0:
            with k.when(four * 4 < width):
                k.store(k.at(result, given[0].type, start + four * 4), k.vector(given))
            continue
        for i, value in enumerate(given):
            with k.when(four * 4 + i < width):
                k.store(result, value, start + four * 4 + i)


def _long_rms_norm(k: Code, width: Operand, eps: float, out: str) -> None:
    """As `rms_norm`, of rows that are read twice."""
    x, *weights, result = k.pointers.values()
    start = k.block * width

    def square(i: Value) -> Value:
        value = k.load(x, F32, start + i)
        return value * value

    factor = 1.0 / sqrt_(k, _sum_over(k, width, square) / _number(k, width) + eps)

    def write(i: Value) -> None:
        value = k.load(x, F32, start + i) * factor
        value = value * k.load(weights[0], F32, i, constant=True) if weights else value
        k.store(result, rounded(value, out), start + i)

    _strided(k, width, write)


def layer_norm(k: Code, width: Operand, eps: float, weights: int, out: str) -> None:
    """A row for each block: (x - mean) / sqrt(variance + eps) [* w [+ b]]."""
    x, *given, result = k.pointers.values()
    start, size = k.block * width, _number(k, width)
    mean = _sum_over(k, width, lambda i: k.load(x, F32, start + i)) / size

    def square(i: Value) -> Value:
        value = k.load(x, F32, start + i) - mean
        return value * value

    factor = 1.0 / sqrt_(k, _sum_over(k, width, square) / size + eps)

    def write(i: Value) -> None:
        value = (k.load(x, F32, start + i) - mean) * factor
        value = value * k.load(given[0], F32, i, constant=True) if weights else value
        value = value + k.load(given[1], F32, i, constant=True) if weights > 1 else value
        k.store(result, rounded(value, out), start + i)

    _strided(k, width, write)


def _number(k: Code, value: Operand) -> Value:
    return value.to(F32) if isinstance(value, Value) else k.f32(value)


def softmax(k: Code, width: Operand) -> None:
    """A row for each block."""
    x, result = k.pointers.values()
    start, top = k.block * width, k.variable(F32, -_LIMIT)
    _strided(k, width, lambda i: top.set(k.fmax(top.get(), k.load(x, F32, start + i))))
    largest = k.block_max(top.get())

    def weight(i: Value) -> Value:
        return exp(k, k.load(x, F32, start + i) - largest)

    total = _sum_over(k, width, weight)
    _strided(k, width, lambda i: k.store(result, weight(i) / total, start + i))


def row_reduce(k: Code, width: Operand, mean: bool) -> None:
    """A row for each block: its sum, or its mean."""
    x, result = k.pointers.values()
    total = _sum_over(k, width, lambda i: k.load(x, F32, k.block * width + i))
    with k.when(k.thread.equals(0)):
        k.store(result, total / _number(k, width) if mean else total, k.block)


def column_reduce(k: Code, count: Operand, n: Operand, width: Operand, mean: bool) -> None:
    """[rows, n, width] -> [rows, 1, width], an element for each thread."""
    x, result = k.pointers.values()

    def body(i: Value) -> None:
        row, column = i // width, i % width
        total = k.variable(F32, 0.0)
        with k.loop(0, n) as j:
            total.set(total.get() + k.load(x, F32, (row * n + j) * width + column))
        k.store(result, total.get() / _number(k, n) if mean else total.get(), i)

    each(k, count, body)


def index_of_largest(k: Code, width: Operand, checked: bool) -> None:
    """A row for each block: the index of its largest number, the first of equals.

    Args:
        checked: -1 if the row holds a NaN or an infinity; otherwise the first NaN counts as the largest.
    """
    x, result = k.pointers.values()
    start, best = k.block * width, Best(k)

    def visit(i: Value) -> None:
        value = k.load(x, F32, start + i)
        if checked:
            best.note(value, i, (k.fabs(value) < _LIMIT).to(I32) ^ 1)
        else:
            best.note(k.select(value.is_nan(), k.f32(_LIMIT), value), i, k.number(0))

    _strided(k, width, visit)
    _, index, wrong = best.of_block()
    with k.when(k.thread.equals(0)):
        k.store(result, k.select(wrong.equals(0), index, -1), k.block)


class Pick:
    """The choice of the largest of a row's numbers, which blocks find one by one.

    Args:
        cap: bounds the numbers before, see `rlx.ir.meaning.softcap`.
    """

    def __init__(self, k: Code, cap: float | None) -> None:
        self.code, self.cap, self.best = k, cap, Best(k)

    def note(self, value: Value, index: Value) -> None:
        """Sees a number."""
        k = self.code
        value = value if self.cap is None else softcap(k, value, self.cap)
        self.best.note(value, index, (k.fabs(value) < _LIMIT).to(I32) ^ 1)

    def write(self, blocks: int) -> None:
        """The last of the blocks writes the index of the largest number, or -1 if one is not finite."""
        k, parts = self.code, self.code.pointers["parts"]
        value, index, wrong = self.best.of_block()
        with k.when(k.thread.equals(0)):
            k.store(parts, value, k.block)
            k.store(parts, index, k.block + blocks)
            k.store(parts, wrong, k.block + 2 * blocks)
        with k.when(k.is_last(k.pointers["counters"], blocks)):
            every = Best(k)
            with k.loop(k.thread, blocks, THREADS) as i:
                found = (k.load(parts, type_, i + at * blocks) for at, type_ in enumerate((F32, I32, I32)))
                every.note(*found)
            _, index, wrong = every.of_block()
            with k.when(k.thread.equals(0)):
                k.store(k.pointers["out"], k.select(wrong.equals(0), index, -1))


class Best:
    """The largest number that a thread has seen, its index, the least of equal ones, and flags of all that it has seen.

    Args:
        type_: of the numbers, f32 or f64.
    """

    def __init__(self, k: Code, type_: str = F32) -> None:
        self.code = k
        self.value, self.index = k.variable(type_, -_LIMIT), k.variable(I32, 0x7FFFFFFF)
        self.wrong = k.variable(I32, 0)

    def note(self, value: Value, index: Value, wrong: Value) -> None:
        """Sees a number; `wrong` is 0, or says what is wrong with it."""
        found = _better(self.code, self.value.get(), self.index.get(), value, index)
        self.value.set(found[0])
        self.index.set(found[1])
        self.wrong.set(self.wrong.get() | wrong)

    def of_block(self) -> tuple[Value, Value, Value]:
        """Those of all threads of the block, in its first thread."""
        k = self.code
        value, index, wrong = self.value.get(), self.index.get(), self.wrong.get()
        for distance in (16, 8, 4, 2, 1):
            value, index = _better(k, value, index, k.exchanged(value, distance), k.exchanged(index, distance))
            wrong = wrong | k.exchanged(wrong, distance)
        place, ints = k.share(8 * WARPS), k.share(8 * WARPS)
        with k.when(k.lane.equals(0)):
            k.store(place, value, k.warp)
            k.store(ints, index, k.warp)
            k.store(ints, wrong, k.warp + WARPS)
        k.barrier()
        for warp in range(WARPS):
            value, index = _better(k, value, index, k.load(place, value.type, warp), k.load(ints, I32, warp))
            wrong = wrong | k.load(ints, I32, warp + WARPS)
        return value, index, wrong


def _better(k: Code, value: Value, index: Value, other: Value, other_index: Value) -> tuple[Value, Value]:
    better = (other > value) | (other.equals(value) & (other_index < index))
    return k.select(better, other, value), k.select(better, other_index, index)


def top_k(k: Code, width: int, count: int, groups: int, kept: int) -> None:
    """A row for each block: the indices of its `count` largest numbers, the first of equals first.

    An element's place is the number of those that come before it. With `groups` only elements of the `kept` groups
    count whose two largest have the largest sums.
    """
    x, result = k.pointers.values()
    start = k.block * width
    chosen = _chosen_groups(k, x, start, width // groups, groups, kept) if groups > 1 else None

    def number(i: Value) -> Value:
        value = k.load(x, F32, start + i)
        if chosen is None:
            return value
        return k.select(k.load(chosen, I32, i // (width // groups)).equals(1), value, k.f32(-_LIMIT))

    def visit(i: Value) -> None:
        value, before = number(i), k.variable(I32, 0)
        with k.loop(0, width) as j:
            other = number(j)
            larger = (other > value) | (other.equals(value) & (j < i)) | (value.is_nan() & (j < i))
            larger = larger | (value.is_nan() & other.equals(other))
            before.set(before.get() + larger.to(I32))
        with k.when(before.get() < count):
            k.store(result, i, k.block * count + before.get())

    _strided(k, width, visit)


def _chosen_groups(k: Code, x: Value, start: Value, size: int, groups: int, kept: int) -> Value:
    """Shared memory with 1 for each group that counts, else 0."""
    sums, chosen = k.share(4 * groups), k.share(4 * groups)

    def add(group: Value) -> None:
        first, second = k.variable(F32, -_LIMIT), k.variable(F32, -_LIMIT)
        with k.loop(0, size) as i:
            value = k.load(x, F32, start + group * size + i)
            second.set(k.fmax(second.get(), k.fmin(first.get(), value)))
            first.set(k.fmax(first.get(), value))
        k.store(sums, first.get() + second.get(), group)

    def rank(group: Value) -> None:
        own, before = k.load(sums, F32, group), k.variable(I32, 0)
        with k.loop(0, groups) as other:
            value = k.load(sums, F32, other)
            before.set(before.get() + ((value > own) | (value.equals(own) & (other < group))).to(I32))
        k.store(chosen, (before.get() < kept).to(I32), group)

    _strided(k, groups, add)
    k.barrier()
    _strided(k, groups, rank)
    k.barrier()
    return chosen


# -- gathers and copies ------------------------------------------------------------------------------------------------


def overlay_rows(k: Code, count: Operand, width: Operand) -> None:
    """Row r is rows[index[r]], or x[r] where index[r] is negative."""
    x, rows, index, result = k.pointers.values()

    def body(i: Value) -> None:
        chosen = k.load(index, I32, i // width)
        found = k.variable(F32, 0.0)
        with k.when(chosen < 0):
            found.set(k.load(x, F32, i))
        with k.when(chosen >= 0):
            found.set(k.load(rows, F32, chosen * width + i % width))
        k.store(result, found.get(), i)

    each(k, count, body)


def take(k: Code, count: Operand, per_row: Operand, width: Operand, shared: bool) -> None:
    """Elements ids [rows, per_row] of each row of x [rows, width], or of the one row."""
    x, ids, result = k.pointers.values()

    def body(i: Value) -> None:
        place = k.load(ids, I32, i)
        k.store(result, k.load(x, F32, place if shared else (i // per_row) * width + place), i)

    each(k, count, body)


def relabel(k: Code, count: Operand) -> None:
    """The label of each id; a negative id stays."""
    ids, labels, result = k.pointers.values()

    def body(i: Value) -> None:
        chosen = k.load(ids, I32, i)
        with k.when(chosen < 0):
            k.store(result, chosen, i)
        with k.when(chosen >= 0):
            k.store(result, k.load(labels, F32, chosen).to(I32), i)

    each(k, count, body)


def take_rows(k: Code, count: Operand, row_bytes: int) -> None:
    """Rows of x, as bytes; an i32 for each thread."""
    x, rows, result = k.pointers.values()
    words = row_bytes // 4

    def body(i: Value) -> None:
        k.store(result, k.load(x, I32, k.load(rows, I32, i // words) * words + i % words), i)

    each(k, count, body)


def last_row(k: Code, rows: Operand, row_bytes: int) -> None:
    """The last row of x, as bytes; an i32 for each thread."""
    x, result = k.pointers.values()
    words = row_bytes // 4
    each(k, words, lambda i: k.store(result, k.load(x, I32, (k.number(rows) - 1) * words + i), i))


def mix(k: Code, count: Operand, m: Operand, n: Operand, width: Operand) -> None:
    """Row by row a matrix product: coefficients [rows, m, n] times values [rows, n, width]."""
    values, coefficients, result = k.pointers.values()

    def body(i: Value) -> None:
        column, line = i % width, i // width
        row, own = line // m, line % m
        total = k.variable(F32, 0.0)
        with k.loop(0, n) as j:
            factor = k.load(coefficients, F32, (row * m + own) * n + j)
            total.set(k.fma(factor, k.load(values, F32, (row * n + j) * width + column), total.get()))
        k.store(result, total.get(), i)

    each(k, count, body)


def slice_(k: Code, count: Operand, start: int, kept: int, size: int, inner: int) -> None:
    """Indices [start, start + kept) of an axis of `size`, around which there are runs of `inner` elements."""
    x, result = k.pointers.values()

    def body(i: Value) -> None:
        outer, rest = i // (kept * inner), i % (kept * inner)
        k.store(result, k.load(x, F32, outer * (size * inner) + rest + start * inner), i)

    each(k, count, body)


def concat(k: Code, count: Operand, sizes: Sequence[int]) -> None:
    """Runs of `sizes` elements of each operand in turn."""
    *operands, result = k.pointers.values()
    whole = sum(sizes)

    def body(i: Value) -> None:
        outer, at = i // whole, i % whole
        found, start = k.variable(F32, 0.0), 0
        for operand, size in zip(operands, sizes, strict=True):
            with k.when((at >= start) & (at < start + size)):
                found.set(k.load(operand, F32, outer * size + at - start))
            start += size
        k.store(result, found.get(), i)

    each(k, count, body)
