"""Softmax over rows.

    y = exp(x - max(x)) / sum(exp(x - max(x)))

There are three passes: the largest element, the exponentials and their sum (a sum of parts, see `reduce.py`), and the
multiplication by the inverse of the sum.
"""

from __future__ import annotations

from rlx.backends.cpu.kernel import Kernel
from rlx.backends.cpu.kernels.rows.reduce import PART, row_max
from rlx.backends.cpu.loops import loop_kernel
from rlx.ir.dtypes import F32
from rlx.scalars import HOLE, SUM_FLAGS, Ptr, Scalar, exp, f32, fastmath

#: Hole: elements of a row.
WIDTH: int = HOLE


def softmax(width: int) -> Kernel:
    """f32[rows, width] -> f32[rows, width]. Buffers: x, out. A unit is a row.

    Entries of -infinity become 0. A row with NaN or +infinity, or with -infinity only, becomes NaN.
    """
    return loop_kernel(_softmax, {"WIDTH": width}, [("x", F32), ("out", F32)])


@fastmath(*SUM_FLAGS)
def exponentials(x: Ptr, out: Ptr, top: Scalar, start: int, stop: int) -> Scalar:
    """Writes exp(x - top) and returns the sum."""
    total = f32(0.0)
    for i in range(start, stop):
        e = exp(x[i] - top)
        out[i] = e
        total += e
    return total


def _softmax(x: Ptr, out: Ptr, begin: int, end: int) -> None:
    for row in range(begin, end):
        start = row * WIDTH
        top = row_max(x, start, start + WIDTH)
        first = start + WIDTH % PART
        total = exponentials(x, out, top, start, first)
        for at in range(first, start + WIDTH, PART):
            total += exponentials(x, out, top, at, at + PART)
        share = f32(1.0) / total
        for i in range(start, start + WIDTH):
            out[i] = out[i] * share
