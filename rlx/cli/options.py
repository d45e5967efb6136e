"""Options that several subcommands share: how to open a model, and how to choose tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

import click

from rlx.ir.dtypes import KV_DTYPES

if TYPE_CHECKING:
    from rlx.runners import CachedRunner, SampleOpts
    from rlx.runners.auto import Progress
    from rlx.runtime.cache import CompileCache, Policy

Command = Callable[..., Any]
Decorator = Callable[[Command], Command]

# Parameter name -> option.
_ENGINE: dict[str, Decorator] = {
    "threads": click.option(
        "--threads", type=click.IntRange(1), metavar="N", help="Worker threads; the physical cores by default."
    ),
    "max_seq": click.option(
        "--max-seq", type=click.IntRange(1), metavar="N", help="Tokens the context holds, prompt and answer together."
    ),
    "kv_dtype": click.option(
        "--kv-dtype", type=click.Choice([dtype.name for dtype in KV_DTYPES]), help="Type of the KV cache."
    ),
    "precision": click.option(
        "--precision",
        type=click.Choice(["auto", "exact"]),
        default="auto",
        help="exact: float32 throughout, slower. auto: what the profile says, else int8 where it is close.",
    ),
    "profile": click.option("--profile", metavar="FILE", help="A compile profile (TOML); options given here win."),
    "cache": click.option(
        "--cache", type=click.Choice(["on", "off", "redo", "readonly"]), help="How to use the compile cache."
    ),
    "dump_ir": click.option("--dump-ir", metavar="DIR", help="Write every program after every pass to DIR, as text."),
}
_SAMPLING: dict[str, Decorator] = {
    "temperature": click.option(
        "--temperature", type=float, default=0.0, metavar="T", help="0, the default, takes the likeliest token."
    ),
    "top_k": click.option("--top-k", type=int, metavar="K", help="Choose among the K likeliest tokens."),
    "top_p": click.option("--top-p", type=float, metavar="P", help="Choose among the likeliest that together reach P."),
    "min_p": click.option("--min-p", type=float, metavar="P", help="Leave out what is below P times the likeliest."),
    "repetition_penalty": click.option(
        "--repetition-penalty", type=float, metavar="R", help="Above 1: avoid tokens of the last 64."
    ),
    "seed": click.option("--seed", type=int, metavar="N", help="Of the random numbers; another each time by default."),
}
_NEEDS_TEMPERATURE = ("top_k", "top_p", "min_p")


def engine_options(command: Command) -> Command:
    """Adds the options of `auto_runner`; the command gets them as the dict `engine`."""
    return _collected(command, "engine", _ENGINE, dict)


def sampling_options(command: Command) -> Command:
    """Adds the options of `SampleOpts`; the command gets one as `sample`."""
    return _collected(command, "sample", _SAMPLING, sample_opts)


def _collected(command: Command, name: str, options: dict[str, Decorator], make: Callable[..., Any]) -> Command:
    """`command` with more options, whose values become one argument."""

    @wraps(command)
    def collecting(*args: Any, **values: Any) -> Any:
        values[name] = make(**{option: values.pop(option) for option in options})
        return command(*args, **values)

    wrapped: Command = collecting
    for option in reversed(options.values()):
        wrapped = option(wrapped)
    return wrapped


def sample_opts(temperature: float, **given: Any) -> SampleOpts:
    """The options as `SampleOpts`; a filter without a temperature is a mistake, because it would do nothing."""
    from rlx.runners import SampleOpts

    given = {key: value for key, value in given.items() if value is not None}
    idle = [f"--{key.replace('_', '-')}" for key in _NEEDS_TEMPERATURE if key in given]
    if idle and temperature == 0:
        raise click.UsageError(f"{idle[0]} does nothing at temperature 0: add --temperature, such as --temperature 0.7")
    return SampleOpts(temperature, **given)


def compile_cache(policy: Policy | None) -> CompileCache | None:
    """A compile cache of that policy in the usual place; None leaves the policy to the environment."""
    if policy is None:
        return None
    from rlx.runtime.cache import CompileCache
    from rlx.runtime.store import Store

    return CompileCache(store=None if policy == "off" else Store(), policy=policy)


def open_runner(model: str | None, engine: dict[str, Any], progress: Progress, *, load: bool = True) -> CachedRunner:
    """The runner for a path, or for the embedded demo model; with `load` its weights are packed at once."""
    from rlx import demo
    from rlx.runners import auto_runner

    options = {**engine, "cache": compile_cache(engine["cache"])}
    return auto_runner(model if model is not None else demo.path(), progress=progress, load=load, **options)
