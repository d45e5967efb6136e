"""The end of a text that streams to a terminal: where its rows break, and how many of them there are."""

from __future__ import annotations

import re
import shutil
from math import ceil
from typing import TextIO

from rich.cells import cell_len

FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
"""The beginning of a line that opens or closes a block of code in Markdown."""
_ERASE_BELOW = "\x1b[J"


class Tail:
    """The raw text of an unfinished block on the screen: breaks its lines, and knows how many rows it takes.

    Widths are upper bounds (an emoji of several code points counts each of them), so that a row that fits here fits in
    every terminal.
    """

    def __init__(self) -> None:
        self._rows, self._word = [0], ""

    def write(self, text: str, width: int) -> str:
        """The output for more text: rows break in place of a space, or in a word that is too long."""
        sent = []
        for char in text:
            cells = _cells(char)
            if char == "\n":
                self._rows.append(0)
            elif self._rows[-1] + cells > width:
                sent.append(self._broken(char, width))
                if char == " ":
                    continue
            self._rows[-1] += 0 if char == "\n" else cells
            self._word = "" if char in " \n" else self._word + char
            sent.append("    " if char == "\t" else char)
        return "".join(sent)

    def _broken(self, char: str, width: int) -> str:
        """A line break in front of the word that `char` belongs to, which moves to the new row."""
        cells = sum(map(_cells, self._word))
        if char == " " or not self._word or cells >= min(width, self._rows[-1]):
            self._rows.append(0)
            self._word = ""
            return "\n"
        self._rows[-1] -= cells
        self._rows.append(cells)
        return f"\x1b[{cells}D\x1b[K\n{self._word}"

    def erased(self, width: int, height: int) -> str | None:
        """The output that takes the text off the screen; None if its beginning has left the screen already.

        A terminal that was made narrower since has broken the rows again.
        """
        rows = sum(max(1, ceil(cells / width)) for cells in self._rows)
        if rows > height:
            return None
        up = f"\x1b[{rows - 1}A" if rows > 1 else ""
        return f"\r{up}{_ERASE_BELOW}"


class WrappedStream:
    """A terminal in which the rows of a text break between words. Lines of code stay whole, so that they can be copied.

    Args:
        out: the terminal. The text has no control characters but tab and newline.
    """

    def __init__(self, out: TextIO) -> None:
        self._out, self._tail, self._line, self._is_code = out, Tail(), "", False

    def write(self, text: str, /) -> None:
        """More of the text."""
        columns = shutil.get_terminal_size().columns
        for piece in text.splitlines(keepends=True):
            self._line += piece
            fence = FENCE.match(self._line)
            self._out.write(piece if fence or self._is_code else self._tail.write(piece, columns))
            if piece.endswith("\n"):
                self._is_code ^= fence is not None
                self._line, self._tail = "", Tail()

    def flush(self) -> None:
        self._out.flush()

    def isatty(self) -> bool:
        return True


def _cells(char: str) -> int:
    """Columns that a character takes at most."""
    if char == "\t":
        return 4
    return 2 if char == "\N{VARIATION SELECTOR-16}" else max(cell_len(char), 0)
