"""Finds and opens the vision tower of a text model: in the same checkpoint, or in an mmproj file beside a GGUF file.

Vision stage, in front of `tower.py`. A tower is opened at first use, so that text alone pays nothing for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Lock
from typing import Any

from rlx.closing import on_error
from rlx.errors import ModelFileError, MultimodalError, RlxError
from rlx.models.config import ModelConfig
from rlx.models.vision_config import VISION_FAMILIES, VisionConfig, vision_from_gguf, vision_from_hf
from rlx.vision.tower import Tower
from rlx.vision.weights import TowerWeights
from rlx.weights.loader import WeightLoader, open_weights
from rlx.weights.locate import image_processor, projectors_in, usual_type

Make = Callable[[VisionConfig, TowerWeights], Tower]
MmprojPath = str | os.PathLike[str]


class Vision:
    """The vision tower of one model, if it has one.

    Args:
        loader: the open file of the text model.
        text: its configuration.
        mmproj: the file with the tower, or None: then it is found.
        make: makes the tower of a file.

    Raises:
        ModelFileError, MultimodalError: the file `mmproj` cannot be used. A file that was found is not opened yet:
            what is wrong with it is said by `required`.
    """

    def __init__(self, loader: WeightLoader, text: ModelConfig, mmproj: MmprojPath | None, make: Make) -> None:
        self._loader, self._text, self._mmproj, self._make = loader, text, mmproj, make
        self._tower: Tower | None = None
        self._refusal: RlxError | None = None
        self._lock = Lock()  # callers and the engine's loop ask
        if mmproj is not None:
            self.required()

    @property
    def tower(self) -> Tower | None:
        """The tower; None if the model has none that can be used, and `required` says why."""
        with self._lock:
            if self._tower is None and self._refusal is None:
                try:
                    self._tower = self._open()
                except RlxError as error:
                    self._refusal = error
            return self._tower

    @property
    def opened(self) -> Tower | None:
        """The tower if it was opened already."""
        return self._tower

    def required(self) -> Tower:
        """The tower, for a caller who has an image.

        Raises:
            MultimodalError: the model has no tower, there are several files that could hold it, or it is of another
                model.
            ModelFileError: the tower's file cannot be used.
        """
        tower = self.tower
        if tower is None:
            assert self._refusal is not None
            raise self._refusal
        return tower

    def close(self) -> None:
        """Releases the tower's memory and closes its file."""
        if self._tower:
            self._tower.close()

    def _open(self) -> Tower:
        config, weights = open_tower(self._loader, self._text, self._mmproj)
        with on_error(weights.close):
            return self._make(config, weights)


def open_tower(
    loader: WeightLoader, text: ModelConfig, mmproj: MmprojPath | None = None
) -> tuple[VisionConfig, TowerWeights]:
    """The configuration and the tensors of a model's tower.

    Args:
        loader: the open file of the text model.
        text: its configuration.
        mmproj: the GGUF file that holds the tower; by default the only one beside the text model.

    Raises:
        MultimodalError: there is no tower, or more than one, or it is of another model.
        ModelFileError: the tower's file cannot be used.
    """
    if loader.format == "gguf":
        return _open_mmproj(loader, text, _found(loader, text) if mmproj is None else mmproj)
    if mmproj is not None:
        what = "an mmproj file goes with a GGUF file of the text model, and this model is a safetensors checkpoint"
        raise MultimodalError(what, where=mmproj, hint="leave it out: a checkpoint holds its own tower")
    config = vision_from_hf(
        loader.metadata, image_processor(loader.path.parent), out_hidden=text.hidden, where=loader.path
    )
    if config is None:
        raise MultimodalError("the model takes text only: its config.json has no vision tower", where=loader.path)
    weights = TowerWeights(loader, config, owned=False)
    if not weights.has("v.patch_embd.weight"):
        what = "the checkpoint holds no tensors of the vision tower that its config.json describes"
        raise MultimodalError(what, where=loader.path, hint="use the complete checkpoint")
    return config, weights


def _found(loader: WeightLoader, text: ModelConfig) -> Path:
    """The mmproj file beside a GGUF file.

    It is the one called like the model, as `rlx convert` calls it, or the only one whose tower fits, or of files that
    differ in the type of their weights only the one in the usual type.
    """
    if not any(text.arch in row.archs for row in VISION_FAMILIES.values()):
        raise MultimodalError(f"models of the architecture '{text.arch}' take text only", where=loader.path)
    folder = loader.path.parent
    files = projectors_in(folder)
    if (
        not files and folder.parent.parent.name == "snapshots"
    ):  # the parts of a downloaded model have a folder of their own
        files = projectors_in(folder.parent)
    if not files:
        hint = "put the model's mmproj-*.gguf beside it, or give its path as `mmproj`"
        what = "there is no vision tower: no mmproj file lies beside the model"
        raise MultimodalError(what, where=loader.path, hint=hint)
    own = [file for file in files if file.name == f"mmproj-{loader.path.name}"]
    if len(own or files) == 1:
        return (own or files)[0]
    fitting = {file.name: file for file in files if _fits(loader, text, file)}
    if name := usual_type(fitting):
        return fitting[name]
    listed = ", ".join(each.name for each in files)
    what = f"there are {len(files)} mmproj files beside the model: {listed}"
    raise MultimodalError(what, where=loader.path, hint="give the path of one as `mmproj`")


def _fits(loader: WeightLoader, text: ModelConfig, path: Path) -> bool:
    """Whether a file can be opened and holds a tower for the model."""
    try:
        _open_mmproj(loader, text, path)[1].close()
    except (MultimodalError, ModelFileError):
        return False
    return True


def _open_mmproj(loader: WeightLoader, text: ModelConfig, path: MmprojPath) -> tuple[VisionConfig, TowerWeights]:
    file = open_weights(path)
    with on_error(file.close):
        if file.format != "gguf":
            hint = "give the mmproj-*.gguf of the model"
            raise MultimodalError("this is no mmproj file but a safetensors checkpoint", where=file.path, hint=hint)
        config = mmproj_config(file, loader.metadata)
        _check_pair(config, text, file.path)
        return config, TowerWeights(file, config, owned=True)


def mmproj_config(file: WeightLoader, text: Mapping[str, Any]) -> VisionConfig:
    """The configuration of the tower in an open mmproj file; `text` are the keys of the text model's file."""
    tensors = file.tensors
    return vision_from_gguf(
        file.metadata, lambda name: tensors[name].shape if name in tensors else None, text, where=file.path
    )


def _check_pair(config: VisionConfig, text: ModelConfig, where: Path) -> None:
    """Checks that a tower belongs to a text model, as far as family and width say."""
    archs, hint = VISION_FAMILIES[config.family].archs, "use the mmproj file that was made with the model's GGUF file"
    if text.arch not in archs:
        what = f"the tower is for models of {' or '.join(archs)}, and the model is of {text.arch}"
        raise MultimodalError(what, where=where, hint=hint)
    if len(config.deepstack) != text.deepstack:
        what = f"the tower gives rows for {len(config.deepstack)} further layers, and the model takes {text.deepstack}"
        raise MultimodalError(what, where=where, hint=hint)
    if config.out_hidden != text.hidden:
        what = f"the tower gives rows of {config.out_hidden} numbers, and the model's have {text.hidden}"
        raise MultimodalError(what, where=where, hint=hint)
