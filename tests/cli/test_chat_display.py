"""What a terminal shows of an answer: Markdown block by block, thinking, and nothing that a model should not write."""

from __future__ import annotations

import io
import os
import re
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlx.cli.chat.markdown import Display, MarkdownStream
from rlx.cli.output import printable
from rlx.text.answer import ThinkingSplitter, ThinkingTags

TAGS = ThinkingTags("<think>", "</think>")


class Screen(io.StringIO):
    """A terminal that understands what is sent to it: text, newlines, cursor up and left, erasing, colours."""

    def __init__(self, columns: int = 80, rows: int = 24) -> None:
        super().__init__()
        self.columns, self.height = columns, rows
        self.lines, self.row, self.column, self.top = [[]], 0, 0, 0
        self.lines: list[list[str]]

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        for code, char in re.findall(r"(\x1b\[[0-9;?]*[A-Za-z])|(.)", text, re.DOTALL):
            self._code(code) if code else self._char(char)
        return len(text)

    def _code(self, code: str) -> None:
        count = int(re.sub(r"\D", "", code) or 1)
        if code.endswith("A"):
            assert self.row - count >= self.top, "what has scrolled off cannot be reached"
            self.row -= count
        elif code.endswith("D"):
            self.column -= count
        elif code.endswith(("J", "K")):
            del self.lines[self.row][self.column :]
            if code.endswith("J"):
                del self.lines[self.row + 1 :]
        else:
            assert code.endswith("m"), code

    def _char(self, char: str) -> None:
        if char == "\r":
            self.column = 0
            return
        wide = 2 if unicodedata.east_asian_width(char) in "WF" else 1
        if char == "\n" or self.column + wide > self.columns:
            self.row, self.column = self.row + 1, 0
            if self.row == len(self.lines):
                self.lines.append([])
            self.top = max(self.top, self.row - self.height + 1)
        if char != "\n":
            line = self.lines[self.row]
            line[self.column :] = [*line[self.column : self.column], char, *[""] * (wide - 1)]
            self.column += wide

    @property
    def shown(self) -> list[str]:
        return ["".join(line).rstrip() for line in self.lines]


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Screen:
    screen = Screen()
    monkeypatch.setattr("shutil.get_terminal_size", lambda *_, **__: os.terminal_size((screen.columns, screen.height)))
    return screen


def drawn(screen: Screen, text: str, piece: int = 3) -> list[str]:
    stream = MarkdownStream(screen)
    for at in range(0, len(text), piece):
        stream.write(text[at : at + piece])
    stream.finish()
    assert screen.column == 0
    return screen.shown[:-1]


# ---------------------------------------------------------------------------------------------------- Markdown


@pytest.mark.parametrize("piece", [1, 2, 7, 1000])
def test_code_is_verbatim(piece: int, screen: Screen) -> None:
    code = "```python\ndef f(x):\n    return x**2  # *not* soft\n\n\n~~~\n``\n```"
    assert drawn(screen, f"Look:\n{code}\nand *on*", piece) == ["Look:", *code.splitlines(), "and on"]


def test_nothing_that_was_said_vanishes(screen: Screen) -> None:
    text = "<div>a</div>\n\n[ref]: http://x.y\n\nuse <b>bold</b> and &amp;\n\ntext\n---\n"
    shown = drawn(screen, text)
    assert shown[0] == "<div>a</div>" and shown[2] == "[ref]: http://x.y" and shown[4] == "use <b>bold</b> and &"
    assert shown[6] == "text"


def test_how_text_is_cut_into_pieces_does_not_matter(screen: Screen) -> None:
    text = "Some *text* that is long enough to be broken into two rows of this terminal, surely.\n\n1. a\n2. b\n"
    text += "\n```\nx\n```\n"
    expected = drawn(screen, text, 1000)
    for piece in (1, 2, 3, 5, 11):
        screen.__init__()  # type: ignore[misc]
        assert drawn(screen, text, piece) == expected


def test_a_block_longer_than_the_screen_stays_raw_and_is_there_once(screen: Screen) -> None:
    words = " ".join(f"word{i}" for i in range(400))
    shown = drawn(screen, f"*{words}*\n\nend *soft*\n")
    assert re.findall(r"word\d+", " ".join(shown)) == words.split()
    assert shown[-1] == "end soft"


@pytest.mark.parametrize("columns", [40, 46, 80])
def test_wide_characters_and_narrow_terminals(columns: int, screen: Screen) -> None:
    screen.columns = columns
    text = "日本語の文章 " * 12 + "🦊🦊 **end** " + "x" * 100
    shown = drawn(screen, f"{text}\n\nلغة عربية e\N{COMBINING ACUTE ACCENT}\n")
    joined = "".join(shown).replace(" ", "")
    assert joined.count("日本語の文章") == 12 and "🦊🦊end" in joined and joined.count("x") == 100
    assert shown[-1].startswith("لغة عربية")


ALPHABET = st.sampled_from(
    ["a", "word ", "*", "**", "`", "```", "\n", "\n\n", "- ", "1. ", "# ", "> ", "|", "---", "    ", "~~~", "日", "<b>"]
)


@given(st.lists(ALPHABET, max_size=60), st.integers(1, 5))
def test_no_text_breaks_it(pieces: list[str], size: int) -> None:
    """Whatever a model writes: it ends, in a new row, and every word of it is on the screen."""
    text = "".join(pieces)
    screen = Screen(80, 24)
    stream = MarkdownStream(screen)
    for at in range(0, len(text), size):
        stream.write(text[at : at + size])
    stream.finish()
    assert screen.column == 0
    assert "".join(screen.shown).count("word") == text.count("word")


# ---------------------------------------------------------------------------------------------------- thinking


def test_control_characters_never_reach_the_terminal(screen: Screen) -> None:
    sent: list[str] = []
    write = screen.write
    screen.write = lambda text: sent.append(text) or write(text)  # type: ignore[method-assign]
    display = Display(screen, ThinkingSplitter(TAGS), markdown=True, fold=False)
    display.write(printable("*a*\x1b]0;title\x07 \x9b2J\n```\n\x1b[31m\n```\n&#27;[31m\n"))
    display.finish()
    left = re.sub(r"\x1b\[[0-9;]*[AJKmD]", "", "".join(sent))
    assert not re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]", left)
    assert r"\x1b]0;title\x07" in "".join(screen.shown)
