"""The configuration of a vision tower: what turns an image into rows of a text model, independent of the file format.

Part of the models stage, beside `config.py`. It is read from `config.json` with `preprocessor_config.json`, or from the
mmproj file that holds the tower of a text model in GGUF. Sources: the configuration and image processor classes of
transformers 5; the keys `clip.*` that llama.cpp's converter writes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isqrt
from typing import Any, NamedTuple

from rlx.errors import MultimodalError
from rlx.models.keys import EPS, HEADS, POSITIVE, WIDTH, Keys, Range

Means = tuple[float, float, float]
Shape = Callable[[str], tuple[int, ...] | None]
Sizes = dict[str, Any]

LAYERS, SIDE, PIXELS = (1, 1024), (1, 1 << 16), (1, 1 << 40)
SHIFT: Range = (-1e6, 1e6)


class Published(NamedTuple):
    """What the published models of a family have where a file does not say it.

    Attributes:
        archs: architectures of the text models.
        model_types: of `config.json`.
        projector: `clip.projector_type` of an mmproj.
        tokens: texts of the placeholder, of the token before an image, and of the one after it.
        image_token: id of the placeholder.
    """

    archs: tuple[str, ...]
    model_types: tuple[str, ...]
    projector: str
    tokens: tuple[str, str, str]
    image_token: int


_QWEN_TOKENS = ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>")
_GEMMA3_TOKENS = ("<image_soft_token>", "<start_of_image>", "<end_of_image>")
_GEMMA4_TOKENS = ("<|image|>", "<|image>", "<image|>")
VISION_FAMILIES: dict[str, Published] = {
    "qwen35": Published(
        ("qwen35", "qwen35moe", "qwen3vl", "qwen3vlmoe"),
        ("qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe"),
        "qwen3vl_merger",
        _QWEN_TOKENS,
        248056,
    ),
    "gemma3": Published(("gemma3",), ("gemma3",), "gemma3", _GEMMA3_TOKENS, 262144),
    "gemma4": Published(("gemma4",), ("gemma4",), "gemma4v", _GEMMA4_TOKENS, 258880),
    "gemma4_unified": Published(("gemma4",), ("gemma4_unified",), "gemma4uv", _GEMMA4_TOKENS, 258880),
}
QWEN_SIZE = 768  # pixels along the side of the published towers' position tables
QWEN_PIXELS = (65536, 16777216)  # limits of an image's area in the published preprocessor_config.json
GEMMA4_BUDGET = 280  # rows of an image
ROPE_BASE = {"qwen35": 1e4, "gemma4": 100.0}
MERGE = {"qwen35": 2, "gemma3": 4, "gemma4": 3, "gemma4_unified": 3}
NORM_EPS = 1e-6  # of Qwen's layer norms, whatever the file says: llama.cpp's converter writes the text model's


@dataclass(frozen=True)
class VisionConfig:
    """The configuration of one vision tower.

    Attributes:
        family: "qwen35", "gemma3", "gemma4" or "gemma4_unified".
        hidden: width of the tower.
        patch: side of a patch in pixels.
        merge: side of the block of patches that becomes one row: merged (Qwen) or averaged (Gemma 3 and 4), or one
            large patch (Gemma 4 unified).
        positions: rows of the position table; of each of its two parts for Gemma 4.
        out_hidden: width of the rows: the hidden size of the text model.
        eps: of the norms inside the tower.
        mean, std: of the three colours, applied to pixels from 0 to 1.
        image_token: id that stands for a row of an image in a prompt; may lie outside the vocabulary.
        begin_token, end_token: ids before and after an image; None if unknown.
        layers, heads, head_dim, ffn: sizes of the transformer; 0 for `gemma4_unified`, which has none.
        rope_base: base of the two-dimensional rope, 0 for none.
        image_size: side of the square to which every image is resized, in pixels (Gemma 3); 0 where the size varies.
        min_pixels, max_pixels: limits of the resized image's area (Qwen); 0 for none.
        budget: most rows of an image (Gemma 4); 0 for none.
        standardize: whether the pooled rows are shifted and scaled (Gemma 4).
        deepstack: the layers whose results are merged, too, for the first layers of the text model (Qwen 3 VL).
        clipped: whether linear layers have bounds for their inputs and outputs (Gemma 4 E2B and E4B).
    """

    family: str
    hidden: int
    patch: int
    merge: int
    positions: int
    out_hidden: int
    eps: float
    mean: Means
    std: Means
    image_token: int
    begin_token: int | None
    end_token: int | None
    layers: int = 0
    heads: int = 0
    head_dim: int = 0
    ffn: int = 0
    rope_base: float = 0.0
    image_size: int = 0
    min_pixels: int = 0
    max_pixels: int = 0
    budget: int = 0
    standardize: bool = False
    clipped: bool = False
    deepstack: tuple[int, ...] = ()

    @property
    def frames(self) -> int:
        """How often a patch holds the image: Qwen's towers take pairs of frames, and an image is both."""
        return 2 if self.family == "qwen35" else 1

    @property
    def has_biases(self) -> bool:
        """Whether the linear layers have biases."""
        return self.family != "gemma4"

    @property
    def row_width(self) -> int:
        """Numbers of one row: those for the first layer of the text model, then those for the layers after it."""
        return self.out_hidden * (1 + len(self.deepstack))

    @property
    def patch_values(self) -> int:
        """Numbers of one patch."""
        side = self.patch * (self.merge if self.family == "gemma4_unified" else 1)
        return 3 * self.frames * side * side

    @property
    def patches_per_row(self) -> int:
        """Consecutive patches that become one row."""
        return 1 if self.family == "gemma4_unified" else self.merge * self.merge


def vision_family(model_type: object) -> str | None:
    """The family of towers for a `model_type` of `config.json`; None if rlx has no tower for it."""
    return next((name for name, row in VISION_FAMILIES.items() if model_type in row.model_types), None)


def colours(keys: Keys, key: str, allowed: Range) -> Means:
    """Three numbers, one a colour; `ConfigError` otherwise."""
    red, green, blue = keys.elements(key, lambda each: each.number(key, allowed), 3)
    return red, green, blue


class _Names(NamedTuple):
    """The keys of the sizes of a tower's layers."""

    hidden: str
    layers: str
    heads: str
    kv_heads: str
    head_dim: str
    ffn: str


_GGUF = _Names(
    "embedding_length", "block_count", "attention.head_count", "attention.head_count_kv", "attention.head_dim",
    "feed_forward_length",
)  # fmt: skip
_HF = _Names(
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size"
)


def _transformer(keys: Keys, names: _Names) -> Sizes:
    """The sizes of a tower's layers. A head's is a multiple of 4: a rope in two dimensions turns pairs of each half."""
    hidden, heads = keys.integer(names.hidden, WIDTH), keys.integer(names.heads, HEADS)
    keys.require(names.kv_heads, heads, "attention heads that share keys are not supported in a tower")
    layers, ffn = keys.integer(names.layers, LAYERS), keys.integer(names.ffn, WIDTH)
    if names.head_dim not in keys and hidden % heads:
        keys.wrong(names.hidden, hidden, f"a multiple of the number of heads, which is {heads}")
    size = keys.integer(names.head_dim, HEADS, hidden // heads)
    if size % 4:
        key, found = (names.head_dim, size) if names.head_dim in keys else (names.hidden, hidden)
        keys.wrong(key, found, f"heads of a multiple of 4, found {size}")
    return {"hidden": hidden, "layers": layers, "heads": heads, "head_dim": size, "ffn": ffn}


# ---------------------------------------------------------------------------------------------- config.json

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
    sizes = _OF_HF[family](outer, keys)
    _check(image, family, sizes)
    written = keys.integer("out_hidden_size", WIDTH, out_hidden)
    if written != out_hidden:
        keys.wrong("out_hidden_size", written, f"the text model's hidden_size, which is {out_hidden}")
    mean, std = _means(image, family)
    return VisionConfig(
        **sizes,
        family=family,
        rope_base=_base(keys, family),
        out_hidden=out_hidden,
        mean=mean,
        std=std,
        **_limits(image, family),
        **_tokens(outer, family),
    )


def _qwen35(_outer: Keys, keys: Keys) -> Sizes:
    keys.require("temporal_patch_size", 2, "patches of two frames are supported")
    keys.choice("hidden_act", _TANH, "gelu_pytorch_tanh")
    positions = keys.integer("num_position_embeddings", WIDTH, 2304)
    if isqrt(positions) ** 2 != positions:
        keys.wrong("num_position_embeddings", positions, "a square")
    layers = _transformer(keys, _HF._replace(layers="depth", heads="num_heads"))
    return {
        **layers,
        "deepstack": _deepstack(keys, layers["layers"]),
        "patch": keys.integer("patch_size", SIDE, 16),
        "merge": keys.integer("spatial_merge_size", (1, 16), 2),
        "positions": positions,
        "eps": NORM_EPS,
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
        **_transformer(keys, _HF),
        "patch": patch,
        "merge": side // isqrt(rows),
        "image_size": size,
        "positions": side * side,
        "eps": keys.number("layer_norm_eps", EPS, 1e-6),
    }


def _gemma4(_outer: Keys, keys: Keys) -> Sizes:
    keys.choice("hidden_activation", _TANH, "gelu_pytorch_tanh")
    return {
        **_transformer(keys, _HF),
        "patch": keys.integer("patch_size", SIDE, 16),
        "merge": keys.integer("pooling_kernel_size", (1, 16), 3),
        "positions": keys.integer("position_embedding_size", WIDTH, 10240),
        "eps": keys.number("rms_norm_eps", EPS, 1e-6),
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


_OF_HF: dict[str, Callable[[Keys, Keys], Sizes]] = {
    "qwen35": _qwen35, "gemma3": _gemma3, "gemma4": _gemma4, "gemma4_unified": _unified,
}  # fmt: skip


def _base(keys: Keys, family: str) -> float:
    if family not in ROPE_BASE:
        return 0.0
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


# ---------------------------------------------------------------------------------------------- mmproj


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
        **{"hidden": keys.integer("embedding_length", WIDTH), **_OF_GGUF[family](keys, shape)},
        family=family,
        rope_base=ROPE_BASE.get(family, 0.0),
        patch=keys.integer("patch_size", SIDE),
        merge=_merge(keys, family),
        out_hidden=keys.integer("projection_dim", WIDTH),
        mean=colours(keys, "image_mean", SHIFT),
        std=colours(keys, "image_std", POSITIVE),
        **_mmproj_limits(keys, family),
        **_vocabulary_tokens(text, family),
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


def _mmproj_qwen35(keys: Keys, _shape: Shape) -> Sizes:
    _tanh(keys)
    layers, key = _transformer(keys, _GGUF), "is_deepstack_layers"
    taken = keys.elements(key, lambda each: each.flag(key), layers["layers"]) if key in keys else []
    deepstack = tuple(layer for layer, is_taken in enumerate(taken) if is_taken)
    return {"positions": _square(keys), "eps": NORM_EPS, "deepstack": deepstack, **layers}


def _mmproj_gemma3(keys: Keys, _shape: Shape) -> Sizes:
    _tanh(keys)
    sizes = {"positions": _square(keys), "image_size": keys.integer("image_size", SIDE)}
    return {**sizes, "eps": keys.number("attention.layer_norm_epsilon", EPS), **_transformer(keys, _GGUF)}


def _mmproj_gemma4(keys: Keys, shape: Shape) -> Sizes:
    return {
        **_mmproj_unified(keys, shape),
        **_transformer(keys, _GGUF),
        "standardize": shape("v.std_scale") is not None,
        "clipped": any(shape(f"v.blk.0.ffn_up.{end}_max") is not None for end in ("input", "output")),
    }


def _mmproj_unified(keys: Keys, shape: Shape) -> Sizes:
    table = shape("v.position_embd.weight")
    positions = table[1] if table is not None and len(table) == 3 else 0
    return {"positions": positions, "eps": keys.number("attention.layer_norm_epsilon", EPS)}


_OF_GGUF: dict[str, Callable[[Keys, Shape], Sizes]] = {
    "qwen35": _mmproj_qwen35, "gemma3": _mmproj_gemma3, "gemma4": _mmproj_gemma4, "gemma4_unified": _mmproj_unified,
}  # fmt: skip


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


def _mmproj_limits(keys: Keys, family: str) -> Sizes:
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


def _vocabulary_tokens(text: Mapping[str, Any], family: str) -> Sizes:
    """The ids of a family's image tokens in a GGUF vocabulary.

    The placeholder may be missing there, since llama.cpp needs none: then it has an id behind the vocabulary.
    """
    row, names = VISION_FAMILIES[family], list(text.get("tokenizer.ggml.tokens") or ())
    image, begin, end = (names.index(name) if name in names else None for name in row.tokens)
    outside = max(row.image_token, len(names))
    return {"image_token": outside if image is None else image, "begin_token": begin, "end_token": end}
