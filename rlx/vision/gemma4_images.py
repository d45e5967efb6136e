"""Images of Gemma 4: each is scaled, up or down, to fill a budget of tokens.

Part of the vision stage, under `processors.py`. Source: the classes `Gemma4ImageProcessorPil` and
`Gemma4UnifiedImageProcessorPil` of transformers. The unified model has one patch a token, the others 3 x 3.
"""

from __future__ import annotations

import math

from rlx.models.vision_config import VisionConfig
from rlx.vision.options import ImageOptions
from rlx.vision.processors import Floats, ImageProcessor
from rlx.vision.resize import Pixels


class Gemma4Images(ImageProcessor):
    """The image processor of Gemma 4, with and without a transformer in the tower."""

    options_taken = ("image_tokens",)

    def __init__(self, config: VisionConfig, options: ImageOptions) -> None:
        super().__init__(config, options)
        self.budget = options.image_tokens or config.budget

    def target(self, height: int, width: int) -> tuple[int, int]:
        unit, long, short = self.unit, max(height, width), min(height, width)
        scale = math.sqrt(self.budget * unit * unit / (height * width))
        rows, columns = math.floor(scale * height / unit), math.floor(scale * width / unit)
        if not rows or not columns:  # a long strip: one row of tokens
            most = min(long // short, self.budget)
            rows, columns = (most, 1) if height > width else (1, most)
        return rows * unit, columns * unit

    def cut(self, pixels: Pixels) -> tuple[Floats, Floats]:
        patch, merge = self.config.patch, self.config.merge
        if self.config.patches_per_row == 1:
            rows = self._rows(pixels, 1, patch * merge, planes=False)
            return rows, rows
        return self._rows(pixels, 1, patch, planes=False), self._rows(pixels, merge, patch, planes=False)
