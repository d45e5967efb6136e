"""Gathers elements of rows by index, such as the indices that `top_k` returns, and rows by index."""

from __future__ import annotations

from rlx.backends.cpu.kernel import Kernel
from rlx.backends.cpu.loops import loop_kernel
from rlx.ir.dtypes import F32, I32
from rlx.scalars import HOLE, Ptr, i32

#: Holes: results per row; elements from one row of x to the next, 0 if all rows share one.
K: int = HOLE
STRIDE: int = HOLE
#: Hole of `overlay_rows`: elements of a row.
WIDTH: int = HOLE


def take(width: int, k: int, *, shared: bool = False) -> Kernel:
    """f32[rows, width], or f32[width] if `shared`, and i32[rows, k] -> f32[rows, k].

    Buffers: x, ids, out. A unit is a row. Ids must be in 0..width - 1; the kernel does not check them.
    """
    holes = {"K": k, "STRIDE": 0 if shared else width}
    return loop_kernel(_take, holes, [("x", F32), ("ids", I32), ("out", F32)])


def overlay_rows(width: int) -> Kernel:
    """x f32[rows, width], extra f32[any, width] and index i32[rows] -> f32[rows, width].

    Row r is row index[r] of extra, or row r of x where the index is negative. Buffers: x, extra, index, out. A unit is
    a row. The kernel does not check the indices.
    """
    params = [("x", F32), ("extra", F32), ("index", I32), ("out", F32)]
    return loop_kernel(_overlay_rows, {"WIDTH": width}, params)


def relabel() -> Kernel:
    """ids i32[rows] and labels f32[any] -> i32[rows], the label of each id; a negative id stays.

    Buffers: ids, labels, out. A unit is a row. The kernel does not check that there is a label for each id.
    """
    return loop_kernel(_relabel, {}, [("ids", I32), ("labels", F32), ("out", I32)])


def _relabel(ids: Ptr, labels: Ptr, out: Ptr, begin: int, end: int) -> None:
    for row in range(begin, end):
        chosen = ids[row]
        out[row] = i32(labels[chosen]) if chosen >= 0 else chosen


def _overlay_rows(x: Ptr, extra: Ptr, index: Ptr, out: Ptr, begin: int, end: int) -> None:
    for row in range(begin, end):
        chosen = index[row]
        dst = row * WIDTH
        if chosen < 0:
            for i in range(WIDTH):
                out[dst + i] = x[dst + i]
        else:
            src = chosen * WIDTH
            for i in range(WIDTH):
                out[dst + i] = extra[src + i]


def _take(x: Ptr, ids: Ptr, out: Ptr, begin: int, end: int) -> None:
    for row in range(begin, end):
        for i in range(row * K, row * K + K):
            out[i] = x[row * STRIDE + ids[i]]
