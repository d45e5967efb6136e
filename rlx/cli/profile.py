"""`rlx profile`: writes a compile profile with the defaults of this machine, or shows the profile of a model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from rlx import demo
from rlx.cli.command import Group
from rlx.cli.options import engine_options, model_argument, model_path, open_plan
from rlx.engine.opening.setup import Plan, pools_of
from rlx.errors import ProfileError, file_error
from rlx.partial_file import into_place
from rlx.profile import CompileProfile

#: Keys whose default depends on the machine, the environment or other keys. Written as values they would override it.
_DEPENDENT = (
    "precision.kv_dtype", "backend.cpu.level", "backend.cpu.threads", "engine.kv_bytes", "engine.cache_kv",
    "engine.cache_kv_bytes", "engine.device", "cache.policy", "buckets.seq",
)  # fmt: skip
_FOLDER, _MOST = "~/.cache/rlx-kv", "20GiB"  # examples for `cache_kv`: nothing is kept by default
_DEVICE = "auto"  # an example


@click.group(cls=Group)
def profile() -> None:
    """Write and show compile profiles.

    A profile is a TOML file of choices about the compile. One that is called FAMILY.rlx.toml and lies beside the
    weights is found by itself.
    """


@profile.command()
@click.argument("model")
@click.option(
    "-o",
    "--out",
    "output",
    metavar="FILE",
    help="Output file, - for stdout; FAMILY.rlx.toml beside MODEL by default (demo: the current folder).",
)
@click.option("--force", is_flag=True, help="Replace an existing file.")
def init(model: str, output: str | None, force: bool) -> None:
    """Write a profile for MODEL: every key, with a comment.

    The values are the defaults of MODEL, so the file as written changes nothing. Those that depend on the machine, the
    environment or other keys begin with a #: remove it to fix them.
    """
    with open_plan(model, {"profile": {}}) as plan:
        weights = plan.weights.loader.path
        path = Path(output) if output not in (None, "-") else _folder(weights) / f"{plan.config.family}.rlx.toml"
        full = replace(effective(plan), model=_from(path, weights), kv_bytes=pools_of([plan])[0])
        full = replace(full, cache_kv=_FOLDER, cache_kv_bytes=_MOST, device=_DEVICE)
        text = full.to_toml(comments=True, commented_out=_DEPENDENT)
    if output == "-":
        click.echo(text, nl=False)
        return
    if path.exists() and not force:
        raise ProfileError("the file is there already", where=path, hint="--force writes over it, -o names another")
    try:
        with into_place(path, replace=force) as partial:
            partial.write_text(text, encoding="utf-8")
    except OSError as error:
        raise file_error(ProfileError, "the profile cannot be written", error, path, "-o names another file") from error
    click.echo(f"wrote {path}", err=True)


@profile.command()
@model_argument
@engine_options
def show(model: str | None, engine: dict[str, Any]) -> None:
    """Show the profile that MODEL uses.

    It is that of --profile, the one beside the weights, or the defaults.
    """
    with open_plan(model_path(model, engine, tell_demo=True), engine) as plan:
        text, source = effective(plan).to_toml(), plan.setup.source
    click.echo(text, nl=False)
    click.echo(f"from {source}" if source else "the defaults of this machine", err=True)


def _folder(weights: Path) -> Path:
    """Where a profile goes by default: beside the model, and never into the installed package."""
    return Path() if weights.absolute().parent == demo.path().absolute().parent else weights.parent


def _from(profile: Path, weights: Path) -> str:
    """The model's name in a profile: its file name if it lies beside the profile, else its full path."""
    weights = weights.absolute()
    return weights.name if weights.parent == profile.absolute().parent else str(weights)


def effective(plan: Plan) -> CompileProfile:
    """The profile of a plan, with defaults filled in."""
    setup = plan.setup
    return replace(
        setup.profile,
        family=plan.config.family,
        kv_dtype=setup.kv_type.name,
        deterministic=bool(setup.profile.deterministic),
        level=setup.target.level,
        threads=setup.threads,
        cache=setup.cache.policy,
        capacity=setup.cache.capacity,
    )
