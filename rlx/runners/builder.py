"""Builder for runners: `Qwen3Runner.builder().weights(path).max_seq(8192).build()`.

Runners stage, under `model.py`. It has a method for each field of `RunnerOptions`, and those below for what RLX
calls differently. `Qwen3Runner.from_path(path, max_seq=8192)` is the equivalent with keyword arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field, fields
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from rlx.engine.opening.options import EngineOptions, RunnerOptions
from rlx.errors import ArgumentError
from rlx.profile.option import options_of

if TYPE_CHECKING:
    from rlx.engine.loop.handle import OnToken
    from rlx.engine.opening.options import ModelSource

R = TypeVar("R")


class RunnerBuilder(Generic[R]):
    """Collects options; `build` opens the model. Each method returns the builder; a repeated call overrides the first.

    Every option of `auto_runner` is a method, too, such as `threads(2)`.

    Args:
        name: name of the class to build.
        open_runner: the `from_path` of that class.
    """

    def __init__(self, name: str, open_runner: Callable[..., R]) -> None:
        self._name, self._open = name, open_runner
        self._source: ModelSource | None = None
        self._options: dict[str, Any] = {}

    def _with(self, name: str, value: Any) -> Self:
        self._options[name] = value
        return self

    def weights(self, path: ModelSource) -> Self:
        """The model: a GGUF file, a safetensors file or index, a model directory, or an open loader."""
        self._source = path
        return self

    def packed(self, packed: bool = True) -> Self:
        """Whether quantized weights stay quantized; False dequantizes them exactly and computes in float32.

        RLX unpacks a model into float32 memory here. rlx always keeps the single packed copy; only the arithmetic
        differs, so False is `precision("exact")`.
        """
        return self._with("precision", None if packed else "exact")

    def stream(self, on_token: OnToken | bool) -> Self:
        """Default callback for the tokens of calls that give none, or whether callbacks are called per token.

        True, the default, calls them for each token as it is generated. False calls them for all tokens after the last,
        as RLX does; such a callback cannot stop the generation.
        """
        return self._with("streams" if isinstance(on_token, bool) else "on_token", on_token)

    def mtp(self, enabled: bool = True) -> Self:
        """Whether `generate` uses MTP drafts by default."""
        return self._with("speculative", "mtp" if enabled else None)

    def build(self) -> R:
        """Opens the model.

        Raises:
            ArgumentError: `weights` was not called.
            ModelFileError: the file cannot be used.
        """
        if self._source is None:
            hint = f"call {self._name}.builder().weights(path) first"
            raise ArgumentError("no weights are set", where="build", hint=hint)
        return self._open(self._source, **self._options)

    def __repr__(self) -> str:
        chosen = "".join(f".{name}({value!r})" for name, value in self._options.items())
        return f"{self._name}.builder(){chosen}"

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Callable[..., Self]: ...


def setter(option: Field[Any], options: type[EngineOptions]) -> Callable[..., Any]:
    """The builder's method for a field of a dataclass of options. A switch is on if the call has no value."""

    def set_option(self: RunnerBuilder[Any], value: Any) -> RunnerBuilder[Any]:
        return self._with(option.name, value)

    set_option.__name__, set_option.__qualname__ = option.name, f"RunnerBuilder.{option.name}"
    set_option.__doc__ = f"{options_of(options)[option.name].doc}."
    set_option.__annotations__ = {"value": option.type, "return": "Self"}
    if "bool" in str(option.type).split(" | "):
        set_option.__defaults__ = (True,)
    return set_option


for _option in fields(RunnerOptions):
    setattr(RunnerBuilder, _option.name, setter(_option, RunnerOptions))
