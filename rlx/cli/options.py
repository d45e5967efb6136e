"""Options shared by several subcommands: for opening a model, for sampling, and for the end of an answer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import fields
from functools import partial, wraps
from pathlib import Path
from typing import Any

import click

from rlx import demo
from rlx.cli.command import Parsed, flag_of
from rlx.cli.downloads import download_if_agreed
from rlx.engine.engine import Engine
from rlx.engine.opening.options import EngineOptions
from rlx.engine.opening.setup import Plan, choose_model
from rlx.engine.request import stop_strings
from rlx.errors import RlxError, SamplingError
from rlx.profile import CompileProfile
from rlx.profile.option import Option, options_of
from rlx.runners import Model, auto_runner
from rlx.runners.auto import Progress, runner_class
from rlx.sampling import SampleOpts
from rlx.sampling.options import NUMBERS, combined, meant
from rlx.weights import WeightLoader, open_weights

Function = Callable[..., Any]
Decorator = Callable[[Function], Function]


def field_options(argument: str, options: type, *names: str) -> Decorator:
    """Adds the options for fields of a dataclass of options; the command receives them as a dict.

    Args:
        argument: the command's argument that is the dict.
        names: of the fields; by default all that the command line has.
    """
    flags = names or [name for name, each in options_of(options).items() if each.is_flag]
    return lambda command: collected(
        command, argument, {name: command_line_option(name, options) for name in flags}, dict
    )


def some_engine_options(*names: str) -> Decorator:
    """Adds these options of `auto_runner`; the command receives them as the dict `engine`."""
    return field_options("engine", EngineOptions, *names)


engine_options = some_engine_options()


def command_line_option(name: str, options: type) -> Decorator:
    """The option `--name` for a field of a dataclass of options. A field with a tuple may be given more than once."""
    option = options_of(options)[name]
    flag = flag_of(name)
    text = f"{option.help}.".replace("`", "")
    if option.kind is bool:
        default = next(each.default for each in fields(options) if each.name == name)
        names = flag if default is False else f"{flag}/--no-{flag[2:]}"
        return click.option(names, is_flag=True, default=default, help=text)
    if option.kind is tuple:
        checked = partial(_checked, option)
        return click.option(flag, metavar=option.metavar, multiple=True, callback=checked, help=text)
    low: Any = option.low
    kind: Any = {int: click.IntRange(low), float: click.FloatRange(low)}.get(option.kind)
    kind = click.Choice(option.choices) if option.choices else kind
    return click.option(flag, type=kind, metavar=option.metavar, callback=partial(_checked, option), help=text)


def _checked(option: Option, ctx: click.Context, parameter: click.Parameter, value: Any) -> Any:
    """The value of an option that the command line gave; `click.BadParameter` if it does not parse."""
    if value is not None and option.parse is not None and (found := option.problem(str(parameter.name), value)):
        what, hint = found
        raise click.BadParameter(str(RlxError(what.removeprefix(f"{parameter.name}: "), hint=hint)))
    return value


def model_argument(command: Function) -> Function:
    """Adds MODEL and `--model`; either sets the argument `model`, which is None without them."""

    @wraps(command)
    def merged(*args: Any, model: str | None, named_model: str | None, **values: Any) -> Any:
        if model is not None and named_model is not None:
            raise click.UsageError(f"the model is given twice: {model} and --model {named_model}")
        return command(*args, model=model if named_model is None else named_model, **values)

    option = click.option("--model", "named_model", metavar="MODEL", help="Another way to name MODEL.")
    wrapped: Function = click.argument("model", required=False)(option(merged))
    return wrapped


def models_argument(command: Function) -> Function:
    """Adds any number of MODEL, also as `--model`; the command receives them as the list `models`."""

    @wraps(command)
    def joined(*args: Any, models: tuple[str, ...], named_models: tuple[str, ...], **values: Any) -> Any:
        return command(*args, models=[*models, *named_models], **values)

    option = click.option("--model", "named_models", metavar="MODEL", multiple=True, help="Another way to name MODEL.")
    wrapped: Function = click.argument("models", nargs=-1, metavar="[[NAME=]MODEL]...")(option(joined))
    return wrapped


def collected(command: Function, name: str, options: dict[str, Decorator], make: Callable[..., Any]) -> Function:
    """`command` with more options, whose values it receives as one argument."""

    @wraps(command)
    def collecting(*args: Any, **values: Any) -> Any:
        values[name] = make(**{option: values.pop(option) for option in options})
        return command(*args, **values)

    wrapped: Function = collecting
    for option in reversed(options.values()):
        wrapped = option(wrapped)
    return wrapped


def model_path(
    model: str | None, engine: dict[str, Any], *, tell_demo: bool = False, images: bool = False, yes: bool = False
) -> str:
    """The model to open: MODEL, else the model that `--profile` names or that lies beside it, else the demo model.

    Where the profile decides, a line on stderr says what was taken. A model that is named as on the hub and is not
    there is downloaded, if the user agrees.

    Args:
        tell_demo: the line is there for the demo model too.
        images: whether it must take images: then the demo model is the one that sees.
        yes: the user has agreed to a download.

    Raises:
        AmbiguousModelError, ProfileError: as `choose_model`.
        ModelFileError, DownloadError: the model is not there and cannot be downloaded.
    """
    loaded = read_profile(engine) if model is None else None
    choice, profile = choose_model(model, loaded), loaded and loaded.source
    reasons = {"profile": f"named by {profile}", "beside": f"beside {profile}", "demo": "no model was named"}
    if choice.origin != "named" and (profile or tell_demo):
        name = "the demo model" if choice.origin == "demo" else choice.path
        click.echo(f"model: {name} ({reasons[choice.origin]})", err=True)
    if images and choice.origin == "demo":
        return str(demo.path(demo.VISION))
    if choice.origin in ("named", "profile"):
        download_if_agreed(str(choice.path), yes)
    return str(choice.path)


yes_option = click.option("--yes", is_flag=True, help="Download a missing MODEL of the hub without asking.")


def read_profile(engine: dict[str, Any]) -> CompileProfile | None:
    """The profile that `--profile` names, read once: it then stands among the options in place of the name.

    Raises:
        ProfileError: it cannot be read.
    """
    if engine.get("profile") is not None:
        engine["profile"] = CompileProfile.load(engine["profile"])
    return engine.get("profile")


def named(model: str | WeightLoader) -> str:
    """The name of a model, for messages."""
    return model if isinstance(model, str) else str(model.path)


@contextmanager
def open_plan(model: str | WeightLoader, engine: dict[str, Any]) -> Iterator[Plan]:
    """The plan for a model: reads the header; compiles and loads nothing.

    Raises:
        ModelFileError, ProfileError, ArgumentError, TargetError: as `auto_runner`.
    """
    with open_weights(model) if isinstance(model, str) else model as loader:
        runner_class(loader)  # names what an unknown architecture lacks
        yield Plan.of(loader, EngineOptions(**engine))


def open_runner(
    model: str | WeightLoader | None, engine: dict[str, Any], progress: Progress | None, *, load: bool = True
) -> Model:
    """The runner for the model that `model_path` finds, or for an open file; `load` packs its weights at once."""
    source = model_path(model, engine) if model is None or isinstance(model, str) else model
    return auto_runner(source, progress=progress, load=load, **engine)


@contextmanager
def open_engine(
    model: str | Path | WeightLoader, progress: Progress | None, load: bool = True, **options: Any
) -> Iterator[Engine]:
    """The engine of a model, without a runner: to measure it, and to look into it. Errors as `auto_runner`."""
    loader = model if isinstance(model, WeightLoader) else open_weights(model)
    runner_class(loader)  # names what an unknown architecture lacks
    with closing(Engine.open(loader, progress=progress, load=load, **options)) as engine:
        yield engine


def adapter_option(text: str, *, multiple: bool = False) -> Decorator:
    """Adds `--adapter NAME=PATH`; the command receives the option `adapters` of an engine.

    Args:
        text: its help.
        multiple: whether it may be given more than once.
    """

    def by_name(ctx: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, str] | None:
        pairs = [value.partition("=")[::2] for value in values]
        for value, (name, path) in zip(values, pairs, strict=True):
            if not name or not path:
                raise click.BadParameter(f"{value!r} is no NAME=PATH, such as sql=adapters/sql")
        found = dict(pairs)
        if len(found) < len(pairs):
            raise click.BadParameter("two adapters have the same name")
        if len(found) > 1 and not multiple:
            raise click.BadParameter("one adapter answers: name one")
        return found or None

    return click.option("--adapter", "adapters", metavar="NAME=PATH", multiple=True, callback=by_name, help=text)


one_adapter = adapter_option("The LoRA adapter to use: a PEFT folder or a GGUF file.")


_ALL = "all"


def _window(value: str) -> int | str:
    """A number of tokens, or `all`."""
    return value if value == _ALL else int(value)


def _length(value: str) -> int:
    """A number of tokens; -1 is any."""
    if (count := int(value)) < 1 and count != -1:
        raise ValueError
    return sys.maxsize if count == -1 else count


def _bias(value: str) -> tuple[int, float]:
    """`ID=BIAS`."""
    token, _, bias = value.partition("=")
    return int(token), float(bias)


_LENGTH, _WINDOW, _BIAS = (
    Parsed(_length, "neither a number of tokens nor -1"),
    Parsed(_window, "not a valid integer, and not 'all'"),
    Parsed(_bias, "no ID=BIAS, such as 42=-1.5 or 42=-inf"),
)
#: Options of which None is all tokens.
WINDOWS = dict.fromkeys(("repetition_window", "dry_penalty_last_n"), _WINDOW)
#: Option -> its decorator; without it the value is the model's own.
_SAMPLING: dict[str, Decorator] = {
    **{
        name: click.option(
            flag_of(name),
            type=WINDOWS.get(name, int if each.metadata["allowed"].whole else float),
            metavar=each.metadata["metavar"],
            help=each.metadata["help"],
        )
        for name, each in NUMBERS.items()
    },
    "dry_sequence_breakers": click.option(
        "--dry-sequence-breaker", "dry_sequence_breakers", multiple=True, metavar="TEXT",
        help="A repeated sequence ends at TEXT; may be given again. A line break, : \" and * by default.",
    ),
    "logit_bias": click.option(
        "--logit-bias", type=_BIAS, multiple=True, metavar="ID=BIAS",
        help="Add BIAS to the logit of token ID; -inf bans it; may be given again.",
    ),
}  # fmt: skip
_ENDING: dict[str, Decorator] = {
    "max_tokens": click.option(
        "--max-tokens", type=_LENGTH, default=256, show_default=True, metavar="N",
        help="Maximum number of tokens of the answer; -1 for what the context has room for.",
    ),
    "min_tokens": click.option(
        "--min-tokens", type=click.IntRange(0), default=0, metavar="N",
        help="Minimum number of tokens of the answer.",
    ),
    "stop": click.option(
        "--stop", multiple=True, metavar="TEXT", help="End the answer before TEXT; may be given again."
    ),
}  # fmt: skip


def sampling_options(command: Function) -> Function:
    """Adds the options of `SampleOpts`; the command receives the given ones as the dict `sample`."""
    return collected(command, "sample", _SAMPLING, _given)


def ending_options(command: Function) -> Function:
    """Adds `--max-tokens`, `--min-tokens` and `--stop`; the command receives them as the dict `ending`."""
    return collected(command, "ending", _ENDING, _ending)


def sample_opts(recommended: SampleOpts | None, chosen: dict[str, Any]) -> SampleOpts:
    """The recommended options of the model (greedy without a recommendation), overridden by the given ones.

    An option without an effect is an error: a filter at temperature 0 or with Mirostat.
    """
    try:
        return combined(recommended or SampleOpts.greedy(), chosen, flag_of)
    except SamplingError as error:
        raise click.UsageError(error.what) from error


def described(opts: SampleOpts, recommended: SampleOpts | None) -> dict[str, Any]:
    """The sampling options for a report: those that differ from their defaults, and whether they are recommended."""
    plain = SampleOpts()
    changed = {f.name: getattr(opts, f.name) for f in fields(opts) if getattr(opts, f.name) != getattr(plain, f.name)}
    changed.pop("repetition_window", None) if not opts.has_penalties else None
    return {"greedy": opts.is_greedy, "recommended": opts == recommended, **changed}


def _given(**values: Any) -> dict[str, Any]:
    """The values that were given, checked before a model is opened."""
    chosen = {name: meant(name, value) for name, value in values.items() if value not in (None, ())}
    chosen |= {name: None for name in WINDOWS if chosen.get(name) == _ALL}
    SampleOpts(**chosen)
    return chosen


def _ending(**values: Any) -> dict[str, Any]:
    """The values, checked before a model is opened."""
    if values["min_tokens"] > values["max_tokens"]:
        raise click.UsageError(f"--min-tokens {values['min_tokens']} is more than --max-tokens {values['max_tokens']}")
    return {**values, "stop": stop_strings(values["stop"])}
