"""`rlx devices`: what programs can run on here, and why not."""

from __future__ import annotations

import json
import sys
from math import isfinite
from typing import Any

import click

from rlx import backends
from rlx.cli.command import Command, in_options, json_option
from rlx.cli.output import printable, size, stdout, wrapped


@click.command(cls=Command)
@json_option
def devices(as_json: bool) -> None:
    """List the devices that programs run on.

    \b
    rlx devices
    rlx run --device cuda "Hello"
    """
    found = [_found(name) for name in backends.MODULES]
    if as_json:
        click.echo(json.dumps(found, indent=2), file=stdout())
        return
    for row in found:
        free = "" if row["free_bytes"] is None else f", {size(row['free_bytes'])} free"
        about = row["missing"] or row["description"] + free
        click.echo(wrapped(f"{row['name']:11}{printable(about)}", sys.stdout, indent=11), file=stdout())


def _found(name: str) -> dict[str, Any]:
    """What is known of a device: plain JSON data."""
    backend, missing = backends.backend(name), backends.why_missing(name)
    free = None if missing else backend.memory.available()
    return {
        "name": name,
        "description": None if missing else backend.description(),
        "free_bytes": int(free) if free is not None and isfinite(free) else None,
        "missing": missing and in_options(missing, {"device": "--device"}),
    }
