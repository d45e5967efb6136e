"""Greedy generation of several tokens in one native call.

Runners stage, beside the engine: for generations in which no caller observes a token before the next one is computed.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlx.backends.base import Program
from rlx.errors import NumericalError
from rlx.runtime.session import Session

#: Maximum steps and seconds per call: an interrupt has to wait until the call returns.
STEPS, SECONDS = 32, 0.05


def greedy_run(
    program: Program, session: Session, token: int, count: int, stops: Sequence[int], rows: int
) -> list[int]:
    """Appends `token` to the session, then the likeliest tokens after it, one by one.

    Ties go to the lower token id. The session then also holds all tokens of the result but the last.

    Args:
        program: a program for one row with the output `token`; weights and states are bound.
        count: maximum number of tokens, for which the context must have room. At least one is returned, possibly
            fewer than `count`.
        stops: token ids that end the run.
        rows: number of rows of the embedding table; a token id beyond it also ends the run.

    Raises:
        NumericalError: a logit is NaN or infinite; the session ends before the token that it followed.
    """
    past = session.done
    program.inputs["tokens"][:1] = token
    if "positions" in program.inputs:  # absent if every layer is recurrent
        program.inputs["positions"][:1] = past
    steps = min(count, STEPS)
    session.begin(steps)
    found = program.repeat(steps, rows, stops, SECONDS, {"SEQ": 1, "PAST_SEQ": past, **session.states.extents})
    end_run(session, token, found)
    return found


def end_run(session: Session, token: int, found: Sequence[int]) -> None:
    """Adds `token` and all of `found` but the last to the session; `NumericalError` as `greedy_run`."""
    session.end([token, *found[:-1]])
    if found[-1] < 0:
        session.rewind(session.done - 1)
        raise NumericalError(
            "a logit is NaN or infinite", where=f"position {len(session.ids)}",
            hint="the weights or the arithmetic are broken: check the file, or try precision='exact'",
        )  # fmt: skip
