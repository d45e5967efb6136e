"""The configuration of a vision tower from `config.json` and `preprocessor_config.json`.

Part of the models stage. Sources: the configuration and image processor classes of transformers 5.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isqrt
from typing import Any

from rlx.errors import MultimodalError
from rlx.models.keys import EPS, HEADS, POSITIVE, WIDTH, Keys
from rlx.models.vision_config import (
    GEMMA4_BUDGET,
    LAYERS,
    NORM_EPS,
    PIXELS,
    QWEN_PIXELS,
    ROPE_BASE,
    SHIFT,
    SIDE,
    VISION_FAMILIES,
    Means,
    VisionConfig,
    colours,
    head_size,
    vision_family,
)

Sizes = dict[str, Any]
_TANH = {"gelu_pytorch_tanh": "gelu_tanh"}


def vision_from_hf(
    config: Mapping[str, Any], preprocessor: Mapping[str, Any], *, out_hidden: int, where: object = "config.json"
) -> VisionConfig | None:
    """Reads a parsed `config.json` with the parsed `preprocessor_config.json`, which may be empty.

    Args:
        out_hidden: hidden size of the text model.
        where: shown in errors: the file.

    Returns:
        The configuration; None if the model has no tower.

    Raises:
        ConfigError: a key is missing, of the wrong type, out of range, or contradicts another.
        UnsupportedModelError: a feature that rlx does not support.
        MultimodalError: the tower is of a kind that rlx does not support.
    """
    if not config.get("vision_config"):
        return None
    outer = Keys(config, where)
    found = outer.text("model_type")
    family = vision_family(found)
    if family is None:
        known = ", ".join(each for row in VISION_FAMILIES.values() for each in row.model_types)
        what = f"the vision tower of the model type '{found}' is not supported"
        raise MultimodalError(what, where=where, hint=f"it takes text only; towers of {known} are supported")
    keys, image = outer.nested("vision_config"), Keys(preprocessor, f"{where}, preprocessor")
    sizes = _SIZES[family](outer, keys)
    _check(image, family, sizes)
    written = keys.integer("out_hidden_size", WIDTH, out_hidden)
    if written != out_hidden:
        keys.wrong("out_hidden_size", written, f"the text model's hidden_size, which is {out_hidden}")
    mean, std = _means(image, family)
    return VisionConfig(
        **sizes,
        family=family,
        out_hidden=out_hidden,
        mean=mean,
        std=std,
        **_limits(image, family),
        **_tokens(outer, family),
    )


def _layers(keys: Keys, layers: str = "num_hidden_layers", heads: str = "num_attention_heads") -> Sizes:
    """The sizes of a tower's layers; `layers` and `heads` are the keys of their numbers."""
    hidden, count = keys.integer("hidden_size", WIDTH), keys.integer(heads, HEADS)
    return {
        "hidden": hidden,
        "layers": keys.integer(layers, LAYERS),
        "heads": count,
        "head_dim": head_size(keys, "head_dim", "hidden_size", hidden, count),
        "ffn": keys.integer("intermediate_size", WIDTH),
    }


def _qwen35(_outer: Keys, keys: Keys) -> Sizes:
    keys.require("temporal_patch_size", 2, "patches of two frames are supported")
    keys.choice("hidden_act", _TANH, "gelu_pytorch_tanh")
    positions = keys.integer("num_position_embeddings", WIDTH, 2304)
    if isqrt(positions) ** 2 != positions:
        keys.wrong("num_position_embeddings", positions, "a square")
    layers = _layers(keys, "depth", "num_heads")
    return {
        **layers,
        "deepstack": _deepstack(keys, layers["layers"]),
        "patch": keys.integer("patch_size", SIDE, 16),
        "merge": keys.integer("spatial_merge_size", (1, 16), 2),
        "positions": positions,
        "eps": NORM_EPS,
        "rope_base": _base(keys, "qwen35"),
    }


def _deepstack(keys: Keys, layers: int) -> tuple[int, ...]:
    key = "deepstack_visual_indexes"
    found = keys.elements(key, lambda each: each.integer(key, (0, layers - 1))) if key in keys else []
    if found != sorted(set(found)):
        keys.wrong(key, found, "each layer once, in order")
    return tuple(found)


def _gemma3(outer: Keys, keys: Keys) -> Sizes:
    keys.choice("hidden_act", _TANH, "gelu_pytorch_tanh")
    patch, size = keys.integer("patch_size", SIDE), keys.integer("image_size", SIDE)
    if size % patch:
        keys.wrong("image_size", size, f"a multiple of patch_size, which is {patch}")
    side, rows = size // patch, outer.integer("mm_tokens_per_image", (1, 1 << 20), 256)
    if isqrt(rows) ** 2 != rows or side % isqrt(rows):
        outer.wrong("mm_tokens_per_image", rows, f"the square of a divisor of {side}, the patches of a side")
    return {
        **_layers(keys),
        "patch": patch,
        "merge": side // isqrt(rows),
        "image_size": size,
        "positions": side * side,
        "eps": keys.number("layer_norm_eps", EPS, 1e-6),
    }


def _gemma4(_outer: Keys, keys: Keys) -> Sizes:
    keys.choice("hidden_activation", _TANH, "gelu_pytorch_tanh")
    layers = _layers(keys)
    keys.require("num_key_value_heads", layers["heads"], "attention heads that share keys are not supported in a tower")
    return {
        **layers,
        "patch": keys.integer("patch_size", SIDE, 16),
        "merge": keys.integer("pooling_kernel_size", (1, 16), 3),
        "positions": keys.integer("position_embedding_size", WIDTH, 10240),
        "eps": keys.number("rms_norm_eps", EPS, 1e-6),
        "rope_base": _base(keys, "gemma4"),
        "standardize": keys.flag("standardize", False),
        "clipped": keys.flag("use_clipped_linears", False),
    }


def _unified(_outer: Keys, keys: Keys) -> Sizes:
    return {
        "hidden": keys.integer("mm_embed_dim", WIDTH),
        "patch": keys.integer("patch_size", SIDE, 16),
        "merge": keys.integer("pooling_kernel_size", (1, 16), 3),
        "positions": keys.integer("mm_posemb_size", WIDTH, 1120),
        "eps": keys.number("rms_norm_eps", EPS, 1e-6),
    }


_SIZES: dict[str, Callable[[Keys, Keys], Sizes]] = {
    "qwen35": _qwen35,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "gemma4_unified": _unified,
}


def _base(keys: Keys, family: str) -> float:
    rope = keys.nested("rope_parameters", optional=True)
    return rope.number("rope_theta", POSITIVE, keys.number("rope_theta", POSITIVE, ROPE_BASE[family]))


def _check(image: Keys, family: str, sizes: Sizes) -> None:
    """Checks that the image processor cuts images into the patches that the tower takes."""
    _agree(image, "patch_size", sizes["patch"])
    if family == "gemma3":
        size = image.nested("size", optional=True)
        for side in ("height", "width"):
            _agree(size, side, sizes["image_size"])
    else:
        _agree(image, "merge_size" if family == "qwen35" else "pooling_kernel_size", sizes["merge"])


def _limits(image: Keys, family: str) -> Sizes:
    """Qwen: `min_pixels` and `max_pixels` or, as areas too, the edges of `size`. Gemma 4: the budget of rows."""
    if family in ("gemma4", "gemma4_unified"):
        return {"budget": image.integer("max_soft_tokens", SIDE, GEMMA4_BUDGET)}
    if family != "qwen35":
        return {}
    size = image.nested("size", optional=True)
    low = image.integer("min_pixels", PIXELS, size.integer("shortest_edge", PIXELS, QWEN_PIXELS[0]))
    high = image.integer("max_pixels", PIXELS, size.integer("longest_edge", PIXELS, QWEN_PIXELS[1]))
    if low > high:
        image.wrong("min_pixels", low, f"at most max_pixels, which is {high}")
    return {"min_pixels": low, "max_pixels": high}


def _means(image: Keys, family: str) -> tuple[Means, Means]:
    gemma4 = family.startswith("gemma4")
    if not image.flag("do_normalize", not gemma4):
        return (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    mean, std = (0.0, 1.0) if gemma4 else (0.5, 0.5)
    return (
        colours(image, "image_mean", SHIFT) if "image_mean" in image else (mean, mean, mean),
        colours(image, "image_std", POSITIVE) if "image_std" in image else (std, std, std),
    )


def _agree(keys: Keys, key: str, value: int) -> None:
    found = keys.integer(key, SIDE, value)
    if found != value:
        keys.wrong(key, found, f"{value}, as the tower's configuration says")


def _tokens(outer: Keys, family: str) -> Sizes:
    """The ids of the placeholder and of the tokens around an image; each family spells them in its own way."""
    first, last = ("vision_start", "vision_end") if family == "qwen35" else ("boi", "eoi")
    found = {}
    for name, stem in (("image_token", "image"), ("begin_token", first), ("end_token", last)):
        key = next((k for k in (f"{stem}_token_id", f"{stem}_token_index") if k in outer), None)
        found[name] = None if key is None else outer.integer(key, (0, 1 << 31))
    if found["image_token"] is None:
        found["image_token"] = VISION_FAMILIES[family].image_token
    return found
