"""The commands that a user types in `rlx chat`: `/help` and the others, each a function in one table."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import click

from rlx.arguments import nearest
from rlx.cli import chat as parts
from rlx.cli.answering import readable, sampled, speculative_option, system_option, thinking_option
from rlx.cli.chat.conversation import Conversation, Question, asked, load, piped, save
from rlx.cli.chat.session import Session, Settings, display_options
from rlx.cli.command import Command
from rlx.cli.interrupts import Interrupts
from rlx.cli.main import INTERRUPTED, show_mistake
from rlx.cli.options import (
    described,
    ending_options,
    engine_options,
    model_argument,
    model_path,
    one_adapter,
    open_runner,
    sampling_options,
    yes_option,
)
from rlx.cli.output import Bars, counted, is_terminal, printable, size, table
from rlx.engine.opening.setup import has_chat_template
from rlx.errors import ChatError, ChatTemplateError, RlxError
from rlx.runners import Model
from rlx.runners.auto import runner_class
from rlx.weights import open_weights


class Ended(Exception):
    """The user ends the conversation."""


@dataclass(frozen=True)
class ChatCommand:
    """One command: what its argument is called, what it does in a few words, and the function."""

    argument: str
    help: str
    act: Callable[[Session, str], None]


def is_command(text: str) -> bool:
    """Whether a line is a command: it begins with one slash. Two stand for a text that begins with a slash."""
    return text.startswith("/") and not text.startswith("//")


def obey(session: Session, line: str) -> None:
    """Carries out a line that `is_command`.

    Raises:
        Ended: the user has had enough.
        ChatError: there is no such command, or it cannot be carried out.
        RlxError: what its answer raises.
    """
    name, _, argument = line[1:].strip().partition(" ")
    command = COMMANDS.get(_SYNONYMS.get(name, name))
    if command is None:
        near = nearest(name, [*COMMANDS, *_SYNONYMS], cutoff=0.5)
        hint = f"did you mean /{near[0]}? //{name} sends it as a message" if near else "/help lists the commands"
        raise ChatError(f"there is no command /{printable(name)}", hint=hint)
    argument = argument.strip()
    if argument and not command.argument:
        raise ChatError(f"/{name} takes no argument, found {argument!r}")
    command.act(session, argument)


def _help(session: Session, argument: str) -> None:
    rows = [(f"/{name} {command.argument}".strip(), command.help) for name, command in COMMANDS.items()]
    keys = [
        ("Enter", "send; Alt-Enter, or \\ at the end of a line, begins a new line"),
        ('"""', "at the start: a message of several lines, up to the next one"),
        ("Ctrl-C", "clear the line; stop an answer; twice at an empty prompt: end"),
        ("Ctrl-D", "end"),
        ("Ctrl-R, Up", "search and step through earlier lines"),
        ("Tab", "complete a command, a setting or a file name"),
    ]
    table(("command", "what it does"), rows, file=sys.stderr)
    table(("key", "what it does"), keys, file=sys.stderr)


def _clear(session: Session, argument: str) -> None:
    session.conversation.exchanges.clear()
    session.attached.clear()
    _say("the conversation is empty" + ("" if session.conversation.system is None else "; the system message stays"))


def _system(session: Session, argument: str) -> None:
    """Shows the system message, sets it, or with - removes it."""
    if argument:
        session.conversation.system = None if argument == "-" else argument
    found = session.conversation.system
    _say("there is no system message" if found is None else f"system message: {printable(found)}")


def _set(session: Session, argument: str) -> None:
    """Shows all settings or one, or changes one: `temperature 0.7`, and as in ollama `parameter temperature 0.7`."""
    words = argument.split()
    words = words[1:] if words[:1] == ["parameter"] else words
    if len(words) > 1:
        session.change(lambda settings: settings.set(words[0], words[1:]))
    name = words[0] if words else None
    rows = [row for row in session.settings.shown() if name is None or row[0] == session.settings.name(name)]
    table(("setting", "value", ""), rows, file=sys.stderr)


def _save(session: Session, argument: str) -> None:
    if not argument:
        raise ChatError("a file name is missing", where="/save")
    replaced = save(argument, session.conversation, session.model, session.settings.saved())
    count = counted(len(session.conversation.messages()), "message")
    _say(f"saved {count} to {printable(argument)}" + (", in place of an earlier conversation" if replaced else ""))


def _load(session: Session, argument: str) -> None:
    if not argument:
        raise ChatError("a file name is missing", where="/load")
    conversation, settings = load(argument)
    session.change(lambda present: present.replace(settings))
    session.conversation = conversation
    _say(f"{counted(len(conversation.messages()), 'message')} from {printable(argument)}")
    if conversation.exchanges:
        _say(f"the last answer: {printable(conversation.exchanges[-1][1])}")


def _image(session: Session, argument: str) -> None:
    """Attaches an image to the next message, shows those that are, or with - removes them."""
    if argument == "-":
        session.attached.clear()
    elif argument:
        session.attach(argument)
    names = ", ".join(printable(str(each)) for each in session.attached)
    _say(f"with the next message: {names}" if names else "no image is attached; /image FILE attaches one")


def _undo(session: Session, argument: str) -> None:
    question, _ = _last(session)
    session.conversation.exchanges.pop()
    left = len(session.conversation.exchanges)
    _say(f"{counted(left, 'exchange') if left else 'nothing'} left; taken back: {printable(str(question))}")


def _regenerate(session: Session, argument: str) -> None:
    last = _last(session)
    session.conversation.exchanges.pop()
    if not session.answer(last[0]):
        session.conversation.exchanges.append(last)
        _say("the earlier answer stays")


def _last(session: Session) -> tuple[Question, str]:
    if not session.conversation.exchanges:
        raise ChatError("nothing was said yet")
    return session.conversation.exchanges[-1]


def _stats(session: Session, argument: str) -> None:
    """Tokens and speeds of the last answer, use of the context, memory, and what was compiled."""
    runner, last = session.runner, session.last
    stats = runner.stats()
    cache = stats["cache"]
    rows = [("context", f"{session.used} of {runner.max_seq} tokens")]
    if last is not None:
        rate, first = last.answer.rate, last.answer.first_seconds
        rows += [
            ("last prompt", f"{counted(last.prompt, 'token')}, {last.reused} of them reused"),
            ("first token", "" if first is None else f"after {first:.3f} s"),
            (
                "last answer",
                counted(len(last.answer.ids), "token") + ("" if rate is None else f", {rate:.1f} tokens/s"),
            ),
        ]
    rows += [
        ("messages", str(len(session.conversation.messages()))),
        ("threads", str(stats["threads"])),
        ("weights", size(stats["weights_bytes"])),
        ("compiled", f"{counted(cache.compiles, 'piece')} of code"),
        ("found in the cache", counted(cache.hits_disk, "program")),
        ("compile profile", stats["profile"] or "none"),
    ]
    table(("", ""), [row for row in rows if row[1]], file=sys.stderr)


def _exit(session: Session, argument: str) -> None:
    raise Ended


def _say(text: str) -> None:
    click.echo(f"({text})", err=True)


COMMANDS = {
    "help": ChatCommand("", "this list", _help),
    "clear": ChatCommand("", "forget the messages; system message and settings stay", _clear),
    "system": ChatCommand("[TEXT]", "show or change the system message; - removes it", _system),
    "set": ChatCommand("[NAME [VALUE]]", "show or change settings (temperature 0.7); default resets", _set),
    "save": ChatCommand("FILE", "write the conversation and the settings to a file (JSON)", _save),
    "load": ChatCommand("FILE", "go on with a saved conversation", _load),
    "image": ChatCommand("[FILE]", "show the model an image with the next message; - removes it", _image),
    "undo": ChatCommand("", "take back the last message and its answer", _undo),
    "regenerate": ChatCommand("", "answer the last message again", _regenerate),
    "stats": ChatCommand("", "tokens, speeds, context used, memory, compile cache", _stats),
    "exit": ChatCommand("", "end; also /bye, /quit and Ctrl-D", _exit),
}
_SYNONYMS = {"bye": "exit", "quit": "exit", "?": "help"}


@click.command(cls=Command)
@model_argument
@ending_options
@sampling_options
@system_option
@thinking_option
@speculative_option
@one_adapter
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

    In a terminal, /help lists the commands and keys. Ctrl-C clears the line, or stops an answer, which stays in the
    conversation as far as it came; Ctrl-D ends the chat. On a pipe every line of stdin is a message.

    \b
    rlx chat
    rlx chat model.gguf --system "Be brief." --temperature 0.7
    """
    ctx, bars, interrupts = click.get_current_context(), Bars(), Interrupts()
    engine["adapters"] = adapters
    with bars, _opened(model, engine, yes, bars, interrupts) as runner, interrupts:
        conversation = Conversation(None if system is None else readable(system))
        commanded, set_up = is_terminal(sys.stdin), Settings(runner.recommended_sample)
        session = Session(runner, model, set_up, interrupts, bars, conversation, commanded)
        session.change(lambda settings: settings.take(ctx))
        if commanded and (how := sampled(described(session.settings.sample, runner.recommended_sample))):
            click.echo(f"({how})", err=True)
        try:
            with _messages(interrupts, not no_history) as messages:
                for text in messages:
                    _answer(ctx, session, text)
        except Ended:
            pass
        except KeyboardInterrupt:
            ctx.exit(INTERRUPTED)


def _answer(ctx: click.Context, session: Session, text: str) -> None:
    """Acts on one line: a command, or a message.

    On a pipe a conversation that does not fit ends it: nothing behind it could be answered.
    """
    try:
        if not text.strip():
            return
        if session.has_commands and is_command(text):
            obey(session, text)
        else:
            session.ask(text.removeprefix("/") if session.has_commands and text.startswith("//") else text)
    except RlxError as error:
        if session.is_full and not session.has_commands:
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
        with parts.editor.terminal_messages(interrupts, keep_history) as messages:
            yield messages


def _opened(model: str | None, engine: dict[str, Any], yes: bool, bars: Bars, interrupts: Interrupts) -> Model:
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
