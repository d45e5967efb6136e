"""Describes the tower of a safetensors checkpoint as an `ExportModel`: the mmproj file beside the language model's.

Export stage, called by `convert`; `hf.py` describes the language model. Keys, names and the order of numbers follow
llama.cpp's converter.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from math import isqrt
from pathlib import Path
from typing import Any

import numpy.typing as npt

from rlx.errors import UnsupportedModelError
from rlx.export.hf import general_metadata
from rlx.export.hf_config import Metadata, TextConfig, Writer
from rlx.export.hf_tensors import Change, export_tensor
from rlx.export.model import ExportModel, ExportTensor
from rlx.ir.dtypes import BF16, F16, F32, DType
from rlx.models.gguf_config import MMPROJ
from rlx.models.vision_config import MERGE, VISION_FAMILIES, VisionConfig, vision_from_hf
from rlx.passes.capabilities import Layouts
from rlx.vision.tower import tower_table
from rlx.vision.weights import TowerWeights, tower_names
from rlx.weights import WeightLoader
from rlx.weights.locate import image_processor

_ANY_SIZE = 224  # readers want an image_size of families whose images have any; nothing depends on it
_MOST = (1 << 32) - 1  # the largest number that a key of type u32 holds


def tower_metadata(config: VisionConfig) -> Metadata:
    """The keys `clip.*`."""
    keys = Writer("clip")
    keys.flag("has_vision_encoder", True)
    _sizes(keys, config)
    keys.floats("vision.image_mean", config.mean)
    keys.floats("vision.image_std", config.std)
    _limits(keys, config)
    projector = VISION_FAMILIES[config.family].projector
    if config.family.startswith("gemma4"):  # a file with audio has two projectors
        keys.text("vision.projector_type", projector)
    else:
        keys.text("projector_type", projector)
        keys.flag("use_gelu", True)
    keys.f32("vision.attention.layer_norm_epsilon", config.eps)
    if config.family == "qwen35":
        keys.u32("vision.spatial_merge_size", config.merge)
        keys.flags("vision.is_deepstack_layers", [layer in config.deepstack for layer in range(config.layers)])
    elif config.merge != MERGE[config.family]:
        keys.u32("vision.projector.scale_factor", config.merge)
    return keys.found


def _sizes(keys: Writer, config: VisionConfig) -> None:
    square = isqrt(config.positions) * config.patch if config.family == "qwen35" else _ANY_SIZE
    keys.u32("vision.projection_dim", config.out_hidden)
    keys.u32("vision.image_size", config.image_size or square)
    keys.u32("vision.patch_size", config.patch)
    keys.u32("vision.embedding_length", config.hidden)
    keys.u32("vision.feed_forward_length", config.ffn)
    keys.u32("vision.block_count", config.layers)
    keys.u32("vision.attention.head_count", config.heads)
    if config.heads and config.head_dim != config.hidden // config.heads:
        keys.u32("vision.attention.head_dim", config.head_dim)


def _limits(keys: Writer, config: VisionConfig) -> None:
    """Limits of an image's area in pixels; the budget of Gemma 4 is an area too."""
    most = config.max_pixels or config.budget * (config.merge * config.patch) ** 2
    for key, pixels in (("vision.image_min_pixels", config.min_pixels), ("vision.image_max_pixels", most)):
        if pixels:
            keys.u32(key, min(pixels, _MOST))


Array = npt.NDArray[Any]
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
    names = tower_names(source.tensors, config.family, source.path, config.deepstack)
    _check(source, names, config)
    tensors = sorted(_tensors(source, config, names), key=lambda tensor: _layer(tensor.name))
    return ExportModel(
        path=source.path,
        arch=MMPROJ,
        metadata=general_metadata(MMPROJ, _folder(source), tensors, kind="mmproj") | tower_metadata(config),
        tensors=tuple(tensors),
        left_out=tuple(name for name in source.tensors if name not in set(names.values())),
        close=source.close,
    )


def _folder(source: WeightLoader) -> Path:
    return source.path if source.path.is_dir() else source.path.parent


def _layer(name: str) -> int:
    found = _LAYER.match(name)
    return int(found[1]) if found else -1


def _check(source: WeightLoader, names: Mapping[str, str], config: VisionConfig) -> None:
    """Builds the tower's graphs, which name a tensor that they lack, and looks for what would be left out."""
    tower_table(config, TowerWeights(source, config, owned=False), Layouts())
    known = set(names.values())
    for name in source.tensors:
        if name not in known and _OF_A_TOWER.search(name) and not _UNUSED.search(name):
            hint = "leaving it out would change the model"
            what = f"{name!r} is no tensor of a {config.family} tower"
            raise UnsupportedModelError(what, where=source.path, hint=hint)
    for canonical in names:
        if _layer(canonical) >= config.layers:
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
