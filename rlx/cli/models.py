"""`rlx list` and `rlx rm`: the models that were downloaded from the Hugging Face hub."""

from __future__ import annotations

import json
import sys

import click

from rlx.cli.command import Command
from rlx.cli.main import debug_option
from rlx.cli.output import ago, counted, is_terminal, printable, size, table


@click.command("list", cls=Command)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; sizes in bytes.")
@debug_option
def list_(as_json: bool) -> None:
    """List the downloaded models, the most recently used first.

    The name is what `rlx run` takes. Models that other tools of the hub have downloaded are there too, if rlx can read
    their files. Files elsewhere are not listed.
    """
    from rlx.weights import hub
    from rlx.weights.downloaded import downloaded

    models = downloaded()
    if as_json:
        rows = [
            {"name": each.name, "repository": each.repo, "quantization": each.model.quantization,
             "bytes": each.model.nbytes, "last_used": each.used, "path": str(each.model.path)}
            for each in models
        ]  # fmt: skip
        click.echo(json.dumps({"folder": str(hub.folder()), "models": rows}))
        return
    if models:
        cells = ((m.name, m.model.quantization or "", size(m.model.nbytes), f"{ago(m.used)} ago") for m in models)
        table(("name", "quantization", "size", "last used"), cells, right=("size", "last used"))
    total = size(sum(each.model.nbytes for each in models))
    click.echo(printable(f"{counted(len(models), 'model')}, {total} in {hub.folder()}"))
    if not models:
        click.echo("rlx pull ORG/REPO downloads one", err=True)


@click.command(cls=Command)
@click.argument("names", nargs=-1, required=True, metavar="ORG/REPO[:QUANT]...")
@click.option("--yes", is_flag=True, help="Do not ask.")
@debug_option
def rm(names: tuple[str, ...], yes: bool) -> None:
    """Remove downloaded models.

    Without QUANT all models of the repository go. It asks first in a terminal, and needs --yes elsewhere.

    \b
    rlx rm Qwen/Qwen3-0.6B-GGUF:Q8_0
    """
    from rlx.weights.downloaded import find, remove

    models = list({each.model.path: each for name in names for each in find(name)}.values())
    total = size(sum(each.model.nbytes for each in models))
    what = f"{', '.join(each.name for each in models)} ({total})"
    if not yes:
        if not is_terminal(sys.stdin):
            raise click.UsageError(f"rm would remove {printable(what)}; say --yes, as there is no terminal to ask.")
        click.confirm(printable(f"Remove {what}?"), abort=True)
    remove(models)
    click.echo(printable(f"removed {what}"))
