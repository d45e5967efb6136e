"""The kernel between two steps of a loop: it takes the token that a step chose to the next step."""

from __future__ import annotations

from rlx.backends.cuda.agreed.loop import COUNT, FOUND_AT, NUMBERS_AT, STEPS, STOP_COUNT, STOPS_AT, TABLE
from rlx.backends.cuda.agreed.steps import RUNS
from rlx.backends.cuda.code import F64, I32, Code


def advance(k: Code, past: bool) -> None:
    """One block: notes the token, and makes it the input of the next step, or ends the loop.

    With a pointer to the random number of the choice, it also brings the next one there, and the token is followed by
    whether all logits are finite. If it is none, it is not noted: the host then looks at the step.

    Args:
        past: whether the program has the symbol PAST_SEQ.
    """
    loop, extents = k.pointers["loop"], k.extents
    with k.when(k.thread.equals(0) & k.load(extents, I32, k.symbol(RUNS)).equals(1)):
        token, count = k.load(k.pointers["token"], I32), k.load(loop, I32, COUNT)
        ended = k.variable(I32, ((token < 0) | (token >= k.load(loop, I32, TABLE))).to(I32))
        if draws := "number" in k.pointers:
            fails = (token < 0) | k.load(k.pointers["token"], I32, 1).equals(0)
            ended.set(ended.get() | fails.to(I32))
            following = k.load(loop, F64, k.smaller(count + 1, STEPS - 1) + NUMBERS_AT)
            k.store(k.pointers["number"], following)
        with k.guarded(fails.equals(0) if draws else None):
            k.store(loop, token, count + FOUND_AT)
            k.store(loop, count + 1, COUNT)
        with k.loop(0, k.load(loop, I32, STOP_COUNT)) as i:
            ended.set(ended.get() | k.load(loop, I32, i + STOPS_AT).equals(token).to(I32))
        k.store(extents, 1 - ended.get(), k.symbol(RUNS))
        with k.when(ended.get().equals(0)):
            k.store(k.pointers["tokens"], token)
            if "positions" in k.pointers:
                k.store(k.pointers["positions"], k.load(k.pointers["positions"], I32) + 1)
            if past:
                k.store(extents, k.load(extents, I32, k.symbol("PAST_SEQ")) + 1, k.symbol("PAST_SEQ"))
