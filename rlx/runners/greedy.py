"""Several greedy tokens in one native call.

Runners stage, beside the engine: for generations in which nobody needs to see a token before the next one is computed.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlx.errors import NumericalError
from rlx.runtime.native import NativeProgram
from rlx.runtime.session import Session

#: Steps and seconds of one call at most: an interrupt must wait for its end.
STEPS, SECONDS = 32, 0.05


def greedy_run(
    program: NativeProgram, session: Session, token: int, count: int, stops: Sequence[int], rows: int
) -> list[int]:
    """Appends `token` to the session and what the model finds likeliest after it, token by token.

    Of equally likely tokens the lowest is taken. All tokens of the result but the last are in the session, too.

    Args:
        program: of one row, with the output `token`; its weights and states are bound.
        count: how many tokens are wanted, and the context has room for; fewer may come, but one at least.
        stops: tokens after which it ends.
        rows: of the table that tokens are looked up in; a token without a row ends it, too.

    Raises:
        NumericalError: a logit is NaN or infinite; the session ends before the token that it followed.
    """
    past = session.done
    program.inputs["tokens"][:1] = token
    if "positions" in program.inputs:  # not if every layer is recurrent
        program.inputs["positions"][:1] = past
    steps = min(count, STEPS)
    session.begin(steps)
    found = program.repeat(steps, rows, stops, SECONDS, {"SEQ": 1, "PAST_SEQ": past, **session.states.extents})
    end_run(session, token, found)
    return found


def end_run(session: Session, token: int, found: Sequence[int]) -> None:
    """Ends a step that appended `token` and all that was found but the last; `NumericalError` as `greedy_run`."""
    session.end([token, *found[:-1]])
    if found[-1] < 0:
        session.rewind(session.done - 1)
        raise NumericalError(
            "a logit is NaN or infinite", where=f"position {len(session.ids)}",
            hint="the weights or the arithmetic are broken: check the file, or try precision='exact'",
        )  # fmt: skip
