"""`rlx convert`: writes a safetensors model as a GGUF file."""

from __future__ import annotations

import time
from collections import Counter

import click

from rlx.cli.command import Command
from rlx.cli.main import debug_option
from rlx.cli.output import Bars, printable, size


@click.command(cls=Command)
@click.argument("source", metavar="IN")
@click.argument("out")
@click.option("--type", "target", default="auto", show_default=True, metavar="TYPE", help="F32, F16, BF16 or auto.")
@click.option(
    "--part",
    type=click.Choice(["all", "model", "mmproj"]),
    default="all",
    show_default=True,
    help="The language model and its vision tower, or one of them.",
)
@click.option("--force", is_flag=True, help="Replace the files if they exist.")
@debug_option
def convert(source: str, out: str, target: str, part: str, force: bool) -> None:
    """Write the safetensors model IN as the GGUF file OUT.

    IN is a folder with config.json, the weights and the tokenizer. With --type auto every matrix keeps the type it has;
    norms and other small tensors are always F32. The vision tower of a model for images and text becomes a file of its
    own beside OUT, mmproj-OUT, where `rlx run` finds it. A file appears when it is whole.
    """
    from rlx.export.convert import convert as write

    start = time.perf_counter()
    with Bars() as bars:
        bars.waiting("writing tensors")  # first it is opened
        done = write(source, out, target, part=part, force=force, progress=bars)
    for line in left_out(done.left_out):
        click.echo(printable(line), err=True)
    if done.no_mmproj is not None:
        click.echo(printable(f"the vision tower is not written: {done.no_mmproj}"), err=True)
    for file in (done, done.mmproj):
        if file is not None:
            types = ", ".join(f"{count} {dtype}" for dtype, count in file.types.most_common())
            kind = "vision tower" if file.arch == "clip" else file.arch
            click.echo(printable(f"{file.path}: {kind}, {file.type}, {size(file.nbytes)} ({types})"))
    click.echo(f"in {time.perf_counter() - start:.1f} s", err=True)


def left_out(names: tuple[str, ...]) -> list[str]:
    """A line for each part of a checkpoint that no file got."""
    parts = Counter(_part(name) for name in names)
    return [
        f"left out: {part} ({count} tensors)" if count > 1 else f"left out: {part}" for part, count in parts.items()
    ]


def _part(name: str) -> str:
    """The part that a tensor belongs to, such as `model.vision_tower.*` or `visual.*`; a single tensor is a part."""
    pieces = name.split(".")
    return ".".join([*pieces[: 2 if pieces[0] == "model" else 1], "*"]) if len(pieces) > 2 else name
