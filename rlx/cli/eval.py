"""`rlx eval FILE`: which of several choices a model finds likeliest, and how often that is the right one."""

from __future__ import annotations

import json
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import click

from rlx.cli.command import Command, json_option
from rlx.cli.options import model_argument, model_path, open_runner, some_engine_options
from rlx.cli.output import Bars, counted
from rlx.cli.ppl import read_text
from rlx.errors import PromptError
from rlx.runners.choices import Answers, Question, answers


@click.command("eval", cls=Command)
@click.argument("file", metavar="FILE")
@model_argument
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Only the first N questions.")
@click.option("--delimiter", default=" ", metavar="TEXT", help="Put it between query and choice; a space by default.")
@some_engine_options("max_seq", "threads", "precision", "kv_dtype", "profile", "device")
@json_option
def eval_(
    file: str, model: str | None, limit: int | None, delimiter: str, as_json: bool, engine: dict[str, Any]
) -> None:
    """Measure how often MODEL finds the right choice likeliest.

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
    for number, line in enumerate(read_text(name).split("\n"), 1):
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
