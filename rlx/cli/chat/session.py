"""A chat session: a model, a conversation and its settings; answers questions and stores the answers."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from rlx.arguments import did_you_mean
from rlx.cli import chat
from rlx.cli.answering import (
    ENDS,
    INTERRUPTED_ANSWER,
    Answer,
    Answerer,
    Message,
    speculative_option,
    template_variables,
    thinking_option,
)
from rlx.cli.chat.conversation import AttachedImage, Conversation, Question
from rlx.cli.command import ALIASES
from rlx.cli.interrupts import Interrupts
from rlx.cli.options import WINDOWS, ending_options, sample_opts, sampling_options
from rlx.cli.output import Bars, counted, moves_cursor, stdout
from rlx.engine.request import Context
from rlx.errors import ChatError, MultimodalError, PromptError, RlxError
from rlx.prompt import Prompt
from rlx.runners import Model
from rlx.sampling import SampleOpts
from rlx.text import StreamDetokenizer
from rlx.text.answer import ThinkingTags, splitter

if TYPE_CHECKING:
    from rlx.cli.chat.markdown import Display


DEFAULT = "default"  # as a value: take the setting back
_ON_OFF = {"on": True, "true": True, "yes": True, "off": False, "false": False, "no": False}
_NUMBER = re.compile(r"-?\d+(\.\d+)?(e[+-]?\d+)?", re.IGNORECASE)


def display_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options of a conversation that are about neither the engine nor the choice of tokens."""
    options = (
        click.option("--drop-oldest", is_flag=True, help="When the context is full, forget the oldest messages."),
        click.option(
            "--markdown/--no-markdown", default=True, show_default=True, help="Draw answers as Markdown in a terminal."
        ),
        click.option("--fold-thinking", is_flag=True, help="Show how long the model thought, not what it thought."),
    )
    for option in reversed(options):
        command = option(command)
    return command


@click.command("set", add_help_option=False)
@ending_options
@sampling_options
@thinking_option
@speculative_option
@display_options
def _parsed(**values: Any) -> dict[str, Any]:
    return values


class Settings:
    """Options by their names on the command line, such as `top-k`, and what they come to.

    Args:
        recommended: how the model's files want tokens to be chosen, where no option says otherwise.

    Attributes:
        values: the values that hold, by parameter: `ending`, `thinking`, `speculative`, `drop_oldest` and so on.
        sample: how tokens are chosen.
    """

    def __init__(self, recommended: SampleOpts | None) -> None:
        self._recommended = recommended
        self._words: dict[str, list[str]] = {}
        self._use({})

    def take(self, ctx: click.Context) -> None:
        """Takes those that a command line gives."""
        words = {}
        for name, option in _OPTIONS.items():
            parameter = str(option.name)
            if ctx.get_parameter_source(parameter) is click.core.ParameterSource.COMMANDLINE:
                words[name] = _as_words(ctx.params[parameter])
        self._use(words)

    @staticmethod
    def names() -> Sequence[str]:
        """Every name."""
        return list(_OPTIONS)

    @staticmethod
    def name(written: str) -> str:
        """The name that a user means, who may write dashes in front or underscores inside; `ChatError` for none."""
        return _name(_option(written))

    def set(self, name: str, words: Sequence[str]) -> None:
        """Gives a setting a value, or with `default` takes it back. Nothing changes if it is refused.

        Raises:
            ChatError: there is no such setting, the value is out of its range, or it would do nothing.
        """
        option = _option(name)
        words = list(words) if option.multiple else [" ".join(words)]
        self._use({**self._words, _name(option): [] if words == [DEFAULT] else words})

    def replace(self, saved: Mapping[str, Any]) -> None:
        """Takes the settings of a saved conversation; `ChatError` as `set`, and then nothing changes."""
        words = {}
        for name, value in saved.items():
            each = value if isinstance(value, list) else [value]
            if not all(isinstance(one, str | int | float) for one in each):
                raise ChatError(f"{value!r} is no value", where=name)
            words[_name(_option(name))] = [word for one in each for word in _as_words(one)]
        self._use(words)

    def saved(self) -> dict[str, Any]:
        """Those that were given, for a file."""
        shown = {name: [_as_json(word) for word in words] for name, words in self._words.items()}
        return {name: words if _OPTIONS[name].multiple else words[0] for name, words in shown.items()}

    def shown(self) -> Iterator[tuple[str, str, str]]:
        """Name, present value, and whether the user set it, of every setting."""
        for name, option in _OPTIONS.items():
            yield name, self._value(str(option.name)), "set" if name in self._words else ""

    def _value(self, parameter: str) -> str:
        others = {**self.values, **self.values["ending"]}
        value = others[parameter] if parameter in others else getattr(self.sample, parameter)
        return "all" if value is None and parameter in WINDOWS else _as_text(value)

    def _use(self, words: dict[str, list[str]]) -> None:
        words = {name: each for name, each in words.items() if each}
        arguments = [word for name, each in words.items() for word in _arguments(_OPTIONS[name], each)]
        try:
            values = _parsed.main(arguments, prog_name="/set", standalone_mode=False)
            sample = sample_opts(self._recommended, values["sample"])
        except click.BadParameter as error:
            name = "/set" if error.param is None else f"/set {_name(error.param)}"
            raise ChatError(error.message.rstrip("."), where=name) from error
        except click.ClickException as error:
            raise ChatError(error.format_message().rstrip("."), where="/set") from error
        except RlxError as error:
            raise ChatError(error.what.replace("_", "-"), where="/set", hint=error.hint) from error
        self._words, self.values, self.sample = words, values, sample


def _name(option: click.Parameter) -> str:
    return option.opts[0].removeprefix("--")


def _option(name: str) -> click.Option:
    """The option of a name, with or without dashes in front or underscores inside."""
    plain = name.lstrip("-").replace("_", "-")
    plain = _OTHER_NAMES.get(plain, plain)
    if plain in _OPTIONS:
        return _OPTIONS[plain]
    hint = did_you_mean(plain, _OPTIONS, shown=str, otherwise="`/set` lists them")
    raise ChatError(f"there is no setting {name!r}", where="/set", hint=hint)


def _arguments(option: click.Option, words: list[str]) -> Iterator[str]:
    """The arguments as one would type them on the command line."""
    for word in words:
        if not option.is_flag:
            yield f"{option.opts[0]}={word}"
        elif word.lower() not in _ON_OFF:
            raise ChatError(f"{_name(option)} is {word!r}, expected on or off", where="/set")
        elif _ON_OFF[word.lower()]:
            yield option.opts[0]
        elif option.secondary_opts:
            yield option.secondary_opts[0]


def _as_words(value: Any) -> list[str]:
    """A parsed value as it is typed."""
    if isinstance(value, tuple):
        return [f"{one[0]}={one[1]:g}" if isinstance(one, tuple) else str(one) for one in value]
    return [_as_text(value)]


def _as_text(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return " ".join(repr(word) if isinstance(word, str) else f"{word[0]}={word[1]:g}" for word in value)
    if value == sys.maxsize:  # `max-tokens -1`
        return "-1"
    return "" if value is None else f"{value:g}" if isinstance(value, float) and math.isfinite(value) else str(value)


def _as_json(word: str) -> str | int | float:
    """Numbers as numbers; `on`, texts and `ID=BIAS` as they are."""
    if not _NUMBER.fullmatch(word):
        return word
    return int(word) if re.fullmatch(r"-?\d+", word) else float(word)


_OPTIONS = {_name(option): option for option in _parsed.params if isinstance(option, click.Option)}
# What other tools call a setting; the last name is ollama's.
_OTHER_NAMES = {other.lstrip("-"): name.removeprefix("--") for name, others in ALIASES.items() for other in others}
_OTHER_NAMES["num-predict"] = "max-tokens"


_COMPLETE = ("stop", "stop_string")  # ends of which there is nothing to say
_ROOM_BY_OPTIONS = "--drop-oldest forgets the oldest messages; a larger --max-seq holds more"
_ROOM_BY_COMMANDS = (
    "it stays as it is: /undo takes back the last exchange, /clear begins anew, and `/set drop-oldest on` forgets the "
    "oldest messages; a larger --max-seq at the start holds more"
)
_NEARLY_FULL = 10  # warn when less than this part of the context is left


@dataclass(frozen=True)
class Turn:
    """The last answer, with the number of tokens of its prompt, and how many of those were reused from the session."""

    prompt: int
    reused: int
    answer: Answer


class Session:
    """A conversation with a model.

    Args:
        runner: the model.
        model: its name as the user gave it; None for the demo model.
        settings: sampling and display.
        interrupts: handles Ctrl-C.
        bars: progress bars for loading, compiling and prefill.
        conversation: the messages so far.
        has_commands: whether the user can type commands: not on a pipe.

    Attributes:
        last: about the last answer; None before the first.
    """

    def __init__(
        self,
        runner: Model,
        model: str | None,
        settings: Settings,
        interrupts: Interrupts,
        bars: Bars,
        conversation: Conversation,
        has_commands: bool = True,
    ) -> None:
        self.has_commands = has_commands
        self.runner, self.model, self.settings = runner, model, settings
        self.interrupts, self._bars, self.conversation = interrupts, bars, conversation
        self.last: Turn | None = None
        self.attached: list[AttachedImage] = []  # for the next question
        self.is_full = False  # whether the last question did not fit
        self._tags = ThinkingTags.of(runner.tokenizer)

    @property
    def used(self) -> int:
        """Tokens of the context that the conversation takes, computed or not. The end of a turn may lie beyond it."""
        if not self.conversation.exchanges:
            return 0
        return min(self._count(self.conversation.messages(), add_generation_prompt=False), self.runner.max_seq)

    def change(self, act: Callable[[Settings], None]) -> None:
        """Changes the settings by `act`; those that the model cannot follow are refused, and nothing changes.

        Raises:
            ChatError: a value is refused.
            ChatTemplateError: the chat template does not know about thinking.
        """
        changed = copy(self.settings)
        act(changed)
        template_variables(self.runner, changed.values["thinking"])
        self.settings = changed

    def ask(self, text: str) -> None:
        """Answers a question about the images that were attached, if there are any. Errors as `answer`."""
        if self.answer(Question(text, tuple(self.attached))):
            self.attached.clear()

    def attach(self, name: str) -> AttachedImage:
        """Attaches an image to the next question.

        Raises:
            ImageError: the file is missing, or no image that the model takes.
            MultimodalError: the model takes text only.
        """
        found = AttachedImage.of(name)
        if not self.runner.supports_multimodal:
            hint = "`rlx chat demo-vision` opens the demo model that sees; other models need `--mmproj`"
            raise MultimodalError("the model takes text only", where="/image", hint=hint)
        self.runner.preprocess_image(found.image)
        self.attached.append(found)
        return found

    def answer(self, question: Question) -> bool:
        """Answers a question and keeps both; False if nothing was said.

        Raises:
            PromptError: the question does not fit into the context.
            ChatTemplateError: the template refuses the messages.
            MultimodalError: the question has images that the template leaves out.
        """
        prompts: list[Context] = []
        if self.interrupts.run(lambda: prompts.append(self._prompt(question))):
            say_end(INTERRUPTED_ANSWER)
            return False
        prompt = prompts[0]
        reused, answerer = self.runner.stats()["reused_tokens"], self._answerer()
        display = self._display(prompt.ids)
        keep = self._tags.ids(self.runner.tokenizer) if display and self._tags else frozenset()
        self._bars.waiting("reading the prompt")
        try:
            answer, end = answerer(prompt, display or stdout(), self._bars.pause, self.interrupts, keep)
        finally:
            self._bars.pause()
            if display is not None:
                display.finish()
        self.last = Turn(len(prompt), self.runner.stats()["reused_tokens"] - reused, answer)
        if answer.ids:
            self.conversation.exchanges.append((question, said(self.runner, answer, end)))
        if end not in _COMPLETE:
            say_end(end)
        self._warn_of_end(len(prompt) + len(answer.ids))
        return bool(answer.ids)

    def _warn_of_end(self, used: int) -> None:
        """Says so when little of the context is left, before a message is refused."""
        limit = self.runner.max_seq
        left = max(limit - used, 0)
        if left < limit // _NEARLY_FULL and not self.settings.values["drop_oldest"]:
            room = "/undo or /clear make room" if self.has_commands else "--drop-oldest makes room"
            click.echo(f"({counted(left, 'token')} of the context left; {room})", err=True)

    def _answerer(self) -> Answerer:
        settings = self.settings
        return Answerer(self.runner, settings.values["ending"], settings.sample, settings.values["speculative"])

    # -- the prompt -----------------------------------------------------------------------------------------------

    def _prompt(self, question: Question) -> Context:
        """The conversation with one more question.

        Raises:
            PromptError: they do not fit, and nothing may be left out.
        """
        self.is_full, most = False, self.runner.max_seq
        alone = self._count(self.conversation.messages(question, len(self.conversation.exchanges)))
        if alone > most:
            hint = "shorten it, or start with a larger --max-seq"
            raise PromptError(f"it has {alone} tokens, and the context holds {most}", where="message", hint=hint)
        if self.settings.values["drop_oldest"] and (gone := self.conversation.without_oldest(question, self._fits)):
            click.echo(f"(the context is full: {counted(gone, 'old exchange')} left out)", err=True)
        prompt = self._ids(self.conversation.messages(question))
        count = self.runner.count_tokens(prompt)
        self.is_full = count > most
        if self.is_full:
            what = f"the conversation with this message has {count} tokens, and the context holds {most}"
            raise PromptError(what, hint=_ROOM_BY_COMMANDS if self.has_commands else _ROOM_BY_OPTIONS)
        return self.runner.checked_prompt(prompt)

    def _fits(self, messages: list[Message], spare: bool) -> bool:
        """Whether there is room for a prompt and its answer, or half of the context for the answer."""
        limit = self.runner.max_seq
        most: int = limit - min(self.settings.values["ending"]["max_tokens"], limit // 2)
        return self._count(messages) <= (most * 3 // 4 if spare else most)

    def _count(self, messages: list[Message], **more: Any) -> int:
        return self.runner.count_tokens(self._ids(messages, **more))

    def _ids(self, messages: list[Message], **more: Any) -> list[int] | Prompt:
        variables = template_variables(self.runner, self.settings.values["thinking"])
        return self.runner.chat_ids(messages, **variables, **more)

    # -- the terminal ---------------------------------------------------------------------------------------------

    def _display(self, ids: list[int]) -> Display | None:
        """The display that draws the answer in a terminal; None where plain text is wanted."""
        if not moves_cursor(sys.stdout):
            return None
        is_open = self._tags is not None and self._tags.is_open(self.runner.tokenizer, ids)
        values = self.settings.values
        return chat.markdown.Display(
            stdout(), splitter(self._tags, is_open), markdown=values["markdown"], fold=values["fold_thinking"]
        )


def said(runner: Model, answer: Answer, end: str) -> str:
    """The kept part of an answer: its text, with the control tokens that the template may look for.

    A token that ended it is the template's to write.
    """
    if end == "stop_string":
        return answer.text
    text = StreamDetokenizer(runner.tokenizer, continues=True)
    ids = answer.ids[:-1] if answer.ids[-1] in runner.stop_ids else answer.ids
    return "".join(map(text.push, ids)) + text.finish()


def say_end(end: str) -> None:
    """Says why an answer ended."""
    click.echo(f"({ENDS[end]})", err=True)
