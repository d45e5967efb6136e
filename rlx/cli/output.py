"""The output of the command line: the streamed answer and its speed, progress bars, tables.

Text goes to stdout, everything about it to stderr, so that a pipe gets the text alone.
"""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from io import TextIOWrapper
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, TextIO

from rlx.engine.request.stopping import AnswerText
from rlx.env import size as size
from rlx.text import Tokenizer

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


def wrapped(text: str, file: TextIO | None) -> str:
    """A message in lines that a terminal breaks at no word; unchanged where `file` is no terminal."""
    if not is_terminal(file):
        return text
    options: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False, "drop_whitespace": False}
    lines = (textwrap.wrap(line, max(width(file), 20), **options) or [""] for line in text.split("\n"))
    return "\n".join(part.rstrip() for parts in lines for part in parts)


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
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for head in heads:
        table.add_column(head, justify="right" if head in right else "left", overflow="fold", no_wrap=head == "digest")
    for row in found:
        table.add_row(*map(Text, row))
    Console(file=out, width=columns).print(table)


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


class Out(Protocol):
    """Receives the text of an answer: a text stream, or a wrapper of one."""

    def write(self, text: str, /) -> object: ...
    def flush(self) -> object: ...
    def isatty(self) -> bool: ...


class Answer:
    """The tokens of one generation: collected, timed, and streamed as text.

    Args:
        tokenizer: turns them into text, control tokens left out.
        out: where the text goes as it comes; None keeps it.
        before: called before any text is shown.
        stop: the text ends before the first of these.
        min_tokens: but not before there are as many tokens.
        keep: control tokens that have a text nevertheless.
        waited: the seconds so far in which steps waited for their programs, most of them compiled.

    Attributes:
        ids: the tokens so far.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        out: Out | None,
        before: Callable[[], object],
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        keep: Set[int] = frozenset(),
        waited: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.ids: list[int] = []
        self._answer, self._min_tokens = AnswerText(tokenizer, stop, keep), min_tokens
        self._out, self._before = out, before
        self._waited = waited
        self._waits = [waited()] * 3  # at the start, at the first token and at the end
        self._start = self._first = self._last = time.perf_counter()

    def push(self, token: int) -> None:
        """One more token; what `generate` gets as `on_token`."""
        self._last = time.perf_counter()
        if not self.ids:
            self._first = self._last
            self._waits[1:] = [self._waited()] * 2
            self._before()
        self.ids.append(token)
        self._show(self._answer.push(token, may_stop=len(self.ids) >= self._min_tokens))

    def finish(self) -> None:
        """Ends the answer: shows the text that was held back, and ends the line."""
        self._waits[2] = self._waited()
        self._before()
        self._show(self._answer.finish())
        if self._out is not None and self.ids:
            self._out.write("\n")
            self._out.flush()

    def _show(self, text: str) -> None:
        if self._out is not None and text:
            self._out.write(printable(text) if self._out.isatty() else text)
            self._out.flush()

    @property
    def text(self) -> str:
        return self._answer.text

    @property
    def first_seconds(self) -> float | None:
        """Seconds from the start to the first token, including the prefill; None without tokens."""
        return self._first - self._start if self.ids else None

    @property
    def first_wait(self) -> float:
        """Seconds of those in which the prompt waited for programs."""
        return self._waits[1] - self._waits[0]

    @property
    def rate(self) -> float | None:
        """Tokens per second, from the first to the last token; None with fewer than two tokens.

        As in `prompt_rate`, the time in which steps waited for programs does not count. Where it is most of the time,
        there is no rate: a wait may have begun before the first token was seen.
        """
        waited = self._waits[2] - self._waits[1]
        seconds = self._last - self._first - waited
        return (len(self.ids) - 1) / seconds if len(self.ids) > 1 and seconds > waited else None

    def prompt_rate(self, tokens: int) -> float | None:
        """Prompt tokens per second, until the first token of the answer."""
        seconds = self._first - self._start - self.first_wait
        return tokens / seconds if self.ids and seconds > 0 else None


ENDS = {
    "stop": "end of the answer",
    "stop_string": "stopped by --stop",
    "grammar": "complete by its grammar",
    "length": "stopped by --max-tokens",
    "context": "stopped by the end of the context",
    "interrupted": "interrupted",
}


def speeds(report: Mapping[str, Any]) -> str:
    """One line about a generation, from `rlx run`'s report."""
    first, compiles = report["first_token_seconds"], report["compiles"]
    parts = [
        f"loaded in {report['load_seconds']:.2f} s",
        f"prompt: {counted(report['prompt_tokens'], 'token')}{_rate(report['prompt_tokens_per_second'])}",
        first is not None and f"first token after {first:.3f} s{_of_it_compiling(report)}",
        f"answer: {counted(report['tokens'], 'token')}{_rate(report['tokens_per_second'])}",
        ENDS[report["end"]],
        sampled(report["sampling"]),
        report["profile"] and f"by {report['profile']}",
        compiles and f"compiled {counted(compiles, 'piece')} of code in {report['compile_seconds']:.2f} s",
    ]
    return "; ".join(part for part in parts if part)


def sampled(sampling: Mapping[str, Any]) -> str | None:
    """The sampling options in words; None for plain greedy."""
    options = [f"{name} {value}" for name, value in sampling.items() if name not in ("greedy", "recommended")]
    if sampling["greedy"] and len(options) == 1:  # the temperature of 0
        return None
    source = ", as the model recommends" if sampling["recommended"] else ""
    return f"sampled with {', '.join(options) or 'temperature 1'}{source}"


def _of_it_compiling(report: Mapping[str, Any]) -> str:
    wait = report["first_token_compile_seconds"]
    return f", {wait:.2f} s of it compiling" if report["compiles"] and wait >= 0.01 else ""


def _rate(rate: float | None) -> str:
    return "" if rate is None else f", {rate:.1f} tokens/s"


class Bars:
    """Progress bars on stderr if it is a terminal, otherwise nothing. It can be the `progress` of `auto_runner`.

    Compiles report from their own threads, so every method holds a lock: two displays at once would leave lines behind.

    Args:
        file: instead of stderr.
        show: False shows nothing in a terminal either.
    """

    def __init__(self, file: TextIO | None = None, show: bool = True) -> None:
        self._file: TextIO | None = file or sys.stderr  # None where the process has no stderr
        self._shown = show and self._file is not None and self._file.isatty()
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
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            console = Console(file=self._file)
            columns = TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn()
            # stdout stays what it is: a redirected one would end up on the console, a line a token.
            self._progress = Progress(*columns, console=console, transient=True, redirect_stdout=False)
            self._progress.start()
        return self._progress

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
