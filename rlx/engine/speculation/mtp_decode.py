"""Greedy generation with MTP drafts: several tokens per step, many steps per native call.

Runners stage, beside `greedy.py`, which generates one token per step.
"""

from __future__ import annotations

from collections.abc import Sequence as Ids
from dataclasses import replace
from typing import Any

from rlx.backends.program import Program
from rlx.engine.greedy import SECONDS, end_run
from rlx.engine.kv.prompt_embeddings import feed
from rlx.engine.kv.sequence import Sequence
from rlx.engine.programs.specs import ProgramSpec
from rlx.engine.speculation.drafts import MOST, Counters, Drafts
from rlx.engine.speculation.mtp import ROWS, HeadDrafter
from rlx.engine.stepper import Stepper
from rlx.errors import NumericalError

TOKENS = 256  # maximum number per call


def drafted_run(
    stepper: Stepper,
    sequence: Sequence,
    drafter: HeadDrafter,
    token: int,
    count: int,
    stops: Ids[int],
    counters: Counters,
) -> list[int]:
    """As `greedy_run`: appends `token` and the likeliest tokens after it. Returns [] if there are no drafts.

    Nor are there any if the model has both rings and recurrent states: the programs alternate between two slots.

    Args:
        drafter: its MTP head has followed the sequence.
        count, stops: as in `greedy_run`.
        counters: incremented.

    Raises:
        PromptError, PoolFullError, NumericalError: as `greedy_run`.
    """
    stepper.prepare(sequence, [token])
    stepper.catch_up(sequence)
    if sequence.recurrent and not sequence.memory.can_alternate:
        return []
    past = sequence.done
    most = min(count, TOKENS, stepper.limits.max_seq - past)
    drafter.observe(token)
    ids = [token, *drafter.propose(len(drafter.chances(min(most - 1, MOST))))]
    if len(ids) == 1:
        return []
    sequence.begin(most, alternating=True)
    models = _models(stepper, sequence)
    feed(models[0].inputs, ids, past, sequence.embeddings)
    for model, swapped in zip(models, (False, True), strict=True):
        model.prepare({"SEQ": len(ids), "PAST_SEQ": past, **stepper.place(model, sequence, swapped=swapped)})
        if model.then:
            model.then.prepare({"SEQ": 1})
    found = drafter.rounds(models, ids, count=most, rows=stepper.limits.ids, stops=stops, seconds=SECONDS)
    if found.rounds % 2 and sequence.recurrent:
        sequence.memory.take_spare()
    counters.steps += found.rounds
    counters.drafted += found.drafted
    counters.accepted += found.accepted
    try:
        end_run(sequence, token, found.tokens)
    except NumericalError:
        drafter.forget(len(sequence))
        raise
    return found.tokens


def _models(stepper: Stepper, sequence: Sequence) -> tuple[Program, Program]:
    """The two verifying programs, in the order in which they run; each reads the slot that the other one writes.

    They return the likeliest token after each row, and the hidden states for the MTP head.
    """
    spec = ProgramSpec(ROWS, all_rows=True, hidden=True, greedy=True, verifies=sequence.recurrent)
    now, after = (stepper.programs[replace(spec, swapped=swapped and sequence.recurrent)] for swapped in (False, True))
    return now, after


class HeadDrafts(Drafts):
    """The drafts of the MTP head for one sequence, which it follows until `close`.

    Args:
        stepper: runs the model; the head receives the hidden states of each step of the sequence.
        drafter: drafts with the head.
        counters: incremented.
    """

    def __init__(self, stepper: Stepper, sequence: Sequence, drafter: HeadDrafter, counters: Counters) -> None:
        super().__init__(drafter, counters)
        self.sequence, self._stepper, self._head = sequence, stepper, drafter
        stepper.listener = self

    def hear(self, start: int, ids: Ids[int], hidden: Any) -> None:
        """Receives a step of the model, see `Predictor.hear`."""
        self._head.hear(start, ids, hidden)

    def forget(self, length: int) -> None:
        self._head.forget(length)

    def close(self) -> None:
        if self._stepper.listener is self:
            self._stepper.listener = None
            self._head.close()

    def run(self, engine: Any, sequence: Any, tokens: Ids[int], left: int, stops: Ids[int]) -> list[int]:
        """Rounds of drafts and verifying steps in one native call; [] if the engine runs its steps one by one."""
        if not engine.native_loops:
            return []
        for token in tokens[self._seen : -1]:
            self._head.observe(token)
        found = drafted_run(self._stepper, self.sequence, self._head, tokens[-1], left, stops, self._counters)
        self._seen = len(tokens) + max(0, len(found) - 1)
        return found
