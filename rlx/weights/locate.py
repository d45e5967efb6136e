"""From what a user calls a model to its file: a path, a directory, or a name on the Hugging Face hub.

First step of the weights stage, in front of `loader.py`. Of several models none is chosen: the error lists them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rlx import demo, weights
from rlx.arguments import nearest
from rlx.env import size
from rlx.errors import AmbiguousModelError, ArgumentError, ConfigError, ModelFileError, file_error
from rlx.json_file import JsonObject, read_object
from rlx.weights.gguf import part_number

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
SUFFIXES = (".gguf", ".safetensors", ".safetensors.index.json")
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
NO_PICKLES = (
    "pickled weights can run any code when loaded, so rlx does not read them; "
    "use the model's safetensors or GGUF files, or convert them (`safetensors.torch.save_file`)"
)
GIVE = "give a .gguf file, a .safetensors file or a directory that holds one"
SAFETENSORS = "safetensors"
_LISTED = 12  # models in an error
_QUANTIZATION = re.compile(
    r"(?<![A-Z0-9])(?:UD-)?(?:I?Q[1-8](?:_[A-Z0-9]+)*|TQ[12]_0|MXFP4(?:_MOE)?|NVFP4|BF16|FP?16|FP?32)(?![A-Z0-9])",
    re.IGNORECASE,
)


# Types of the mmproj files that are published of one tower: the usual one first, then those that round more.
_TOWER_TYPES = ("F16", "BF16", "F32", "Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q4_0")


@dataclass(frozen=True)
class FoundModel:
    """A model in a directory.

    Attributes:
        path: the file to open: of a split model its first part that is there, of safetensors shards their index.
        files: with its weights: `path`, all parts, or all shards and their index.
        quantization: what the name says about its type, such as "Q4_K_M"; "safetensors" for a checkpoint; None where
            the name says nothing.
    """

    path: Path
    quantization: str | None
    files: tuple[Path, ...]

    @property
    def nbytes(self) -> int:
        """Size of all its files."""
        return sum(file.stat().st_size for file in self.files)

    def __str__(self) -> str:
        facts = [self.quantization] if self.quantization else []
        return f"{self.path.name} ({', '.join([*facts, size(self.nbytes)])})"


def resolve_model_path(path: str | os.PathLike[str]) -> Path:
    """The file that `path` means.

    Args:
        path: a file; a directory that holds one model (vision projectors do not count); "demo" or "demo-vision", the
            embedded models; or the name of a model on the Hugging Face hub, `org/repo`, that was downloaded. `:QUANT`
            behind a directory or a name chooses one of several, such as `models/qwen3:Q8_0`.

    Raises:
        AmbiguousModelError: there are several models, and nothing chooses.
        ArgumentError: `path` is no path.
        ModelFileError: nothing there, or no weights in the directory.
    """
    given: object = path
    if not isinstance(given, str | os.PathLike):
        hint = f'{GIVE}, such as "model.gguf"'
        raise ArgumentError(f"expected a path or a name, found {path!r:.80}", where="model", hint=hint)
    text = os.fspath(path)
    if not text:
        raise ModelFileError("the path is empty", hint=GIVE)
    try:
        found = Path(text).expanduser()
        if found.exists():
            return _in_directory(found, None) if found.is_dir() else found
        if text in demo.FILES:
            return demo.path(text)
        base, quantization = split_quantization(text)
        if quantization and (directory := Path(base).expanduser()).is_dir():
            return _in_directory(directory, quantization)
        if weights.hub.is_name(base) and not base.lower().endswith(SUFFIXES):
            return _downloaded(base, quantization)
        raise _missing(found)
    except (OSError, RuntimeError, ValueError) as error:
        raise file_error(ModelFileError, "the path cannot be read", error, Path(text)) from error


def split_quantization(text: str) -> tuple[str, str | None]:
    """`models/qwen3:Q8_0` -> ("models/qwen3", "Q8_0"); without a colon in the last part (text, None)."""
    base, colon, quantization = text.rpartition(":")
    return (base, quantization) if colon and quantization and not re.search(r"[/\\\s]", quantization) else (text, None)


def can_be_downloaded(text: str) -> bool:
    """Whether a text names a model as on the Hugging Face hub, and neither a file nor a typing error of one."""
    base, _ = split_quantization(text)
    path = Path(base).expanduser()
    return weights.hub.is_name(base) and not base.lower().endswith(SUFFIXES) and not path.exists() and not _close(path)


def is_model(text: str) -> bool:
    """Whether a text means a model rather than words: it is called like one, is a directory with one, or was
    downloaded under this name.
    """
    try:
        if not text:
            return False
        if text in demo.FILES or (" " not in text and text.lower().endswith(SUFFIXES)):
            return True
        base, _ = split_quantization(text)
        directory = Path(base).expanduser()
        if directory.is_dir():
            return bool(models_in(directory))
        return weights.hub.is_name(base) and weights.hub.snapshot(base) is not None
    except (OSError, RuntimeError, ValueError):  # too long for a path, or with a NUL
        return False


def models_in(directory: Path, deep: bool = False) -> list[FoundModel]:
    """The models in a directory, by name.

    Args:
        deep: those of its subdirectories too, where repositories keep split models.
    """
    files = sorted(entry for entry in (directory.rglob("*") if deep else directory.iterdir()) if entry.is_file())
    parts = _gguf_parts(files)
    models = [FoundModel(group[0], quantization_of(whole.name), tuple(group)) for whole, group in parts.items()]
    models = [model for model in models if not is_projector(model.path.name)] or models
    for name in (SINGLE_NAME, INDEX_NAME):
        if (directory / name).is_file():
            shards = [file for file in files if file.suffix == ".safetensors" and file.parent == directory]
            path = directory / name
            return [*models, FoundModel(path, SAFETENSORS, tuple(dict.fromkeys([path, *shards])))]
    return models


def usual_type(names: Iterable[str]) -> str | None:
    """Of mmproj files that differ in the type of their weights only, the name of the one that is taken; None if they
    differ in more.
    """
    by_type = {quantization_of(name): name for name in names}
    if len({name.upper().replace(kind or "", "") for kind, name in by_type.items()}) != 1:
        return None
    return next(by_type[kind] for kind in (*_TOWER_TYPES, *by_type) if kind in by_type)


def projectors_in(directory: Path) -> list[Path]:
    """The mmproj files in a directory by name: GGUF files with the vision towers of models. Of a split one the first
    part; an unreadable directory has none.
    """
    try:
        files = sorted(entry for entry in directory.iterdir() if entry.is_file() and is_projector(entry.name))
    except OSError:
        return []
    return [group[0] for group in _gguf_parts(files).values()]


def _gguf_parts(files: Iterable[Path]) -> dict[Path, list[Path]]:
    """The GGUF files among `files` by whole: the parts of a split file count as one."""
    parts: dict[Path, list[Path]] = {}
    for file in files:
        if file.name.lower().endswith(".gguf"):
            part = part_number(file.name)
            parts.setdefault(file.with_name(part[0]) if part else file, []).append(file)
    return parts


def quantization_of(name: str) -> str | None:
    """What a file's name says about the type of its weights, in capitals."""
    found = _QUANTIZATION.findall(name)
    return found[-1].upper() if found else None


def is_projector(name: str) -> bool:
    """Whether a GGUF file's name says that it belongs to a vision model's other half."""
    return "mmproj" in name.lower()


def choose(models: list[FoundModel], quantization: str | None, where: str | Path) -> FoundModel:
    """The one model, or the one of that quantization.

    Args:
        where: what the user named: a directory or a repository.

    Raises:
        AmbiguousModelError: several fit.
        ModelFileError: none fits.
    """
    fitting = [m for m in models if quantization in (None, m.quantization) or _is_called(m, quantization)]
    if len(fitting) == 1:
        return fitting[0]
    listed = ", ".join(map(str, models[:_LISTED])) + (f" and {len(models) - _LISTED} more" if models[_LISTED:] else "")
    if not fitting:
        raise ModelFileError(f"there is no {quantization} model here", where=where, hint=f"there is {listed}")
    what = f"there are {len(fitting)} models here: {listed}"
    example = str(fitting[0].path)
    labels = [model.quantization for model in models]
    if labels.count(fitting[0].quantization) == 1 and fitting[0].quantization:
        example = f"{where}:{fitting[0].quantization}"
    paths = tuple(model.path for model in fitting)
    raise AmbiguousModelError(what, where=where, hint=f"choose one, such as {example}", choices=paths, example=example)


def _is_called(model: FoundModel, quantization: str | None) -> bool:
    return (model.quantization or "").upper() == (quantization or "").upper()


def _in_directory(directory: Path, quantization: str | None) -> Path:
    models = models_in(directory)
    if models:
        return choose(models, quantization, directory).path
    what = f"the directory holds no {SINGLE_NAME}, no {INDEX_NAME} and no .gguf file; it holds {_listing(directory)}"
    if any(entry.name.lower().endswith(PICKLES) for entry in directory.iterdir()):
        raise ModelFileError(what, where=directory, hint=NO_PICKLES)
    raise ModelFileError(what, where=directory, hint="give the path of the model file itself")


def _downloaded(repo: str, quantization: str | None) -> Path:
    """The file of a model that was downloaded from the hub; `ModelFileError` if it was not."""
    name = f"{repo}:{quantization}" if quantization else repo
    folder = weights.hub.snapshot(repo)
    models = [] if folder is None else models_in(folder, deep=True)
    if not models:
        what = "there is no such file or directory, and no model of this name was downloaded"
        hint = f"`rlx pull {name}` downloads it, if the Hugging Face hub has it"
        close = _close(Path(repo).expanduser())
        raise ModelFileError(what, where=name, hint=f"did you mean {close[0]}?" if close else hint)
    if quantization and not any(_is_called(model, quantization) for model in models):
        there = ", ".join(map(str, models))
        what = f"of {repo} only {there} was downloaded"
        raise ModelFileError(what, where=name, hint=f"`rlx pull {name}` downloads it, if the Hugging Face hub has it")
    return choose(models, quantization, repo).path


def _missing(path: Path) -> ModelFileError:
    if path.is_symlink():
        what = f"it is a link to {path.readlink()}, which leads to nothing"
        return ModelFileError(what, where=path, hint="make it again, or name the file itself")
    close = _close(path)
    if close:
        hint = f"did you mean {' or '.join(map(str, close))}?"
    elif not path.parent.is_dir():
        hint = f"the directory {path.parent} is not there either"
    else:
        hint = GIVE
    return ModelFileError("there is no such file or directory", where=path, hint=hint)


def _close(path: Path) -> list[Path]:
    """Models and directories beside `path` that are called nearly like it."""
    if not path.parent.is_dir():
        return []
    names = [each.name for each in path.parent.iterdir() if each.name.lower().endswith(SUFFIXES) or each.is_dir()]
    return [path.parent / name for name in nearest(path.name, names, 3)]


def _listing(directory: Path) -> str:
    names = sorted(entry.name + "/" * entry.is_dir() for entry in directory.iterdir())
    return ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "") or "nothing"


_OWN, _JOINT = "preprocessor_config.json", "processor_config.json"


def image_processor(folder: Path) -> JsonObject:
    """The configuration of a checkpoint's image processor: `preprocessor_config.json` or, as transformers 5 saves it,
    the key `image_processor` of `processor_config.json`, which counts more; {} without both.

    Raises:
        ConfigError: a file is malformed.
    """
    found = read_object(folder / _OWN, ConfigError) if (folder / _OWN).exists() else {}
    joint = read_object(folder / _JOINT, ConfigError).get("image_processor") if (folder / _JOINT).exists() else None
    return {**found, **joint} if isinstance(joint, dict) else found
