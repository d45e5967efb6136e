"""Shared by `rlx run` and `rlx chat`: options, those of structured output, the system message, and the answer with its
speed. Its text goes to stdout, everything about it to stderr, so that a pipe gets the text alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import click

from rlx.arguments import without_none
from rlx.cli.command import Parsed, flag_of
from rlx.cli.interrupts import Interrupts
from rlx.cli.options import Decorator, Function, collected
from rlx.cli.output import counted, printable
from rlx.engine.programs.programs import TOWER
from rlx.engine.request import PromptLike
from rlx.grammar import Grammar, after_thinking
from rlx.runners import Model
from rlx.runners.base import SPECULATIONS, checked_speculation
from rlx.sampling import SampleOpts
from rlx.text import Tokenizer
from rlx.text.chat import thinking_variables
from rlx.text.tokenizer import AnswerText
from rlx.vision.image import Image

Message = dict[str, Any]

INTERRUPTED_ANSWER = "interrupted"

system_option = click.option("--system", metavar="TEXT", help="A system message before the prompt.")
thinking_option = click.option(
    "--thinking/--no-thinking", default=None, help="Whether the model thinks before it answers."
)


_SPECULATION = Parsed(checked_speculation, f"not one of {', '.join(map(repr, SPECULATIONS))}, 'model:PATH'")
speculative_option = click.option(
    "--speculative",
    type=_SPECULATION,
    metavar=f"[{'|'.join(SPECULATIONS)}|model:PATH]",
    help="Guess tokens and check several at once; mtp: by the model's own head; model: by a smaller model or a "
    "draft head. Same answer.",
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


def user_message(text: str, parts: Sequence[Mapping[str, Any]]) -> Message:
    """A message of the user: a text, perhaps behind parts with images."""
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}] if parts else text}


def template_variables(runner: Model, thinking: bool | None) -> dict[str, Any]:
    """The variables of the chat template that the options set; `ChatTemplateError` if the template ignores them."""
    return thinking_variables(runner.tokenizer, thinking, "--thinking")


def _program_seconds(runner: Model) -> float:
    """The seconds so far in which calls waited for programs that were compiled, or read from the compile cache."""
    towers = (each.record.seconds for each in runner.programs if each.record.phase == TOWER)
    return float(sum(row.seconds for row in runner.stats()["programs"].values()) + sum(towers))


class Out(Protocol):
    """Receives the text of an answer: a text stream, or a wrapper of one."""

    def write(self, text: str, /) -> object: ...
    def flush(self) -> object: ...
    def isatty(self) -> bool: ...


class Answer:
    """The tokens of one generation: collected, timed, and streamed as text.

    Args:
        tokenizer: turns them into text, control tokens left out.
        out: where the text goes as it comes; None keeps it.
        before: called before any text is shown.
        stop: the text ends before the first of these.
        min_tokens: but not before there are as many tokens.
        keep: control tokens that have a text nevertheless.
        waited: the seconds so far in which steps waited for their programs, most of them compiled.

    Attributes:
        ids: the tokens so far.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        out: Out | None,
        before: Callable[[], object],
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        keep: Set[int] = frozenset(),
        waited: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.ids: list[int] = []
        self._answer, self._min_tokens = AnswerText(tokenizer, stop, keep), min_tokens
        self._out, self._before = out, before
        self._waited = waited
        self._waits = [waited()] * 3  # at the start, at the first token and at the end
        self._start = self._first = self._last = time.perf_counter()

    def push(self, token: int) -> None:
        """One more token; what `generate` gets as `on_token`."""
        self._last = time.perf_counter()
        if not self.ids:
            self._first = self._last
            self._waits[1:] = [self._waited()] * 2
            self._before()
        self.ids.append(token)
        self._show(self._answer.push(token, may_stop=len(self.ids) >= self._min_tokens))

    def finish(self) -> None:
        """Ends the answer: shows the text that was held back, and ends the line."""
        self._waits[2] = self._waited()
        self._before()
        self._show(self._answer.finish())
        if self._out is not None and self.ids:
            self._out.write("\n")
            self._out.flush()

    def _show(self, text: str) -> None:
        if self._out is not None and text:
            self._out.write(printable(text) if self._out.isatty() else text)
            self._out.flush()

    @property
    def text(self) -> str:
        return self._answer.text

    @property
    def first_seconds(self) -> float | None:
        """Seconds from the start to the first token, including the prefill; None without tokens."""
        return self._first - self._start if self.ids else None

    @property
    def first_wait(self) -> float:
        """Seconds of those in which the prompt waited for programs."""
        return self._waits[1] - self._waits[0]

    @property
    def rate(self) -> float | None:
        """Tokens per second, from the first to the last token; None with fewer than two tokens.

        As in `prompt_rate`, the time in which steps waited for programs does not count. Where it is most of the time,
        there is no rate: a wait may have begun before the first token was seen.
        """
        waited = self._waits[2] - self._waits[1]
        seconds = self._last - self._first - waited
        return (len(self.ids) - 1) / seconds if len(self.ids) > 1 and seconds > waited else None

    def prompt_rate(self, tokens: int) -> float | None:
        """Prompt tokens per second, until the first token; None where most of that was waiting for compiles."""
        seconds = self._first - self._start - self.first_wait
        return tokens / seconds if self.ids and seconds > self.first_wait else None


ENDS = {
    "stop": "end of the answer",
    "stop_string": "stopped by --stop",
    "grammar": "complete by its grammar",
    "length": "stopped by --max-tokens",
    "context": "stopped by the end of the context",
    "interrupted": "interrupted",
}


def speeds(report: Mapping[str, Any]) -> str:
    """One line about a generation, from `rlx run`'s report."""
    first, compiles = report["first_token_seconds"], report["compiles"]
    parts = [
        f"loaded in {report['load_seconds']:.2f} s",
        f"prompt: {counted(report['prompt_tokens'], 'token')}{_rate(report['prompt_tokens_per_second'])}",
        first is not None and f"first token after {first:.3f} s{_of_it_compiling(report)}",
        f"answer: {counted(report['tokens'], 'token')}{_rate(report['tokens_per_second'])}",
        ENDS[report["end"]],
        sampled(report["sampling"]),
        report["profile"] and f"by {report['profile']}",
        compiles and f"compiled {counted(compiles, 'piece')} of code",
    ]
    return "; ".join(part for part in parts if part)


def sampled(sampling: Mapping[str, Any]) -> str | None:
    """The sampling options in words; None for plain greedy."""
    options = [f"{name} {value}" for name, value in sampling.items() if name not in ("greedy", "recommended")]
    if sampling["greedy"] and len(options) == 1:  # the temperature of 0
        return None
    source = ", as the model recommends" if sampling["recommended"] else ""
    return f"sampled with {', '.join(options) or 'temperature 1'}{source}"


def _of_it_compiling(report: Mapping[str, Any]) -> str:
    wait = report["first_token_compile_seconds"]
    return f", {wait:.2f} s of it compiling" if report["compiles"] and wait >= 0.01 else ""


def _rate(rate: float | None) -> str:
    return "" if rate is None else f", {rate:.1f} tokens/s"


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

    runner: Model
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
        options |= {"grammar": self.grammar, "adapter": next(iter(self.runner.adapters), None)}
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


def structured_options(command: Function) -> Function:
    """Adds `--json-schema`, `--grammar` and `--regex`; the command receives a `Grammar` or None as `grammar`."""
    return collected(command, "grammar", _FORMS, _grammar)


def answer_grammar(grammar: Grammar | None, runner: Model, prompt: list[int]) -> Grammar | None:
    """The grammar of the answer to a prompt in the chat template, which may begin with thinking."""
    if grammar is None or not runner.tokenizer.chat_template:
        return grammar
    return after_thinking(grammar, runner.tokenizer, prompt)


def _grammar(**values: Any) -> Grammar | None:
    """The grammar, checked before a model is opened."""
    grammars = without_none(**values)
    if not grammars:
        return None
    names = [flag_of(name) for name in grammars]
    if len(names) > 1:
        raise click.UsageError(f"{' and '.join(names)} exclude each other")
    ((name, value),) = grammars.items()
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
