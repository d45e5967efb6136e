"""Images of Qwen 3.5: the nearest size within a minimum and a maximum of pixels, patches in blocks of 2 x 2.

Part of the vision stage, under `processors.py`. Source: the class `Qwen2VLImageProcessorPil` of transformers. A still
image is two equal frames, so that the values of a patch stand twice in its row.
"""

from __future__ import annotations

import math
import warnings

from rlx.errors import ImageError
from rlx.models.vision_config import QWEN_PIXELS, VisionConfig
from rlx.vision.options import ImageOptions
from rlx.vision.processors import Floats, ImageProcessor
from rlx.vision.resize import Pixels

CPU_PIXELS = 1 << 20  # by default at most: the published maximum, 16 times as many, takes minutes on a CPU
MAX_RATIO = 200  # of the longer side to the shorter one


class ImageWarning(UserWarning):
    """The model sees an image smaller than it could."""


class Qwen35Images(ImageProcessor):
    """The image processor of Qwen 3.5."""

    options_taken = ("max_pixels", "min_pixels")

    def __init__(self, config: VisionConfig, options: ImageOptions) -> None:
        super().__init__(config, options)
        self.own_max = config.max_pixels or QWEN_PIXELS[1]
        self.max_pixels = options.max_pixels or max(min(self.own_max, CPU_PIXELS), options.min_pixels or 0)
        self.min_pixels = min(options.min_pixels or config.min_pixels or QWEN_PIXELS[0], self.max_pixels)
        self._silent = options.max_pixels is not None or self.own_max <= self.max_pixels

    def target(self, height: int, width: int) -> tuple[int, int]:
        if max(height, width) > MAX_RATIO * min(height, width):
            what = f"an image of {width} x {height} pixels is more than {MAX_RATIO} times as long as wide"
            raise ImageError(what, hint="the model takes no such images: cut it into pieces")
        found = self._within(height, width, self.max_pixels)
        if not self._silent and found != (full := self._within(height, width, self.own_max)):
            self._silent = True
            text = (
                f"the model sees an image of {width} x {height} pixels as {found[1]} x {found[0]}, to save time: "
                f"with max_pixels={self.own_max} it would see {full[1]} x {full[0]}; this is said once"
            )
            warnings.warn(text, ImageWarning, stacklevel=2)
        return found

    def _within(self, height: int, width: int, most: int) -> tuple[int, int]:
        """The multiples of `unit` nearest to both sides (halves to even), or, beyond a limit, to both sides scaled."""
        unit, area = self.unit, height * width
        rows, columns = round(height / unit), round(width / unit)
        if rows * columns * unit * unit > most:
            shrink = math.sqrt(area / most)
            rows, columns = (max(1, math.floor(side / shrink / unit)) for side in (height, width))
        elif rows * columns * unit * unit < self.min_pixels:  # also where a side is 0
            grow = math.sqrt(self.min_pixels / area)
            rows, columns = (math.ceil(side * grow / unit) for side in (height, width))
        return rows * unit, columns * unit

    def cut(self, pixels: Pixels) -> tuple[Floats, Floats]:
        rows = self._rows(pixels, self.config.merge, self.config.patch, planes=True)
        return rows, rows
