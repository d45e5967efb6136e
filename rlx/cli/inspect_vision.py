"""`rlx inspect` of vision towers: an mmproj file by itself, or the tower of a model.

Reads headers only. `tower_of` and `mmproj` give the facts, `page` the rows that are shown of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from math import prod
from typing import TYPE_CHECKING, Any

from rlx import backends
from rlx.cli.output import size
from rlx.errors import MultimodalError, RlxError

if TYPE_CHECKING:
    from rlx.models import ModelConfig
    from rlx.models.vision_config import VisionConfig
    from rlx.vision.weights import TowerWeights
    from rlx.weights import WeightLoader

MMPROJ = "mmproj"
_FRAMES = "gemma4ua"  # audio without a tower: frames of samples go through one matrix
# Width and height of the images whose tokens are listed: a thumbnail, squares, screens, a photo.
_IMAGES = ((224, 224), (512, 512), (640, 480), (1024, 1024), (1920, 1080), (4032, 3024))
_SIZES = ("hidden", "layers", "heads", "head_dim", "ffn", "patch", "merge", "positions", "out_hidden")


def is_mmproj(loader: WeightLoader) -> bool:
    """Whether an open file holds the tower of another one."""
    return loader.format == "gguf" and loader.metadata.get("general.architecture") == "clip"


def mmproj(loader: WeightLoader) -> dict[str, Any]:
    """The facts about an open mmproj file: "runnable", the tower under "vision", and "audio" if it takes any."""
    from rlx.models.vision_gguf_config import vision_from_gguf
    from rlx.vision.weights import TowerWeights

    tensors, audio = loader.tensors, _audio(loader.metadata)
    facts: dict[str, Any] = {"kind": MMPROJ} | ({} if audio is None else {"audio": audio})

    def shape(name: str) -> tuple[int, ...] | None:
        return tuple(tensors[name].shape) if name in tensors else None

    try:
        config = vision_from_gguf(loader.metadata, shape, {}, where=loader.path)
        tower = _tower(config, TowerWeights(loader, config, owned=False))
    except RlxError as error:
        return {**facts, "runnable": False, "reason": str(error)}
    return {**facts, "runnable": True, "vision": tower}


def tower_of(loader: WeightLoader, text: ModelConfig) -> dict[str, Any] | None:
    """The facts about the tower of a model, or under "reason" why it cannot be used; None if the model takes text
    only.
    """
    from rlx.models.vision_config import VISION_FAMILIES
    from rlx.vision.opening import open_tower

    sees = any(text.arch in row.archs for row in VISION_FAMILIES.values())
    if not sees or (loader.format != "gguf" and not loader.metadata.get("vision_config")):
        return None
    try:
        config, weights = open_tower(loader, text)
        with weights:
            return {"path": str(weights.loader.path), "usable": True, **_tower(config, weights)}
    except RlxError as error:
        return {"usable": False, "reason": str(error)}


def _tower(config: VisionConfig, weights: TowerWeights) -> dict[str, Any]:
    from rlx.cli.inspect import weight_bytes
    from rlx.models.vision_config import VISION_FAMILIES
    from rlx.vision.options import ImageOptions
    from rlx.vision.processors import ImageProcessor
    from rlx.vision.tower import tower_table

    layouts = backends.backend().target().capabilities.layouts
    memory = weight_bytes(tower_table(config, weights, layouts), layouts)
    processor = ImageProcessor.of(config, ImageOptions())
    return {
        "family": config.family,
        "architectures": list(VISION_FAMILIES[config.family].archs),
        "config": {name: getattr(config, name) for name in _SIZES},
        "mean": list(config.mean),
        "std": list(config.std),
        "limits": _limits(config, processor),
        "images": [_image(config, processor, width, height) for width, height in _IMAGES],
        "memory": memory,
    }


def _limits(config: VisionConfig, processor: Any) -> dict[str, Any]:
    """What bounds the size of an image: a fixed size, a budget of tokens, or the pixels that are seen of it."""
    if config.image_size:
        return {"size": [config.image_size, config.image_size]}
    if config.budget:
        return {"tokens": config.budget}
    return {"min_pixels": processor.min_pixels, "max_pixels": processor.max_pixels, "own_max_pixels": processor.own_max}


def _image(config: VisionConfig, processor: Any, width: int, height: int) -> dict[str, Any]:
    """What an image of this size becomes; "reason" if the model cannot take it."""
    facts: dict[str, Any] = {"width": width, "height": height}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rows, columns = processor.target(height, width)
        tokens = prod(side // processor.unit for side in (rows, columns))
        _check_table(config, max(rows, columns))
    except RlxError as error:
        return {**facts, "reason": error.what}
    return {**facts, "resized": [columns, rows], "patches": tokens * config.patches_per_row, "tokens": tokens}


def _check_table(config: VisionConfig, side: int) -> None:
    """Gemma 4 has a table of a row for each place along a side."""
    count = side // (config.patch * (config.merge if config.family == "gemma4_unified" else 1))
    if config.family.startswith("gemma4") and count > config.positions:
        raise MultimodalError(f"{count} patches along a side, and the position table has {config.positions}")


def _audio(metadata: Mapping[str, Any]) -> dict[str, Any] | None:
    if not metadata.get("clip.has_audio_encoder"):
        return None
    projector = metadata.get("clip.audio.projector_type", metadata.get("clip.projector_type"))
    if projector == _FRAMES:
        return {"projector": projector, "usable": True}
    return {"projector": projector, "usable": False, "reason": "towers for audio are not supported"}


# ---------------------------------------------------------------------------------------------------- the page


def tower_rows(tower: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The rows about a tower, but for images."""
    config = tower["config"]
    fits = f"{' or '.join(tower['architectures'])} with hidden size {config['out_hidden']}"
    rows = [("file", tower["path"])] if "path" in tower else []
    rows += [("family", tower["family"]), ("language model", fits)]
    rows += [(name, str(config[name])) for name in _SIZES if name != "out_hidden" and config[name]]
    rows += [("mean, std", f"{_colours(tower['mean'])}, {_colours(tower['std'])}")]
    return [*rows, ("image size", _limit(tower["limits"])), ("weights, packed", size(tower["memory"]))]


def image_rows(tower: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """A row for each size of an image; one for all if they become the same."""
    images = tower["images"]
    same = "size" in tower["limits"]
    for image in images[:1] if same else images:
        name = "any" if same else f"{image['width']} x {image['height']}"
        if "reason" in image:
            yield name, f"refused: {image['reason']}", "", ""
        else:
            width, height = image["resized"]
            yield name, f"resized to {width} x {height}", f"{image['patches']} patches", f"{image['tokens']} tokens"


def _colours(values: list[float]) -> str:
    return " ".join(f"{value:g}" for value in (values[:1] if len(set(values)) == 1 else values))


def _limit(limits: Mapping[str, Any]) -> str:
    if "size" in limits:
        width, height = limits["size"]
        return f"always {width} x {height}"
    if "tokens" in limits:
        return f"scaled to fill {limits['tokens']} tokens"
    low, high, own = limits["min_pixels"], limits["max_pixels"], limits["own_max_pixels"]
    return f"{low} to {high} pixels" + (f", the model's own maximum is {own}" if own != high else "")


def audio_line(audio: Mapping[str, Any]) -> str:
    """The line about audio."""
    return "\naudio: yes" if audio["usable"] else f"\naudio: no. {audio['reason']}"
