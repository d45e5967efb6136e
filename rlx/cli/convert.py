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
@click.option("--force", is_flag=True, help="Replace OUT if it exists.")
@debug_option
def convert(source: str, out: str, target: str, force: bool) -> None:
    """Write the safetensors model IN as the GGUF file OUT.

    IN is a folder with config.json, the weights and the tokenizer. With --type auto every matrix keeps the type it has;
    norms and other small tensors are always F32. Of a model for images and text the language model is written. OUT
    appears when it is whole.
    """
    from rlx.export.convert import convert as write

    start = time.perf_counter()
    with Bars() as bars:
        bars.waiting("writing tensors")  # first it is opened
        done = write(source, out, target, force=force, progress=bars)
    for line in _left_out(done.left_out):
        click.echo(printable(line), err=True)
    types = ", ".join(f"{count} {dtype}" for dtype, count in done.types.most_common())
    click.echo(printable(f"{done.path}: {done.arch}, {done.type}, {size(done.nbytes)} ({types})"))
    click.echo(f"in {time.perf_counter() - start:.1f} s", err=True)


def _left_out(names: tuple[str, ...]) -> list[str]:
    """Prints a line for each part of the checkpoint that does not belong to the language model."""
    parts = Counter(_part(name) for name in names)
    return [
        f"left out: {part} ({count} tensors)" if count > 1 else f"left out: {part}" for part, count in parts.items()
    ]


def _part(name: str) -> str:
    """The part that a tensor belongs to, such as `model.vision_tower.*` or `visual.*`; a single tensor is a part."""
    pieces = name.split(".")
    return ".".join([*pieces[: 2 if pieces[0] == "model" else 1], "*"]) if len(pieces) > 2 else name
