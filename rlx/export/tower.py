"""Describes the tower of a safetensors checkpoint as an `ExportModel`: the mmproj file beside the language model's.

Export stage, called by `convert`; `hf.py` describes the language model. Keys, names and the order of numbers follow
llama.cpp's converter.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy.typing as npt

from rlx.errors import INCOMPLETE, UnsupportedModelError, WeightError
from rlx.export.hf import general_metadata
from rlx.export.hf_config import TextConfig
from rlx.export.hf_tensors import Change, export_tensor
from rlx.export.model import ExportModel, ExportTensor
from rlx.export.tower_keys import tower_metadata
from rlx.export.tower_shapes import tower_shapes
from rlx.ir.dtypes import BF16, F16, F32, DType
from rlx.models.gguf_config import MMPROJ
from rlx.models.keys import Keys
from rlx.models.vision_config import VisionConfig
from rlx.models.vision_hf_config import vision_from_hf
from rlx.weights import WeightLoader
from rlx.weights.processor_files import image_processor
from rlx.weights.tower_names import checkpoint_names, tower_names

Array = npt.NDArray[Any]
AUDIO = "mm.a.input_projection.weight"
# Modules of towers for images, whose tensors must all be known; some Gemma 3 files have a head for classification.
_OF_A_TOWER = re.compile(r"(?:^|\.)(?:visual|vision_tower|vision_embedder|embed_vision|multi_modal_projector)\.")
_UNUSED = re.compile(r"vision_model\.head\.")
_LAYER = re.compile(r"v\.blk\.([0-9]+)\.")


def tower_config(source: WeightLoader) -> VisionConfig | None:
    """The configuration of a checkpoint's vision tower; None if it has none.

    Raises:
        ConfigError, UnsupportedModelError: it cannot be used.
        MultimodalError: rlx has no tower of this kind.
    """
    where = _folder(source) / "config.json"
    if not source.metadata.get("vision_config"):
        return None
    width = TextConfig(source.metadata, where).integer("hidden_size", (1, 1 << 20))
    return vision_from_hf(source.metadata, image_processor(where.parent), out_hidden=width, where=where)


def tower_from_hf(source: WeightLoader, config: VisionConfig) -> ExportModel:
    """Describes the tower of a checkpoint; reads no weights.

    Raises:
        WeightError: a tensor is missing, is there twice, or has another shape than the configuration says.
        UnsupportedModelError: a tensor that the family's towers do not have.
    """
    names = tower_names(source.tensors, config.family, source.path)
    _check(source, names, config)
    tensors = sorted(_tensors(source, config, names), key=_layer)
    audio = Keys(source.metadata, _folder(source) / "config.json").nested("audio_config") if AUDIO in names else None
    return ExportModel(
        path=source.path,
        arch=MMPROJ,
        metadata=general_metadata(MMPROJ, _folder(source), tensors, kind="mmproj") | tower_metadata(config, audio),
        tensors=tuple(tensors),
        left_out=tuple(name for name in source.tensors if name not in set(names.values())),
        close=source.close,
    )


def _folder(source: WeightLoader) -> Path:
    return source.path if source.path.is_dir() else source.path.parent


def _layer(tensor: ExportTensor) -> int:
    found = _LAYER.match(tensor.name)
    return int(found[1]) if found else -1


def _check(source: WeightLoader, names: Mapping[str, str], config: VisionConfig) -> None:
    """Compares the checkpoint's tensors with those that the configuration requires."""
    for canonical, shape in tower_shapes(config).items():
        if canonical not in names:
            tried = ", ".join(checkpoint_names(canonical, config.family))
            what = f"there is no tensor for {canonical}; names tried: {tried}"
            raise WeightError(what, where=source.path, hint=INCOMPLETE)
        found = source.tensors[names[canonical]].shape
        if found != shape:
            what = f"expected shape {list(shape)}, found {list(found)}"
            raise WeightError(what, where=f"{source.path}, {names[canonical]}")
    known = set(names.values())
    for name in source.tensors:
        if name not in known and _OF_A_TOWER.search(name) and not _UNUSED.search(name):
            hint = "leaving it out would change the model"
            what = f"{name!r} is no tensor of a {config.family} tower"
            raise UnsupportedModelError(what, where=source.path, hint=hint)
    for canonical in names:
        found_layer = _LAYER.match(canonical)
        if found_layer and int(found_layer[1]) >= config.layers:
            what = f"{names[canonical]} belongs to a layer beyond the {config.layers} of the configuration"
            raise UnsupportedModelError(what, where=source.path)


def _tensors(source: WeightLoader, config: VisionConfig, names: Mapping[str, str]) -> Iterator[ExportTensor]:
    for canonical, stored in names.items():
        info, raw = source.tensors[stored], partial(source.raw, stored)
        for name, change in _changes(config, canonical):
            tensor = export_tensor(name, info, raw, change, where=f"{source.path}, {stored}")
            yield replace(tensor, instead=_instead(config, name))


def _instead(config: VisionConfig, name: str) -> dict[DType, DType]:
    """llama.cpp convolves patches in F32 or, but for Gemma 3, in F16; it cannot turn Gemma 3's projection in BF16."""
    if name.startswith("v.patch_embd.weight"):
        return {BF16: F32, F16: F32} if config.family == "gemma3" else {BF16: F32}
    return {BF16: F16} if config.family == "gemma3" and name == "mm.input_projection.weight" else {}


def _changes(config: VisionConfig, canonical: str) -> Iterator[tuple[str, Change]]:
    """(name in an mmproj, conversion) of every output of the tensor with this canonical name."""
    side = config.patch * (config.merge if config.family == "gemma4_unified" else 1)
    if config.family == "qwen35" and canonical == "v.patch_embd.weight":  # [hidden, colour, frame, row, column]
        yield canonical, _frame(0)
        yield f"{canonical}.1", _frame(1)
    elif config.family == "gemma3" and canonical == "mm.soft_emb_norm.weight":
        yield canonical, Change(compute=lambda values: values + 1)  # the model multiplies by 1 + weight
    elif config.family == "gemma4" and canonical == "v.patch_embd.weight":
        yield canonical, Change(lambda shape: (shape[0], 3, side, side), lambda array: _planes(array, side))
    elif config.family == "gemma4_unified" and canonical.startswith(("v.patch_embd.weight", "v.patch_norm.1.")):
        yield canonical, Change(move=lambda array: _planes(array, side).reshape(array.shape))
    elif config.family == "gemma4_unified" and canonical == "v.position_embd.weight":
        yield canonical, Change(lambda shape: (shape[1], shape[0], shape[2]), lambda array: array.swapaxes(0, 1))
    else:  # the bounds of linear layers are single numbers
        yield canonical, Change(lambda shape: shape or (1,), lambda array: array.reshape(array.shape or (1,)))


def _frame(which: int) -> Change:
    return Change(lambda shape: (*shape[:2], *shape[3:]), lambda array: array[:, :, which])


def _planes(array: Array, side: int) -> Array:
    """Values of a patch [..., row, column, colour] as [..., colour, row, column]."""
    split = array.reshape(*array.shape[:-1], side, side, 3)
    moved: Array = split.swapaxes(-1, -2).swapaxes(-2, -3)
    return moved
