"""Shared by `rlx run` and `rlx chat`: options, those of structured output, the system message, and the answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click

from rlx.arguments import without_none
from rlx.cli.interrupts import Interrupts
from rlx.cli.options import Command, Decorator, collected
from rlx.cli.output import Answer, Out
from rlx.engine.programs.ready import TOWER
from rlx.engine.request.context import PromptLike
from rlx.grammar import Grammar, after_thinking
from rlx.runners import CachedRunner
from rlx.sampling import SampleOpts
from rlx.text.chat import thinking_variables
from rlx.vision.image import Image

Message = dict[str, Any]

INTERRUPTED_ANSWER = "interrupted"

system_option = click.option("--system", metavar="TEXT", help="A system message before the prompt.")
thinking_option = click.option(
    "--thinking/--no-thinking",
    default=None,
    help="Whether the model thinks before it answers.",
)
speculative_option = click.option(
    "--speculative",
    type=click.Choice(["prompt-lookup", "mtp"]),
    help="Guess tokens and check several at once; mtp: by the model's own head. Same answer.",
)


image_option = click.option(
    "--image", multiple=True, metavar="FILE", help="An image before the prompt (PNG, JPEG, WebP, GIF, BMP); repeatable."
)


def readable(word: str) -> str:
    """An argument in which U+FFFD replaces bytes that are not UTF-8 (which Python keeps as surrogates)."""
    return word.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def system_messages(system: str | None) -> list[Message]:
    """The messages in front of the first question."""
    return [] if system is None else [{"role": "system", "content": readable(system)}]


def read_images(files: Sequence[str]) -> list[Image]:
    """The images that a user names; `ImageError` names the one that cannot be read."""
    if not files:
        return []
    return [Image.of(file if file.startswith("data:") else Path(file).expanduser()) for file in files]


def question(text: str, images: Sequence[Image] = ()) -> Message:
    """A message of the user: a text, perhaps behind images."""
    parts = [{"type": "image", "image": image} for image in images]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}] if parts else text}


def template_variables(runner: CachedRunner, thinking: bool | None) -> dict[str, Any]:
    """The variables of the chat template that the options set; `ChatTemplateError` if the template ignores them."""
    return thinking_variables(runner.tokenizer, thinking, "--thinking")


def _program_seconds(runner: CachedRunner) -> float:
    """The seconds so far in which calls waited for programs that were compiled, or read from the compile cache."""
    towers = (each.record.seconds for each in runner.programs if each.record.phase == TOWER)
    return float(sum(row.seconds for row in runner.stats()["programs"].values()) + sum(towers))


@dataclass(frozen=True)
class Answerer:
    """Generates the answers of one command.

    Attributes:
        runner: who answers.
        ending: `max_tokens`, `min_tokens` and `stop`.
        sample: how tokens are chosen.
        speculative: how they are guessed; None if they are not.
        grammar: what the text must look like; None if it is free.
    """

    runner: CachedRunner
    ending: dict[str, Any]
    sample: SampleOpts
    speculative: str | None
    grammar: Grammar | None = None

    def __call__(
        self,
        prompt: PromptLike,
        out: Out | None,
        before: Callable[[], object],
        interrupts: Interrupts | None = None,
        keep: Set[int] = frozenset(),
    ) -> tuple[Answer, str]:
        """The answer to a prompt, and why it ended. After an interrupt the answer holds the tokens generated so far.

        Args:
            out: where the text goes as it comes; None keeps it.
            before: called before any text is shown.
            interrupts: handles Ctrl-C; by default only during this call.
            keep: as for `Answer`.
        """
        if interrupts is None:
            with Interrupts() as own:
                return self(prompt, out, before, own, keep)
        stop, least, most = (self.ending[name] for name in ("stop", "min_tokens", "max_tokens"))
        waited = partial(_program_seconds, self.runner)
        answer = Answer(self.runner.tokenizer, out, before, stop, least, keep, waited)
        options: dict[str, Any] = {"stop": stop, "min_tokens": least, "speculative": self.speculative}
        options["grammar"] = self.grammar
        end: list[str] = []

        def push(token: int) -> bool:
            with interrupts.held():  # what is drawn is drawn to its end
                answer.push(token)
            return not interrupts.pending

        def generate() -> None:
            end.append(str(self.runner.generate(prompt, most, push, self.sample, **options).finish_reason))

        try:
            interrupted = interrupts.run(generate)
        finally:
            answer.finish()
        return answer, INTERRUPTED_ANSWER if interrupted else end[0]


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
    given = without_none(**values)
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
