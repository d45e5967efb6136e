"""The memory that Python and native code share: the context of a step, its clocks, the worker pool, plans.

CPU backend, between what writes LLVM IR (the linker, the worker loop) and what launches it. All but the pool are tables
of 8-byte fields.
"""

from __future__ import annotations

#: The context of a step.
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


#: The functions of the worker loop.
SYMBOLS = ("rlx_phase", "rlx_worker", "rlx_share", "rlx_read", "rlx_cycles", "rlx_repeat", "rlx_drafts")

# Layout of the pool's memory. Words that different threads write are 128 bytes apart: CPUs prefetch pairs of cache
# lines. A signal is { i32 value, i32 sleepers }.
#   size: { i64 workers, i64 spin in a step, i64 spin of an idle worker }, nanoseconds
#   tick: signal for a new step and for a finished phase         finished: signal that the caller of a step waits for
#   gate: i64, see CLOSED, then ptr function, ptr context
_LINE = 128
OFFSETS = {name: _LINE * i for i, name in enumerate("size tick gate finished".split())}
POOL_BYTES = _LINE * len(OFFSETS)

#: The gate: the upper half is the number of the step, the lower half says who may enter. CLOSED: nobody; else any free
#: worker. The low bits count the workers inside.
CLOSED, INSIDE = 1 << 31, (1 << 31) - 1

# The plan of repeated steps, 8 bytes per field. Of a step: the function for `rlx_share`, counters that must be zero
# before it, the address of its chosen token, and that of another result, which the next step takes. The first step may
# belong to another program. Updated from step to step: PAST_SEQ among the symbols, and the inputs: the token, its
# position, and the operand that takes the other result; `result` and `operand` may be null if no bytes are carried.
# Then the ids that end the run, and the buffer for the tokens found. `rows`: ids from there on are out of range.
STEP = ("function", "context", "counters", "counter_bytes", "chosen", "result")
FIXED = (*STEP, *(f"first_{name}" for name in STEP), "past", "position", "token", "operand", "carried_bytes")
VARYING = ("rows", "stops", "stop_count", "found", "count", "nanoseconds")  # fields that change from run to run
PLAN = (*FIXED, *VARYING)

# Fields of the model's program, 8 bytes each: its step function, the chosen token of each row, the hidden states for
# the head, its inputs, and the symbols SEQ and PAST_SEQ. Then the program that recomputes the recurrent states for the
# first rows: its function (null if there is nothing to do), and SEQ.
CALL = ("function", "context", "counters", "counter_bytes")
MODEL = (
    *CALL, "chosen", "hidden", "tokens", "positions", "seq", "past",
    *(f"again_{name}" for name in CALL), "again_seq",
)  # fmt: skip
# The plan. `now` and `next` are two such programs, which alternate: each reads the recurrent states that the other one
# wrote. The head has a program for one row and one for several rows; each runs the first step of a plan of
# `rlx_repeat`, with separate inputs. `one` runs the steps after the first in both. `seen`: rows that the head has
# processed before the first round. `shift` and `head_shift`: what to add to the number of rows before a row for its
# position, of the model and of the head.
PROGRAMS = (
    "now", "next",
    "one", "one_tokens", "one_hidden", "one_position", "one_past",
    "some", "some_tokens", "some_hidden", "some_positions", "some_seq", "some_past",
    "hidden_bytes",
)  # fmt: skip
RUN = ("seen", "shift", "head_shift", "most", "rows", "stops", "stop_count", "found", "count", "nanoseconds")
# Results: rounds, drafts, accepted drafts, accepted rows of the last round. Input and output: the recent acceptance
# rate of drafts, a double.
RESULTS = ("rounds", "drafted", "accepted", "right", "rate")
DRAFTS_PLAN = (*PROGRAMS, *RUN, *RESULTS)
