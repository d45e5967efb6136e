"""The runner class of each family, for `auto_runner` and for code that knows its model's family.

Runners stage. A family is one row of the table in `rlx.models`. The classes differ only in the family that they accept,
because the engine builds the graph from the model's own configuration.
"""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING, Any, Self

from rlx.arguments import OPENING, check_arguments
from rlx.errors import named_refusals
from rlx.runners.builder import RunnerBuilder
from rlx.runners.cached import CachedRunner
from rlx.runners.generation.stopping import OnToken
from rlx.runtime.devices import Device
from rlx.runtime.devices import device as find_device
from rlx.sampling.options import Sample

if TYPE_CHECKING:
    from rlx.runners.engine.token_engine import TokenEngine
    from rlx.runners.opening.configured import Config
    from rlx.weights.loader import WeightLoader


_FROM_PATH = ("path", "config", "sample", "on_token", "streams", "speculative")


class FamilyRunner(CachedRunner):
    """A `CachedRunner` that opens its own engine."""

    @classmethod
    def builder(cls) -> RunnerBuilder[Self]:
        """A builder, which sets options one at a time: `builder().weights(path).max_seq(8192).build()`."""
        return RunnerBuilder(cls.__name__, cls.from_path)

    @classmethod
    def from_path(
        cls,
        path: str | PathLike[str] | WeightLoader,
        *,
        config: Config | None = None,
        device: str | Device | None = None,
        sample: Sample = None,
        on_token: OnToken | None = None,
        streams: bool = True,
        speculative: str | None = None,
        **options: Any,
    ) -> Self:
        """Opens a GGUF file, a safetensors file, a model directory or an open `WeightLoader`, which the runner then
        owns.

        Args:
            config: a `config.json` (path or contents) for safetensors weights without one. For a file that has its own,
                it must describe the same model.
            device: what to run on; see `rlx.devices()`.
            sample, on_token, streams, speculative: as for `CachedRunner`.
            options: those of `auto_runner`.

        Raises:
            UnsupportedModelError: the model is of another family, or rlx does not support its architecture.
            ModelFileError: the file cannot be used.
            TargetError: there is no such device.
        """
        from rlx.runners.opening.configured import open_with

        check_arguments(f"{cls.__name__}.from_path", options, [*_FROM_PATH, *sorted(OPENING)])
        place = find_device(device)
        engine = open_engine(path if config is None else open_with(path, config), options)
        try:
            return cls(engine, device=place, sample=sample, on_token=on_token, streams=streams, speculative=speculative)
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
def open_engine(path: str | PathLike[str] | WeightLoader, options: dict[str, Any]) -> TokenEngine:
    """`Engine.open`; imported here because the engine imports the compiler."""
    from rlx.runners.engine.engine import Engine

    engine: TokenEngine = Engine.open(path, **{"compile_ahead": None, **options})
    return engine
