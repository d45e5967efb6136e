"""Speculative decoding: a drafter proposes tokens, and one step of several rows verifies them.

Runners stage, between an engine and the loop that chooses tokens. `Speculation.step` returns the same logits in the
same order as steps of one token; only the number of rows per step differs. Sampling is therefore unchanged, penalties
and seeds included. This is the method of Leviathan et al. (arXiv 2211.17192) for deterministic drafts: a token is drawn
from the model's distribution and compared with the draft. A draft is thus accepted with the model's probability of it,
and a rejected draft is replaced by a token with the remaining distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from rlx.backends.cpu.launch.loop_drafts import MEMORY, WORTH
from rlx.errors import NumericalError

Logits = npt.NDArray[np.float32]

MOST = 15  # maximum number of drafts per step


class Drafter(Protocol):
    """Proposes how a text continues."""

    def observe(self, token: int) -> None:
        """Appends one token to the text."""
        ...

    def propose(self, limit: int) -> list[int]:
        """At most `limit` drafts for the next tokens; none if drafting does not pay."""
        ...


class VerifyingEngine(Protocol):
    """The part of an engine that speculation uses; `rlx.runners.engine.engine.Engine` implements it."""

    max_seq: int
    most_rows: int

    @property
    def past(self) -> int: ...
    def trim(self, length: int) -> None: ...
    def verify(self, ids: Sequence[int]) -> Logits: ...


def proposed(drafter: Drafter, engine: VerifyingEngine, left: int) -> list[int]:
    """Drafts after the next token: at most `left`, and no more than the engine has room for."""
    room = min(left, engine.max_seq - engine.past - 1, engine.most_rows - 1, MOST)
    return drafter.propose(room) if room > 0 else []


@dataclass
class Counters:
    """Counters of speculative decoding.

    Attributes:
        steps: calls of the model.
        drafted: tokens that were proposed.
        accepted: drafts that were accepted.
    """

    steps: int = 0
    drafted: int = 0
    accepted: int = 0


class Speculation:
    """The logits of one generation, one row per token, computed several rows at a time.

    Args:
        engine: its session holds the prompt.
        drafter: has observed the prompt.
        count: maximum number of rows that are needed.
        check: called with all rows of a step. If it raises, it is called again with each row that is used, and its
            exception then propagates.
        counters: incremented.
    """

    def __init__(
        self,
        engine: VerifyingEngine,
        drafter: Drafter,
        count: int,
        check: Callable[[Logits, str], Any],
        counters: Counters | None = None,
    ) -> None:
        self._engine, self._drafter, self._left, self._check = engine, drafter, count, check
        self._counters = Counters() if counters is None else counters
        self._past = engine.past  # accepted tokens in the session
        self._drafts: list[int] = []  # tokens in the session that are not accepted yet
        self._rows: list[Logits] = []  # the logits after each of them
        self._sound = False  # whether all these rows have passed the check

    def step(self, token: int) -> Logits:
        """The logits after one more token, float32[vocab].

        Raises:
            NumericalError: from `check`; the token is then not counted.
        """
        self._drafter.observe(token)
        self._left -= 1
        if self._drafts and self._drafts[0] == token:
            self._counters.accepted += 1
            del self._drafts[0]
        else:
            self._verify(token)
        row = self._rows.pop(0)
        if not self._sound:
            self._check(row, f"position {self._past}")
        self._past += 1
        return row

    def _verify(self, token: int) -> None:
        """Computes the logits after a token and after each draft that may follow it."""
        self.finish()
        drafts = proposed(self._drafter, self._engine, self._left)
        rows = self._engine.verify([token, *drafts])
        self._rows, self._drafts = list(rows), drafts
        try:
            self._check(rows, "verification")
            self._sound = True
        except NumericalError:  # possibly in a row after a draft that will be rejected
            self._sound = False
        self._counters.steps += 1
        self._counters.drafted += len(drafts)

    def finish(self) -> None:
        """Removes the drafts that were not accepted from the session."""
        self._drafts, self._rows = [], []
        if self._engine.past > self._past:
            self._engine.trim(self._past)


class Hits:
    """Estimates the acceptance rate of drafts, as a moving average."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def count(self, hit: bool) -> None:
        self.rate += (hit - self.rate) / MEMORY

    def worth(self, limit: int) -> int:
        """How many drafts in a row pay, assuming that each is accepted at the current rate."""
        count, reached = 0, self.rate
        while count < limit and reached >= WORTH:
            count, reached = count + 1, reached * self.rate
        return count


class PromptLookup:
    """Prompt lookup: proposes what followed the last occurrence of the newest tokens.

    It matches n-grams of a few lengths; the longest match wins. It tracks the acceptance rate of each length, also
    without proposing. A text without repetitions therefore costs a few microseconds per token and no drafts.

    Args:
        ids: the text so far.
    """

    SIZES = (6, 4, 3, 2)  # n-gram lengths, the longest first

    def __init__(self, ids: Iterable[int]) -> None:
        self._ids: list[int] = []
        self._after: list[dict[tuple[int, ...], int]] = [{} for _ in self.SIZES]  # n-gram -> position after it
        self._hits = [Hits(rate) for rate in (0.9, 0.8, 0.7, 0.5)]
        self._match: tuple[int, int] | None = None  # index of the length, and position after the match
        for token in ids:
            self.observe(token)

    def observe(self, token: int) -> None:
        if self._match is not None:
            size, at = self._match
            self._hits[size].count(self._ids[at] == token)
        self._ids.append(token)
        self._match, end = None, len(self._ids)
        for i, (size, table) in enumerate(zip(self.SIZES, self._after, strict=True)):
            if size <= end:
                newest = tuple(self._ids[-size:])
                if self._match is None and newest in table:
                    self._match = i, table[newest]
                table[newest] = end

    def propose(self, limit: int) -> list[int]:
        if self._match is None:
            return []
        size, at = self._match
        period = len(self._ids) - at  # a continuation beyond the end of the text repeats
        return [self._ids[at + i % period] for i in range(self._hits[size].worth(limit))]
