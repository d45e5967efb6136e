"""`rlx trace`: answers one prompt as `rlx run`, and records what is done, and when; the options of other recorders."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click

import rlx
from rlx import tracing
from rlx.cli.command import Command
from rlx.cli.output import counted, size, table
from rlx.cli.run import run
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


_SHARED = [each for each in run.params if each.name not in ("as_json", "no_stream")]
_OUT = "The file of the trace."


@click.command(cls=Command, params=_SHARED)
@click.option("-o", "--out", metavar="FILE", default="trace.json", show_default=True, help=_OUT)
@detail_option("--detail", "kernels")
@limit_option("--limit")
@click.pass_context
def trace(ctx: click.Context, /, out: str, detail: Detail, limit: int, **options: Any) -> None:
    """Answer PROMPT, and write a time line of what is done.

    https://ui.perfetto.dev opens the file. It shows how the model is opened, loaded and compiled, with every pass;
    each step of a program with its regions; the kernels that each worker runs, and its waits; the request. It is
    valid after Ctrl-C, too.

    \b
    rlx trace "Tell me a story." -o trace.json
    rlx trace model.gguf "What is 27 + 45?" --max-tokens 20
    """
    with recorded(out, detail, limit, _show):
        ctx.invoke(run, **options, as_json=False, no_stream=False)


def _show(found: Trace) -> None:
    """Where the time went, and how much of it the trace explains."""
    total = max(found.seconds, 1e-9)
    rows = [(name, seconds / 1e9) for name, seconds in found.phases.items()]
    rows += [("not covered", total - sum(seconds for _, seconds in rows))]
    cells = [(name, f"{seconds * 1e3:.1f}", f"{seconds / total:.1%}") for name, seconds in rows]
    table(("phase", "ms", "share"), cells, right=("ms", "share"), file=sys.stderr)
    answer = found.phases.get("answer", 0)
    if answer:
        click.echo(f"steps of programs: {found.steps / 1e6:.1f} ms, {found.steps / answer:.1%} of the answer", err=True)
