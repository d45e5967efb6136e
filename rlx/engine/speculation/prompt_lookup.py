"""Prompt lookup: drafts from the text so far.

Runners stage. It needs no weights, and helps where answers repeat the prompt: edits, extraction, code, summaries.
"""

from __future__ import annotations

from collections.abc import Iterable

from rlx.engine.speculation.drafts import Hits


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

    def chances(self, limit: int) -> list[float]:
        return [] if self._match is None else self._hits[self._match[0]].chances(limit)

    def propose(self, count: int) -> list[int]:
        if self._match is None:
            return []
        at = self._match[1]
        period = len(self._ids) - at  # a continuation beyond the end of the text repeats
        return [self._ids[at + i % period] for i in range(count)]
