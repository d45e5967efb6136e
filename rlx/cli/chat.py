"""`rlx chat`: a conversation, a line a turn."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import redirect_stdout, suppress
from io import TextIOWrapper
from typing import TYPE_CHECKING, Any

import click

from rlx.cli.answering import (
    INTERRUPTED_ANSWER,
    Answerer,
    Message,
    speculative_option,
    system_messages,
    system_option,
    template_variables,
    thinking_option,
)
from rlx.cli.command import Command
from rlx.cli.main import debug_option, show_mistake
from rlx.cli.options import engine_options, model_argument, open_runner
from rlx.cli.output import ENDS, Answer, Bars, counted, stdout
from rlx.cli.sampling import ending_options, sample_opts, sampling_options
from rlx.errors import ChatTemplateError, RlxError

if TYPE_CHECKING:
    from rlx.runners import CachedRunner

_PROMPT = "> "
_COMPLETE = ("stop", "stop_string")  # ends of which there is nothing to say


@click.command(cls=Command)
@model_argument
@ending_options
@sampling_options
@system_option
@thinking_option
@speculative_option
@engine_options
@debug_option
@click.pass_context
def chat(
    ctx: click.Context,
    model: str | None,
    ending: dict[str, Any],
    sample: dict[str, Any],
    system: str | None,
    thinking: bool | None,
    speculative: str | None,
    engine: dict[str, Any],
) -> None:
    """Talk with MODEL, by default the demo model.

    Every line of stdin is a message. Ctrl-C stops an answer, and what was said of it stays in the conversation; Ctrl-D
    ends. When the context is full, the oldest messages and answers are left out.

    \b
    rlx chat
    rlx chat model.gguf --system "Be brief." --temperature 0.7
    """
    with Bars() as bars, _opened(model, engine, bars) as runner:
        if runner.tokenizer.chat_template is None:
            hint = "it may be a base model: `rlx run MODEL PROMPT` continues a text"
            raise ChatTemplateError("the model has no chat template", where=model, hint=hint)
        answerer = Answerer(runner, ending, sample_opts(runner.recommended_sample, sample), speculative)
        variables = template_variables(runner, thinking)
        conversation = Conversation(runner, system_messages(system), variables, ending["max_tokens"])
        for question in _lines():
            try:
                _turn(conversation, answerer, question, bars)
            except RlxError as error:
                show_mistake(ctx, error)
            except KeyboardInterrupt:  # before the answer began
                _say_end(INTERRUPTED_ANSWER)


def _opened(model: str | None, engine: dict[str, Any], bars: Bars) -> CachedRunner:
    bars.waiting("opening the model")
    try:
        return open_runner(model, engine, bars)
    finally:
        bars.pause()


class Conversation:
    """The turns so far, as many of the last ones as the context has room for.

    Args:
        runner: whose chat template writes them, and whose context bounds them.
        head: messages that stay in front.
        variables: what else the template gets.
        max_tokens: of an answer. A prompt leaves room for it, or half of the context, if the turns before can give it.
    """

    def __init__(self, runner: CachedRunner, head: list[Message], variables: dict[str, Any], max_tokens: int) -> None:
        self._runner, self._head, self._variables = runner, head, variables
        self._most = runner.max_seq - min(max_tokens, runner.max_seq // 2)
        self._turns: list[tuple[Message, Message]] = []

    def ask(self, question: str) -> list[int]:
        """The prompt that ends with `question`. Turns that are left out for it are forgotten, which is said on stderr.

        Raises:
            PromptError: the question alone is longer than the context; every turn stays.
            ChatTemplateError: the template refuses the messages.
        """
        skipped, ids = self._fitting(question)
        self._runner.checked_ids(ids)
        if skipped:
            del self._turns[:skipped]
            click.echo(f"(the context is full: {counted(skipped, 'old turn')} left out)", err=True)
        return ids

    def keep(self, question: str, answer: str) -> None:
        """One more turn."""
        self._turns.append(({"role": "user", "content": question}, {"role": "assistant", "content": answer}))

    def _fitting(self, question: str) -> tuple[int, list[int]]:
        """How many turns are left out in front of `question`, and the prompt without them.

        What follows them is computed anew, so that more go than must: the next turns find room.
        """
        skipped, ids = 0, self._ids(question, 0)
        most = self._most if len(ids) <= self._most else self._most * 3 // 4
        while len(ids) > most and skipped < len(self._turns):
            skipped += 1
            ids = self._ids(question, skipped)
        return skipped, ids

    def _ids(self, question: str, skipped: int) -> list[int]:
        turns = [message for turn in self._turns[skipped:] for message in turn]
        messages = [*self._head, *turns, {"role": "user", "content": question}]
        return self._runner.chat_ids(messages, **self._variables)


def _turn(conversation: Conversation, answerer: Answerer, question: str, bars: Bars) -> None:
    """One message and its answer, which is kept with it unless nothing was said."""
    ids = conversation.ask(question)
    bars.waiting("reading the prompt")
    try:
        answer, end = answerer(ids, stdout(), bars.pause)
    finally:
        bars.pause()
    if answer.ids:
        conversation.keep(question, _said(answerer.runner, answer, end))
    if end not in _COMPLETE:
        _say_end(end)


def _said(runner: CachedRunner, answer: Answer, end: str) -> str:
    """What the conversation keeps of an answer: its text, with the control tokens that the template may look for.

    A token that ended it is the template's to write.
    """
    if end == "stop_string":
        return answer.text
    from rlx.text import StreamDetokenizer

    text = StreamDetokenizer(runner.tokenizer, continues=True)
    ids = answer.ids[:-1] if answer.ids[-1] in runner.stop_ids else answer.ids
    return "".join(map(text.push, ids)) + text.finish()


def _say_end(end: str) -> None:
    click.echo(f"({ENDS[end]})", err=True)


def _lines() -> Iterator[str]:
    """What the user says: the lines of stdin that are not blank."""
    lines: Iterable[str] = sys.stdin or ()  # None where it is closed
    if isinstance(sys.stdin, TextIOWrapper):
        if sys.stdin.isatty() and sys.stderr:
            sys.stdin.reconfigure(errors="replace")
            lines = _typed()
        else:
            sys.stdin.reconfigure(encoding="utf-8", errors="replace")
    return (line.rstrip("\r\n") for line in lines if line.strip())


def _typed() -> Iterator[str]:
    """Lines from the terminal, with a prompt, and with line editing where Python has it."""
    with suppress(ImportError):
        import readline  # noqa: F401 - `input` uses it
    while True:
        try:
            with redirect_stdout(sys.stdout if sys.stdout and sys.stdout.isatty() else sys.stderr):
                line = input(_PROMPT)
        except (EOFError, KeyboardInterrupt) as end:
            click.echo(err=True)  # the shell goes on in a line of its own
            if isinstance(end, EOFError):
                return
            raise
        yield line
