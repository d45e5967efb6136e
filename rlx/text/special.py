"""Cutting a text at the tokens that are matched as whole strings, before any merging.

Text stage, used by `from_gguf.py`: control and user-defined tokens never take part in merges.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping


class SpecialSplitter:
    """Finds the given token texts in a text: the leftmost first, the longest where several begin at one place."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = {text: token for text, token in ids.items() if text}
        lengths: dict[str, set[int]] = {}
        for text in self._ids:
            lengths.setdefault(text[0], set()).add(len(text))
        self._lengths = {first: sorted(sizes, reverse=True) for first, sizes in lengths.items()}
        self._first = re.compile("[" + re.escape("".join(lengths)) + "]") if lengths else None

    def split(self, text: str) -> Iterator[str | int]:
        """The text in order: ids of the tokens found, and the stretches between them that are not empty."""
        begin = at = 0
        while (found := self._next(text, at)) is not None:
            at, end = found
            if end == at:
                at += 1
                continue
            if begin < at:
                yield text[begin:at]
            yield self._ids[text[at:end]]
            begin = at = end
        if begin < len(text):
            yield text[begin:]

    def _next(self, text: str, at: int) -> tuple[int, int] | None:
        """The next place where a token may begin, and its end (the place itself if none does)."""
        match = self._first.search(text, at) if self._first else None
        if match is None:
            return None
        at = match.start()
        sizes = (size for size in self._lengths[text[at]] if text[at : at + size] in self._ids)
        return at, at + next(sizes, 0)
