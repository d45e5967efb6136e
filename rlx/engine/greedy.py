"""Greedy generation of several tokens in one native call.

Runners stage, beside the engine: for generations in which no caller observes a token before the next one is computed.
"""

from __future__ import annotations

from collections.abc import Sequence as Ids

from rlx.backends.program import TokenRun
from rlx.engine.kv.prompt_embeddings import shift_at
from rlx.engine.kv.sequence import Sequence
from rlx.engine.programs.specs import GREEDY
from rlx.engine.stepper import Stepper
from rlx.errors import NumericalError

#: Maximum steps and seconds per call: an interrupt has to wait until the call returns.
STEPS, SECONDS = 32, 0.05


def greedy_run(stepper: Stepper, sequence: Sequence, token: int, count: int, stops: Ids[int] = ()) -> list[int]:
    """Appends `token` to a sequence, then the likeliest tokens after it, one by one.

    Ties go to the lower token id. The sequence then also holds all tokens of the result but the last.

    Args:
        count: maximum number of tokens. At least one is returned, possibly fewer than `count`.
        stops: token ids that end the run.

    Raises:
        PromptError: the context is full, or `token` is invalid.
        PoolFullError: there is no room.
        NumericalError: a logit is NaN or infinite; the sequence ends before the token that it followed.
    """
    stepper.prepare(sequence, [token])
    stepper.catch_up(sequence)
    program, past = stepper.programs[GREEDY], sequence.done
    steps = min(count, STEPS, stepper.limits.max_seq - past)
    sequence.begin(steps)
    program.inputs["tokens"][:1] = token
    if "positions" in program.inputs:  # absent if every layer is recurrent
        program.inputs["positions"][:1] = past + shift_at(sequence.embeddings, past)
    env = {"SEQ": 1, "PAST_SEQ": past, **stepper.place(program, sequence)}
    found = program.repeat(TokenRun(steps, stepper.limits.ids, stops, SECONDS, env))
    end_run(sequence, token, found)
    return found


def end_run(sequence: Sequence, token: int, found: Ids[int]) -> None:
    """Adds `token` and all of `found` but the last to the sequence; `NumericalError` as `greedy_run`."""
    sequence.end([token, *found[:-1]])
    if found[-1] < 0:
        sequence.rewind(sequence.done - 1)
        raise NumericalError(
            "a logit is NaN or infinite", where=f"position {len(sequence)}",
            hint="the weights or the arithmetic are broken: check the file, or try precision='exact'",
        )  # fmt: skip
