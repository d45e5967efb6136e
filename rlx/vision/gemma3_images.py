"""Images of Gemma 3: every image becomes a square of one size; with pan and scan, so do crops of a long one.

Part of the vision stage, under `processors.py`. Source: the class `Gemma3ImageProcessorPil` of transformers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from rlx.models.vision_config import VisionConfig
from rlx.vision.image import Image
from rlx.vision.options import ImageOptions
from rlx.vision.processors import Floats, ImageProcessor
from rlx.vision.resize import Filter, Pixels

# Pan and scan in the published preprocessor_config.json: the crops, pixels of a crop's side, and how long an image is.
MAX_CROPS, MIN_CROP, MIN_RATIO = 4, 256, 1.2


class Gemma3Images(ImageProcessor):
    """The image processor of Gemma 3."""

    method = Filter.BILINEAR
    options_taken = ("pan_and_scan",)

    def __init__(self, config: VisionConfig, options: ImageOptions) -> None:
        super().__init__(config, options)
        self.pan_and_scan = bool(options.pan_and_scan)

    def target(self, height: int, width: int) -> tuple[int, int]:
        return self.config.image_size, self.config.image_size

    def cut(self, pixels: Pixels) -> tuple[Floats, Floats]:
        planes = np.stack([table[pixels[:, :, colour]] for colour, table in enumerate(self._table)])
        return planes, self._rows(pixels, self.config.merge, self.config.patch, planes=True)

    def parts(self, image: Image) -> Sequence[str | Image]:
        """The image; with pan and scan also its crops, in the words that the model was trained on."""
        crops = self.crops(image) if self.pan_and_scan else []
        if not crops:
            return [image]
        spaced = [part for crop in crops for part in (" ", crop)]
        return ["Here is the original image ", image, " and here are some crops to help you see better", *spaced]

    def crops(self, image: Image) -> list[Image]:
        """2 to 4 equal pieces along the longer side, in reading order; none of an image that is nearly square."""
        (height, width), pixels = image.size, image.pixels
        long, short = max(height, width), min(height, width)
        if long / short < MIN_RATIO:
            return []
        count = min(max(min(long // MIN_CROP, math.floor(long / short + 0.5)), 2), MAX_CROPS)
        size = math.ceil(long / count)
        if min(size, short) < MIN_CROP:
            return []
        begins = range(0, count * size, size)
        pieces = [pixels[:, at : at + size] if width >= height else pixels[at : at + size] for at in begins]
        return [Image.from_pixels(piece.copy()) for piece in pieces]
