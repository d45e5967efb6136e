"""An image as a tower takes it: resized, normalized, cut into patches, in the order of the tower's rows.

Second step of the vision stage: `Image` -> `Patches`, equal to the image processors of transformers. This file has the
interface, what all families share, and the rules of size of each family. Sources: `Qwen2VLImageProcessorPil`,
`Gemma3ImageProcessorPil`, `Gemma4ImageProcessorPil` and `Gemma4UnifiedImageProcessorPil` of transformers.

Pillow resizes, antialiased: first the width, then the height. The models were trained on what Pillow up to 12.3
computes. Pillow 13 chooses the order by the sizes, so its pixels differ; two calls in this order give the same with all
versions.
"""

from __future__ import annotations

import math
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from math import isqrt
from typing import TypeAlias, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from rlx.errors import ArgumentError, ImageError, MultimodalError
from rlx.models.vision_config import QWEN_PIXELS, VisionConfig
from rlx.vision.decode import pillow
from rlx.vision.image import Image, ImageOptions, Pixels

Steps: TypeAlias = Generator[None, None, Pixels]
Result = TypeVar("Result")

BILINEAR, BICUBIC = 2, 3  # `PIL.Image.Resampling`: a triangle, and the cubic of Keys (1981) with a = -0.5
STRIP = 1 << 18  # pixels that are resized at a time: a few milliseconds


def resized(pixels: Pixels, height: int, width: int, method: int) -> Steps:
    """An image of another size, piece by piece: a generator that pauses every few milliseconds and returns the pixels.

    Args:
        pixels: uint8 [rows, columns, 3].
        height, width: the new size, at least 1; the sides are scaled each by itself.
        method: the weights; where the image becomes smaller they are as wide as a new pixel (antialiasing).

    Returns:
        uint8 [height, width, 3].

    Raises:
        ImageError: Pillow is not installed.
    """
    pixels = yield from _along_rows(pixels, width, method)
    across = yield from _along_rows(pixels.swapaxes(0, 1), height, method)
    return np.ascontiguousarray(across.swapaxes(0, 1))


def _along_rows(pixels: Pixels, width: int, method: int) -> Steps:
    rows, columns, channels = pixels.shape
    if width == columns:
        return pixels
    image, step = pillow(), max(1, STRIP // max(columns, width))
    result = np.empty((rows, width, channels), np.uint8)
    for at in range(0, rows, step):
        strip = image.fromarray(np.ascontiguousarray(pixels[at : at + step]))
        result[at : at + step] = strip.resize((width, strip.height), method)
        yield
    return result


def finish(steps: Generator[None, None, Result]) -> Result:
    """Runs work to its end: what the generator returns."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: Result = end.value
            return result


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

    method = BICUBIC
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
        return FAMILIES[config.family](config, options)

    @abstractmethod
    def target(self, height: int, width: int) -> tuple[int, int]:
        """Height and width that an image of this size is resized to, in pixels: multiples of `unit`.

        Raises:
            ImageError: the model takes no image of this size.
        """

    @property
    @abstractmethod
    def most_patches(self) -> int:
        """How many patches an image can have."""

    @abstractmethod
    def cut(self, pixels: Pixels) -> tuple[Floats, Floats]:
        """`pixel_values` and `patches` of an image that has been resized."""

    def preprocess(self, image: Image) -> Patches:
        """The image as the tower takes it.

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
        height, width = image.target or self.target(*image.size)
        found = yield from self._resized(image.pixels, height, width, seconds)
        pixel_values, patches = self.cut(found)
        if image.later is not None:
            later = yield from self._resized(image.later, height, width, seconds)
            pixel_values = patches = self.pair(patches, self.cut(later)[1])
        rows, columns = height // self.unit, width // self.unit
        return Patches(pixel_values, patches, self._places(rows, columns), (rows, columns))

    def _resized(self, pixels: Pixels, height: int, width: int, seconds: float | None) -> Steps:
        work, start = resized(pixels, height, width, self.method), time.perf_counter()
        while True:
            try:
                next(work)
            except StopIteration as end:
                return cast(Pixels, end.value)
            if seconds is not None and time.perf_counter() - start > seconds:
                yield
                start = time.perf_counter()

    def video(self, frames: Sequence[Image], fps: float) -> list[str | Image]:
        """The parts of a prompt that stand for a video: texts, and images.

        Args:
            frames: in order, at least one, all of one size.
            fps: frames in a second.

        Raises:
            MultimodalError: the model takes no videos.
            ImageError: frames differ in size, or the model takes none of such a size.
        """
        hint = "give the frames as images"
        raise MultimodalError(f"models of {self.config.family} take no videos", where="video", hint=hint)

    def pair(self, patches: Floats, later: Floats) -> Floats:
        """The patches of two frames as those of one image; only where `video` makes such pairs."""
        raise NotImplementedError

    def parts(self, image: Image) -> Sequence[str | Image]:
        """The parts of a prompt that stand for an image: the image alone, or texts, the image and crops of it."""
        return [image]

    def grid(self, image: Image) -> tuple[int, int]:
        """Rows and columns of the tokens that `preprocess` will give, without computing a pixel.

        Raises:
            ImageError: the model takes no image of this size.
        """
        height, width = image.target or self.target(*image.size)
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
    """Each value of each colour, normalized: float32 [3, 256]. Rounded where the reference processors round."""
    unit = (np.arange(256) * (1 / 255)).astype(np.float32)
    mean, std = np.array(config.mean, np.float32), np.array(config.std, np.float32)
    found: Floats = (unit - mean[:, None]) / std[:, None]
    return found


CPU_PIXELS = 1 << 20  # by default at most: the published maximum, 16 times as many, takes minutes on a CPU
MAX_RATIO = 200  # of the longer side to the shorter one
VIDEO_PIXELS = (4096, 25165824)  # of all frames together, in the published video_preprocessor_config.json


class ImageWarning(UserWarning):
    """The model sees an image smaller than it could."""


class Qwen35Images(ImageProcessor):
    """Images of Qwen 3.5: the nearest size within a minimum and a maximum of pixels, patches in blocks of 2 x 2.

    A still image is two equal frames, so that the values of a patch stand twice in its row.
    """

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

    @property
    def most_patches(self) -> int:
        return self.max_pixels // self.config.patch**2

    def video(self, frames: Sequence[Image], fps: float) -> list[str | Image]:
        """Pairs of frames, each behind the mean of their times; the last frame is repeated where there is an odd one.

        All pixels of a video together have the limits of the published `video_preprocessor_config.json`; each frame has
        also that of an image. Source: `Qwen3VLVideoProcessor` of transformers.
        """
        if len({frame.size for frame in frames}) > 1:
            sizes = " and ".join(f"{w} x {h}" for h, w in sorted({frame.size for frame in frames})[:2])
            raise ImageError(f"frames of {sizes} pixels are in one video", where="video", hint="make them one size")
        height, width = frames[0].size
        if max(height, width) > MAX_RATIO * min(height, width):
            raise ImageError(f"frames are more than {MAX_RATIO} times as long as wide", where="video")
        if min(height, width) < self.unit:
            scale = self.unit / min(height, width)
            height, width = int(height * scale), int(width * scale)
        least, most = VIDEO_PIXELS[0], min(VIDEO_PIXELS[1], len(frames) * self.max_pixels)
        target = self._within(height, width, most, least, len(frames), max(1, round(len(frames) / 2)) * 2)
        found: list[str | Image] = []
        for at in range(0, len(frames), 2):
            last = min(at + 1, len(frames) - 1)
            found += [f"<{(at + last) / fps / 2:.1f} seconds>", frames[at].with_later(frames[last], target)]
        return found

    def pair(self, patches: Floats, later: Floats) -> Floats:
        shape = len(patches), 3, self.config.frames, -1
        patches.reshape(shape)[:, :, 1] = later.reshape(shape)[:, :, 1]
        return patches

    def _within(
        self, height: int, width: int, most: int, least: int | None = None, count: int = 1, counted: int = 1
    ) -> tuple[int, int]:
        """The multiples of `unit` nearest to both sides (halves to even), or, beyond a limit, to both sides scaled.

        Args:
            most, least: pixels of all frames; `least` is by default that of an image.
            count, counted: the number of frames, and as what it counts where limits are compared.
        """
        unit, area = self.unit, count * height * width
        least = self.min_pixels if least is None else least
        rows, columns = round(height / unit), round(width / unit)
        if counted * rows * columns * unit * unit > most:
            shrink = math.sqrt(area / most)
            rows, columns = (max(1, math.floor(side / shrink / unit)) for side in (height, width))
        elif counted * rows * columns * unit * unit < least:  # also where a side is 0
            grow = math.sqrt(least / area)
            rows, columns = (math.ceil(side * grow / unit) for side in (height, width))
        return rows * unit, columns * unit

    def cut(self, pixels: Pixels) -> tuple[Floats, Floats]:
        rows = self._rows(pixels, self.config.merge, self.config.patch, planes=True)
        return rows, rows


# Pan and scan in the published preprocessor_config.json: the crops, pixels of a crop's side, and how long an image is.
MAX_CROPS, MIN_CROP, MIN_RATIO = 4, 256, 1.2


class Gemma3Images(ImageProcessor):
    """Images of Gemma 3: every image becomes a square of one size; with pan and scan, so do crops of a long one."""

    method = BILINEAR
    options_taken = ("pan_and_scan",)

    def __init__(self, config: VisionConfig, options: ImageOptions) -> None:
        super().__init__(config, options)
        self.pan_and_scan = bool(options.pan_and_scan)

    def target(self, height: int, width: int) -> tuple[int, int]:
        return self.config.image_size, self.config.image_size

    @property
    def most_patches(self) -> int:
        return (self.config.image_size // self.config.patch) ** 2

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


class Gemma4Images(ImageProcessor):
    """Images of Gemma 4: each is scaled, up or down, to fill a budget of tokens.

    The unified model has one patch a token, the others 3 x 3.
    """

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

    @property
    def most_patches(self) -> int:
        return self.budget * self.config.patches_per_row

    def cut(self, pixels: Pixels) -> tuple[Floats, Floats]:
        patch, merge = self.config.patch, self.config.merge
        if self.config.patches_per_row == 1:
            rows = self._rows(pixels, 1, patch * merge, planes=False)
            return rows, rows
        return self._rows(pixels, 1, patch, planes=False), self._rows(pixels, merge, patch, planes=False)


FAMILIES: dict[str, type[ImageProcessor]] = {
    "qwen35": Qwen35Images,
    "gemma3": Gemma3Images,
    "gemma4": Gemma4Images,
    "gemma4_unified": Gemma4Images,
}
