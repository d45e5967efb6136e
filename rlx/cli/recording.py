"""Traces of commands: the options, and what is said at the end."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from rlx import tracing
from rlx.cli.output import counted, size

if TYPE_CHECKING:
    from rlx.tracing import Detail, Trace

Function = Callable[..., Any]

_DETAIL = click.Choice(("steps", "kernels"))


def detail_option(name: str, default: str) -> Callable[[Function], Function]:
    """How much is recorded."""
    text = "Record the time of each step, or also its regions and kernels on each worker."
    return click.option(name, "detail", type=_DETAIL, default=default, show_default=True, help=text)


def limit_option(name: str) -> Callable[[Function], Function]:
    """Where the recording ends."""
    text = "Maximum number of events; 1000 are about 200 kB."
    return click.option(
        name, "limit", type=click.IntRange(1), default=tracing.EVENTS, show_default=True, metavar="N", help=text
    )


def trace_options(command: Function) -> Function:
    """Adds --trace, --trace-detail and --trace-limit: the arguments `trace`, `detail` and `limit`."""
    command = limit_option("--trace-limit")(command)
    command = detail_option("--trace-detail", "steps")(command)
    help_text = "Record a trace in FILE for https://ui.perfetto.dev."
    return click.option("--trace", metavar="FILE", help=help_text)(command)


def check_no_trace(path: str | None) -> None:
    """`click.UsageError` if a trace is asked for: other processes than this one would compute."""
    if path is not None:
        raise click.UsageError("--trace records this process only: leave out --ray")


@contextmanager
def recorded(
    path: str | None, detail: Detail, limit: int, then: Callable[[Trace], object] | None = None
) -> Iterator[None]:
    """Records a trace in the `with` block, and says what it is; without a path it does nothing.

    Args:
        then: called at the end, to say more.
    """
    if path is None:
        yield
        return
    import rlx

    facts = {"rlx": rlx.__version__, "command": " ".join(["rlx", *sys.argv[1:]]), "cpus": os.cpu_count()}
    with tracing.trace(path, detail=detail, limit=limit, **facts) as found:
        try:
            yield
        finally:
            tracing.stop()
            click.echo(_said(found), err=True)
            if then is not None:
                then(found)


def _said(found: Trace) -> str:
    """A line about the file."""
    what = f"{counted(found.events, 'event')}, {size(found.path.stat().st_size)}, {found.seconds:.2f} s"
    full = f" The limit of {found.limit} events was reached: the file lacks what followed." if found.is_full else ""
    return f"trace: {found.path}, {what}. Open it in https://ui.perfetto.dev.{full}"
