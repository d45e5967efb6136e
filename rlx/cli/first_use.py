"""Download on first use: a model that is named as on the hub and is not there, if the user agrees."""

from __future__ import annotations

import sys

import click

from rlx.cli.output import Bars, is_terminal, printable
from rlx.errors import AmbiguousModelError, ModelFileError


def download_if_agreed(model: str, yes: bool) -> None:
    """Downloads a model that is named as on the hub and is not there, if `yes` or the user in a terminal says so.

    Raises:
        DownloadError: it cannot be downloaded.
        ModelFileError: there is nobody to ask; the message says `rlx pull`.
        click.Abort: the user says no.
    """
    from rlx.weights.locate import can_be_downloaded, resolve_model_path

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
    from rlx.weights import hub
    from rlx.weights.pull import plan

    with Bars() as bars:

        def say(line: str) -> None:
            bars.pause()
            click.echo(printable(line), err=True)

        bars.waiting("asking the hub")
        found = plan(model, say)
        bars.pause()
        what = f"{found.repository.name}, {found.model}"
        if not yes:
            question = f"{model} is not on this machine. Download {what} to {hub.folder()}?"
            click.confirm(printable(question), default=True, abort=True, err=True)
        bars.waiting(f"downloading {what}")
        found.fetch(bars, say)
