"""The options of a model that is opened: one field each, from which everything that takes an option is made.

Runners stage, in front of the engine. The arguments of `auto_runner`, `from_path` and `Engine.open`, the methods of
the builder, the options of the command line and the tables of the documentation follow from the fields here and in
`rlx.profile.option`. CONTRIBUTING.md has the recipe for a new one.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, fields
from functools import partial, wraps
from os import PathLike
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeAlias, TypeVar

from rlx import arguments, env
from rlx.arguments import check_arguments
from rlx.backends import checked_device, is_auto
from rlx.errors import ArgumentError, UnknownArgumentError
from rlx.passes.options import MAX_PAST, PRECISIONS
from rlx.profile.option import ProfileOptions, byte_count, check_options, option, options_of
from rlx.text.chat import template_text
from rlx.vision.image import ImageOptions

if TYPE_CHECKING:
    from rlx.compiler.compile import Progress
    from rlx.engine.loop.handle import OnToken
    from rlx.engine.opening.setup import Config
    from rlx.profile import ProfileLike
    from rlx.sampling.options import Sample
    from rlx.store.cache import CompileCache
    from rlx.weights.loader import WeightLoader

    ModelSource: TypeAlias = str | PathLike[str] | WeightLoader

SLOTS = 32  # sequences at once: beyond it arithmetic is the limit, and more rows gain nothing
STALL_MS = 200.0
BATCH = "batch"  # of `compile_ahead`
IMAGE_CACHE_BYTES = 256 << 20

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
Owner = TypeVar("Owner")
Options = TypeVar("Options", bound="EngineOptions")
Options_contra = TypeVar("Options_contra", bound="EngineOptions", contravariant=True)


def parse_image_bytes(value: Any) -> int:
    """As `parse_bytes`; 0 keeps no image."""
    return byte_count("image_cache_bytes", value, 0)


def parse_adapters(value: Any) -> dict[str, str | PathLike[str]]:
    """A mapping of names to paths, checked; `ArgumentError` otherwise."""
    fits = isinstance(value, Mapping) and all(
        isinstance(name, str) and name and isinstance(path, str | PathLike) for name, path in value.items()
    )
    if not fits:
        raise ArgumentError(f"adapters is {value!r}, expected names with paths", hint='give {"name": "path"}')
    return dict(value)


@dataclass(frozen=True, kw_only=True)
class EngineOptions(ImageOptions, ProfileOptions):
    """The options of an engine; None takes the profile's value or a default.

    Raises:
        ArgumentError: a value is out of its range.
        TargetError: there is no such device.
    """

    max_seq: int | None = option(
        None,
        "Context length in tokens, prompt and answer together",
        default="the model's, at most 4096",
        low=1,
        high=MAX_PAST,
        metavar="N",
    )
    precision: str | None = option(
        None,
        "`exact` computes in float32, `auto` may use int8 or bf16 activations",
        default="the profile's, or `auto`",
        choices=PRECISIONS,
    )
    n_cpu_moe: int | None = option(
        None,
        "With a card: layers whose experts the CPU computes, the last ones; their weights stay in its memory",
        default="as many as the card has no room for",
        low=0,
        high=MAX_PAST,
        metavar="N",
    )
    mmproj: str | PathLike[str] | None = option(
        None, "GGUF file (mmproj) with the vision tower", default="the only one beside the model", metavar="FILE"
    )
    chat_template: str | PathLike[str] | None = option(
        None,
        "Chat template in Jinja: a file, its text, or the name `chatml`, `llama3` or `gemma`",
        default="the model's",
        parse=template_text,
        metavar="FILE",
    )
    adapters: Mapping[str, str | PathLike[str]] | None = option(
        None,
        "LoRA adapters by name, each a PEFT folder or a GGUF file; `adapter` of a request chooses one",
        parse=parse_adapters,
    )
    profile: ProfileLike = option(
        None,
        "Compile profile (TOML); other options override it",
        python="a path, a dict or a `CompileProfile`",
        default="`<family>.rlx.toml` beside the weights, if it exists",
        metavar="FILE",
    )
    cache: CompileCache | str | None = option(
        None,
        "Use of the compile cache",
        python="`on`, `off`, `redo`, `readonly`, or a `CompileCache`",
        default="the profile's, or RLX_CACHE",
        choices=env.CACHE_POLICIES,
    )
    progress: Progress | None = option(
        None,
        "Callback for progress of loading and compiling: (what, done, total)",
        parse=partial(arguments.function, "progress"),
    )
    dump_ir: str | PathLike[str] | None = option(
        None,
        "Folder for the IR of every program after every pass",
        parse=partial(arguments.path, "dump_ir"),
        metavar="DIR",
    )
    image_cache_bytes: int | str | None = option(
        None,
        "Memory for encoded images of earlier prompts, such as 256MiB",
        python="or a number of bytes",
        default="256MiB",
        parse=parse_image_bytes,
        metavar="SIZE",
    )
    load: bool = option(True, "Load the weights now; False loads them when they are needed", flag=False)
    keep_packed: bool = option(False, "Store the packed weights in the cache folder, so that later starts load faster")
    compile_ahead: bool | str | Sequence[int] | None = option(
        None,
        'Compile in the background what later calls need: True, False, `"batch"` (also for several requests at '
        "once), or the lengths of the calls to come, such as [30, 1]",
        default="RLX_COMPILE_AHEAD, or True",
    )

    def __post_init__(self) -> None:
        for entry in fields(self):
            if getattr(self, entry.name) is None:
                object.__setattr__(self, entry.name, entry.default)
        check_options(self)
        if not is_auto(self.device):
            checked_device(self.device)
        self.check_pixels()

    def image_options(self) -> ImageOptions:
        """The options of images alone."""
        return ImageOptions(**{name: getattr(self, name) for name in options_of(ImageOptions)})

    def engine(self) -> dict[str, Any]:
        """The options of the engine, without those of a runner."""
        return {each.name: getattr(self, each.name) for each in fields(EngineOptions)}


@dataclass(frozen=True, kw_only=True)
class RunnerOptions(EngineOptions):
    """The options of a runner that opens its engine."""

    config: Config | None = option(None, "`config.json` (path or contents) for safetensors weights without one")
    sample: Sample = option(
        None,
        'Default sampling: a `SampleOpts`, or `"recommended"` for the options in the model\'s files',
        default="greedy",
    )
    on_token: OnToken | None = option(
        None, "Default callback for tokens", parse=partial(arguments.function, "on_token")
    )
    streams: bool = option(
        True, "Call the callback for each token as it comes; False calls it after the last token", flag=False
    )
    speculative: str | None = option(
        None,
        "Default speculative decoding: `prompt-lookup`, `mtp`, or `model:PATH` for a draft model or head",
        kind=object,
    )
    slots: int = option(SLOTS, "Requests computed at the same time; further ones wait", low=1, high=128, metavar="N")
    stall_ms: float = option(
        STALL_MS,
        "Longest pause that prompts may cause in other answers, in milliseconds",
        low=1,
        high=60_000,
        metavar="MS",
    )

    def runner(self) -> dict[str, Any]:
        """The options of the runner that `Model` takes."""
        others = options_of(RunnerOptions).keys() - options_of(EngineOptions).keys() - {"config"}
        return {name: getattr(self, name) for name in others}


OPENING = frozenset(options_of(RunnerOptions))


class Function(Protocol[Options_contra, R_co]):
    """A function as it is written: of a model and an options object."""

    def __call__(self, path: ModelSource | None = None, *, options: Options_contra) -> R_co: ...


class Opens(Protocol[P, R_co]):
    """A function as it is called: of a model and options by name, such as `opens(path, threads=2)`."""

    def __call__(self, path: ModelSource | None = None, *args: P.args, **options: P.kwargs) -> R_co: ...


def takes_options(options: Callable[P, Options]) -> Callable[[Function[Options, R]], Opens[P, R]]:
    """Decorator for a function of a model and an options object: callers give the options as keyword arguments.

    The signature and the docstring of the result have every option, with its type and meaning.

    Args:
        options: the dataclass of the options.

    Returns:
        A decorator. The result raises `UnknownArgumentError` for a keyword that is no option.
    """
    return lambda function: _keywords(function, options)


def method_takes_options(
    options: Callable[P, Options],
) -> Callable[[Callable[[Owner, ModelSource, Options], R]], Callable[Concatenate[Owner, ModelSource, P], R]]:
    """As `takes_options`, for a method whose first argument after `self` or `cls` is the model."""
    return lambda function: _keywords(function, options)


def _keywords(function: Callable[..., R], options: Any) -> Callable[..., R]:
    signature, added = inspect.signature(function), {each.name: each for each in fields(options)}
    leading = [name for name in signature.parameters if name != "options"]
    names = [*leading, *options_of(options)]

    @wraps(function)
    def opens(*positional: Any, **values: Any) -> R:
        owner = positional[0].__name__ + "." if positional and isinstance(positional[0], type) else ""
        where = owner + function.__name__
        if len(positional) > len(leading):
            hint = f"name the options, as in {where}(path, threads=2)"
            raise UnknownArgumentError("options have no positions", where=where, hint=hint)
        first = {name: values.pop(name) for name in leading if name in values}
        check_arguments(where, values, [name for name in names if name not in ("cls", "self")])
        return function(*positional, **first, options=options(**values))

    parameters = [signature.parameters[name] for name in leading]
    parameters += [_parameter(each) for each in added.values()]
    opens.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    opens.__doc__ = _documented(inspect.cleandoc(function.__doc__ or ""), options)
    return opens


def _parameter(field: Field[Any]) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(field.name, kind, default=field.default, annotation=field.type)


def _documented(text: str, options: Any) -> str:
    """A docstring with an entry for each option in place of that of `options`."""
    entries = [f"{name}: {meaning}." for name, meaning in meanings(options).items()]
    wrapped = [textwrap.wrap(entry, 112, initial_indent=" " * 4, subsequent_indent=" " * 8) for entry in entries]
    lines = text.split("\n")
    at = next(i for i, line in enumerate(lines) if line.startswith("    options: "))
    return "\n".join([*lines[:at], *(line for entry in wrapped for line in entry), *lines[at + 1 :]])


def meanings(options: type[EngineOptions]) -> dict[str, str]:
    """The meaning of each option for a Python user: the texts in docstrings and in docs/python.md."""
    return {name: _lower(each.doc) for name, each in options_of(options).items()}


def _lower(text: str) -> str:
    """A sentence as a part of another one: without its capital, unless the first word is a name."""
    first = text.split(maxsplit=1)[0]
    return text if first[1:].lower() != first[1:] or first in ("True", "False") else text[0].lower() + text[1:]
