"""`rlx pull`, `rlx list`, `rlx rm`: models of the Hugging Face hub; and a download on first use, if the user agrees."""

from __future__ import annotations

import json
import sys
from functools import partial

import click

from rlx.cli.command import Command, confirm_removal, json_option
from rlx.cli.output import Bars, ago, counted, is_terminal, printable, size, table
from rlx.errors import AmbiguousModelError, ModelFileError
from rlx.weights import hub
from rlx.weights.locate import can_be_downloaded, resolve_model_path
from rlx.weights.pull import downloaded, find, models_of, plan, remove, repository_of
from rlx.weights.pull import pull as download


@click.command("list", cls=Command)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; sizes in bytes.")
def list_(as_json: bool) -> None:
    """List the downloaded models, the most recently used first.

    The name is what `rlx run` takes. Models that other tools of the hub have downloaded are there too, if rlx can read
    their files. Files elsewhere are not listed.
    """
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
def rm(names: tuple[str, ...], yes: bool) -> None:
    """Remove downloaded models.

    Without QUANT all models of the repository go. It asks first in a terminal, and needs --yes elsewhere.

    \b
    rlx rm Qwen/Qwen3-0.6B-GGUF:Q8_0
    """
    models = list({each.model.path: each for name in names for each in find(name)}.values())
    total = size(sum(each.model.nbytes for each in models))
    what = f"{', '.join(each.name for each in models)} ({total})"
    if not yes:
        confirm_removal("rm", what)
    remove(models)
    click.echo(printable(f"removed {what}"))


@click.command(cls=Command)
@click.argument("name", metavar="ORG/REPO[:QUANT]")
@click.option("--list", "listed", is_flag=True, help="List the models in the repository; download nothing.")
@json_option
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
    with Bars("asking the hub") as bars:
        path = download(name, bars, partial(_say, bars))
    if as_json:
        click.echo(json.dumps({"name": name, "path": str(path)}))
    else:
        click.echo(printable(str(path)))
        click.echo(f'rlx run {name} "..." runs it', err=True)


def _list(name: str, as_json: bool) -> None:
    models = models_of(repository_of(name)[0])
    if as_json:
        rows = [{"quantization": m.quantization, "bytes": m.nbytes, "files": [f.name for f in m.files]} for m in models]
        click.echo(json.dumps({"name": name, "models": rows}))
        return
    cells = ((m.quantization or "", size(m.nbytes), m.files[0].name) for m in models)
    table(("quantization", "size", "file"), cells, right=("size",))


def download_if_agreed(model: str, yes: bool) -> None:
    """Downloads a model that is named as on the hub and is not there, if `yes` or the user in a terminal says so.

    Raises:
        DownloadError: it cannot be downloaded.
        ModelFileError: there is nobody to ask; the message says `rlx pull`.
        click.Abort: the user says no.
    """
    if not can_be_downloaded(model):
        return
    try:
        resolve_model_path(model)
    except AmbiguousModelError:
        return
    except ModelFileError:
        if not yes and not (is_terminal(sys.stdin) and is_terminal(sys.stderr)):
            raise
    else:
        return
    _download(model, yes)


def _download(model: str, yes: bool) -> None:
    with Bars("asking the hub") as bars:
        found = plan(model, partial(_say, bars))
        bars.pause()
        what = f"{found.repository.name}, {found.model}"
        if not yes:
            question = f"{model} is not on this machine. Download {what} to {hub.folder()}?"
            click.confirm(printable(question), default=True, abort=True, err=True)
        bars.waiting(f"downloading {what}")
        found.fetch(bars, partial(_say, bars))


def _say(bars: Bars, line: str) -> None:
    bars.pause()
    click.echo(printable(line), err=True)
