"""Downloads a model from the Hugging Face hub into the folder that all tools of the hub share.

Part of the weights stage, in front of `locate.py`, which finds what lies there. It says which files of a repository are
a model. Only `rlx pull` downloads, other commands after a question, and Python code that calls `pull`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from rlx.env import size
from rlx.errors import AmbiguousModelError, DownloadError, ModelFileError
from rlx.suggest import nearest
from rlx.weights import hub
from rlx.weights.download import Downloads, Progress
from rlx.weights.gguf import GgufFile
from rlx.weights.gguf_split import part_number
from rlx.weights.locate import PICKLES, SAFETENSORS, is_projector, quantization_of, split_quantization, usual_type
from rlx.weights.repository import RemoteFile, RemoteModel, Repository, look_up
from rlx.weights.safetensors import INDEX_NAME, SINGLE_NAME

Notice = Callable[[str], None]

PREFERRED = "Q4_K_M"
"""The quantization that is taken of several where none is named, as other tools do; a word says so."""
# What belongs to a checkpoint beside its weights.
_BESIDE = frozenset({
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja",
    "chat_template.json", "preprocessor_config.json", "processor_config.json",
})  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """A model that can be downloaded, and from where."""

    repository: Repository
    model: RemoteModel

    def fetch(self, progress: Progress | None = None, notice: Notice | None = None) -> Path:
        """Downloads it; arguments, result and errors as of `pull`."""
        say = notice or (lambda line: None)
        downloads = Downloads(self.repository, progress, say)
        path = downloads.fetch(self.model.files)[0]
        if tower := tower_of(self.repository, path):
            say(f"with its vision tower, {tower.name} ({size(tower.nbytes)})")
            downloads.fetch((tower,))
        return path


def plan(name: str, notice: Notice | None = None) -> Plan:
    """What `pull` would download: asks the hub, and downloads nothing."""
    repository, quantization = repository_of(name)
    return Plan(repository, choose(models_of(repository), quantization, repository, notice or (lambda line: None)))


def pull(name: str, progress: Progress | None = None, notice: Notice | None = None) -> Path:
    """Downloads a model; what is there already is not fetched again, and a broken download goes on where it ended.

    Args:
        name: `org/repo`, or `org/repo:QUANT`. Without QUANT the one model that there is, or of several GGUF files the
            one in Q4_K_M. With the GGUF file of a model that takes images comes its vision tower.
        progress: called with (what, bytes done, bytes in all).
        notice: called with a line for the user.

    Returns:
        The file to open: the GGUF file, the first part of a split one, the safetensors file or the index of its shards.

    Raises:
        DownloadError: no such repository or file, no access, no network, no room, or bytes that are not those of the
            repository.
        AmbiguousModelError: there are several models, and none of them is the usual one.
    """
    return plan(name, notice).fetch(progress, notice)


def repository_of(name: str) -> tuple[Repository, str | None]:
    """What the hub has under a name, `org/repo` or `org/repo:QUANT`, and the quantization; errors as of `pull`."""
    base, quantization = split_quantization(name)
    if not hub.is_name(base):
        raise DownloadError("this is no name of a repository", where=name, hint="write org/repo or org/repo:QUANT")
    return look_up(base), quantization


def tower_of(repository: Repository, model: Path) -> RemoteFile | None:
    """The mmproj file that goes with a downloaded GGUF file.

    None if the model takes no images, or the repository has no such file, or several that differ in more than their
    type.
    """
    from rlx.models.vision_config import VISION_FAMILIES

    if model.suffix.lower() != ".gguf":
        return None
    try:
        with GgufFile(model) as file:
            arch = file.metadata.get("general.architecture")
    except ModelFileError:  # whoever opens it reads why
        return None
    files = {f.name: f for f in repository.files if "/" not in f.name and f.name.lower().endswith(".gguf")}
    name = usual_type(name for name in files if is_projector(name))
    return files[name] if name and any(arch in row.archs for row in VISION_FAMILIES.values()) else None


def models_of(repository: Repository) -> list[RemoteModel]:
    """The models in a repository: GGUF files, the parts of one together, and a safetensors checkpoint."""
    groups: dict[str, list[RemoteFile]] = {}
    for file in sorted(repository.files, key=lambda file: file.name):
        if file.name.lower().endswith(".gguf") and not is_projector(file.name):
            part = part_number(PurePosixPath(file.name).name)
            whole = str(PurePosixPath(file.name).with_name(part[0])) if part else file.name
            groups.setdefault(whole, []).append(file)
    models = [RemoteModel(quantization_of(name), tuple(files)) for name, files in groups.items()]
    at_top = {file.name: file for file in repository.files if "/" not in file.name}
    first = next((at_top[name] for name in (SINGLE_NAME, INDEX_NAME) if name in at_top), None)
    if first is not None:
        shards = [f for n, f in at_top.items() if n.endswith(".safetensors")] if first.name == INDEX_NAME else []
        beside = [file for name, file in sorted(at_top.items()) if name in _BESIDE]
        models.append(RemoteModel(SAFETENSORS, (first, *shards, *beside)))
    return models


def choose(models: list[RemoteModel], quantization: str | None, repository: Repository, say: Notice) -> RemoteModel:
    """The model that is meant; see `pull`."""
    if not models:
        pickles = any(file.name.lower().endswith(PICKLES) for file in repository.files)
        hint = "its weights are pickles, which rlx does not read" if pickles else "look for one with GGUF in its name"
        raise DownloadError("the repository holds no GGUF file and no safetensors", where=repository.name, hint=hint)
    listed = ", ".join(map(str, models))
    labels = [str(model.quantization) for model in models]
    if quantization is not None:
        fitting = [model for model in models if str(model.quantization).upper() == quantization.upper()]
        if not fitting:
            close = nearest(quantization.upper(), labels)
            hint = f"did you mean {repository.name}:{close[0]}? There are {listed}" if close else f"there are {listed}"
            raise DownloadError(f"it has no model in {quantization}", where=repository.name, hint=hint)
    else:
        fitting = models if len(models) == 1 else [m for m in models if m.quantization == PREFERRED]
        if len(models) > 1 and len(fitting) == 1:
            others = ", ".join(str(model) for model in models if model is not fitting[0])
            say(f"taking {fitting[0]}; there are also {others}")
    if len(fitting) == 1:
        return fitting[0]
    example = f"{repository.name}:{next((q for q in labels if labels.count(q) == 1), 'QUANT')}"
    what, hint = f"it holds {len(models)} models: {listed}", f"choose one, such as {example}"
    raise AmbiguousModelError(what, where=repository.name, hint=hint, example=example)
