"""Rounds of MTP drafts: the model verifies drafts and its MTP head makes the next ones, in one native call.

CPU backend, beside `native.py`: it fills in the plan of `rlx_drafts` (`loop_drafts.py`).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from rlx.backends.cpu.context import CALL, DRAFTS_PLAN, MODEL, RESULTS
from rlx.backends.cpu.launch.native import NativeProgram, logged, native
from rlx.backends.drafts import Heads, Rounds
from rlx.backends.host import address
from rlx.backends.program import Program, RowEnd, TokenRun


def run_rounds(
    models: tuple[Program, Program],
    heads: Heads,
    *,
    most: int,
    seen: int,
    shifts: tuple[int, int] = (0, 0),
    rate: float,
    count: int,
    rows: int,
    stops: Sequence[int],
    seconds: float,
) -> Rounds:
    """Runs the model on a token and its drafts, and continues with drafts of the MTP head.

    Args:
        models: two programs that alternate, each on the recurrent states that the other one wrote; twice the same
            program without recurrent states. Their outputs are `token` i32[rows] and the head's input. Inputs and
            symbol values of the first round are set; the second program and their follow-up programs are prepared.
        heads: prepared; the head has processed all rows before the first round.
        most: maximum number of drafts in a round.
        seen: number of rows that the head has processed.
        shifts: what to add to the number of rows before a row for its position: of the model, and of the head.
        rate: the recent acceptance rate of drafts.
        count: maximum number of tokens; at least the number of rows of the first round.
        rows: number of rows of the embedding table; a token id beyond it ends the run.
        stops: token ids that end the run.
        seconds: time limit; the run ends after the current round.
    """
    found, ends = array("i", bytes(4 * count)), array("i", stops)
    one, some, taken = native(heads.one), native(heads.some), heads.carried[1]
    runs = [TokenRun([RowEnd(0)], heads.rows, {}, heads.carried, first) for first in (None, some)]
    plans = [one.plan(run, array("i"), 0, 0, seconds) for run in runs]
    turns = [_model_fields(native(model), taken) for model in models]
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
        "shift": shifts[0] % (1 << 64),
        "head_shift": shifts[1] % (1 << 64),
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
    with logged(_expected(models, one, some, count, most)):
        done = one.pool.drafts(plan.ctypes.data)
    rounds, drafted, accepted, right = map(int, plan[-len(RESULTS) : -1])
    return Rounds(found[:done].tolist(), right, rounds, drafted, accepted, float(plan.view(np.float64)[-1]))


def _expected(
    models: tuple[Program, Program], one: NativeProgram, some: NativeProgram, count: int, most: int
) -> dict[NativeProgram, int]:
    """The programs of rounds, and how many steps each runs at most."""
    again = [native(model.then) for model in models if model.then]
    return {**dict.fromkeys((*map(native, models), *again, some), count), one: count * most}


def _model_fields(model: NativeProgram, taken: str) -> array[int]:
    """The values of `MODEL`."""
    then = native(model.then) if model.then else None
    again = then.call() if then else dict.fromkeys(CALL, 0)
    values = {
        **model.call(),
        "chosen": address(model.result("token")),
        "hidden": address(model.result(taken)),
        "tokens": model.input("tokens"),
        "positions": model.input("positions"),
        "seq": model.extent("SEQ"),
        "past": model.extent("PAST_SEQ"),
        **{f"again_{name}": value for name, value in again.items()},
        "again_seq": (then or model).extent("SEQ"),
    }
    return array("Q", map(values.__getitem__, MODEL))
