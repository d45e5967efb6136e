"""`rlx convert` and `rlx quantize`: write a model as a GGUF file."""

from __future__ import annotations

import json
import time
from collections import Counter
from typing import Any

import click

from rlx.cli.command import Command, json_option
from rlx.cli.output import Bars, counted, printable, size
from rlx.export.convert import convert as write
from rlx.export.model import Written
from rlx.export.quantize import quantize as write_quantized


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
def convert(source: str, out: str, target: str, part: str, force: bool) -> None:
    """Write the safetensors model IN as the GGUF file OUT.

    IN is a folder with config.json, the weights and the tokenizer. With --type auto every matrix keeps the type it has;
    norms and other small tensors are always F32. The vision tower of a model for images and text becomes a file of its
    own beside OUT, mmproj-OUT, where `rlx run` finds it. A file appears when it is complete.
    """
    start = time.perf_counter()
    with Bars("writing tensors") as bars:  # first it is opened
        done = write(source, out, target, part=part, force=force, progress=bars)
    say_left_out(done)
    if done.no_mmproj is not None:
        click.echo(printable(f"the vision tower is not written: {done.no_mmproj}"), err=True)
    for file in (done, done.mmproj):
        if file is not None:
            kind = "vision tower" if file.arch == "clip" else file.arch
            click.echo(printable(f"{file.path}: {kind}, {file.type}, {size(file.nbytes)} ({types_of(file)})"))
    click.echo(f"in {time.perf_counter() - start:.1f} s", err=True)


def types_of(file: Written) -> str:
    """The types of a file's tensors, with how many have each."""
    return ", ".join(f"{count} {dtype}" for dtype, count in file.types.most_common())


def say_left_out(done: Written) -> None:
    """A line for each part of a checkpoint that no file got."""
    for part, count in Counter(map(_part, done.left_out)).items():
        click.echo(printable(f"left out: {part} ({count} tensors)" if count > 1 else f"left out: {part}"), err=True)


def _part(name: str) -> str:
    """The part that a tensor belongs to, such as `model.vision_tower.*` or `visual.*`; a single tensor is a part."""
    pieces = name.split(".")
    return ".".join([*pieces[: 2 if pieces[0] == "model" else 1], "*"]) if len(pieces) > 2 else name


@click.command(cls=Command)
@click.argument("source", metavar="IN")
@click.argument("out")
@click.argument("target", metavar="TYPE")
@click.option("--threads", type=click.IntRange(1), metavar="N", help="Worker threads; the physical cores by default.")
@click.option("--force", is_flag=True, help="Replace OUT if it exists.")
@click.option("--requantize", is_flag=True, help="Accept an IN that is quantized already; errors add up.")
@click.option("--imatrix", metavar="FILE", help="An importance matrix, of `rlx imatrix` or of llama.cpp.")
@json_option
def quantize(
    source: str,
    out: str,
    target: str,
    threads: int | None,
    force: bool,
    requantize: bool,
    imatrix: str | None,
    as_json: bool,
) -> None:
    """Write the model IN as the GGUF file OUT of another TYPE.

    IN is a GGUF file, also that of a vision tower (mmproj), or a folder with safetensors, whose language model is
    written; best in F32, F16 or BF16. TYPE is one of F32, F16, BF16, Q8_0, Q6_K, Q5_K_M, Q4_K_M and Q4_0. Each tensor
    gets the type that llama.cpp gives it in a file of that TYPE; norms and other small tensors are not quantized. OUT
    appears when it is complete.
    """
    start = time.perf_counter()
    how: dict[str, Any] = {"threads": threads, "force": force, "requantize": requantize, "imatrix": imatrix}
    with Bars("writing tensors") as bars:  # first it is opened
        done = write_quantized(source, out, target, progress=bars, **how)
    seconds = time.perf_counter() - start
    if as_json:
        click.echo(json.dumps(_report(done, seconds)))
        return
    say_left_out(done)
    click.echo(f"{done.path}: {done.type}, {size(done.nbytes)}, {done.bits:.2f} bits a number ({types_of(done)})")
    if imatrix is not None:
        click.echo(f"{counted(done.weighed, 'tensor')} rounded by importance", err=True)
    click.echo(f"in {seconds:.1f} s", err=True)


def _report(done: Written, seconds: float) -> dict[str, Any]:
    tensors = [{"name": name, "from": a.name, "to": b.name} for name, a, b in done.tensors]
    return {
        "file": str(done.path),
        "type": done.type,
        "bytes": done.nbytes,
        "bits": done.bits,
        "seconds": seconds,
        "by_importance": done.weighed,
        "tensors": tensors,
        "left_out": list(done.left_out),
    }
