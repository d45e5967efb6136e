"""Several greedy tokens a step, and many steps in one native call, with drafts of the model's own head.

Runners stage, beside `greedy.py`, where one token is a step.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlx.errors import NumericalError
from rlx.runners.greedy import SECONDS, end_run
from rlx.runners.prediction import ROWS, HeadDrafter
from rlx.runners.programs import Programs
from rlx.runners.speculative import MOST, Counters
from rlx.runners.wanted import Wanted
from rlx.runtime.given import feed
from rlx.runtime.session import Session

TOKENS = 256  # of one call at most


def drafted_run(
    programs: Programs,
    session: Session,
    drafter: HeadDrafter,
    token: int,
    count: int,
    stops: Sequence[int],
    rows: int,
    counters: Counters,
) -> list[int]:
    """As `greedy_run`: appends `token` and what the model finds likeliest after it. Without drafts it does nothing.

    Args:
        drafter: its head has heard of the session.
        count, stops, rows: as in `greedy_run`.
        counters: counted up.

    Raises:
        NumericalError: as `greedy_run`.
    """
    drafter.observe(token)
    ids = [token, *drafter.propose(min(count - 1, MOST))]
    if len(ids) == 1:
        return []
    program, past, most = programs[_wanted(session)], session.done, min(count, TOKENS)
    feed(program.inputs, ids, past, None)
    program.prepare({"SEQ": len(ids), "PAST_SEQ": past, **session.states.extents})
    if program.then:
        program.then.prepare({"SEQ": 1})
    session.begin(most)
    found = drafter.rounds(program, ids, count=most, rows=rows, stops=stops, seconds=SECONDS)
    counters.steps += found.rounds
    counters.drafted += found.drafted
    counters.accepted += found.accepted
    try:
        end_run(session, token, found.tokens)
    except NumericalError:
        drafter.forget(len(session.ids))
        raise
    return found.tokens


def _wanted(session: Session) -> Wanted:
    """The program that verifies: it says what is likeliest after each row, and what the head takes."""
    return Wanted(ROWS, all_rows=True, hidden=True, greedy=True, verifies=bool(session.recurrent))
