"""`rlx chat`: opens a model, and answers what the user says until the end."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from rlx.cli.answering import readable, sampled, speculative_option, system_option, thinking_option
from rlx.cli.chat.commands import Ended, is_command, obey
from rlx.cli.chat.conversation import Conversation
from rlx.cli.chat.lines import asked, piped
from rlx.cli.chat.session import Session, Settings, display_options
from rlx.cli.command import Command
from rlx.cli.interrupts import Interrupts
from rlx.cli.main import INTERRUPTED, show_mistake
from rlx.cli.options import (
    answering_adapter,
    described,
    ending_options,
    engine_options,
    model_argument,
    model_path,
    open_runner,
    sampling_options,
    yes_option,
)
from rlx.cli.output import Bars, is_terminal
from rlx.engine.opening.setup import has_chat_template
from rlx.errors import ChatTemplateError, RlxError
from rlx.runners import CachedRunner
from rlx.runners.auto import runner_class
from rlx.weights import open_weights


@click.command(cls=Command)
@model_argument
@ending_options
@sampling_options
@system_option
@thinking_option
@speculative_option
@answering_adapter
@display_options
@click.option("--no-history", is_flag=True, help="Do not keep what is typed for later conversations.")
@yes_option
@engine_options
def chat(
    model: str | None,
    system: str | None,
    adapters: dict[str, str] | None,
    no_history: bool,
    yes: bool,
    engine: dict[str, Any],
    **settings: Any,
) -> None:
    """Talk with MODEL, by default the demo model.

    In a terminal, /help lists the commands and keys. Ctrl-C clears the line or stops an answer, and what was said of it
    stays in the conversation; Ctrl-D ends. On a pipe every line of stdin is a message.

    \b
    rlx chat
    rlx chat model.gguf --system "Be brief." --temperature 0.7
    """
    ctx, bars, interrupts = click.get_current_context(), Bars(), Interrupts()
    engine["adapters"] = adapters
    with bars, _opened(model, engine, yes, bars, interrupts) as runner, interrupts:
        conversation = Conversation(None if system is None else readable(system))
        session = Session(runner, model, Settings(runner.recommended_sample), interrupts, bars, conversation)
        session.change(lambda settings: settings.take(ctx))
        commanded = is_terminal(sys.stdin)
        if commanded and (how := sampled(described(session.settings.sample, runner.recommended_sample))):
            click.echo(f"({how})", err=True)
        try:
            with _messages(interrupts, not no_history) as messages:
                for text in messages:
                    _answer(ctx, session, text, commanded)
        except Ended:
            pass
        except KeyboardInterrupt:
            ctx.exit(INTERRUPTED)


def _answer(ctx: click.Context, session: Session, text: str, commanded: bool) -> None:
    """Acts on one line: a command, or a message.

    On a pipe a conversation that does not fit ends it: nothing behind it could be answered.
    """
    try:
        if not text.strip():
            return
        if commanded and is_command(text):
            obey(session, text)
        else:
            session.ask(text.removeprefix("/") if commanded and text.startswith("//") else text)
    except RlxError as error:
        if session.is_full and not commanded:
            raise
        show_mistake(ctx, error)


@contextmanager
def _messages(interrupts: Interrupts, keep_history: bool) -> Iterator[Iterator[str]]:
    """The messages of the user, from stdin."""
    if not is_terminal(sys.stdin):
        yield piped(interrupts)
    elif os.environ.get("TERM", "dumb") == "dumb" or not (is_terminal(sys.stdout) or is_terminal(sys.stderr)):
        yield asked(interrupts)
    else:
        from rlx.cli.chat.editor import terminal_messages

        with terminal_messages(interrupts, keep_history) as messages:
            yield messages


def _opened(model: str | None, engine: dict[str, Any], yes: bool, bars: Bars, interrupts: Interrupts) -> CachedRunner:
    """The runner; a model that is not supported or has no chat template is refused before its weights are loaded."""
    path = model_path(model, engine, yes=yes)
    bars.waiting("opening the model")
    try:
        with open_weights(path) as loader:
            runner_class(loader)
            if engine["chat_template"] is None and not has_chat_template(loader):
                hint = "it may be a base model: `rlx run MODEL PROMPT` continues a text. --chat-template gives it one"
                raise ChatTemplateError("the model has no chat template", where=path, hint=hint)
        return open_runner(path, engine, interrupts.guarded(bars))
    finally:
        bars.pause()
