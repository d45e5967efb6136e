"""Options for opening a model, shared by several subcommands. `sampling.py` has the options about the answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any

import click

from rlx import env
from rlx.ir.dtypes import KV_DTYPES

if TYPE_CHECKING:
    from rlx.runners import CachedRunner
    from rlx.runners.auto import Progress
    from rlx.runners.opening.setup import Plan
    from rlx.runtime.cache import CompileCache
    from rlx.weights import WeightLoader

Command = Callable[..., Any]
Decorator = Callable[[Command], Command]

# Parameter name -> option.
_ENGINE: dict[str, Decorator] = {
    "threads": click.option(
        "--threads", type=click.IntRange(1), metavar="N", help="Worker threads; the physical cores by default."
    ),
    "max_seq": click.option(
        "--max-seq",
        type=click.IntRange(1),
        metavar="N",
        help="Context size in tokens, for prompt and answer together.",
    ),
    "kv_dtype": click.option(
        "--kv-dtype", type=click.Choice([dtype.name for dtype in KV_DTYPES]), help="Type of the KV cache."
    ),
    "precision": click.option(
        "--precision",
        type=click.Choice(["auto", "exact"]),
        help="exact: float32 arithmetic, slower. auto, the default: int8 or bf16 where it is accurate enough.",
    ),
    "profile": click.option("--profile", metavar="FILE", help="A compile profile (TOML); options override it."),
    "cache": click.option("--cache", type=click.Choice(env.CACHE_POLICIES), help="How to use the compile cache."),
    "keep_packed": click.option(
        "--keep-packed", is_flag=True, help="Store the packed weights in the cache, so that later starts load faster."
    ),
    "dump_ir": click.option("--dump-ir", metavar="DIR", help="Write the IR of every program after every pass to DIR."),
}


def engine_options(command: Command) -> Command:
    """Adds the options of `auto_runner`; the command receives them as the dict `engine`."""
    return collected(command, "engine", _ENGINE, dict)


def model_argument(command: Command) -> Command:
    """Adds MODEL and `--model`; either sets the argument `model`, which is None without them."""

    @wraps(command)
    def merged(*args: Any, model: str | None, named_model: str | None, **values: Any) -> Any:
        if model is not None and named_model is not None:
            raise click.UsageError(f"the model is given twice: {model} and --model {named_model}")
        return command(*args, model=model if named_model is None else named_model, **values)

    option = click.option("--model", "named_model", metavar="MODEL", help="Another way to name MODEL.")
    wrapped: Command = click.argument("model", required=False)(option(merged))
    return wrapped


def collected(command: Command, name: str, options: dict[str, Decorator], make: Callable[..., Any]) -> Command:
    """`command` with more options, whose values it receives as one argument."""

    @wraps(command)
    def collecting(*args: Any, **values: Any) -> Any:
        values[name] = make(**{option: values.pop(option) for option in options})
        return command(*args, **values)

    wrapped: Command = collecting
    for option in reversed(options.values()):
        wrapped = option(wrapped)
    return wrapped


def compile_cache(policy: str | None) -> CompileCache | None:
    """The default compile cache with a policy; None if the profile and the environment choose the policy."""
    if policy is None:
        return None
    from rlx.runtime.cache import CompileCache

    return CompileCache.default(policy)


def model_path(model: str | None, engine: dict[str, Any], *, tell_demo: bool = False) -> str:
    """The model to open: MODEL, else the model that `--profile` names or that lies beside it, else the demo model.

    Where the profile decides, a line on stderr says what was taken.

    Args:
        tell_demo: the line is there for the demo model too.

    Raises:
        AmbiguousModelError, ProfileError: as `choose_model`.
    """
    from rlx.runners.opening.model_choice import choose_model

    profile = engine.get("profile")
    choice = choose_model(model, profile)
    reasons = {"profile": f"named by {profile}", "beside": f"beside {profile}", "demo": "no model was named"}
    if choice.origin != "named" and (profile or tell_demo):
        name = "the demo model" if choice.origin == "demo" else choice.path
        click.echo(f"model: {name} ({reasons[choice.origin]})", err=True)
    return str(choice.path)


def named(model: str | WeightLoader) -> str:
    """The name of a model, for messages."""
    return model if isinstance(model, str) else str(model.path)


@contextmanager
def open_plan(model: str | WeightLoader, engine: dict[str, Any]) -> Iterator[Plan]:
    """The plan for a model: reads the header; compiles and loads nothing.

    Raises:
        ModelFileError, ProfileError, ArgumentError, TargetError: as `auto_runner`.
    """
    from rlx.runners.auto import runner_class
    from rlx.runners.opening.setup import Plan
    from rlx.weights import open_weights

    with open_weights(model) if isinstance(model, str) else model as loader:
        runner_class(loader)  # names what an unknown architecture lacks
        choices = {name: value for name, value in engine.items() if name != "keep_packed"}  # that is about loading
        yield Plan.of(loader, **{**choices, "cache": compile_cache(engine.get("cache"))})


def open_runner(
    model: str | WeightLoader | None, engine: dict[str, Any], progress: Progress | None, *, load: bool = True
) -> CachedRunner:
    """The runner for the model that `model_path` finds, or for an open file; `load` packs its weights at once."""
    from rlx.runners import auto_runner

    options = {**engine, "cache": compile_cache(engine["cache"])}
    source = model_path(model, engine) if model is None or isinstance(model, str) else model
    return auto_runner(source, progress=progress, load=load, **options)
