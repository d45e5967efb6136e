"""Tables and progress bars as `rich` draws them; imported when the first one is shown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TextIO

from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text


def draw_table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[str], out: TextIO, columns: int
) -> None:
    """Prints a table, see `rlx.cli.output.table`."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for head in heads:
        table.add_column(head, justify="right" if head in right else "left", overflow="fold", no_wrap=head == "digest")
    for row in rows:
        table.add_row(*map(Text, row))
    Console(file=out, width=columns).print(table)


def task_bars(file: TextIO | None) -> Progress:
    """Bars of tasks that take an unknown time."""
    return _started(TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn(), file=file)


def request_bar(file: TextIO | None, total: int, done: int) -> Progress:
    """The bar of a number of requests; `update(0, speed=..., failed=...)` sets the texts behind it."""
    texts = TextColumn("{task.fields[speed]}"), TextColumn("{task.fields[failed]}")
    columns = TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), *texts
    found = _started(*columns, file=file)
    found.add_task("", total=total, completed=done, speed="", failed="")
    return found


def _started(*columns: ProgressColumn, file: TextIO | None) -> Progress:
    # stdout stays what it is: a redirected one would end up on the console, a line a token.
    found = Progress(*columns, console=Console(file=file), transient=True, redirect_stdout=False)
    found.start()
    return found
