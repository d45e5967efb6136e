"""`rlx trace`: answers one prompt as `rlx run`, and records what is done, and when."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from rlx.cli.command import Command
from rlx.cli.output import table
from rlx.cli.recording import detail_option, limit_option, recorded
from rlx.cli.run import run

if TYPE_CHECKING:
    from rlx.tracing import Detail, Trace

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
