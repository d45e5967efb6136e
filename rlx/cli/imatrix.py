"""`rlx imatrix TEXT OUT`: how important the inputs of a model's linear layers are, for `rlx quantize --imatrix`."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path
from typing import Any

import click

from rlx.cli.command import Command
from rlx.cli.options import model_argument, model_path, some_engine_options
from rlx.cli.output import Bars, counted, size
from rlx.cli.ppl import read_text
from rlx.engine.engine import Engine
from rlx.engine.importance import PROFILE, WINDOW, importance
from rlx.export.imatrix import write_importance
from rlx.export.writer import check_output


@click.command(cls=Command)
@click.argument("file", metavar="TEXT")
@click.argument("out", metavar="OUT")
@model_argument
@click.option("--window", type=click.IntRange(2), default=WINDOW, metavar="N", help="Tokens of a window. Default: 512.")
@click.option("--windows", type=click.IntRange(1), metavar="N", help="Only the first N windows of the text.")
@click.option("--force", is_flag=True, help="Replace OUT if it exists.")
@some_engine_options("threads", "device")
def imatrix(
    file: str, out: str, model: str | None, window: int, windows: int | None, force: bool, engine: dict[str, Any]
) -> None:
    """Write the importance of MODEL's inputs as the GGUF file OUT.

    TEXT is a file with text of the kind that the model will read (`-` is stdin); some hundred windows are enough. MODEL
    is best in F32, F16 or BF16. OUT has the form of llama.cpp's llama-imatrix.

    \b
    rlx imatrix text.txt imatrix.gguf model-bf16.gguf
    rlx quantize model-bf16.gguf model.gguf Q4_K_M --imatrix imatrix.gguf
    """
    text, start = read_text(file), time.perf_counter()
    path = model_path(model, engine, tell_demo=True)
    check_output(Path(out), Path(path), force=force)
    with (
        Bars("opening the model") as bars,
        closing(Engine.open(path, max_seq=window, progress=bars, profile=PROFILE, **engine)) as opened,
    ):
        ids = opened.tokenizer.encode(text, add_special_tokens=False)
        ids = ids if windows is None else ids[: windows * window]
        total = len(ids) // window
        found = importance(opened, ids, window, lambda done: bars("reading windows", done, total))
    nbytes = write_importance(found, out, text=Path(file).name, windows=total, window=window)
    what = f"{counted(len(found), 'tensor')}, {counted(total, 'window')} of {window} tokens"
    click.echo(f"{out}: {what}, {size(nbytes)}")
    click.echo(f"in {time.perf_counter() - start:.1f} s", err=True)
