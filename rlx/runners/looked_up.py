"""Greedy tokens with guesses of prompt lookup, where nobody needs to see one before the next ones are computed.

Runners stage, beside `greedy.py`. Where there is nothing to guess, runs of plain steps are one native call: the longer
nothing was found, the longer the run, since a guess that its tokens would allow comes late by as many.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from rlx.runners.checks import check_finite
from rlx.runners.speculative import Counters, Drafter, VerifyingEngine, proposed

LONGEST = 8  # run of plain steps


class RunningEngine(VerifyingEngine, Protocol):
    """What is needed of an engine; `rlx.runners.engine.Engine` says it in full."""

    def greedy(self, token: int, count: int, stops: Sequence[int] = ()) -> list[int]: ...


class LookedUp:
    """The tokens of one generation, some at a time.

    Args:
        engine: its session holds the prompt.
        drafter: knows the prompt.
        counters: counted up.
    """

    def __init__(self, engine: RunningEngine, drafter: Drafter, counters: Counters) -> None:
        self._engine, self._drafter, self._counters, self._run = engine, drafter, counters, 1

    def more(self, token: int, count: int, stops: Sequence[int]) -> list[int]:
        """Appends `token` and what is likeliest after it; as `greedy`, `NumericalError` included."""
        drafter = self._drafter
        drafter.observe(token)
        drafts = proposed(drafter, self._engine, count - 1)
        found = self._verified([token, *drafts], stops) if drafts else self._plain(token, count, stops)
        for following in found[:-1]:
            drafter.observe(following)
        return found

    def _plain(self, token: int, count: int, stops: Sequence[int]) -> list[int]:
        found = self._engine.greedy(token, min(count, self._run), stops)
        self._run = min(2 * self._run, LONGEST)
        self._counters.steps += len(found)
        return found

    def _verified(self, ids: list[int], stops: Sequence[int]) -> list[int]:
        """The tokens after the first id and after the drafts behind it that are right."""
        engine, past = self._engine, self._engine.past
        rows = engine.verify(ids)
        chosen, right = rows.argmax(1).tolist(), 1
        while right < len(ids) and ids[right] == chosen[right - 1] and chosen[right - 1] not in stops:
            right += 1
        finite = np.isfinite(rows[:right]).all(1)
        right = right if finite.all() else int(finite.argmin())  # the rows in front of the first that is broken
        engine.trim(past + right)
        if not right:
            check_finite(rows[0], f"position {past}")
        self._run = 1
        self._counters.steps += 1
        self._counters.drafted += len(ids) - 1
        self._counters.accepted += right - 1
        return list(chosen[:right])
