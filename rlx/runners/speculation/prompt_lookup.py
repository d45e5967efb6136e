"""Greedy generation with prompt lookup, for callers that do not observe single tokens.

Runners stage, beside `greedy.py`. Without a draft, several plain steps run in one native call. The run length grows
while no draft is found: drafts are looked for only between runs, so a long run finds them late.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from rlx.runners.generation.checks import check_finite
from rlx.runners.speculation.speculative import Counters, Drafter, VerifyingEngine, proposed

LONGEST = 8  # maximum number of plain steps in a run


class RunningEngine(VerifyingEngine, Protocol):
    """The part of an engine that this module uses; `rlx.runners.engine.engine.Engine` implements it."""

    @property
    def current(self) -> Any: ...
    def greedy(self, sequence: Any, token: int, count: int, stops: Sequence[int] = ()) -> list[int]: ...


class LookedUp:
    """Computes the tokens of one generation, some at a time.

    Args:
        engine: its session holds the prompt.
        drafter: has observed the prompt.
        counters: incremented.
    """

    def __init__(self, engine: RunningEngine, drafter: Drafter, counters: Counters) -> None:
        self._engine, self._drafter, self._counters, self._run = engine, drafter, counters, 1

    def more(self, token: int, count: int, stops: Sequence[int]) -> list[int]:
        """Appends `token` and the likeliest tokens after it; as `greedy`, `NumericalError` included."""
        drafter = self._drafter
        drafter.observe(token)
        drafts = proposed(drafter, self._engine, count - 1)
        found = self._verified([token, *drafts], stops) if drafts else self._plain(token, count, stops)
        for following in found[:-1]:
            drafter.observe(following)
        return found

    def _plain(self, token: int, count: int, stops: Sequence[int]) -> list[int]:
        found = self._engine.greedy(self._engine.current, token, min(count, self._run), stops)
        self._run = min(2 * self._run, LONGEST)
        self._counters.steps += len(found)
        return found

    def _verified(self, ids: list[int], stops: Sequence[int]) -> list[int]:
        """The tokens after the first id and after each accepted draft after it."""
        engine, past = self._engine, self._engine.past
        rows = engine.verify(ids)
        chosen, right = rows.argmax(1).tolist(), 1
        while right < len(ids) and ids[right] == chosen[right - 1] and chosen[right - 1] not in stops:
            right += 1
        finite = np.isfinite(rows[:right]).all(1)
        right = right if finite.all() else int(finite.argmin())  # only the rows before the first non-finite one
        engine.trim(past + right)
        if not right:
            check_finite(rows[0], f"position {past}")
        self._run = 1
        self._counters.steps += 1
        self._counters.drafted += len(ids) - 1
        self._counters.accepted += right - 1
        return list(chosen[:right])
