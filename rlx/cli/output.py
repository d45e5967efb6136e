"""The output of the command line: text that is safe in a terminal, progress bars, tables. Imports little."""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Iterable, Sequence
from io import TextIOWrapper
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TextIO

from rlx import cli
from rlx.env import size as size

if TYPE_CHECKING:
    from rich.progress import Progress


# C0 and C1 control characters but tab and newline: in a terminal they move the cursor, change its title and worse.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")

_PIPE_WIDTH = 200  # columns of a table that no terminal cuts off


def printable(text: str) -> str:
    """`text` with escaped control characters: for text of a model or a file that is shown in a terminal."""
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def stdout() -> TextIO:
    """stdout, set to write ? for characters that its encoding lacks."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    return sys.stdout


def counted(count: int, what: str) -> str:
    """'1 token', '2 tokens', '2 entries', '2 keys'."""
    plural = what[:-1] + "ies" if what.endswith("y") and what[-2] not in "aeiou" else what + "s"
    return f"{count} {what if count == 1 else plural}"


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a stream is there and is a terminal."""
    return stream is not None and stream.isatty()


def moves_cursor(stream: TextIO | None) -> bool:
    """Whether a stream is a terminal that knows more than lines of text."""
    return is_terminal(stream) and os.environ.get("TERM", "dumb") != "dumb"


def ago(when: float) -> str:
    """How long ago a time was, in its largest unit: '3 d', '20 s'."""
    seconds = max(0, int(time.time() - when))
    for unit, name in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= unit:
            return f"{seconds // unit} {name}"
    return f"{seconds} s"


def width(file: TextIO | None = None) -> int:
    """Columns of the terminal that `file`, by default stdout, goes to; of a pipe as many as no terminal cuts off."""
    return shutil.get_terminal_size().columns if (file or sys.stdout).isatty() else _PIPE_WIDTH


def wrapped(text: str, file: TextIO | None, indent: int = 0) -> str:
    """A message in lines that a terminal breaks at no word; unchanged where `file` is no terminal.

    Args:
        indent: columns before each line that goes on.
    """
    if not is_terminal(file):
        return text
    options: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False, "drop_whitespace": False}
    options["subsequent_indent"] = " " * indent
    found = list[str]()
    for line in text.split("\n"):
        first, *others = textwrap.wrap(line, max(width(file), 20), **options) or [""]
        found += [first.rstrip(), *(" " * indent + row.strip() for row in others)]
    return "\n".join(found)


def table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[str] = (), *, file: TextIO | None = None
) -> None:
    """Prints rows of cells under their heads, to stdout by default; the columns named in `right` end on the right.

    In a terminal that is too narrow each row becomes a block of lines, its first cell above the others.
    """
    out = file or stdout()
    found, columns = [[printable(cell) for cell in row] for row in rows], width(out)
    widest = [max(map(len, column)) for column in zip(heads, *found, strict=True)]
    if sum(widest) + 2 * (len(heads) - 1) > columns:
        _blocks(heads, found, out, columns)
        return
    cli.drawing.draw_table(heads, found, right, out, columns)


def _blocks(heads: Sequence[str], rows: Iterable[Sequence[str]], out: TextIO, columns: int) -> None:
    """Rows one below the other: the first cell, then the others that hold something, each behind its head.

    With two columns the second needs no head. Cells wrap at words.
    """
    indent = max(map(len, heads[1:]), default=0)
    for first, *others in rows:
        out.write(f"{first}\n")
        for head, cell in zip(heads[1:], others, strict=True):
            start = f"  {head:{indent}}  " if len(heads) > 2 else "    "
            room = max(columns - len(start), 20)
            lines = textwrap.wrap(cell, room, break_on_hyphens=False, break_long_words=False)
            out.write("".join(f"{start if i == 0 else ' ' * len(start)}{line}\n" for i, line in enumerate(lines)))


class Bars:
    """Progress bars on stderr if it is a terminal, otherwise nothing. It can be the `progress` of `auto_runner`.

    Compiles report from their own threads, so every method holds a lock: two displays at once would leave lines behind.

    Args:
        first: what is waited for at first, in a `with` statement.
        file: instead of stderr.
    """

    def __init__(self, first: str | None = None, *, file: TextIO | None = None) -> None:
        self._first = first
        self._file: TextIO | None = file or sys.stderr  # None where the process has no stderr
        self._shown = self._file is not None and self._file.isatty()
        self._progress: Progress | None = None
        self._tasks: dict[str, Any] = {}
        self._muted = False
        self._lock = threading.RLock()

    def __call__(self, what: str, done: int, total: int) -> None:
        """`done` of `total` of `what`; of a compile, which says "compiling ...", the bar goes away when it is over."""
        with self._lock:
            if not self._muted and (progress := self._running()) is not None:
                self._update(progress, what, done, total)

    def _update(self, progress: Progress, what: str, done: int, total: int) -> None:
        compiles = what.startswith("compiling ")
        task = self._task(progress, what)
        text = f"{what}: kernel {min(done + 1, total)} of {total}" if compiles and total > 1 else what
        progress.update(task, completed=done, total=total, description=text)
        if compiles and done >= total:
            progress.remove_task(self._tasks.pop(what))
        for name, other in self._tasks.items():  # one line says what goes on
            progress.update(other, visible=name == next(reversed(self._tasks)))

    def waiting(self, what: str) -> None:
        """Replaces all bars by one without an end: `what` takes an unknown time."""
        with self._lock:
            self._muted = False
            if (progress := self._running()) is not None:
                for task in self._tasks.values():
                    progress.remove_task(task)
                self._tasks = {}
                self._task(progress, what)

    def pause(self) -> None:
        """Removes the bars, so that other output can be written, until `waiting` is called."""
        with self._lock:
            self._muted = True
            if self._progress is not None:
                self._progress.stop()
            self._progress, self._tasks = None, {}

    def close(self) -> None:
        """Removes the bars for good; may be called again."""
        self.pause()
        self._shown = False

    def _task(self, progress: Progress, what: str) -> Any:
        if what not in self._tasks:
            self._tasks[what] = progress.add_task(what, total=None)
        return self._tasks[what]

    def _running(self) -> Progress | None:
        if self._shown and self._progress is None:
            self._progress = cli.drawing.task_bars(self._file)
        return self._progress

    def __enter__(self) -> Self:
        if self._first is not None:
            self.waiting(self._first)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
