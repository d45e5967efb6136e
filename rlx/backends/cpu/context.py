"""The context of a step: a table of 8-byte fields that its workers read, and the clocks that they write.

CPU backend, between the linker, which makes the function `step`, and what launches it.
"""

from __future__ import annotations

#: The fields.
#:   args: the argument table, with the address of every buffer
#:   extents: i64, the values of the symbols, in the order of the manifest
#:   counters: i64, zero before a step: for each share, the ranges taken of each call; then the done units per region
#:   pool, phase: the worker pool, and `rlx_phase`, which waits for the end of a region
#:   times: i64, per worker the cycle count at the start and after each region
#:   marks: null, or per worker a `MARK` for each prologue and call, see `mark_number`
#:   log_bytes, log_left: i64. After a step of a native loop `times` and `marks` move by so many bytes, so many times
CONTEXT = ("args", "extents", "counters", "pool", "phase", "times", "marks", "log_bytes", "log_left")

#: What a worker did of a call, or of a prologue: the cycle counts at its begin and end, and its units; i64 each. Zero
#: if it did nothing.
MARK = ("begin", "end", "units")


def mark_number(region: int, calls_before: int) -> int:
    """The number of a region's first mark, that of its prologue; those of its calls follow.

    Args:
        calls_before: number of calls of the regions before it.
    """
    return region + calls_before
