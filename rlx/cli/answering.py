"""What `rlx run` and `rlx chat` have in common: options, what goes in front of a prompt, and the answer to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

import click

from rlx.cli.output import Answer

if TYPE_CHECKING:
    from rlx.runners import CachedRunner
    from rlx.sampling import SampleOpts

Message = dict[str, str]

INTERRUPTED_ANSWER = "interrupted"

system_option = click.option("--system", metavar="TEXT", help="A system message before the prompt.")
thinking_option = click.option(
    "--thinking/--no-thinking", default=None, help="Whether the model thinks before it answers, if it can do both."
)
speculative_option = click.option(
    "--speculative",
    type=click.Choice(["prompt-lookup", "mtp"]),
    help="Check several guessed tokens at once; the answer is the same. mtp: by the model's own head.",
)


def readable(word: str) -> str:
    """An argument with U+FFFD for bytes that are not UTF-8, which Python keeps as surrogates."""
    return word.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def system_messages(system: str | None) -> list[Message]:
    """What a conversation begins with, before the user says anything."""
    return [] if system is None else [{"role": "system", "content": readable(system)}]


def template_variables(runner: CachedRunner, thinking: bool | None) -> dict[str, Any]:
    """What the options tell the chat template; `ChatTemplateError` if it would not listen."""
    from rlx.text.chat import thinking_variables

    return thinking_variables(runner.tokenizer, thinking, "--thinking")


@dataclass(frozen=True)
class Answerer:
    """How the prompts of one command are answered.

    Attributes:
        runner: who answers.
        ending: `max_tokens`, `min_tokens` and `stop`.
        sample: how tokens are chosen.
        speculative: how they are guessed; None if they are not.
    """

    runner: CachedRunner
    ending: dict[str, Any]
    sample: SampleOpts
    speculative: str | None

    def __call__(self, ids: list[int], out: TextIO | None, before: Callable[[], object]) -> tuple[Answer, str]:
        """The answer to a prompt, and why it ended. What is there when the user interrupts it stays.

        Args:
            out: where the text goes as it comes; None keeps it.
            before: called before any text is shown.
        """
        stop, least, most = (self.ending[name] for name in ("stop", "min_tokens", "max_tokens"))
        answer = Answer(self.runner.tokenizer, out, before, stop, least)
        options: dict[str, Any] = {"stop": stop, "min_tokens": least, "speculative": self.speculative}
        try:
            done = self.runner.generate(ids, most, answer.push, self.sample, **options)
        except KeyboardInterrupt:
            return answer, INTERRUPTED_ANSWER
        finally:
            answer.finish()
        return answer, str(done.finish_reason)
