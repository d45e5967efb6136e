"""`rlx doctor`: the command."""

from __future__ import annotations

import json

import click

from rlx.cli.command import Command
from rlx.cli.doctor.page import examine, lines
from rlx.cli.main import debug_option
from rlx.cli.output import Bars, stdout

UNHEALTHY = 2  # exit code where something prevents models from running


@click.command(cls=Command)
@click.option("--measure/--no-measure", default=True, help="Measure memory bandwidth and arithmetic. Default: measure.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@debug_option
@click.pass_context
def doctor(ctx: click.Context, measure: bool, as_json: bool) -> None:
    """Show what rlx finds on this machine, for bug reports.

    Versions, instructions of the CPU that are used and not used, threads, memory, the speed of the machine, the
    compile cache, extras, environment variables, and problems with their ways out. A small program is compiled and
    run. Keys are hidden, and the home folder is shown as ~. The exit code is 2 if something prevents models from
    running.
    """
    with Bars() as bars:
        bars.waiting("examining the machine")
        findings = examine(measure)
    if as_json:
        click.echo(json.dumps(findings.as_dict()))
    else:
        stdout().writelines(f"{line}\n" for line in lines(findings))
    if not findings.can_run:
        ctx.exit(UNHEALTHY)
