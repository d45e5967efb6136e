"""Several greedy tokens a step, and many steps in one native call, with drafts of the model's own head.

Runners stage, beside `greedy.py`, where one token is a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rlx.errors import NumericalError
from rlx.runners.greedy import SECONDS, end_run
from rlx.runners.prediction import ROWS, HeadDrafter
from rlx.runners.programs import Programs
from rlx.runners.speculative import MOST, Counters
from rlx.runners.wanted import Wanted
from rlx.runtime.given import feed
from rlx.runtime.native import NativeProgram
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
    models, past, most = _models(programs, session), session.done, min(count, TOKENS)
    feed(models[0].inputs, ids, past, None)
    for model in models:
        model.prepare({"SEQ": len(ids), "PAST_SEQ": past, **session.states.extents})
        if model.then:
            model.then.prepare({"SEQ": 1})
    session.begin(most, turns=True)
    found = drafter.rounds(models, ids, count=most, rows=rows, stops=stops, seconds=SECONDS)
    session.states.turn ^= found.rounds % 2
    counters.steps += found.rounds
    counters.drafted += found.drafted
    counters.accepted += found.accepted
    try:
        end_run(session, token, found.tokens)
    except NumericalError:
        drafter.forget(len(session.ids))
        raise
    return found.tokens


def _models(programs: Programs, session: Session) -> tuple[NativeProgram, NativeProgram]:
    """The programs that verify, the first to run first: they say what is likeliest after each row, and what the head
    takes.
    """
    wanted = Wanted(ROWS, all_rows=True, hidden=True, greedy=True, verifies=bool(session.recurrent))
    turns = (session.states.turn, 1 - session.states.turn) if session.recurrent else (0, 0)
    now, after = (programs[replace(wanted, turn=turn)] for turn in turns)
    return now, after
