"""Copies f32 rows unchanged: the last one, or chosen ones."""

from __future__ import annotations

from rlx.backends.cpu.kernel import Kernel
from rlx.backends.cpu.loops import loop_kernel
from rlx.ir.dtypes import F32, I32
from rlx.scalars import HOLE, Ptr

#: Hole: elements of a row.
WIDTH: int = HOLE


def last_row(width: int) -> Kernel:
    """f32[seq, width] -> f32[1, width], the last row. Buffers x, out; extent seq; one unit."""
    return loop_kernel(_last_row, {"WIDTH": width}, [("x", F32), ("out", F32)], ("seq",))


def take_rows(width: int) -> Kernel:
    """f32[n, width], rows i32[m] -> f32[m, width]. Buffers x, rows, out; a unit is a row of the result."""
    return loop_kernel(_take_rows, {"WIDTH": width}, [("x", F32), ("rows", I32), ("out", F32)])


def _last_row(x: Ptr, out: Ptr, seq: int, begin: int, end: int) -> None:
    for unit in range(begin, end):
        for i in range(WIDTH):
            out[unit * WIDTH + i] = x[(seq - 1) * WIDTH + i]


def _take_rows(x: Ptr, rows: Ptr, out: Ptr, begin: int, end: int) -> None:
    for row in range(begin, end):
        source = rows[row] * WIDTH
        for i in range(WIDTH):
            out[row * WIDTH + i] = x[source + i]
