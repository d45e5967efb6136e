"""Gathers elements of rows by index, such as the indices that `top_k` returns."""

from __future__ import annotations

from rlx.backends.cpu.kernel import Kernel
from rlx.backends.cpu.loops import HOLE, Ptr, loop_kernel
from rlx.ir.dtypes import F32, I32

#: Holes: results per row; elements from one row of x to the next, 0 if all rows share one.
K: int = HOLE
STRIDE: int = HOLE


def take(width: int, k: int, *, shared: bool = False) -> Kernel:
    """f32[rows, width], or f32[width] if `shared`, and i32[rows, k] -> f32[rows, k].

    Buffers: x, ids, out. A unit is a row. Ids must be in 0..width - 1; the kernel does not check them.
    """
    holes = {"K": k, "STRIDE": 0 if shared else width}
    return loop_kernel(_take, holes, [("x", F32), ("ids", I32), ("out", F32)])


def _take(x: Ptr, ids: Ptr, out: Ptr, begin: int, end: int) -> None:
    for row in range(begin, end):
        for i in range(row * K, row * K + K):
            out[i] = x[row * STRIDE + ids[i]]
