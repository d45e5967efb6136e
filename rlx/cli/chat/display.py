"""What a terminal shows of an answer while it streams: thinking dim or folded, the rest as Markdown or as it is."""

from __future__ import annotations

from typing import TextIO

from rlx.cli.chat.markdown import MarkdownStream
from rlx.cli.output import counted
from rlx.text.answer import ThinkingSplitter

_DIM, _NORMAL = "\x1b[2m", "\x1b[22m"


class Display:
    """A text stream in front of a terminal, for one answer. Call `finish` at its end.

    Args:
        out: the terminal.
        thinking: splits the text.
        markdown: draw the answer as Markdown.
        fold: show how long the thinking was in its place.
    """

    def __init__(self, out: TextIO, thinking: ThinkingSplitter, *, markdown: bool, fold: bool) -> None:
        self._out, self._thinking, self._fold = out, thinking, fold
        self._markdown = MarkdownStream(out) if markdown else None
        self._thought = ""  # as far as it is shown
        self._said = ""

    def isatty(self) -> bool:
        """True: what it gets may hold control characters, which it writes out."""
        return True

    def flush(self) -> None:
        self._out.flush()

    def write(self, text: str) -> None:
        self._parts(*self._thinking.push(text))
        self._out.flush()

    def finish(self) -> None:
        """The answer is over: what was held back, and the end of the line."""
        self._parts(*self._thinking.finish())
        self._end_thinking()
        if self._markdown is not None:
            self._markdown.finish()
        elif self._said and not self._said.endswith("\n"):
            self._out.write("\n")
        self._out.flush()

    def _parts(self, thinking: str, text: str) -> None:
        if thinking:
            self._think(thinking)
        if not text:
            return
        self._end_thinking()
        text = text if self._said else text.lstrip("\n")
        self._said += text
        if self._markdown is not None:
            self._markdown.write(text)
        else:
            self._out.write(text)

    def _think(self, text: str) -> None:
        if not self._fold:
            self._out.write(f"{_DIM}{text}{_NORMAL}")
        elif not self._thought:
            self._out.write(f"{_DIM}(thinking){_NORMAL}")
        self._thought += text

    def _end_thinking(self) -> None:
        if not self._thought:
            return
        if self._fold:
            self._out.write(f"\r\x1b[K{_DIM}(thought: {counted(len(self._thought.split()), 'word')}){_NORMAL}\n\n")
        else:
            self._out.write("\n\n")
        self._thought = ""
