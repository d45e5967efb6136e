"""Builder for runners: `Qwen3Runner.builder().weights(path).max_seq(8192).build()`.

Runners stage, beside `families.py`. Each method sets one option of `auto_runner`, under the name that RLX uses for it.
`Qwen3Runner.from_path(path, max_seq=8192)` is the equivalent with keyword arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from rlx.errors import ArgumentError, MultimodalError

if TYPE_CHECKING:
    from rlx.profile import ProfileLike
    from rlx.runners.generation.stopping import OnToken
    from rlx.runners.opening.configured import Config
    from rlx.runtime.cache import CompileCache
    from rlx.runtime.compile import Progress
    from rlx.runtime.devices import Device
    from rlx.sampling.options import Sample
    from rlx.weights.loader import WeightLoader

R = TypeVar("R")
Path = str | PathLike[str]


class RunnerBuilder(Generic[R]):
    """Collects options; `build` opens the model. Each method returns the builder; a repeated call overrides the first.

    Args:
        name: name of the class to build.
        open_runner: the `from_path` of that class.
    """

    def __init__(self, name: str, open_runner: Callable[..., R]) -> None:
        self._name, self._open = name, open_runner
        self._source: Path | WeightLoader | None = None
        self._options: dict[str, Any] = {}

    def _with(self, name: str, value: Any) -> Self:
        self._options[name] = value
        return self

    def weights(self, path: Path | WeightLoader) -> Self:
        """The model: a GGUF file, a safetensors file or index, a model directory, or an open loader."""
        self._source = path
        return self

    def config(self, config: Config) -> Self:
        """A `config.json` (path or contents) for safetensors weights without one."""
        return self._with("config", config)

    def device(self, device: str | Device) -> Self:
        """What to run on; see `rlx.devices()`."""
        return self._with("device", device)

    def max_seq(self, tokens: int) -> Self:
        """Context length in tokens, prompt and answer together."""
        return self._with("max_seq", tokens)

    def packed(self, packed: bool = True) -> Self:
        """Whether quantized weights stay quantized; False dequantizes them exactly and computes in float32.

        RLX unpacks a model into float32 memory here. rlx always keeps the single packed copy; only the arithmetic
        differs, so False is `precision("exact")`.
        """
        return self._with("precision", None if packed else "exact")

    def precision(self, precision: str) -> Self:
        """`exact` or `auto`."""
        return self._with("precision", precision)

    def sample(self, sample: Sample) -> Self:
        """Default sampling options of calls that give none; "recommended" for those in the model's files."""
        return self._with("sample", sample)

    def stream(self, on_token: OnToken | bool) -> Self:
        """Default callback for the tokens of calls that give none, or whether callbacks are called per token.

        True, the default, calls them for each token as it is generated. False calls them for all tokens after the last,
        as RLX does; such a callback cannot stop the generation.
        """
        return self._with("streams" if isinstance(on_token, bool) else "on_token", on_token)

    def profile(self, profile: ProfileLike) -> Self:
        """The compile profile of all programs: a file, a table, or a `CompileProfile`."""
        return self._with("profile", profile)

    def cache(self, cache: CompileCache) -> Self:
        """The compile cache; by default the one on disk that all runs share."""
        return self._with("cache", cache)

    def keep_packed(self, kept: bool = True) -> Self:
        """Whether to keep a packed copy of the weights in the compile cache's folder; later starts map it."""
        return self._with("keep_packed", kept)

    def compile_ahead(self, ahead: bool | Sequence[int] = True) -> Self:
        """Whether an idle runner compiles programs for later calls in the background; see `auto_runner`."""
        return self._with("compile_ahead", ahead)

    def threads(self, threads: int) -> Self:
        """Number of native worker threads."""
        return self._with("threads", threads)

    def kv_dtype(self, name: str) -> Self:
        """Type of the KV cache: `f32`, `f16`, `bf16`, `q8_0` or `q4_0`."""
        return self._with("kv_dtype", name)

    def mtp(self, enabled: bool = True) -> Self:
        """Whether `generate` uses MTP drafts by default."""
        return self._with("speculative", "mtp" if enabled else None)

    def mmproj(self, path: Path) -> Self:
        """A vision projector: always refused, since no family supports images yet.

        Raises:
            MultimodalError: always.
        """
        raise MultimodalError(
            f"the {self._name} takes text only, {path} is a vision projector", where="mmproj",
            hint="leave it out; `supports_multimodal` says whether a runner takes images",
        )  # fmt: skip

    def progress(self, progress: Progress) -> Self:
        """Callback that reports the progress of loading."""
        return self._with("progress", progress)

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
