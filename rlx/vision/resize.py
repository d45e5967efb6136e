"""Resizing of images with Pillow, antialiased: first the width, then the height.

Second step of the vision stage, under the processors. The models were trained on what Pillow up to 12.3 computes.
Pillow 13 chooses the order by the sizes, so its pixels differ; two calls in this order give the same with all versions.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeAlias, TypeVar

import numpy as np

from rlx.vision.decode import pillow
from rlx.vision.image import Pixels

Steps: TypeAlias = Generator[None, None, Pixels]
Result = TypeVar("Result")

BILINEAR, BICUBIC = 2, 3  # `PIL.Image.Resampling`: a triangle, and the cubic of Keys (1981) with a = -0.5
STRIP = 1 << 18  # pixels that are resized at a time: a few milliseconds


def resize(pixels: Pixels, height: int, width: int, method: int) -> Pixels:
    """An image of another size; the sides are scaled each by itself.

    Args:
        pixels: uint8 [rows, columns, 3].
        height, width: the new size, at least 1.
        method: the weights; where the image becomes smaller they are as wide as a new pixel (antialiasing).

    Returns:
        uint8 [height, width, 3].

    Raises:
        ImageError: Pillow is not installed.
    """
    return finish(resize_steps(pixels, height, width, method))


def resize_steps(pixels: Pixels, height: int, width: int, method: int) -> Steps:
    """As `resize`, piece by piece: a generator that pauses every few milliseconds and returns the pixels."""
    pixels = yield from _along_rows(pixels, width, method)
    turned = yield from _along_rows(pixels.swapaxes(0, 1), height, method)
    return np.ascontiguousarray(turned.swapaxes(0, 1))


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
