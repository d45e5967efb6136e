"""`rlx embed FILE` and `rlx rerank QUERY FILE`: texts as vectors, and in the order in which they answer a query."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import click
import numpy as np

from rlx.arguments import without_none
from rlx.cli.command import Command, flag_of
from rlx.cli.options import model_argument, model_path, one_adapter, open_runner, some_engine_options
from rlx.cli.output import Bars, counted, printable
from rlx.cli.ppl import text_of
from rlx.cli.prompt import STDIN
from rlx.engine.encoder import Rows
from rlx.errors import OutputError, PromptError, file_error
from rlx.runners.encoder import as_encoder
from rlx.runners.model import Model

_LINES = ".jsonl"
_TEXT = re.compile(r"(?:text|document) (\d+)")  # where an error is


@click.command(cls=Command)
@click.argument("file", metavar="FILE")
@model_argument
@click.option("--out", metavar="FILE", help="Write a .npy file, float32 [n, width], or a .jsonl file.")
@click.option("--prompt-name", metavar="NAME", help="Put the model's prompt of this name before each text.")
@click.option("--prompt", metavar="TEXT", help="Put this text before each text.")
@click.option("--dimensions", type=click.IntRange(1), metavar="N", help="Keep the first N numbers of each vector.")
@click.option("--pooling", metavar="NAME", help="`mean`, `cls`, `last` or `max`. Default: what the files say.")
@click.option("--no-normalize", is_flag=True, help="Do not scale vectors to length 1.")
@click.option("--truncate", is_flag=True, help="Cut texts that are too long for the model.")
@one_adapter
@some_engine_options("threads", "precision", "profile", "device")
def embed(
    file: str,
    model: str | None,
    out: str | None,
    prompt_name: str | None,
    prompt: str | None,
    dimensions: int | None,
    pooling: str | None,
    no_normalize: bool,
    truncate: bool,
    adapters: dict[str, str] | None,
    engine: dict[str, Any],
) -> None:
    """Make vectors of the texts in FILE.

    FILE has a text in each line; of a .jsonl file each line is a JSON string, or an object with `text`. A FILE of -
    is stdin. Without --out, each vector is printed as a line of JSON.

    \b
    rlx embed texts.txt bge-small --out vectors.npy
    rlx embed queries.jsonl model.gguf --prompt-name query --dimensions 256
    """
    if out is not None and Path(out).suffix not in (".npy", _LINES):
        raise click.UsageError(f"--out is {out!r}, expected a name that ends in .npy or {_LINES}")
    texts, engine["adapters"] = read_texts(file), adapters
    chosen = without_none(prompt_name=prompt_name, prompt=prompt, dimensions=dimensions, truncate=truncate or None)
    path = model_path(model, engine, tell_demo=True)
    with by_line(file), Bars("opening the model") as bars, closing(open_runner(path, engine, bars)) as runner:
        found = _vectors(runner, texts, pooling, not no_normalize, chosen, bars)
    _write(found, out)


def _vectors(
    runner: Model, texts: list[str], pooling: str | None, normalize: bool, chosen: dict[str, Any], bars: Bars
) -> Rows:
    adapter = next(iter(runner.adapters), None)
    if (encoder := as_encoder(runner)) is not None:
        return encoder.embed(texts, pooling=pooling, normalize=normalize, progress=bars, adapter=adapter, **chosen)
    if chosen:
        names = ", ".join(map(flag_of, chosen))
        raise click.UsageError(f"{names}: only an embedding model has that, and this model generates text")
    if not texts:
        return np.empty((0, runner.config.hidden), np.float32)
    return runner.embed(texts, pooling or "mean", normalize, adapter=adapter)


def _write(vectors: Rows, out: str | None) -> None:
    lines = (json.dumps({"index": i, "embedding": row.tolist()}) for i, row in enumerate(vectors))
    if out is None:
        for line in lines:
            click.echo(line)
        return
    try:
        if Path(out).suffix == _LINES:
            Path(out).write_text("".join(f"{line}\n" for line in lines), "utf-8")
        else:
            np.save(out, vectors)
    except OSError as error:
        raise file_error(OutputError, "the vectors cannot be written", error, Path(out)) from error
    click.echo(f"{counted(len(vectors), 'vector')} of {vectors.shape[1]} numbers in {out}", err=True)


@click.command(cls=Command)
@click.argument("query", metavar="QUERY")
@click.argument("file", metavar="FILE")
@model_argument
@click.option("--top", type=click.IntRange(1), metavar="N", help="Print only the best N.")
@click.option("--truncate", is_flag=True, help="Cut texts that are too long for the model.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line.")
@one_adapter
@some_engine_options("threads", "precision", "profile", "device")
def rerank(
    query: str,
    file: str,
    model: str | None,
    top: int | None,
    truncate: bool,
    as_json: bool,
    adapters: dict[str, str] | None,
    engine: dict[str, Any],
) -> None:
    """Order the texts in FILE by how well they answer QUERY.

    The best comes first, each behind its score. MODEL is a reranker, and FILE as for `rlx embed`.

    \b
    rlx rerank "what is a panda" documents.txt bge-reranker --top 3
    """
    texts, engine["adapters"] = read_texts(file), adapters
    path = model_path(model, engine, tell_demo=True)
    with by_line(file), Bars("opening the model") as bars, closing(open_runner(path, engine, bars)) as runner:
        scores = runner.rerank(query, texts, truncate=truncate, adapter=next(iter(runner.adapters), None))
    for number in sorted(range(len(texts)), key=lambda each: -scores[each])[:top]:
        if as_json:
            click.echo(json.dumps({"index": number, "score": scores[number], "text": texts[number]}))
        else:
            click.echo(f"{scores[number]:8.4f}  {printable(texts[number])}")


@contextmanager
def by_line(file: str) -> Iterator[None]:
    """Errors about one of the texts of a file name its line."""
    try:
        yield
    except PromptError as error:
        if (found := _TEXT.fullmatch(error.where or "")) is None:
            raise
        hint = "take this line out" if error.what == "it is empty" else error.hint
        raise PromptError(error.what, where=f"{file}, line {int(found[1]) + 1}", hint=hint) from error


def read_texts(name: str) -> list[str]:
    """The texts of a file, one a line.

    Raises:
        PromptError: it cannot be read, or a line of a .jsonl file has no text.
    """
    lines = text_of(name).split("\n")
    if lines and not lines[-1]:
        lines.pop()
    lines = [line.removesuffix("\r") for line in lines]
    return list(_of_json(lines, name)) if name != STDIN and Path(name).suffix == _LINES else lines


def _of_json(lines: list[str], name: str) -> Iterator[str]:
    for number, line in enumerate(lines, 1):
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            found = None
        text = found.get("text") if isinstance(found, dict) else found
        if not isinstance(text, str):
            hint = 'a line is "a text" or {"text": "a text"}'
            raise PromptError(f"line {number} is no text", where=Path(name), hint=hint)
        yield text
