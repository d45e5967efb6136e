"""The runner class of each family, for `auto_runner` and for code that knows its model's family.

Runners stage. A family is one row of the table in `rlx.models`. The classes differ only in the family that they accept,
because the engine builds the graph from the model's own configuration.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Self

from rlx import env
from rlx.engine.opening.options import RunnerOptions, method_takes_options
from rlx.errors import named_refusals
from rlx.runners.builder import RunnerBuilder
from rlx.runners.cached import CachedRunner

if TYPE_CHECKING:
    from rlx.engine.opening.options import ModelSource
    from rlx.engine.token_engine import TokenEngine


class FamilyRunner(CachedRunner):
    """A `CachedRunner` that opens its own engine."""

    @classmethod
    def builder(cls) -> RunnerBuilder[Self]:
        """A builder, which sets options one at a time: `builder().weights(path).max_seq(8192).build()`."""
        return RunnerBuilder(cls.__name__, cls.from_path)

    @classmethod
    @method_takes_options(RunnerOptions)
    def from_path(cls, path: ModelSource, options: RunnerOptions) -> Self:
        """Opens a GGUF file, a safetensors file, a model directory or an open `WeightLoader`, which the runner then
        owns.

        Args:
            path: the model.
            options: the fields of `RunnerOptions`.

        Raises:
            UnsupportedModelError: the model is of another family, or rlx does not support its architecture.
            ModelFileError: the file cannot be used.
            ArgumentError, ProfileError, TargetError: an option is out of its range.
        """
        from rlx.engine.opening.source import open_with

        engine = open_engine(path if options.config is None else open_with(path, options.config), options)
        try:
            return cls(engine, **options.runner())
        except BaseException:
            engine.close()
            raise


class Llama32Runner(FamilyRunner):
    """Llama 3 and models of the same architecture, Mistral and Mixtral among them."""

    FAMILY = "llama32"


class Qwen3Runner(FamilyRunner):
    """Qwen 2, 2.5 and 3, and Qwen 3 with experts."""

    FAMILY = "qwen3"


class Qwen35Runner(FamilyRunner):
    """Qwen 3.5, dense and with experts."""

    FAMILY = "qwen35"


class GemmaRunner(FamilyRunner):
    """Gemma 1 to 4: text, and the text part of models that take images."""

    FAMILY = "gemma"


RUNNERS: dict[str, type[FamilyRunner]] = {
    runner.FAMILY: runner for runner in (Llama32Runner, Qwen3Runner, Qwen35Runner, GemmaRunner) if runner.FAMILY
}


@named_refusals()
def open_engine(path: ModelSource, options: RunnerOptions) -> TokenEngine:
    """`Engine.open`; imported here because the engine imports the compiler."""
    from rlx.engine.engine import Engine

    if options.compile_ahead is None:
        options = replace(options, compile_ahead=env.compile_ahead())
    engine: TokenEngine = Engine.open(path, **options.engine())
    return engine
