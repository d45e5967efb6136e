"""Runners put together a choice at a time: `Qwen3Runner.builder().weights(path).max_seq(8192).build()`.

Runners stage, beside `families.py`. Every choice is an option of `auto_runner` under the name that the original has for
it; where Python's keyword arguments do, `Qwen3Runner.from_path(path, max_seq=8192)` says the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from rlx.errors import ArgumentError, MultimodalError

if TYPE_CHECKING:
    from rlx.profile import ProfileLike
    from rlx.runners.configured import Config
    from rlx.runners.stopping import OnToken
    from rlx.runtime.cache import CompileCache
    from rlx.runtime.compile import Progress
    from rlx.runtime.devices import Device
    from rlx.sampling.options import Sample
    from rlx.weights.loader import WeightLoader

R = TypeVar("R")
Path = str | PathLike[str]


class RunnerBuilder(Generic[R]):
    """Collects choices; `build` opens the model. Each method returns the builder, and the last call of each counts.

    Args:
        name: of the class that it builds.
        open_runner: opens a model: that class's `from_path`.
    """

    def __init__(self, name: str, open_runner: Callable[..., R]) -> None:
        self._name, self._open = name, open_runner
        self._source: Path | WeightLoader | None = None
        self._options: dict[str, Any] = {}

    def _with(self, name: str, value: Any) -> Self:
        self._options[name] = value
        return self

    def weights(self, path: Path | WeightLoader) -> Self:
        """The model: a GGUF file, a safetensors file or index, a directory that holds one, or an open loader."""
        self._source = path
        return self

    def config(self, config: Config) -> Self:
        """A `config.json`, or what stands in one, for safetensors weights that lie without theirs."""
        return self._with("config", config)

    def device(self, device: str | Device) -> Self:
        """What to run on; see `rlx.devices()`."""
        return self._with("device", device)

    def max_seq(self, tokens: int) -> Self:
        """How many tokens the context holds, prompt and answer together."""
        return self._with("max_seq", tokens)

    def packed(self, packed: bool = True) -> Self:
        """Whether quantized weights stay quantized; False dequantizes them exactly and computes in float32.

        The original unpacks a model into float32 memory here. rlx keeps the one packed copy in either case: what
        differs is the arithmetic, so False is `precision("exact")`.
        """
        return self._with("precision", None if packed else "exact")

    def precision(self, precision: str) -> Self:
        """`exact` or `auto`."""
        return self._with("precision", precision)

    def sample(self, sample: Sample) -> Self:
        """How tokens are chosen by calls that do not say; "recommended" for what the model's files recommend."""
        return self._with("sample", sample)

    def stream(self, on_token: OnToken | bool) -> Self:
        """A callback for the tokens of calls that give none of their own.

        With True, the default, callbacks get each token as it comes; with False, as in the original, all of them when
        the generation is over. Such a callback cannot stop it.
        """
        return self._with("streams" if isinstance(on_token, bool) else "on_token", on_token)

    def profile(self, profile: ProfileLike) -> Self:
        """The compile profile of all programs: a file, a table, or a `CompileProfile`."""
        return self._with("profile", profile)

    def cache(self, cache: CompileCache) -> Self:
        """The compile cache; the default one, on disk and shared between runs, otherwise."""
        return self._with("cache", cache)

    def keep_packed(self, kept: bool = True) -> Self:
        """Whether a packed copy of the weights is kept in the compile cache's folder, which later starts map."""
        return self._with("keep_packed", kept)

    def compile_ahead(self, ahead: bool | Sequence[int] = True) -> Self:
        """Whether an idle runner compiles in the background what later calls need; see `auto_runner`."""
        return self._with("compile_ahead", ahead)

    def threads(self, threads: int) -> Self:
        """Native workers."""
        return self._with("threads", threads)

    def kv_dtype(self, name: str) -> Self:
        """Type of the KV cache: `f32`, `f16`, `bf16`, `q8_0` or `q4_0`."""
        return self._with("kv_dtype", name)

    def mtp(self, enabled: bool = True) -> Self:
        """Whether `generate` speculates with the model's MTP head where a call says nothing else."""
        return self._with("speculative", "mtp" if enabled else None)

    def mmproj(self, path: Path) -> Self:
        """A vision projector: refused, since no family takes images yet.

        Raises:
            MultimodalError: always.
        """
        raise MultimodalError(
            f"the {self._name} takes text only, {path} is a vision projector", where="mmproj",
            hint="leave it out; `supports_multimodal` tells beforehand",
        )  # fmt: skip

    def progress(self, progress: Progress) -> Self:
        """Told how far loading is."""
        return self._with("progress", progress)

    def build(self) -> R:
        """Opens the model.

        Raises:
            ArgumentError: no weights were named.
            ModelFileError: the file cannot be used, and why.
        """
        if self._source is None:
            hint = f"call {self._name}.builder().weights(path) first"
            raise ArgumentError("no weights were named", where="build", hint=hint)
        return self._open(self._source, **self._options)

    def __repr__(self) -> str:
        chosen = "".join(f".{name}({value!r})" for name, value in self._options.items())
        return f"{self._name}.builder(){chosen}"
