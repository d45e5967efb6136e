"""`rlx compile`: makes a model's programs ahead of its first use."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from rlx.cli.main import debug_option
from rlx.cli.options import engine_options, open_runner
from rlx.cli.output import Bars, size

if TYPE_CHECKING:
    from rlx.runners.programs import ProgramRecord


@click.command(name="compile")
@click.argument("model")
@engine_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@debug_option
def compile_(model: str, engine: dict[str, Any], as_json: bool) -> None:
    """Compile the programs of MODEL, so that its first run need not.

    Prints a line a program: phase, rows it takes, seconds, kernels, size, whether it was compiled or in the cache, and
    its digest for `rlx cache show`. The options must be those of the later run, because they change the code.
    """
    start = time.perf_counter()
    with Bars() as bars:
        bars.waiting("opening the model")
        with open_runner(model, engine, bars, load=False) as runner:
            bars.close()
            records = list(runner.compile(None if as_json else lambda record: click.echo(_line(record))))
    seconds = time.perf_counter() - start
    compiled = sum(not record.cached for record in records)
    if as_json:
        programs = [asdict(record) for record in records]
        click.echo(json.dumps({"model": model, "seconds": seconds, "compiled": compiled, "programs": programs}))
    else:
        click.echo(f"{len(records)} programs, {compiled} compiled, in {seconds:.2f} s", err=True)


def _line(record: ProgramRecord) -> str:
    first, last = record.bucket
    rows = str(last) if first == last else f"{first}-{last}"
    origin = "cached" if record.cached else "compiled"
    figures = f"{record.seconds:8.3f} s  {record.kernels:4d} kernels  {size(record.object_bytes):>7}"
    return f"{record.phase:8}{rows:>10}{figures}  {origin:8}  {record.digest[:12]}"
