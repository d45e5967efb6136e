"""The runners by family name: what `auto_runner` picks from, and what a program that knows its model can use directly.

Runners stage. A family is one row of `rlx.models`' table; its runner differs from the others by its name only, because
the engine builds the graph from the model's own configuration.
"""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING, Any, Self

from rlx.runners.cached import CachedRunner

if TYPE_CHECKING:
    from rlx.runners.cached import TokenEngine
    from rlx.weights.loader import WeightLoader


class FamilyRunner(CachedRunner):
    """A `CachedRunner` that opens its own engine."""

    @classmethod
    def from_path(cls, path: str | PathLike[str] | WeightLoader, **options: Any) -> Self:
        """Opens a GGUF file, a safetensors file or a model directory; an open `WeightLoader` is taken over.

        Args:
            options: those of `auto_runner`.

        Raises:
            UnsupportedModelError: the model is of another family, or rlx has no such architecture.
            ModelFileError: the file cannot be used, and why.
        """
        engine = open_engine(path, options)
        try:
            return cls(engine)
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


def open_engine(path: str | PathLike[str] | WeightLoader, options: dict[str, Any]) -> TokenEngine:
    """`Engine.open`; imported here because an engine brings the compiler's front door along."""
    from rlx.runners.engine import Engine

    engine: TokenEngine = Engine.open(path, **options)
    return engine
