"""What a tower takes of an image: resized, normalized, cut into patches, in the order of the tower's rows.

Second step of the vision stage: `Image` -> `Patches`, equal to the image processors of transformers. This file has the
interface and what all families share; the family's rules of size are in `qwen35_images.py`, `gemma3_images.py` and
`gemma4_images.py`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from math import isqrt
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlx.errors import ArgumentError
from rlx.models.vision_config import VisionConfig
from rlx.vision.image import Image
from rlx.vision.options import ImageOptions
from rlx.vision.resize import Filter, Pixels, finish, resize_steps

Floats: TypeAlias = NDArray[np.float32]


@dataclass(frozen=True)
class Patches:
    """An image as a tower takes it.

    Attributes:
        pixel_values: float32, the values and the shape that the reference processor (transformers) gives for one image,
            without the axis of the batch and without rows of padding.
        patches: float32 [N, values], one row a patch, in the order that the tower takes: patches that become one
            token are consecutive.
        places: int32 [N, 2], the row and the column of each patch in the image.
        grid: rows and columns of the tokens, after merging or pooling.
    """

    pixel_values: Floats
    patches: Floats
    places: NDArray[np.int32]
    grid: tuple[int, int]

    @property
    def tokens(self) -> int:
        """The rows that the image becomes in a prompt."""
        return self.grid[0] * self.grid[1]


class ImageProcessor(ABC):
    """Makes of images what the tower of one model takes.

    Args:
        config: the model's tower.
        options: the caller's options of images, or those of an engine.

    Raises:
        ArgumentError: an option is one that the family does not have.
    """

    method = Filter.BICUBIC
    options_taken: tuple[str, ...] = ()  # names of `ImageOptions`

    def __init__(self, config: VisionConfig, options: ImageOptions) -> None:
        for name in options.chosen:
            if name not in self.options_taken:
                known = " and ".join(self.options_taken)
                hint = f"leave it out; these models take {known}"
                raise ArgumentError(f"{name} does not apply to images of {config.family}", hint=hint)
        self.config = config
        self.unit = config.patch * config.merge  # pixels along the side of a token
        self._table = _normalized(config)

    @staticmethod
    def of(config: VisionConfig, options: ImageOptions) -> ImageProcessor:
        """The processor of the config's family.

        Raises:
            ArgumentError: an option is one that the family does not have.
        """
        from rlx.vision.gemma3_images import Gemma3Images
        from rlx.vision.gemma4_images import Gemma4Images
        from rlx.vision.qwen35_images import Qwen35Images

        families: dict[str, type[ImageProcessor]] = {
            "qwen35": Qwen35Images,
            "gemma3": Gemma3Images,
            "gemma4": Gemma4Images,
            "gemma4_unified": Gemma4Images,
        }
        return families[config.family](config, options)

    @abstractmethod
    def target(self, height: int, width: int) -> tuple[int, int]:
        """Height and width that an image of this size is resized to, in pixels: multiples of `unit`.

        Raises:
            ImageError: the model takes no image of this size.
        """

    @abstractmethod
    def cut(self, pixels: Pixels) -> tuple[Floats, Floats]:
        """`pixel_values` and `patches` of an image that has been resized."""

    def preprocess(self, image: Image) -> Patches:
        """What the tower takes of an image.

        Raises:
            ImageError: the model takes no image of this size.
        """
        return finish(self.steps(image))

    def steps(self, image: Image, seconds: float | None = None) -> Generator[None, None, Patches]:
        """As `preprocess`, piece by piece: a generator that pauses and returns the patches.

        Args:
            seconds: how long a piece should take, about; by default there is one piece.

        Raises:
            ImageError: the model takes no image of this size.
        """
        height, width = self.target(*image.size)
        work, start = resize_steps(image.pixels, height, width, self.method), time.perf_counter()
        while True:
            try:
                next(work)
            except StopIteration as end:
                pixel_values, patches = self.cut(end.value)
                break
            if seconds is not None and time.perf_counter() - start > seconds:
                yield
                start = time.perf_counter()
        rows, columns = height // self.unit, width // self.unit
        return Patches(pixel_values, patches, self._places(rows, columns), (rows, columns))

    def parts(self, image: Image) -> Sequence[str | Image]:
        """What stands in a prompt for an image: the image alone, or texts, the image and crops of it."""
        return [image]

    def grid(self, image: Image) -> tuple[int, int]:
        """Rows and columns of the tokens that `preprocess` will give, without computing a pixel.

        Raises:
            ImageError: the model takes no image of this size.
        """
        height, width = self.target(*image.size)
        return height // self.unit, width // self.unit

    def _rows(self, pixels: Pixels, block: int, side: int, *, planes: bool) -> Floats:
        """Patches as rows of normalized values.

        Args:
            block: the patches of blocks of `block` x `block` are consecutive; blocks and the patches in them go from
                left to right and from top to bottom.
            side: pixels along the side of a patch.
            planes: whether a row has one plane a colour, or the colours of a pixel side by side.
        """
        across = block * side
        rows, columns = pixels.shape[0] // across, pixels.shape[1] // across
        cells = pixels.reshape(rows, block, side, columns, block, side, 3).transpose(0, 3, 1, 4, 2, 5, 6)
        count, frames = rows * columns * block * block, self.config.frames
        result = np.empty((count, 3, frames, side, side) if planes else (count, side, side, 3), np.float32)
        for colour, table in enumerate(self._table):
            values = table[cells[..., colour]].reshape(count, side, side)
            if planes:
                result[:, colour] = values[:, None]
            else:
                result[..., colour] = values
        return result.reshape(count, -1)

    def _places(self, rows: int, columns: int) -> NDArray[np.int32]:
        """Row and column of each patch, for a grid of tokens, in the order of `patches`."""
        block = isqrt(self.config.patches_per_row)
        row, column = np.mgrid[: rows * block, : columns * block].astype(np.int32)
        both = np.stack([row, column], axis=-1).reshape(rows, block, columns, block, 2)
        return np.ascontiguousarray(both.transpose(0, 2, 1, 3, 4)).reshape(-1, 2)


def _normalized(config: VisionConfig) -> Floats:
    """What each value of each colour becomes: float32 [3, 256]. Rounded where the reference processors round."""
    unit = (np.arange(256) * (1 / 255)).astype(np.float32)
    mean, std = np.array(config.mean, np.float32), np.array(config.std, np.float32)
    found: Floats = (unit - mean[:, None]) / std[:, None]
    return found
