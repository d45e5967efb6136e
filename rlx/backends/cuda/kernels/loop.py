"""The kernel between two steps of a run: it takes the tokens that a step chose to the next step."""

from __future__ import annotations

from dataclasses import dataclass

from rlx.backends.cuda.agreed.choice import NO_TOKEN, WORDS
from rlx.backends.cuda.agreed.loop import (
    DONE,
    HEAD_BYTES,
    LEFT,
    NUMBERS_AT,
    ROW_BYTES,
    STEPS,
    STOP_COUNT,
    STOPS_AT,
    TABLE,
)
from rlx.backends.cuda.agreed.steps import RUNS
from rlx.backends.cuda.code import F64, I8, I32, THREADS, Code, Value
from rlx.ir.dims import DimLike
from rlx.ir.segments import PAST, ROWS


@dataclass(frozen=True)
class Sequences:
    """Where a program has the sequences of its rows.

    Attributes:
        count: how many there are.
        columns: of `segments`; 0 if there is no such input: the one sequence has the symbols RUNS and PAST_SEQ.
        has_past: whether there is the symbol PAST_SEQ.
    """

    count: DimLike = 1
    columns: int = 0
    has_past: bool = True


def advance(k: Code, sequences: Sequences) -> None:
    """One block, with a thread for each row: tells its token, and makes it the input of the next step, or ends the row.

    A row that has ended computes nothing more, so that its states stay as they are. With a pointer to the random
    numbers of choices, each token is followed by whether all logits are finite, and the next number goes there. If
    there is no token, or a logit is not finite, the row ends without one: the host then looks at it.
    """
    loop, count = k.pointers["loop"], k.number(k.dim(sequences.count))
    done = k.load(loop, I32, DONE)
    with k.loop(k.thread, count, THREADS) as i:
        runs, past = _places(k, sequences, i)
        found = k.variable(I32, NO_TOKEN)
        with k.when(k.load(runs, I32).equals(0) ^ 1):
            own = k.at(loop, I8, i * ROW_BYTES + HEAD_BYTES)
            found.set(_token(k, i, done, own))
            ends = k.variable(I32, _ends(k, found.get(), loop, own))
            with k.loop(0, k.load(own, I32, STOP_COUNT)) as number:
                ends.set(ends.get() | k.load(own, I32, number + STOPS_AT).equals(found.get()).to(I32))
            k.store(runs, 1 - ends.get())
            with k.when(ends.get().equals(0)):
                k.store(k.pointers["tokens"], found.get(), i)
                if "positions" in k.pointers:
                    k.store(k.pointers["positions"], k.load(k.pointers["positions"], I32, i) + 1, i)
                if sequences.has_past:
                    k.store(past, k.load(past, I32) + 1)
        k.store(k.pointers["found"], found.get(), done % STEPS * count + i)
    k.barrier()
    with k.when(k.thread.equals(0)):
        k.store(loop, done + 1, DONE)


def _places(k: Code, sequences: Sequences, row: Value) -> tuple[Value, Value]:
    """Where a row has whether it runs, which is 0 or 1, and its past."""
    if sequences.columns:
        segment = k.at(k.pointers["segments"], I32, row * sequences.columns)
        return k.at(segment, I32, ROWS), k.at(segment, I32, PAST)
    past = k.symbol("PAST_SEQ") if sequences.has_past else 0
    return k.at(k.extents, I32, k.symbol(RUNS)), k.at(k.extents, I32, past)


def _token(k: Code, row: Value, done: Value, own: Value) -> Value:
    """The token of a row, or none; brings the random number of the next one."""
    if "number" not in k.pointers:
        return k.load(k.pointers["token"], I32, row)
    token, is_finite = (k.load(k.pointers["token"], I32, row * 2 + at) for at in range(2))
    following = k.load(own, F64, k.smaller(done + 1, STEPS - 1) + NUMBERS_AT)
    k.store(k.pointers["number"], following, row * WORDS)
    return k.select((token < 0) | is_finite.equals(0), NO_TOKEN, token)


def _ends(k: Code, token: Value, loop: Value, own: Value) -> Value:
    """Whether a row ends because it has no token, one that has no embedding, or as many as it may get."""
    left = k.load(own, I32, LEFT) - 1
    k.store(own, left, LEFT)
    return ((token < 0) | (token >= k.load(loop, I32, TABLE)) | (left < 1)).to(I32)
