"""Opens a model with the runner that fits: the architecture named in the file decides.

Runners stage, the entry point. The file's header is read first, so an unsupported architecture is reported by name
before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from os import PathLike
from typing import TYPE_CHECKING, cast

from rlx import runners, weights
from rlx.arguments import did_you_mean
from rlx.closing import on_error
from rlx.engine.opening.options import RunnerOptions, takes_options
from rlx.engine.opening.setup import choose_model, open_with
from rlx.errors import ConfigError, UnsupportedModelError, named_refusals
from rlx.models import ARCHITECTURES, MODEL_TYPES, SUPPORTED
from rlx.models.gguf_config import check_language_model
from rlx.models.registry import ENCODER_TYPES, ENCODERS, KNOWN_UNIMPLEMENTED, TWO_WAY
from rlx.runners.model import Model
from rlx.tracing import span

if TYPE_CHECKING:
    from rlx.engine.opening.options import ModelSource
    from rlx.weights.loader import WeightLoader

Progress = Callable[[str, int, int], None]
"""Progress callback: (what is being done, amount done, total).

Weights: ("packing weights", bytes, bytes). Programs: ("compiling the prefill program", 11, 31), counted in kernels.
"""


def _runner(family: str, name: str, about: str) -> type[Model]:
    """The runner class of a family. It differs from others in the family that it accepts."""
    return type(name, (Model,), {"FAMILY": family, "__doc__": about, "__module__": __name__})


#: Family -> its runner class, for `auto_runner` and for code that knows its model's family.
RUNNERS: dict[str, type[Model]] = {
    "llama32": _runner(
        "llama32", "Llama32Runner", "Llama 3 and models of the same architecture, Mistral and Mixtral among them."
    ),
    "qwen3": _runner("qwen3", "Qwen3Runner", "Qwen 2, 2.5 and 3, and Qwen 3 with experts."),
    "qwen35": _runner("qwen35", "Qwen35Runner", "Qwen 3.5, dense and with experts."),
    "gemma": _runner("gemma", "GemmaRunner", "Gemma 1 to 4: text, and the text part of models that take images."),
}
if TYPE_CHECKING:
    Llama32Runner = Model
    Qwen3Runner = Model
    Qwen35Runner = Model
    GemmaRunner = Model
else:
    Llama32Runner, Qwen3Runner, Qwen35Runner, GemmaRunner = RUNNERS.values()


def named_architecture(loader: WeightLoader) -> tuple[str, str, str | None]:
    """The architecture that the open file names.

    Returns:
        The metadata key, `general.architecture` in GGUF or `model_type` in `config.json`; its value; the row of
        `rlx.models.ARCHITECTURES`, None if rlx does not support the architecture.

    Raises:
        ConfigError: it names none.
        UnsupportedModelError: it is an mmproj file.
    """
    key = "general.architecture" if loader.format == "gguf" else "model_type"
    found = loader.metadata.get(key)
    if not isinstance(found, str) or not found:
        hint = "the file is not a language model, or its metadata is incomplete: download it again"
        raise ConfigError(f"'{key}' is {found!r}, expected the name of an architecture", where=loader.path, hint=hint)
    if loader.format == "gguf":
        check_language_model(loader.metadata, loader.path)
        return key, found, found if found in ARCHITECTURES else None
    return key, found, MODEL_TYPES[found][0] if found in MODEL_TYPES else None


def is_encoder(loader: WeightLoader) -> bool:
    """Whether an open file is of an encoder, or of a decoder that serves as one."""
    if loader.format == "gguf":
        found = loader.metadata.get("general.architecture")
        pools = found in SUPPORTED["gguf"] and loader.metadata.get(f"{found}.pooling_type")
        return found in ENCODERS or found in TWO_WAY or bool(pools)
    found = loader.metadata.get("model_type")
    says = weights.sentence_modules.says_embedding
    return found in ENCODER_TYPES or (found in SUPPORTED["safetensors"] and says(loader.path.parent))


def runner_class(loader: WeightLoader) -> type[Model]:
    """The runner class for the open file.

    Raises:
        ConfigError: the file names no architecture.
        UnsupportedModelError: rlx does not support the architecture; the message lists those that it supports.
    """
    key, found, arch = named_architecture(loader)
    if arch is not None:
        return RUNNERS[ARCHITECTURES[arch].runner]
    if is_encoder(loader):
        hint = "use `rlx embed` or `rlx rerank`, or in Python rlx.auto_runner(path).embed(texts)"
        raise UnsupportedModelError("the model is a text encoder: it generates no text", where=loader.path, hint=hint)
    supported = (*SUPPORTED[loader.format], *(ENCODERS if loader.format == "gguf" else ENCODER_TYPES))
    note = KNOWN_UNIMPLEMENTED.get(found.lower())
    said = f"known but not supported yet: {note}" if note else "unknown"
    near = "" if note else did_you_mean(found.lower(), supported, shown=str, otherwise="")
    hint = f"{near.capitalize()} Supported: {', '.join(supported)}".strip()
    raise UnsupportedModelError(f"the architecture '{found}' ({key}) is {said}", where=loader.path, hint=hint)


@named_refusals()
@takes_options(RunnerOptions)
def auto_runner(path: ModelSource | None = None, *, options: RunnerOptions) -> Model:
    """Opens a model and returns the runner for its family.

    Args:
        path: a GGUF file, a safetensors file or index, a directory that holds one model (`directory:QUANT` for one of
            several), the name of a model that was downloaded from the Hugging Face hub, `org/repo[:QUANT]`, or an open
            `WeightLoader`, which the runner then owns. By default the model that the profile names, else the one
            beside the profile, else the embedded demo model.
        options: the fields of `RunnerOptions`.

    Returns:
        For a text encoder an `EncoderRunner`, which embeds or reranks texts.

    Raises:
        AmbiguousModelError: the directory holds several models.
        ModelFileError: the file cannot be used; `UnsupportedModelError` lists the supported architectures.
        ArgumentError, ProfileError, TargetError: an option is out of its range.
        ResourceError: the system refuses memory, threads or file descriptors.
    """
    if isinstance(path, str | PathLike) or path is None:
        path = choose_model(path, options.profile).path
    with span("open the file", "open", path=str(path)):
        loader = open_with(path, options.config)
    with on_error(loader.close):
        if is_encoder(loader):
            return cast(Model, runners.EncoderRunner.from_path(loader, **vars(replace(options, config=None))))
        runner = runner_class(loader)
    return runner.from_path(loader, **vars(replace(options, config=None)))
