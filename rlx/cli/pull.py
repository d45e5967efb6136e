"""`rlx pull`: downloads a model from the Hugging Face hub."""

from __future__ import annotations

import json

import click

from rlx.cli.command import Command
from rlx.cli.main import debug_option
from rlx.cli.output import Bars, printable, size, table


@click.command(cls=Command)
@click.argument("name", metavar="ORG/REPO[:QUANT]")
@click.option("--list", "listed", is_flag=True, help="List the models in the repository; download nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@debug_option
def pull(name: str, listed: bool, as_json: bool) -> None:
    """Download a model from the Hugging Face hub.

    QUANT names one of several GGUF files, such as Q8_0; without it the one in Q4_K_M is taken. A repository with
    safetensors alone is taken as a whole. A download that broke off goes on where it ended. The files lie in the folder
    that the hub's own tools use (HF_HUB_CACHE, HF_HOME); HF_TOKEN opens private repositories.

    \b
    rlx pull Qwen/Qwen3-0.6B-GGUF:Q8_0
    rlx run Qwen/Qwen3-0.6B-GGUF:Q8_0 "What is 27 + 45?"
    """
    if listed:
        _list(name, as_json)
        return
    from rlx.weights import pull as hub

    with Bars() as bars:
        bars.waiting("asking the hub")

        def notice(line: str) -> None:
            bars.pause()
            click.echo(printable(line), err=True)

        path = hub.pull(name, bars, notice)
    if as_json:
        click.echo(json.dumps({"name": name, "path": str(path)}))
    else:
        click.echo(printable(str(path)))
        click.echo(f'rlx run {name} "..." runs it', err=True)


def _list(name: str, as_json: bool) -> None:
    from rlx.weights.pull import models_of, repository_of

    models = models_of(repository_of(name)[0])
    if as_json:
        rows = [{"quantization": m.quantization, "bytes": m.nbytes, "files": [f.name for f in m.files]} for m in models]
        click.echo(json.dumps({"name": name, "models": rows}))
        return
    cells = ((m.quantization or "", size(m.nbytes), m.files[0].name) for m in models)
    table(("quantization", "size", "file"), cells, right=("size",))
