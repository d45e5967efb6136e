"""`rlx ppl FILE`: how well a model predicts a text, and how far its predictions are from those of another."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import click

from rlx.cli.command import Command, json_option
from rlx.cli.options import model_argument, model_path, some_engine_options
from rlx.cli.output import Bars, counted, printable
from rlx.cli.prompt import STDIN
from rlx.engine.engine import Engine
from rlx.errors import ArgumentError, PromptError, file_error
from rlx.runners.auto import runner_class
from rlx.runners.perplexity import Window, halved_windows, score, sliding_windows
from rlx.weights import open_weights

MAX_BYTES = 16 << 20  # of a text; a token takes some 100 bytes of memory

_COUNT = click.IntRange(1)


@click.command(cls=Command)
@click.argument("file", metavar="FILE")
@model_argument
@click.option("--kl", is_flag=True, help="Also the KL divergence to the same model in precision exact.")
@click.option("--base", metavar="MODEL", help="Also the KL divergence to MODEL in precision exact.")
@click.option("--window", type=click.IntRange(2), default=512, metavar="N", help="Tokens of a window. Default: 512.")
@click.option("--stride", type=_COUNT, metavar="N", help="Tokens from a window to the next; half a window by default.")
@click.option("--halves", is_flag=True, help="Windows side by side; only second halves count, as in llama.cpp.")
@click.option("--tokens", type=_COUNT, metavar="N", help="Only the first N tokens of the text.")
@click.option("--rows", type=_COUNT, metavar="N", help="Tokens computed at a time; 1 measures decoding.")
@some_engine_options("threads", "precision", "kv_dtype", "profile", "device")
@json_option
def ppl(
    file: str,
    model: str | None,
    kl: bool,
    base: str | None,
    window: int,
    stride: int | None,
    halves: bool,
    tokens: int | None,
    rows: int | None,
    as_json: bool,
    engine: dict[str, Any],
) -> None:
    """Measure the perplexity of the text in FILE.

    MODEL is by default the demo model. The text is cut into windows. Each token is scored once, with at
    least half a window before it where the text has as much. --halves scores as llama-perplexity does. A FILE of - is
    stdin.

    \b
    rlx ppl wiki.txt model.gguf
    rlx ppl wiki.txt model-q4_k_m.gguf --base model-bf16.gguf
    """
    if halves and stride is not None:
        raise click.UsageError("--halves and --stride exclude each other: the windows of --halves are side by side")
    text, start = read_text(file), time.perf_counter()
    path = model_path(model, engine, tell_demo=True)
    with Bars("opening the model") as bars, ExitStack() as stack:
        opened = stack.enter_context(_opened(path, window, bars, **engine))
        other = None
        if kl or base is not None:
            exact = {name: engine[name] for name in ("threads", "device")} | {"precision": "exact"}
            other = stack.enter_context(_opened(base or path, window, bars, **exact))
            _same_tokens(opened, other, text, path, base)
        pieces, ids = cut(opened, text, window, stride, halves, tokens)
        scores = _scored(opened, other, pieces, rows, bars)
    how: dict[str, Any] = {
        "window": window,
        "stride": None if halves else stride or max(1, window // 2),
        "halves": halves,
    }
    found: dict[str, Any] = {
        "model": path,
        "base": base or (path if kl else None),
        "text_tokens": ids,
        "windows": len(pieces),
        **how,
    }
    found |= {**scores, "seconds": time.perf_counter() - start}
    if as_json:
        click.echo(json.dumps(found))
    else:
        show(found)


def read_text(name: str) -> str:
    """The text in a file, or on stdin for "-".

    Raises:
        PromptError: it cannot be read, is too large, or is no UTF-8.
    """
    try:
        with click.open_file(name, "rb") if name == STDIN else Path(name).expanduser().open("rb") as file:
            found = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise file_error(PromptError, "the file cannot be read", error, name) from error
    if len(found) > MAX_BYTES:
        raise PromptError(f"there are more than {MAX_BYTES >> 20} MiB", where=Path(name), hint="cut the text")
    try:
        return bytes(found).decode()
    except UnicodeDecodeError as error:
        raise PromptError(
            f"it is no UTF-8 text (byte {error.start})", where=Path(name), hint="give a text file"
        ) from error


def cut(
    engine: Engine, text: str, window: int, stride: int | None, halves: bool, tokens: int | None
) -> tuple[list[Window], int]:
    """The windows of a text, and the number of its tokens."""
    tokenizer = engine.tokenizer
    ids = tokenizer.encode(text, add_special_tokens=halves)
    ids = ids[:tokens]
    if halves:
        return halved_windows(ids, window, tokenizer.prefix), len(ids)
    return sliding_windows(ids, window, stride or max(1, window // 2), tokenizer.prefix), len(ids)


def _opened(path: str, window: int, bars: Bars, **options: Any) -> Any:
    loader = open_weights(path)
    runner_class(loader)  # whether there is one
    return closing(Engine.open(loader, max_seq=window, progress=bars, **options))


def _same_tokens(engine: Engine, base: Engine, text: str, path: str, base_path: str | None) -> None:
    """Refuses a base that cuts a text into other tokens: their predictions are not of the same things."""
    if base_path is None:
        return
    some = text[:100_000]
    if engine.tokenizer.encode(some) != base.tokenizer.encode(some):
        what = f"{base_path} and {path} cut the text into different tokens"
        raise ArgumentError(what, where="base", hint="Compare files of one model.")


def _scored(engine: Engine, base: Engine | None, windows: list[Window], rows: int | None, bars: Bars) -> dict[str, Any]:
    total = sum(window.scored for window in windows)
    bars.waiting("scoring")
    return score(engine, windows, base, rows=rows, on_tokens=lambda count: bars("scoring", count, total)).as_dict()


def show(found: dict[str, Any]) -> None:
    """Prints the result."""
    way = "only second halves count" if found["halves"] else f"stride {found['stride']}"
    cuts = f"{counted(found['windows'], 'window')} of {found['window']} tokens, {way}"
    click.echo(f"perplexity {found['perplexity']:.4f} +/- {found['error']:.4f}")
    speed = f"{found['tokens'] / max(found['seconds'], 1e-9):.0f} tokens/s with loading"
    click.echo(f"{counted(found['tokens'], 'token')} scored of {found['text_tokens']}, {cuts}; {speed}")
    if "kl" not in found:
        return
    change = found["perplexity"] / found["base_perplexity"] - 1
    click.echo(f"\nbase: {printable(found['base'])} in precision exact")
    click.echo(f"base perplexity {found['base_perplexity']:.4f}; the model's differs by {change:+.3%}")
    kl = found["kl"]
    click.echo(f"KL divergence: mean {kl['mean']:.3e} +/- {kl['error']:.0e}, median {kl['median']:.3e}, ", nl=False)
    click.echo(f"99% {kl['p99']:.3e}, maximum {kl['max']:.3e} nats")
    click.echo(f"same likeliest token: {kl['same_top']:.2%}")
