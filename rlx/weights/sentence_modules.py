"""What a sentence-transformers folder, or a GGUF file, says about vectors: pooling, dense layers, prompts.

Weights stage, over the open file. The dense layers of a folder have files of their own, which `WithDense` adds to the
checkpoint under the names that GGUF has for them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rlx import json_file
from rlx.errors import ConfigError, ModelFileError, UnsupportedModelError, file_error
from rlx.weights.loader import LoaderOver, WeightLoader
from rlx.weights.mapped import Bytes
from rlx.weights.safetensors import SafetensorsFile

POOLINGS = ("mean", "cls", "last", "max")
GGUF_POOLINGS = {1: "mean", 2: "cls", 3: "last"}
RANK = 4  # pooling_type of a GGUF file with a classifier
_KEYS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "last",
}
_ACTIVATIONS = {"Identity": None, "Tanh": "tanh", "ReLU": "relu", "GELU": "gelu_erf", "SiLU": "silu"}
_FIRST_DENSE, _MOST_DENSE = 2, 2  # dense_2 and dense_3


@dataclass(frozen=True)
class SentenceModules:
    """What turns hidden states into a vector.

    Attributes:
        pooling: one of `POOLINGS`; None: the files do not say.
        lacks: the file that should say it.
        dense: (name of its tensors, activation) of each dense layer behind the pooling.
        folders: where the dense layers are, in a checkpoint.
        prompts: texts to put before a text, by name.
        default_prompt: the name of the one that is put before every text; None for none.
        max_tokens: where texts are cut, when they may be; None: at the model's positions.
    """

    pooling: str | None = None
    lacks: str = "modules.json"
    dense: tuple[tuple[str, str | None], ...] = ()
    folders: tuple[Path, ...] = ()
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    max_tokens: int | None = None


def sentence_modules(loader: WeightLoader) -> SentenceModules:
    """What the files of a model say.

    Raises:
        ConfigError: a file is malformed.
        UnsupportedModelError: a module, an activation or a pooling is not supported.
    """
    return _from_gguf(loader) if loader.format == "gguf" else _from_folder(loader.path.parent)


def says_embedding(folder: Path) -> bool:
    """Whether the files of a checkpoint say that it makes vectors or scores, whatever its architecture."""
    return any(kind == "Pooling" for _, kind in _modules(folder / "modules.json"))


def _from_gguf(loader: WeightLoader) -> SentenceModules:
    arch = loader.metadata.get("general.architecture")
    key = f"{arch}.pooling_type"
    found = loader.metadata.get(key, 0)
    if not isinstance(found, int) or found not in (0, RANK, *GGUF_POOLINGS):
        known = ", ".join(f"{number} ({name})" for number, name in GGUF_POOLINGS.items())
        raise UnsupportedModelError(f"'{key}' is {found!r}: known are {known}, {RANK} (rank)", where=loader.path)
    names = [f"dense_{i}" for i in range(_FIRST_DENSE, _FIRST_DENSE + _MOST_DENSE)]
    dense = tuple((name, None) for name in names if f"{name}.weight" in loader.tensors)
    return SentenceModules(GGUF_POOLINGS.get(found), f"the key '{key}'", dense)


def _from_folder(folder: Path) -> SentenceModules:
    modules, found = _modules(folder / "modules.json"), SentenceModules()
    for path, kind in modules:
        place = _place(folder, path)
        if kind == "Pooling":
            config = place / "config.json"
            pooling = _pooling(json_file.read_object(config, ConfigError), config) if config.is_file() else None
            found = replace(found, pooling=pooling, lacks=f"{path}/config.json")
        elif kind == "Dense":
            name = f"dense_{_FIRST_DENSE + len(found.dense)}"
            dense = (*found.dense, (name, _activation(place / "config.json")))
            found = replace(found, dense=dense, folders=(*found.folders, place))
        elif kind not in ("Transformer", "Normalize"):
            raise UnsupportedModelError(f"the module {kind!r} is not supported", where=folder / "modules.json")
    if len(found.dense) > _MOST_DENSE:
        what = f"there are {len(found.dense)} dense layers, at most {_MOST_DENSE} are supported"
        raise UnsupportedModelError(what, where=folder / "modules.json")
    return _with_prompts(found, folder)


def _place(folder: Path, path: str) -> Path:
    """The folder of a module, which may be missing."""
    place = folder / path
    if ".." in place.parts or Path(path).is_absolute():
        raise ConfigError(f"the path {path!r:.80} leads out of the folder", where=folder / "modules.json")
    try:
        place.exists()
    except OSError as error:
        what = f"the folder {path!r:.80} of a module cannot be read"
        raise file_error(ConfigError, what, error, folder / "modules.json") from error
    return place


def _modules(file: Path) -> list[tuple[str, str]]:
    """(path, name of the class) of each module in order."""
    if not file.is_file():
        return []
    try:
        rows = json.loads(json_file.read_text(file, ConfigError))
        return [(str(row["path"]), str(row["type"]).rpartition(".")[2]) for row in rows]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        what = f"expected a list of objects with 'path' and 'type' ({error})"
        raise ConfigError(what, where=file) from error


def _pooling(config: Mapping[str, Any], where: Path) -> str:
    mode = config.get("pooling_mode")
    chosen = [mode] if isinstance(mode, str) else [key for key, on in config.items() if "pooling_mode" in key and on]
    names = ["last" if mode == "lasttoken" else _KEYS.get(mode, mode) for mode in chosen]
    if len(names) != 1 or names[0] not in POOLINGS:
        known = ", ".join(POOLINGS)
        what = f"the pooling is {' and '.join(map(str, chosen)) or 'none'}: one of {known} is supported"
        raise UnsupportedModelError(what, where=where)
    if config.get("include_prompt") is False:
        raise UnsupportedModelError("a pooling without the tokens of the prompt is not supported", where=where)
    return str(names[0])


def _activation(file: Path) -> str | None:
    name = str(json_file.read_object(file, ConfigError).get("activation_function", "Tanh")).rpartition(".")[2]
    if name not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise UnsupportedModelError(f"the activation {name!r} is not supported, only {known}", where=file)
    return _ACTIVATIONS[name]


def _with_prompts(found: SentenceModules, folder: Path) -> SentenceModules:
    file, sizes = folder / "config_sentence_transformers.json", folder / "sentence_bert_config.json"
    if sizes.is_file():
        most = json_file.read_object(sizes, ConfigError).get("max_seq_length")
        if most is not None and (type(most) is not int or most <= 0):
            raise ConfigError(f"'max_seq_length' is {most!r}, expected a number above 0", where=sizes)
        found = replace(found, max_tokens=most)
    if not file.is_file():
        return found
    config = json_file.read_object(file, ConfigError)
    prompts, default = config.get("prompts") or {}, config.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise ConfigError("'prompts' is no object of texts", where=file)
    if default is not None and not (isinstance(default, str) and default in prompts):
        raise ConfigError(f"'default_prompt_name' is {default!r:.80}, which is none of the prompts", where=file)
    return replace(found, prompts=prompts, default_prompt=default)


class WithDense(LoaderOver):
    """A `WeightLoader` with the tensors of the dense layers that stand in folders beside it.

    Args:
        loader: the checkpoint; closed with this object.
        modules: of its folder.

    Raises:
        ModelFileError: the file of a layer is missing or malformed.
    """

    def __init__(self, loader: WeightLoader, modules: SentenceModules) -> None:
        super().__init__(loader, loader.tensors)
        self._own: dict[str, tuple[WeightLoader, str]] = {}
        self._files: list[WeightLoader] = []
        try:
            for (name, _), folder in zip(modules.dense, modules.folders, strict=True):
                self._add(name, folder)
        except BaseException:
            for file in self._files:
                file.close()
            raise

    def _add(self, name: str, folder: Path) -> None:
        path = folder / "model.safetensors"
        if not path.is_file():
            hint = "download the whole repository: the dense layer has a file of its own"
            raise ModelFileError("the file is missing", where=path, hint=hint)
        file = SafetensorsFile(path, config={"model_type": "dense"})
        self._files.append(file)
        own = {f"{name}.{stored.removeprefix('linear.')}": stored for stored in file.tensors}
        self._own |= {full: (file, stored) for full, stored in own.items()}
        added = {full: replace(file.tensors[stored], name=full) for full, stored in own.items()}
        self.tensors = {**self.tensors, **added}

    def raw(self, name: str) -> Bytes:
        file, stored = self._own.get(name, (self.loader, name))
        return file.raw(stored)

    def release(self, name: str) -> None:
        file, stored = self._own.get(name, (self.loader, name))
        file.release(stored)

    def stamps(self) -> list[tuple[str, int, int]]:
        return [stamp for file in (self.loader, *self._files) for stamp in file.stamps()]

    def close(self) -> None:
        for file in (self.loader, *self._files):
            file.close()
