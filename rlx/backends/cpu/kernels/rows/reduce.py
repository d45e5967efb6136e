"""Reductions of rows: sum, mean, the index of the maximum, the k largest elements.

Searches treat NaN as the largest value, so that a NaN among logits is found.
"""

from __future__ import annotations

from rlx.backends.cpu.kernel import Kernel
from rlx.backends.cpu.loops import loop_kernel
from rlx.errors import ArgumentError
from rlx.ir.dtypes import F32, I32
from rlx.scalars import (
    HOLE,
    SUM_FLAGS,
    Helper,
    Ptr,
    Scalar,
    as_bits,
    f32,
    fastmath,
    i32,
    maximum,
    order_key,
    stack_memory,
)

#: Holes: elements of a row, number of blocks of 64 elements (rounded up), results per row, `REDUCE(x, start, stop)`;
#: rows of a matrix that are added up, and the factor of their sum.
WIDTH: int = HOLE
COUNT: int = HOLE
FACTOR: float = HOLE
BLOCKS: int = HOLE
K: int = HOLE
#: Groups of neighbours, elements of a group, how many of the groups are searched; memory for a number of each.
GROUPS: int = HOLE
SIZE: int = HOLE
KEPT: int = HOLE
SCRATCH: Helper = HOLE
REDUCE: Helper = HOLE

#: Elements of a block. Its largest element is found without branches: it is long enough for vectors, and cheap to
#: search a second time.
BLOCK = 64
#: Elements of a part, which is summed in vector lanes, and of a block of parts, whose sums are added.
PART = 256
SUM_BLOCK = 64 * PART


def row_reduce(width: int, kind: str) -> Kernel:
    """f32[rows, width] -> f32[rows]: `sum` or `mean`. Buffers: x, out. A unit is a row."""
    return loop_kernel(_row_reduce, {"WIDTH": width, "REDUCE": _REDUCE[kind]}, [("x", F32), ("out", F32)])


def column_reduce(count: int, width: int, kind: str) -> Kernel:
    """f32[rows, count, width] -> f32[rows, width]: `sum` or `mean` over the middle axis. A unit is a row."""
    holes = {"WIDTH": width, "COUNT": count, "FACTOR": {"sum": 1.0, "mean": 1.0 / count}[kind]}
    return loop_kernel(_column_reduce, holes, [("x", F32), ("out", F32)])


def argmax(width: int) -> Kernel:
    """f32[rows, width] -> i32[rows], the index of the first largest element. Buffers: x, out. A unit is a row.

    If a row has NaN, the result is the index of the first NaN, as in NumPy.
    """
    holes = {"WIDTH": width, "BLOCKS": -(-width // BLOCK)}
    return loop_kernel(_argmax, holes, [("x", F32), ("out", I32)])


def pick(width: int) -> Kernel:
    """Like `argmax`, but -1 for a row that holds a NaN or an infinity."""
    holes = {"WIDTH": width, "BLOCKS": -(-width // BLOCK)}
    return loop_kernel(_pick, holes, [("x", F32), ("out", I32)])


def top_k(width: int, k: int, groups: int = 1, kept: int = 1) -> Kernel:
    """f32[rows, width] -> values f32[rows, k], indices i32[rows, k] of the k largest, descending.

    Buffers: x, values, indices. A unit is a row. Equal elements are ordered by index; NaN counts as the largest.

    Args:
        groups: of equal size, at least 2; only the `kept` of them are searched whose two largest elements have the
            largest sums.

    Raises:
        ArgumentError: k is not in 1..width.
    """
    if not 1 <= k <= width:
        raise ArgumentError(f"k must lie in 1..{width}, found {k}", where="top_k")
    if groups > 1:
        sizes = {"GROUPS": groups, "SIZE": width // groups, "KEPT": kept, "WIDTH": width, "K": k}
        memory = {"SCRATCH": stack_memory("f32", groups)}
        return loop_kernel(_top_k_of_groups, {**sizes, **memory}, [("x", F32), ("values", F32), ("indices", I32)])
    holes = {"WIDTH": width, "BLOCKS": -(-width // BLOCK), "K": k}
    return loop_kernel(_top_k, holes, [("x", F32), ("values", F32), ("indices", I32)])


@fastmath(*SUM_FLAGS)
def part_sum(x: Ptr, start: int, stop: int) -> Scalar:
    total = f32(0.0)
    for i in range(start, stop):
        total += x[i]
    return total


def block_sum(x: Ptr, start: int, stop: int) -> Scalar:
    total = part_sum(x, start, start + (stop - start) % PART)
    for at in range(start + (stop - start) % PART, stop, PART):
        total += part_sum(x, at, at + PART)
    return total


def row_sum(x: Ptr, start: int, stop: int) -> Scalar:
    """Hierarchical summation of a row. A single running total would lose many small terms to rounding."""
    total = block_sum(x, start, start + (stop - start) % SUM_BLOCK)
    for at in range(start + (stop - start) % SUM_BLOCK, stop, SUM_BLOCK):
        total += block_sum(x, at, at + SUM_BLOCK)
    return total


def row_mean(x: Ptr, start: int, stop: int) -> Scalar:
    return row_sum(x, start, stop) / f32(stop - start)


def row_max(x: Ptr, start: int, stop: int) -> Scalar:
    """The largest element; NaN if there is one."""
    top = x[start]
    for i in range(start, stop):
        top = maximum(top, x[i])
    return top


_REDUCE: dict[str, Helper] = {"sum": row_sum, "mean": row_mean}


def _row_reduce(x: Ptr, out: Ptr, begin: int, end: int) -> None:
    for row in range(begin, end):
        out[row] = REDUCE(x, row * WIDTH, row * WIDTH + WIDTH)


def _column_reduce(x: Ptr, out: Ptr, begin: int, end: int) -> None:
    for row in range(begin, end):
        for i in range(WIDTH):
            total = f32(0.0)
            for j in range(COUNT):
                total += x[(row * COUNT + j) * WIDTH + i]
            out[row * WIDTH + i] = total * f32(FACTOR)


def largest_key(x: Ptr, start: int, stop: int) -> Scalar:
    top = i32(-0x80000000)
    for i in range(start, stop):
        key = order_key(x[i])
        top = key if key > top else top
    return top


def first_with_key(x: Ptr, start: int, stop: int, key: Scalar) -> int:
    for i in range(start, stop):
        if order_key(x[i]) == key:
            return i
    return stop


def first_largest(x: Ptr, src: int) -> int:
    """The index, relative to `src`, of the first largest of the WIDTH elements from `src` on."""
    best = i32(-0x80000000)
    where = 0
    for block in range(BLOCKS):
        start = block * BLOCK
        stop = start + BLOCK if start + BLOCK < WIDTH else WIDTH
        top = largest_key(x, src + start, src + stop)
        where = start if top > best else where
        best = top if top > best else best
    return first_with_key(x, src + where, src + WIDTH, best) - src


def largest_size(x: Ptr, start: int, stop: int) -> Scalar:
    """The bits of the largest magnitude. They are at least those of infinity if there is an infinity or a NaN."""
    top = i32(0)
    for i in range(start, stop):
        size = i32(i32(as_bits(x[i])) & i32(0x7FFFFFFF))
        top = size if size > top else top
    return top


def _argmax(x: Ptr, out: Ptr, begin: int, end: int) -> None:
    for row in range(begin, end):
        out[row] = i32(first_largest(x, row * WIDTH))


def _pick(x: Ptr, out: Ptr, begin: int, end: int) -> None:
    for row in range(begin, end):
        src = row * WIDTH
        finite = largest_size(x, src, src + WIDTH) < i32(0x7F800000)
        out[row] = i32(first_largest(x, src)) if finite else i32(-1)


def insert(x: Ptr, values: Ptr, indices: Ptr, src: int, i: int, dst: int, count: int) -> None:
    """Inserts x[src + i] into the `count` sorted results from `dst` on. If there are K already, the last is dropped."""
    key = order_key(x[src + i])
    at = dst + (count if count < K else K - 1)
    while at > dst and order_key(values[at - 1]) < key:
        values[at] = values[at - 1]
        indices[at] = indices[at - 1]
        at -= 1
    values[at] = x[src + i]
    indices[at] = i32(i)


def _top_k(x: Ptr, values: Ptr, indices: Ptr, begin: int, end: int) -> None:
    for row in range(begin, end):
        src = row * WIDTH
        dst = row * K
        for i in range(K):
            insert(x, values, indices, src, i, dst, i)
        for block in range(BLOCKS):
            start = block * BLOCK if block * BLOCK > K else K
            stop = block * BLOCK + BLOCK if block * BLOCK + BLOCK < WIDTH else WIDTH
            if largest_key(x, src + start, src + stop) > order_key(values[dst + K - 1]):
                for i in range(start, stop):
                    if order_key(x[src + i]) > order_key(values[dst + K - 1]):
                        insert(x, values, indices, src, i, dst, K)


def two_largest(x: Ptr, start: int) -> Scalar:
    """The sum of the two largest of SIZE elements."""
    first = x[start]
    second = x[start + 1]
    if order_key(second) > order_key(first):
        first = x[start + 1]
        second = x[start]
    for i in range(start + 2, start + SIZE):
        if order_key(x[i]) > order_key(first):
            second = first
            first = x[i]
        elif order_key(x[i]) > order_key(second):
            second = x[i]
    return first + second


def groups_before(sums: Ptr, group: int) -> int:
    """How many groups have a larger sum; of equals the lower index comes first."""
    before = 0
    key = order_key(sums[group])
    for other in range(GROUPS):
        rival = order_key(sums[other])
        before += 1 if rival > key or (rival == key and other < group) else 0
    return before


def _top_k_of_groups(x: Ptr, values: Ptr, indices: Ptr, begin: int, end: int) -> None:
    sums = SCRATCH()
    for row in range(begin, end):
        src = row * WIDTH
        dst = row * K
        for group in range(GROUPS):
            sums[group] = two_largest(x, src + group * SIZE)
        found = 0
        for group in range(GROUPS):
            if groups_before(sums, group) < KEPT:
                for i in range(group * SIZE, group * SIZE + SIZE):
                    if found < K or order_key(x[src + i]) > order_key(values[dst + K - 1]):
                        insert(x, values, indices, src, i, dst, found)
                        found = found + 1 if found < K else K
