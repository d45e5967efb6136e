"""Options for structured output: what the text of an answer must look like."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from rlx.cli.options import Command, Decorator, collected
from rlx.grammar import Grammar, after_thinking
from rlx.runners import CachedRunner

_FORMS: dict[str, Decorator] = {
    "json_schema": click.option(
        "--json-schema", metavar="FILE", help="The answer is JSON that the schema in FILE allows."
    ),
    "grammar": click.option(
        "--grammar",
        metavar="FILE",
        help="The answer follows the grammar in FILE, FILE.gbnf (llama.cpp's) or FILE.lark.",
    ),
    "regex": click.option("--regex", metavar="TEXT", help="The answer matches a regular expression."),
}


def structured_options(command: Command) -> Command:
    """Adds `--json-schema`, `--grammar` and `--regex`; the command receives a `Grammar` or None as `grammar`."""
    return collected(command, "grammar", _FORMS, _grammar)


def answer_grammar(grammar: Grammar | None, runner: CachedRunner, prompt: list[int]) -> Grammar | None:
    """The grammar of the answer to a prompt in the chat template, which may begin with thinking."""
    if grammar is None or not runner.tokenizer.chat_template:
        return grammar
    return after_thinking(grammar, runner.tokenizer, prompt)


def _grammar(**values: Any) -> Grammar | None:
    """The grammar, checked before a model is opened."""
    given = {name: value for name, value in values.items() if value is not None}
    if not given:
        return None
    names = [f"--{name.replace('_', '-')}" for name in given]
    if len(names) > 1:
        raise click.UsageError(f"{' and '.join(names)} exclude each other")
    ((name, value),) = given.items()
    if name == "regex":
        return Grammar.regex(value)
    if name == "json_schema" and value.lstrip().startswith("{"):
        return Grammar.json_schema(value)
    path = Path(value).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise click.UsageError(f"{names[0]}: {value} cannot be read: {reason}") from error
    if name == "json_schema":
        return Grammar.json_schema(text)
    kinds = {".gbnf": Grammar.gbnf, ".lark": Grammar.lark}
    if path.suffix not in kinds:
        raise click.UsageError(f"--grammar: {value} is called neither .gbnf nor .lark")
    return kinds[path.suffix](text)
