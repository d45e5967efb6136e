"""The settings of a conversation: command-line options that `/set` can change, checked as the command line does."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import click

from rlx.arguments import did_you_mean
from rlx.cli.answering import speculative_option, thinking_option
from rlx.cli.command import ALIASES
from rlx.cli.sampling import ending_options, sample_opts, sampling_options
from rlx.errors import ChatError, RlxError
from rlx.sampling import SampleOpts

DEFAULT = "default"  # as a value: take the setting back
_ON_OFF = {"on": True, "true": True, "yes": True, "off": False, "false": False, "no": False}
_WINDOWS = ("repetition_window", "dry_penalty_last_n")  # of which None is all tokens
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
        return "all" if value is None and parameter in _WINDOWS else _as_text(value)

    def _use(self, words: dict[str, list[str]]) -> None:
        words = {name: each for name, each in words.items() if each}
        arguments = [word for name, each in words.items() for word in _arguments(_OPTIONS[name], each)]
        try:
            values = _parsed.main(arguments, prog_name="/set", standalone_mode=False)
            sample = sample_opts(self._recommended, values["sample"])
        except click.ClickException as error:
            raise ChatError(error.format_message().rstrip("."), where="/set") from error
        except RlxError as error:
            raise ChatError(error.what.replace("_", "-"), where="/set", hint=error.hint) from error
        self._words, self.values, self.sample = words, values, sample


def _name(option: click.Option) -> str:
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
    """What one would type on the command line."""
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
