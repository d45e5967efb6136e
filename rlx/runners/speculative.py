"""Speculative decoding: a drafter guesses some tokens, one step of several rows says what the model thinks of them.

Runners stage, between an engine and the loop that chooses tokens. `Speculation.step` gives that loop the same logits as
steps of one token would, in the same order; only where they come from differs. What is sampled from them is therefore
distributed as without drafts, penalties and seeds included. It is the sampling of Leviathan et al. (arXiv 2211.17192)
for drafts without a distribution of their own: drawing from the model's distribution and comparing accepts a draft with
the model's probability of it, and what is drawn otherwise is distributed as the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from rlx.errors import NumericalError
from rlx.runtime.loop_drafts import MEMORY, WORTH

Logits = npt.NDArray[np.float32]

MOST = 15  # drafts of a step at most


class Drafter(Protocol):
    """Guesses how a text goes on."""

    def observe(self, token: int) -> None:
        """The text has one more token."""
        ...

    def propose(self, limit: int) -> list[int]:
        """At most `limit` tokens that may come next; none where guessing does not pay."""
        ...


class VerifyingEngine(Protocol):
    """What speculation needs of an engine; `rlx.runners.engine.Engine` says it in full."""

    max_seq: int
    most_rows: int

    @property
    def past(self) -> int: ...
    def trim(self, length: int) -> None: ...
    def verify(self, ids: Sequence[int]) -> Logits: ...


def proposed(drafter: Drafter, engine: VerifyingEngine, left: int) -> list[int]:
    """Drafts behind the next token, of which `left` and those that the engine has room for are wanted at most."""
    room = min(left, engine.max_seq - engine.past - 1, engine.most_rows - 1, MOST)
    return drafter.propose(room) if room > 0 else []


@dataclass
class Counters:
    """What speculation did so far.

    Attributes:
        steps: calls of the model.
        drafted: tokens that were guessed.
        accepted: those that came.
    """

    steps: int = 0
    drafted: int = 0
    accepted: int = 0


class Speculation:
    """Logits for one generation, a row a token, computed several at a time.

    Args:
        engine: its session holds the prompt.
        drafter: knows the prompt.
        count: how many rows are wanted at most.
        check: called with the rows of a step, and if it raises with each that is handed out: what it raises then comes
            through.
        counters: counted up.
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
        self._past = engine.past  # tokens of the session that were chosen
        self._drafts: list[int] = []  # in the session too, but not yet chosen
        self._rows: list[Logits] = []  # the logits after each of them
        self._sound = False  # all these rows have passed the check

    def step(self, token: int) -> Logits:
        """The logits after one more token, float32[vocab].

        Raises:
            NumericalError: what `check` raises; the token does not count then.
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
        """Asks for the logits after a token, and after the drafts that may follow it."""
        self.finish()
        drafts = proposed(self._drafter, self._engine, self._left)
        rows = self._engine.verify([token, *drafts])
        self._rows, self._drafts = list(rows), drafts
        try:
            self._check(rows, "verification")
            self._sound = True
        except NumericalError:  # perhaps in a row after a guess that does not come
            self._sound = False
        self._counters.steps += 1
        self._counters.drafted += len(drafts)

    def finish(self) -> None:
        """Takes the drafts that were not chosen out of the session."""
        self._drafts, self._rows = [], []
        if self._engine.past > self._past:
            self._engine.trim(self._past)


class Hits:
    """How often guesses were right lately, and what that says about the next ones."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def count(self, hit: bool) -> None:
        self.rate += (hit - self.rate) / MEMORY

    def worth(self, limit: int) -> int:
        """How many drafts in a row pay, were each as likely to be right as the last ones."""
        count, reached = 0, self.rate
        while count < limit and reached >= WORTH:
            count, reached = count + 1, reached * self.rate
        return count


class PromptLookup:
    """Guesses that the text goes on as it did before: after the last place where its newest tokens stood together.

    The longest of a few lengths of match counts. For every length it keeps how often such a guess was right, also while
    it proposes nothing, so texts that do not repeat themselves cost a few microseconds a token and no drafts.

    Args:
        ids: the text so far.
    """

    SIZES = (6, 4, 3, 2)  # tokens of a match, the longest first

    def __init__(self, ids: Iterable[int]) -> None:
        self._ids: list[int] = []
        self._after: list[dict[tuple[int, ...], int]] = [{} for _ in self.SIZES]  # where the text went on
        self._hits = [Hits(rate) for rate in (0.9, 0.8, 0.7, 0.5)]
        self._match: tuple[int, int] | None = None  # which size, and where the text went on
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
        period = len(self._ids) - at  # what lies behind the end is the same again
        return [self._ids[at + i % period] for i in range(self._hits[size].worth(limit))]
