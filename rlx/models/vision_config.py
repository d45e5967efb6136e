"""The configuration of a vision tower: what turns an image into rows of a text model, independent of the file format.

Part of the models stage, beside `config.py`. `vision_hf_config.py` reads it from `config.json` with
`preprocessor_config.json`, `vision_gguf_config.py` from the mmproj file that holds the tower of a text model in GGUF.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from rlx.models.keys import HEADS, Keys, Range

Means = tuple[float, float, float]

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


def head_size(keys: Keys, key: str, width: str, hidden: int, heads: int) -> int:
    """The size of an attention head: that of `key`, by default the tower's width, of the key `width`, divided by heads.

    It is a multiple of 4: a rope in two dimensions turns pairs of each half.

    Raises:
        ConfigError: it is not, or the heads do not divide the width.
    """
    if key not in keys and hidden % heads:
        keys.wrong(width, hidden, f"a multiple of the number of heads, which is {heads}")
    size = keys.integer(key, HEADS, hidden // heads)
    if size % 4:
        keys.wrong(*(key, size) if key in keys else (width, hidden), f"heads of a multiple of 4, found {size}")
    return size
