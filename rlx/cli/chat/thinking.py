"""Tells a model's thinking from its answer, by the marks that its chat template names."""

from __future__ import annotations

from collections.abc import Iterator

# Marks around thinking: Qwen 3 and 3.5 and the distilled DeepSeek R1, Gemma 4, Magistral, others.
_MARKS = (
    ("<think>", "</think>"),
    ("<|channel>thought", "<channel|>"),
    ("<thinking>", "</thinking>"),
    ("[THINK]", "[/THINK]"),
)


def thinking_marks(template: str) -> tuple[tuple[str, str], ...]:
    """The pairs of marks that a chat template knows, as (opening, closing)."""
    return tuple(pair for pair in _MARKS if pair[1] in template)


class ThinkingSplitter:
    """Splits streamed text into thinking and answer; the marks themselves are left out.

    An opening mark counts at the start of a line only: an answer may talk about such a mark.

    Args:
        marks: as `thinking_marks` gives them.
        prompt: the end of the prompt; some templates write the opening mark themselves.
    """

    def __init__(self, marks: tuple[tuple[str, str], ...], prompt: str = "") -> None:
        self._marks, self._held, self._at_start = marks, "", True
        opened = (close for mark, close in marks if prompt.rfind(mark) > prompt.rfind(close))
        self._close: str | None = next(opened, None)

    @property
    def is_thinking(self) -> bool:
        """Whether the text so far ends inside thinking."""
        return self._close is not None

    def push(self, text: str) -> Iterator[tuple[bool, str]]:
        """The parts of the text that are certain now, as (is thinking, text); the beginning of a mark is held back."""
        text = self._held + text
        while found := self._next_mark(text):
            begin, end, close = found
            yield from self._part(text[:begin])
            self._close, text = close, text[end:]
        certain = len(text) - self._beginning(text)
        self._held = text[certain:]
        yield from self._part(text[:certain])

    def finish(self) -> Iterator[tuple[bool, str]]:
        """No more text: what was held back."""
        held, self._held = self._held, ""
        yield from self._part(held)

    def _part(self, text: str) -> Iterator[tuple[bool, str]]:
        if text:
            self._at_start = text.endswith("\n") or (self._at_start and text.isspace())
            yield self.is_thinking, text

    def _next_mark(self, text: str) -> tuple[int, int, str | None] | None:
        """Begin and end of the first mark that counts, and the mark that closes what it opens."""
        if self._close is not None:
            begin = text.find(self._close)
            return None if begin < 0 else (begin, begin + len(self._close), None)
        found = [(at, at + len(mark), close) for mark, close in self._marks if (at := self._opening(text, mark)) >= 0]
        return min(found, default=None)

    def _opening(self, text: str, mark: str) -> int:
        at = text.find(mark)
        while at >= 0 and not self._starts_line(text[:at]):
            at = text.find(mark, at + 1)
        return at

    def _starts_line(self, before: str) -> bool:
        line = before.rpartition("\n")[2]
        return not line.strip() and ("\n" in before or self._at_start)

    def _beginning(self, text: str) -> int:
        """How many of the last characters may be the beginning of a mark."""
        marks = [self._close] if self._close is not None else [mark for mark, _ in self._marks]
        longest = max(map(len, marks), default=1) - 1
        sizes = range(min(longest, len(text)), 0, -1)
        return next((size for size in sizes if any(mark.startswith(text[-size:]) for mark in marks)), 0)
