"""Rounds of drafts: what a model's own head guesses is verified, and guessed on, in one native call.

Runtime, beside `native.py`: it fills in the plan of `rlx_drafts` (`loop_drafts.py`).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlx.runtime.loop_drafts import DRAFTS_PLAN, JOB, MODEL, RESULTS
from rlx.runtime.native import NativeProgram


@dataclass(frozen=True)
class Heads:
    """The programs of a head for further tokens, ready to run.

    Attributes:
        one, some: of one row, and of several; the inputs `tokens`, `positions` and what is carried, the output `token`.
        carried: of a row of the head its result that stands for the model's in the next one, and the input that takes
            either; the model's output has the same name as the input.
        rows: of the table that its tokens are looked up in.
    """

    one: NativeProgram
    some: NativeProgram
    carried: tuple[str, str]
    rows: int


@dataclass(frozen=True)
class Rounds:
    """What came of some rounds.

    Attributes:
        tokens: those that the model chose.
        right: how many of them the last round gave; its rows, up to there, are in the results of the program whose turn
            it was.
        rounds, drafted, accepted: calls of the model, guesses, and those that came.
        rate: how often guesses were right lately.
    """

    tokens: list[int]
    right: int
    rounds: int
    drafted: int
    accepted: int
    rate: float


def run_rounds(
    models: tuple[NativeProgram, NativeProgram],
    heads: Heads,
    *,
    most: int,
    seen: int,
    rate: float,
    count: int,
    rows: int,
    stops: Sequence[int],
    seconds: float,
) -> Rounds:
    """Runs the model on a token and its drafts, and goes on with the drafts of its head.

    Args:
        models: they take turns, each on the recurrent states that the other one wrote; one and the same where there are
            none. Their outputs are `token` i32[rows] and what the head takes; inputs and extents of the first round are
            in place, and the second one is prepared as well, and what they lead to.
        heads: prepared; the rows before those of the first round have been through the head.
        most: drafts of a round at most.
        seen: how many rows the head has.
        rate: how often guesses were right lately.
        count: tokens at most; at least as many as the first round has rows.
        rows: of the table that tokens are looked up in; it ends after a token that has none there.
        stops: tokens after which it ends.
        seconds: after so many it returns as soon as the round it is in is over.
    """
    found, ends = array("i", bytes(4 * count)), array("i", stops)
    one, some, taken = heads.one, heads.some, heads.carried[1]
    plans = [one.plan(0, 0, heads.rows, array("i"), seconds, carried=heads.carried, first=f) for f in (None, some)]
    turns = [_model_fields(model, taken) for model in models]
    values = {
        **{name: turn.buffer_info()[0] for name, turn in zip(("now", "next"), turns, strict=True)},
        **{name: plan.buffer_info()[0] for name, plan in zip(("one", "some"), plans, strict=True)},
        **{f"{name}_tokens": program.input("tokens") for name, program in (("one", one), ("some", some))},
        **{f"{name}_hidden": program.input(taken) for name, program in (("one", one), ("some", some))},
        "one_position": one.input("positions"),
        "one_past": one.extent("PAST_SEQ"),
        "some_positions": some.input("positions"),
        "some_seq": some.extent("SEQ"),
        "some_past": some.extent("PAST_SEQ"),
        "hidden_bytes": one.inputs[taken][0].nbytes,
        "seen": seen,
        "most": most,
        "rows": rows,
        "stops": ends.buffer_info()[0],
        "stop_count": len(ends),
        "found": found.buffer_info()[0],
        "count": count,
        "nanoseconds": int(seconds * 1e9),
    }
    plan = np.array([values.get(name, 0) for name in DRAFTS_PLAN], np.uint64)
    plan.view(np.float64)[-1] = rate
    done = one.pool.drafts(plan.ctypes.data)
    rounds, drafted, accepted, right = map(int, plan[-len(RESULTS) : -1])
    return Rounds(found[:done].tolist(), right, rounds, drafted, accepted, float(plan.view(np.float64)[-1]))


def _model_fields(model: NativeProgram, taken: str) -> array[int]:
    """The values of `MODEL`."""
    again = model.then.job() if model.then else dict.fromkeys(JOB, 0)
    values = {
        **model.job(),
        "chosen": model.result("token"),
        "hidden": model.result(taken),
        "tokens": model.input("tokens"),
        "positions": model.input("positions"),
        "seq": model.extent("SEQ"),
        "past": model.extent("PAST_SEQ"),
        **{f"again_{name}": value for name, value in again.items()},
        "again_seq": (model.then or model).extent("SEQ"),
    }
    return array("Q", map(values.__getitem__, MODEL))
