"""Greedy generation with MTP drafts: several tokens per step, many steps per native call.

Runners stage, beside `greedy.py`, which generates one token per step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rlx.backends.base import Program
from rlx.errors import NumericalError
from rlx.runners.engine.greedy import SECONDS, end_run
from rlx.runners.engine.program_spec import ProgramSpec
from rlx.runners.engine.programs import Programs
from rlx.runners.speculation.mtp import ROWS, HeadDrafter
from rlx.runners.speculation.speculative import MOST, Counters
from rlx.runtime.prompt_embeddings import feed
from rlx.runtime.session import Session

TOKENS = 256  # maximum number per call


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
    """As `greedy_run`: appends `token` and the likeliest tokens after it. Returns [] if there are no drafts.

    Args:
        drafter: its MTP head has followed the session.
        count, stops, rows: as in `greedy_run`.
        counters: incremented.

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


def _models(programs: Programs, session: Session) -> tuple[Program, Program]:
    """The two verifying programs, in the order in which they run; one for each buffer of the recurrent states.

    They return the likeliest token after each row, and the hidden states for the MTP head.
    """
    spec = ProgramSpec(ROWS, all_rows=True, hidden=True, greedy=True, verifies=bool(session.recurrent))
    turns = (session.states.turn, 1 - session.states.turn) if session.recurrent else (0, 0)
    now, after = (programs[replace(spec, turn=turn)] for turn in turns)
    return now, after
