"""The configuration of a vision tower from the metadata of an mmproj file.

Part of the models stage. Source: the keys `clip.*` that llama.cpp's converter writes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rlx.errors import MultimodalError
from rlx.models.keys import EPS, HEADS, POSITIVE, WIDTH, Keys
from rlx.models.vision_config import (
    GEMMA4_BUDGET,
    LAYERS,
    MERGE,
    NORM_EPS,
    PIXELS,
    QWEN_PIXELS,
    QWEN_SIZE,
    ROPE_BASE,
    SHIFT,
    SIDE,
    VISION_FAMILIES,
    VisionConfig,
    colours,
    head_size,
)

Shape = Callable[[str], tuple[int, ...] | None]
Sizes = dict[str, Any]


def vision_from_gguf(
    metadata: Mapping[str, Any], shape: Shape, text: Mapping[str, Any], *, where: object = "mmproj"
) -> VisionConfig:
    """Reads the key-values of an mmproj GGUF.

    Args:
        shape: the shape of the file's tensor of this name; None if there is none.
        text: key-values of the text model's GGUF: its vocabulary has the ids, and its sizes say who sees whom.
        where: shown in errors: the file.

    Raises:
        ConfigError: a key is missing, of the wrong type, or out of range.
        MultimodalError: the file holds no tower that rlx supports.
    """
    family = mmproj_family(metadata, where=where)
    keys = Keys(metadata, where, "clip.vision.")
    return VisionConfig(
        **_SIZES[family](keys, shape),
        family=family,
        hidden=keys.integer("embedding_length", WIDTH),
        patch=keys.integer("patch_size", SIDE),
        merge=_merge(keys, family),
        out_hidden=keys.integer("projection_dim", WIDTH),
        mean=colours(keys, "image_mean", SHIFT),
        std=colours(keys, "image_std", POSITIVE),
        **_limits(keys, family),
        **_tokens(text, family),
    )


def mmproj_family(metadata: Mapping[str, Any], *, where: object = "mmproj") -> str:
    """The family of the tower in an mmproj GGUF, by the type of its projector.

    Raises:
        ConfigError: the file names no projector.
        MultimodalError: it is no mmproj, holds no vision tower, or one that rlx does not support.
    """
    outer = Keys(metadata, where)
    if metadata.get("general.architecture") != "clip":
        what = f"this is no mmproj file: its general.architecture is {metadata.get('general.architecture')!r}"
        raise MultimodalError(
            what, where=where, hint="give the file with the vision tower, usually called mmproj-*.gguf"
        )
    if not outer.flag("clip.has_vision_encoder", True):
        raise MultimodalError(
            "the file holds no vision tower, only one for sound",
            where=where,
            hint="use an mmproj file with a vision tower",
        )
    key = next(
        k for k in ("clip.vision.projector_type", "clip.projector_type") if k in outer or k == "clip.projector_type"
    )
    found = outer.text(key)
    family = next((name for name, row in VISION_FAMILIES.items() if row.projector == found), None)
    if family is None:
        known = ", ".join(row.projector for row in VISION_FAMILIES.values())
        raise MultimodalError(
            f"the projector '{found}' ({key}) is not supported", where=where, hint=f"supported: {known}"
        )
    return family


def _qwen35(keys: Keys, _shape: Shape) -> Sizes:
    _tanh(keys)
    layers, key = _transformer(keys, "qwen35"), "is_deepstack_layers"
    taken = keys.elements(key, lambda each: each.flag(key), layers["layers"]) if key in keys else []
    deepstack = tuple(layer for layer, is_taken in enumerate(taken) if is_taken)
    return {"positions": _square(keys), "eps": NORM_EPS, "deepstack": deepstack, **layers}


def _gemma3(keys: Keys, _shape: Shape) -> Sizes:
    _tanh(keys)
    sizes = {"positions": _square(keys), "image_size": keys.integer("image_size", SIDE)}
    return {**sizes, "eps": keys.number("attention.layer_norm_epsilon", EPS), **_transformer(keys, "gemma3")}


def _gemma4(keys: Keys, shape: Shape) -> Sizes:
    return {
        **_unified(keys, shape),
        **_transformer(keys, "gemma4"),
        "standardize": shape("v.std_scale") is not None,
        "clipped": any(shape(f"v.blk.0.ffn_up.{end}_max") is not None for end in ("input", "output")),
    }


def _unified(keys: Keys, shape: Shape) -> Sizes:
    table = shape("v.position_embd.weight")
    positions = table[1] if table is not None and len(table) == 3 else 0
    return {"positions": positions, "eps": keys.number("attention.layer_norm_epsilon", EPS)}


_SIZES: dict[str, Callable[[Keys, Shape], Sizes]] = {
    "qwen35": _qwen35,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "gemma4_unified": _unified,
}


def _transformer(keys: Keys, family: str) -> Sizes:
    hidden, heads = keys.integer("embedding_length", WIDTH), keys.integer("attention.head_count", HEADS)
    keys.require("attention.head_count_kv", heads, "attention heads that share keys are not supported in a tower")
    return {
        "layers": keys.integer("block_count", LAYERS),
        "heads": heads,
        "head_dim": head_size(keys, "attention.head_dim", "embedding_length", hidden, heads),
        "ffn": keys.integer("feed_forward_length", WIDTH),
        "rope_base": ROPE_BASE.get(family, 0.0),
    }


def _tanh(keys: Keys) -> None:
    """Checks the activation. Gemma 4's files do not say it: there it is the tanh form of GELU, too."""
    outer = Keys(keys.mapping, keys.where, "clip.")
    if not outer.flag("use_gelu", False):
        outer.unsupported("use_gelu", False, "only towers with GELU are supported")


def _square(keys: Keys) -> int:
    """Rows of a position table over a square grid: the key `image_size` is the side of its image."""
    side, patch = keys.integer("image_size", SIDE), keys.integer("patch_size", SIDE)
    if side % patch:
        keys.wrong("image_size", side, f"a multiple of patch_size, which is {patch}")
    return (side // patch) ** 2


def _merge(keys: Keys, family: str) -> int:
    found = keys.integer(
        "spatial_merge_size" if family == "qwen35" else "projector.scale_factor", (1, 16), MERGE[family]
    )
    side = keys.integer("image_size", SIDE) // keys.integer("patch_size", SIDE)
    if family == "gemma3" and side % found:
        keys.wrong("projector.scale_factor", found, f"a divisor of {side}, the patches of a side")
    return found


def _limits(keys: Keys, family: str) -> Sizes:
    """Limits of the area of an image: the file's, or the published ones. Gemma 4's limit is a number of rows.

    Qwen's published limits are for towers of `QWEN_SIZE` pixels a side; those of other sizes have them in proportion.
    """
    if family in ("gemma4", "gemma4_unified"):
        block = keys.integer("patch_size", SIDE) * _merge(keys, family)
        return {"budget": max(1, keys.integer("image_max_pixels", PIXELS, GEMMA4_BUDGET * block**2) // block**2)}
    if family != "qwen35":
        return {}
    area = keys.integer("image_size", SIDE) ** 2
    usual = (max(1, each * area // QWEN_SIZE**2) for each in QWEN_PIXELS)
    low, high = (
        keys.integer(f"image_{end}_pixels", PIXELS, own) for end, own in zip(("min", "max"), usual, strict=True)
    )
    return {"min_pixels": min(low, high), "max_pixels": high}


def _tokens(text: Mapping[str, Any], family: str) -> Sizes:
    """The ids of a family's image tokens in a GGUF vocabulary.

    The placeholder may be missing there, since llama.cpp needs none: then it has an id behind the vocabulary.
    """
    row, names = VISION_FAMILIES[family], list(text.get("tokenizer.ggml.tokens") or ())
    image, begin, end = (names.index(name) if name in names else None for name in row.tokens)
    outside = max(row.image_token, len(names))
    return {"image_token": outside if image is None else image, "begin_token": begin, "end_token": end}
