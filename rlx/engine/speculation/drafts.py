"""The drafts of one generation, for the engine loop, which decides how many of them join a step.

Runners stage, between a drafter and the loop. The loop verifies drafts of any drafter in one way: it computes a row for
the newest token and one for each draft, chooses a token from each row, and goes on as long as the draft was the token
that it chose. Sampling is therefore the same as without drafts, penalties and seeds included. This is the method of
Leviathan et al. (arXiv 2211.17192) for deterministic drafts: a token is drawn from the model's distribution and
compared with the draft. A draft is thus accepted with the model's probability of it, and a rejected draft is replaced
by a token with the remaining distribution.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from rlx.backends.drafts import MEMORY, MOST, WORTH, max_useful_drafts

if TYPE_CHECKING:
    from rlx.engine.kv.sequence import Sequence as KVSequence
    from rlx.engine.token_engine import StepEngine

__all__ = ["MOST", "WORTH", "Counters", "Drafter", "Drafting", "Drafts", "Hits", "PromptLookup"]

LONGEST = 8  # maximum number of plain steps in a native run: drafts are looked for between runs only


class Drafter(Protocol):
    """Proposes how a text continues."""

    def observe(self, token: int) -> None:
        """Appends one token to the text."""
        ...

    def acceptance_probs(self, limit: int) -> list[float]:
        """The probability that the first draft is used, the second, and so on: at most `limit`, and what pays alone."""
        ...

    def propose(self, count: int) -> list[int]:
        """Drafts for the next tokens; at most `count`, which is not more than there are chances."""
        ...


class Drafting(Protocol):
    """Makes the drafts of generations."""

    def drafts(self, sequence: KVSequence, ids: list[int], salt: str, counters: Counters) -> Drafts | None:
        """The drafts of a generation; None if it gets none.

        Args:
            sequence: that of the generation.
            ids: its prompt.
            salt: only prompts with the same salt share prefixes.
            counters: incremented.
        """
        ...

    def close(self) -> None:
        """Ends it, and releases its memory."""
        ...


class Hits:
    """Estimates the acceptance rate of drafts, as a moving average."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def count(self, hit: bool) -> None:
        self.rate += (hit - self.rate) / MEMORY

    def acceptance_probs(self, limit: int) -> list[float]:
        """The probabilities that the first draft is accepted, the first two are, and so on, as far as they pay."""
        return [self.rate**count for count in range(1, max_useful_drafts(self.rate, limit) + 1)]


class ModelHits(Hits):
    """The same of a model, which can always draft: each of its drafts counts once it was verified.

    Args:
        most: maximum number of drafts in a row.
        cost: time of a draft relative to a step of the model that verifies it.
    """

    def __init__(self, most: int, cost: float = 0.0) -> None:
        super().__init__(0.9)
        self._most, self._cost, self.open = most, cost, list[int]()

    def observe(self, token: int) -> None:
        """Counts the next open draft, after which the text goes on with `token`; after a wrong one none is open."""
        if self.open:
            hit = self.open.pop(0) == token
            self.count(hit)
            if not hit:
                self.open.clear()

    def acceptance_probs(self, limit: int) -> list[float]:
        """As in `Hits`; a first draft is always worth a try, or the rate would never rise again."""
        found, tokens = list[float](), 1.0
        for count, prob in enumerate(super().acceptance_probs(min(limit, self._most))):
            if prob * (1 + count * self._cost) < tokens * self._cost:  # fewer tokens a time than without it
                break
            found.append(prob)
            tokens += prob
        return found or [WORTH] * min(limit, self._most, 1)


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


class Drafts:
    """The drafts of one generation.

    Args:
        drafter: has observed the prompt.
        counters: incremented.
    """

    def __init__(self, drafter: Drafter, counters: Counters) -> None:
        self._drafter, self._counters = drafter, counters
        self._seen = 0  # how many tokens of the answer the drafter has observed
        self._run = 1  # number of plain steps in the next native run

    def acceptance_probs(self, tokens: Sequence[int], limit: int) -> list[float]:
        """As `Drafter.acceptance_probs`, after the answer so far."""
        for token in tokens[self._seen :]:
            self._drafter.observe(token)
        self._seen = len(tokens)
        return self._drafter.acceptance_probs(min(limit, MOST)) if limit > 0 else []

    def propose(self, count: int) -> list[int]:
        """As `Drafter.propose`."""
        return self._drafter.propose(count) if count else []

    def propose_together(self, lengths: Mapping[Drafts, int]) -> Mapping[Drafts, list[int]]:
        """As `propose`, and the drafts of those others of `lengths` that are computed in the same steps."""
        return {self: self.propose(lengths[self])}

    def forget(self, length: int) -> None:
        """Follows a rewind: the sequence was cut to its first `length` tokens."""

    def close(self) -> None:
        """Ends them: the generation is over."""

    def verified(self, drafted: int, accepted: int) -> None:
        """Counts a step with drafts, or without."""
        self._counters.steps += 1
        self._counters.drafted += drafted
        self._counters.accepted += accepted
        self._run = 1 if drafted else self._run

    def run(
        self, engine: StepEngine, sequence: Any, tokens: Sequence[int], left: int, stops: Sequence[int]
    ) -> list[int]:
        """Several plain steps in one native call while there are no drafts; [] if there are.

        The runs grow while no draft is found: drafts are looked for between runs only, so a long run finds them late.
        """
        if self.acceptance_probs(tokens, left - 1):
            return []
        found = engine.greedy(sequence, tokens[-1], min(left, self._run), stops)
        self._run = min(2 * self._run, LONGEST)
        self._counters.steps += len(found)
        return found


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

    def acceptance_probs(self, limit: int) -> list[float]:
        return [] if self._match is None else self._hits[self._match[0]].acceptance_probs(limit)

    def propose(self, count: int) -> list[int]:
        if self._match is None:
            return []
        at = self._match[1]
        period = len(self._ids) - at  # a continuation beyond the end of the text repeats
        return [self._ids[at + i % period] for i in range(count)]
