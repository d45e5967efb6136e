"""What a terminal shows of an answer while it streams: thinking dim or folded, the rest as Markdown or as it is."""

from __future__ import annotations

from typing import TextIO

from rlx.cli.chat.markdown import MarkdownStream
from rlx.cli.chat.thinking import ThinkingSplitter
from rlx.cli.output import counted

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
        self._thought = ""  # since the last opening mark, as far as it was shown
        self._said = ""

    def isatty(self) -> bool:
        """True: what it gets may hold control characters, which it writes out."""
        return True

    def flush(self) -> None:
        self._out.flush()

    def write(self, text: str) -> None:
        for is_thinking, part in self._thinking.push(text):
            self._part(is_thinking, part)
        self._out.flush()

    def finish(self) -> None:
        """The answer is over: what was held back, and the end of the line."""
        for is_thinking, part in self._thinking.finish():
            self._part(is_thinking, part)
        self._end_thinking()
        if self._markdown is not None:
            self._markdown.finish()
        elif self._said and not self._said.endswith("\n"):
            self._out.write("\n")
        self._out.flush()

    def _part(self, is_thinking: bool, text: str) -> None:
        if is_thinking:
            self._think(text)
            return
        self._end_thinking()
        text = text if self._said else text.lstrip("\n")  # templates put empty lines behind thinking
        self._said += text
        if self._markdown is not None:
            self._markdown.write(text)
        else:
            self._out.write(text)

    def _think(self, text: str) -> None:
        text = text if self._thought else text.lstrip("\n")
        if self._fold and not self._thought and text:
            self._out.write(f"{_DIM}(thinking){_NORMAL}")
        elif not self._fold and text:
            self._out.write(f"{_DIM}{text}{_NORMAL}")
        self._thought += text

    def _end_thinking(self) -> None:
        if not self._thought:
            return
        if self._fold:
            self._out.write(f"\r\x1b[K{_DIM}(thought: {counted(len(self._thought.split()), 'word')}){_NORMAL}\n\n")
        else:
            self._out.write("\n" * (2 - len(self._thought) + len(self._thought.rstrip("\n"))))
        self._thought = ""
