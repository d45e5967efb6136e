"""`rlx quantize`: writes a model as a smaller GGUF file."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import click

from rlx.cli.command import Command
from rlx.cli.convert import left_out
from rlx.cli.main import debug_option
from rlx.cli.output import Bars, printable, size

if TYPE_CHECKING:
    from rlx.export.quantize import Quantized


@click.command(cls=Command)
@click.argument("source", metavar="IN")
@click.argument("out")
@click.argument("target", metavar="TYPE")
@click.option("--threads", type=click.IntRange(1), metavar="N", help="Worker threads; the physical cores by default.")
@click.option("--force", is_flag=True, help="Replace OUT if it exists.")
@click.option("--requantize", is_flag=True, help="Accept an IN that is quantized already; errors add up.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@debug_option
def quantize(
    source: str, out: str, target: str, threads: int | None, force: bool, requantize: bool, as_json: bool
) -> None:
    """Write the model IN as the GGUF file OUT of another TYPE.

    IN is a GGUF file, also that of a vision tower (mmproj), or a folder with safetensors, whose language model is
    written; best in F32, F16 or BF16. TYPE is one of F32, F16, BF16, Q8_0, Q6_K, Q5_K_M, Q4_K_M and Q4_0. Each tensor
    gets the type that llama.cpp gives it in a file of that TYPE; what must not be quantized is not. OUT appears when it
    is whole.
    """
    from rlx.export.quantize import quantize as write

    start = time.perf_counter()
    with Bars() as bars:
        bars.waiting("writing tensors")  # first it is opened
        done = write(source, out, target, threads=threads, force=force, requantize=requantize, progress=bars)
    seconds = time.perf_counter() - start
    if as_json:
        click.echo(json.dumps(_report(done, seconds)))
        return
    for line in left_out(done.left_out):
        click.echo(printable(line), err=True)
    types = ", ".join(f"{count} {dtype}" for dtype, count in done.types.most_common())
    click.echo(f"{done.path}: {done.target.name}, {size(done.nbytes)}, {done.bits:.2f} bits a number ({types})")
    click.echo(f"in {seconds:.1f} s", err=True)


def _report(done: Quantized, seconds: float) -> dict[str, Any]:
    tensors = [{"name": name, "from": a.name, "to": b.name} for name, a, b in done.tensors]
    return {
        "file": str(done.path),
        "type": done.target.name,
        "bytes": done.nbytes,
        "bits": done.bits,
        "seconds": seconds,
        "tensors": tensors,
        "left_out": list(done.left_out),
    }
