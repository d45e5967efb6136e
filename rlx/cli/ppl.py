"""`rlx ppl FILE`: the perplexity of a text; `rlx eval FILE`: which of several choices a model finds likeliest, and how
often that is the right one; `rlx imatrix TEXT OUT`: how important the inputs of its linear layers are.
"""

from __future__ import annotations

import json
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import click

from rlx.cli.command import Command, json_option
from rlx.cli.options import model_argument, model_path, open_engine, open_runner, some_engine_options
from rlx.cli.output import Bars, counted, printable, size
from rlx.cli.prompt import read_text
from rlx.engine.engine import Engine
from rlx.engine.importance import PROFILE, WINDOW, importance
from rlx.errors import ArgumentError, PromptError
from rlx.export.imatrix import write_importance
from rlx.export.model import check_output
from rlx.runners.choices import Answers, Question, answers
from rlx.runners.perplexity import Window, halved_windows, score, sliding_windows

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
@some_engine_options("threads", "precision", "kv_dtype", "profile", "device", "n_cpu_moe")
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
    text, start = text_of(file), time.perf_counter()
    path = model_path(model, engine, tell_demo=True)
    with Bars("opening the model") as bars, ExitStack() as stack:
        opened = stack.enter_context(open_engine(path, bars, max_seq=window, **engine))
        other = None
        if kl or base is not None:
            exact = {name: engine[name] for name in ("threads", "device", "n_cpu_moe")} | {"precision": "exact"}
            other = stack.enter_context(open_engine(base or path, bars, max_seq=window, **exact))
            _same_tokens(opened, other, text, path, base)
        pieces, ids = cut(opened, text, window, stride, halves, tokens)
        scores = _scored(opened, other, pieces, rows, bars)
    found: dict[str, Any] = {
        "model": path,
        "base": base or (path if kl else None),
        "text_tokens": ids,
        "windows": len(pieces),
        "window": window,
        "stride": None if halves else stride or max(1, window // 2),
        "halves": halves,
        **scores,
        "seconds": time.perf_counter() - start,
    }
    click.echo(json.dumps(found)) if as_json else show(found)


def text_of(name: str) -> str:
    """The text that a command is given; arguments and errors as of `read_text`."""
    return read_text(name, MAX_BYTES, strict=True)


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


@click.command("eval", cls=Command)
@click.argument("file", metavar="FILE")
@model_argument
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Only the first N questions.")
@click.option("--delimiter", default=" ", metavar="TEXT", help="Put it between query and choice; a space by default.")
@some_engine_options("max_seq", "threads", "precision", "kv_dtype", "profile", "device", "n_cpu_moe")
@json_option
def eval_(
    file: str, model: str | None, limit: int | None, delimiter: str, as_json: bool, engine: dict[str, Any]
) -> None:
    """Measure how often MODEL chooses the right answer.

    Each line of FILE is a question in JSON, with a query, choices and the number of the right one. acc takes the
    log-likelihood of each choice, acc_norm divides it by its characters, as lm-evaluation-harness does.

    \b
    rlx eval questions.jsonl model.gguf
    rlx eval questions.jsonl model.gguf --limit 100 --json
    """
    questions, start = read_questions(file)[:limit], time.perf_counter()
    path = model_path(model, engine, tell_demo=True)
    with Bars("opening the model") as bars, closing(open_runner(path, engine, bars)) as runner:
        result = answers(runner, questions, delimiter, lambda count: bars("answering questions", count, len(questions)))
    found = {"model": path, **result.as_dict(), "seconds": time.perf_counter() - start}
    click.echo(json.dumps(found) if as_json else _page(result))


def read_questions(name: str) -> list[Question]:
    """The questions in a file, one a line.

    Raises:
        PromptError: it cannot be read, has none, or a line is no question.
    """
    found = []
    for number, line in enumerate(text_of(name).split("\n"), 1):
        if not line.strip():
            continue
        try:
            found.append(Question.of(json.loads(line)))
        except PromptError as error:
            raise PromptError(error.what, where=f"{name}, line {number}", hint=error.hint) from error
        except (ValueError, RecursionError) as error:
            what, hint = "it is no JSON", "write a question a line"
            raise PromptError(what, where=f"{name}, line {number}", hint=hint) from error
    if not found:
        raise PromptError("there is no question", where=Path(name), hint="write one a line, in JSON")
    return found


def _page(result: Answers) -> str:
    found = result.as_dict()
    lines = [f"{name:8} {found[name]:.4f} +/- {found[f'{name}_stderr']:.4f}" for name in ("acc", "acc_norm")]
    return "\n".join([*lines, counted(found["questions"], "question")])


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
    text, start = text_of(file), time.perf_counter()
    path = model_path(model, engine, tell_demo=True)
    check_output(Path(out), Path(path), force=force)
    with (
        Bars("opening the model") as bars,
        open_engine(path, bars, max_seq=window, profile=PROFILE, **engine) as opened,
    ):
        ids = opened.tokenizer.encode(text, add_special_tokens=False)
        ids = ids if windows is None else ids[: windows * window]
        total = len(ids) // window
        found = importance(opened, ids, window, lambda done: bars("reading windows", done, total))
    nbytes = write_importance(found, out, text=Path(file).name, windows=total, window=window, force=force)
    what = f"{counted(len(found), 'tensor')}, {counted(total, 'window')} of {window} tokens"
    click.echo(f"{out}: {what}, {size(nbytes)}")
    click.echo(f"in {time.perf_counter() - start:.1f} s", err=True)
