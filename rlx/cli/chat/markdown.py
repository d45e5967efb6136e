"""Markdown in a terminal while it streams: a block is shown raw as it comes and drawn once when it is complete.

A unit is a top-level block or an item of a top-level list. What is complete is never drawn again, so nothing flickers
and the terminal's own scrolling works. Code blocks are written exactly as they are, line by line.
"""

from __future__ import annotations

import re
import shutil
from functools import cached_property
from typing import Any, ClassVar, TextIO

from markdown_it import MarkdownIt
from markdown_it.token import Token
from rich import markdown
from rich.console import Console
from rich.text import Text

from rlx.cli.output import counted
from rlx.cli.tail import FENCE, Tail
from rlx.text.answer import Splitter


class MarkdownStream:
    """Text that comes in pieces, shown as Markdown.

    Args:
        out: a terminal. The text has no control characters but tab and newline.
    """

    def __init__(self, out: TextIO) -> None:
        self._out, self._text, self._tail = out, "", Tail()
        self._fence: re.Pattern[str] | None = None  # of the line that closes the code block
        self._drawn = False  # whether something stands above

    def write(self, text: str) -> None:
        """More of the text."""
        sent = "".join(map(self._line, text.splitlines(keepends=True)))
        self._out.write(sent)
        self._out.flush()

    def finish(self) -> None:
        """No more text: draws the last block. The cursor is in a new row afterwards if there was any text."""
        sent = self._replaced(self._text.splitlines(keepends=True), "") if self._text and not self._fence else ""
        self._out.write(sent)
        if self._fence and not self._text.endswith("\n"):
            self._out.write("\n")
        self._out.flush()
        self._text, self._tail, self._fence = "", Tail(), None

    def _line(self, piece: str) -> str:
        """The output for a part of one line."""
        self._text += piece
        if self._fence is not None:
            return self._code(piece)
        sent = self._tail.write(piece, self._width)
        return sent + self._complete() if piece.endswith("\n") else sent

    def _code(self, piece: str) -> str:
        """The same inside a code block, whose lines are never drawn again."""
        if piece.endswith("\n"):
            assert self._fence is not None
            if self._fence.fullmatch(self._text):
                self._fence, self._tail = None, Tail()
            self._text = ""
        return self._styled(piece)

    def _complete(self) -> str:
        """Draws the units in front of the last one, which may go on."""
        lines = self._text.splitlines(keepends=True)
        units = _units(self._parser.parse(self._text))
        if not units:
            return ""
        start, kind = units[-1]
        if kind != "fence":
            return self._replaced(lines[:start], "".join(lines[start:])) if start else ""
        if len(lines) > start + 1:  # closed or not, it did not begin in the last line
            return ""
        mark = FENCE.match(lines[start])
        assert mark is not None
        self._fence = re.compile(rf" {{0,3}}{re.escape(mark[1][0])}{{{len(mark[1])},}}[ \t]*\n")
        return self._replaced(lines[:start], "") + self._opened(lines[start])

    def _opened(self, line: str) -> str:
        self._text, self._drawn = "", True
        return self._styled(line)

    def _replaced(self, lines: list[str], rest: str) -> str:
        """Puts the drawing of complete lines in the place of all raw text, and the `rest`, raw, below it."""
        width, height = shutil.get_terminal_size()
        erase = self._tail.erased(width, height)
        if erase is None:  # it has scrolled: what stands there stays raw
            self._drawn, drawing = True, "" if rest or lines[-1].endswith("\n") else "\n"
        else:
            drawing = erase + self._drawing(lines, width)
        self._text, self._tail = rest, Tail()
        raw = self._tail.write(rest, width)
        return drawing if erase is None else drawing + raw

    def _drawing(self, lines: list[str], width: int) -> str:
        """The units of some lines as Markdown; empty lines between them stay, those at the start of the text go."""
        drawn, at = [], 0
        starts = [start for start, _ in _units(self._parser.parse("".join(lines)))]
        for start, end in zip(starts, [*starts, len(lines)][1:], strict=True):
            if self._drawn and any(not line.strip() for line in lines[at:start]):
                drawn.append("\n")
            while end > start and not lines[end - 1].strip():
                end -= 1
            drawn.append(self._unit("".join(lines[start:end]), width))
            at, self._drawn = end, True
        if starts and any(not line.strip() for line in lines[at:]):
            drawn.append("\n")
        return "".join(drawn)

    def _unit(self, text: str, width: int) -> str:
        console = self._console
        console.width = width
        with console.capture() as capture:
            console.print(_rich_markdown(self._parser.parse(text)))
        rows = capture.get().split("\n")
        while rows and not rows[0].strip():
            rows.pop(0)
        return "\n".join(row.rstrip() for row in rows).rstrip("\n") + "\n"

    def _styled(self, code: str) -> str:
        """A piece of a code block."""
        if self._console.no_color or not code.strip():
            return code
        line, end = (code[:-1], "\n") if code.endswith("\n") else (code, "")
        return f"\x1b[36m{line}\x1b[39m{end}"

    @property
    def _width(self) -> int:
        return shutil.get_terminal_size().columns

    @cached_property
    def _console(self) -> Console:
        return Console(file=self._out, force_terminal=True, highlight=False, emoji=False)

    @cached_property
    def _parser(self) -> MarkdownIt:
        """CommonMark and tables. HTML and link definitions are text like any other: nothing that was said vanishes."""
        parser = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
        return parser.disable(["reference", "lheading"])  # a line of - would turn the text before it into a heading


def _units(tokens: list[Token]) -> list[tuple[int, str]]:
    """First line and type of every unit."""
    top = [t for t in tokens if t.map and t.level == 0 and not t.type.endswith("list_open")]
    items = [t for t in tokens if t.map and t.level == 1 and t.type == "list_item_open"]
    return sorted((t.map[0], t.type) for t in (*top, *items) if t.map)


class _Heading(markdown.Heading):
    """A heading, left-aligned."""

    def __rich_console__(self, console: Any, options: Any) -> Any:
        self.text.justify = "left"
        yield self.text


class _Code(markdown.CodeBlock):
    """Code without colours."""

    info = ""

    @classmethod
    def create(cls, markdown: markdown.Markdown, token: Any) -> _Code:
        code = cls("text", markdown.code_theme)
        code.info = token.info.strip()
        return code

    def __rich_console__(self, console: Any, options: Any) -> Any:
        if self.info:  # what stands behind the opening fence: a language, or text of a fence that is not complete
            yield Text(self.info, style="cyan")
        yield Text(str(self.text).rstrip("\n"), style="cyan", no_wrap=False)


class _Drawing(markdown.Markdown):
    elements: ClassVar = {**markdown.Markdown.elements, "heading_open": _Heading, "fence": _Code, "code_block": _Code}


def _rich_markdown(tokens: list[Token]) -> _Drawing:
    """Markdown for rich: line breaks stay where the model put them, headings are left-aligned, code is not coloured."""
    for token in tokens:
        for child in token.children or ():
            child.type = "hardbreak" if child.type == "softbreak" else child.type
    drawing = _Drawing("", hyperlinks=False)
    drawing.parsed = tokens
    return drawing


_DIM, _NORMAL = "\x1b[2m", "\x1b[22m"


class Display:
    """A text stream in front of a terminal, for one answer. Call `finish` at its end.

    Args:
        out: the terminal.
        thinking: splits the text.
        markdown: draw the answer as Markdown.
        fold: show how long the thinking was in its place.
    """

    def __init__(self, out: TextIO, thinking: Splitter, *, markdown: bool, fold: bool) -> None:
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
