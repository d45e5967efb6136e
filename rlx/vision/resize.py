"""Resizing of images, antialiased, with the same pixels on every machine and with every version of every library.

Second step of the vision stage, under the processors. The models were trained on what Pillow up to 12.3 computes:
weights with 22 fractional bits, first along the rows, then along the columns, with pixels of 8 bits between the two.
Pillow 13 chooses the order by the sizes, so its pixels differ; these do not.

An output has few weights, so a matrix of all inputs and outputs of an axis would be nearly empty. But 16 neighbouring
outputs share most of their inputs: their weights are a small dense matrix, and NumPy multiplies those fast. Every sum
is a multiple of 2^-22 and less than 2^10, which float64 holds exactly, so that no order of adding changes it.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

Pixels: TypeAlias = NDArray[np.uint8]
Floats: TypeAlias = NDArray[np.float64]
Steps: TypeAlias = Generator[None, None, Pixels]
Result = TypeVar("Result")

UNIT = float(1 << 22)  # the steps of a weight: 22 bits behind the point
BLOCK = 16  # outputs that share a matrix: more of them have more zeros in it
PRODUCT = 1 << 18  # multiplications of a product: OpenBLAS starts threads, which then spin, for larger ones
LEAST = 48  # rows or columns of a product


class Filter(Enum):
    """How much a pixel counts by its distance; the value is the radius, in pixels of the smaller image."""

    BILINEAR = 1.0
    BICUBIC = 2.0

    def weights(self, distance: Floats) -> Floats:
        """The weights at the distances, not normalized: a triangle, or the cubic of Keys (1981) with a = -0.5."""
        x, a = np.abs(distance), -0.5
        if self is Filter.BILINEAR:
            return np.where(x < 1, 1 - x, 0.0)
        near, far = ((a + 2) * x - (a + 3)) * x * x + 1, (((x - 5) * x + 8) * x - 4) * a
        return np.where(x < 1, near, np.where(x < 2, far, 0.0))


@dataclass(frozen=True)
class Block:
    """The weights of neighbouring outputs of an axis.

    Attributes:
        outputs, inputs: from where to where, the end not included.
        matrix: float64 [inputs, outputs], multiples of 2^-22.
    """

    outputs: slice
    inputs: slice
    matrix: Floats


def resize(pixels: Pixels, height: int, width: int, method: Filter) -> Pixels:
    """An image of another size; the sides are scaled each by itself.

    Args:
        pixels: uint8 [rows, columns, channels].
        height, width: the new size, at least 1.
        method: the weights; where the image becomes smaller they are as wide as a new pixel (antialiasing).

    Returns:
        uint8 [height, width, channels]: bit for bit that of `Image.resize` of Pillow 12.3, and in Pillow 13 that of two
        calls, the first of which changes the width only.
    """
    return finish(resize_steps(pixels, height, width, method))


def resize_steps(pixels: Pixels, height: int, width: int, method: Filter) -> Steps:
    """As `resize`, piece by piece: a generator that pauses every few milliseconds and returns the pixels."""
    if width != pixels.shape[1]:
        pixels = yield from _along_rows(pixels, blocks(pixels.shape[1], width, method))
    if height != pixels.shape[0]:
        pixels = yield from _along_columns(pixels, blocks(pixels.shape[0], height, method))
    return pixels


def finish(steps: Generator[None, None, Result]) -> Result:
    """Runs work to its end: what the generator returns."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: Result = end.value
            return result


def blocks(inputs: int, outputs: int, method: Filter) -> list[Block]:
    """The weights of an axis of `inputs` pixels that becomes one of `outputs` pixels."""
    scale = inputs / outputs
    wide = max(scale, 1.0)  # pixels of the input that are 1 of the filter's distance
    radius = method.value * wide
    center = (np.arange(outputs) + 0.5) * scale
    first = np.maximum((center - radius + 0.5).astype(np.int64), 0)
    end = np.minimum((center + radius + 0.5).astype(np.int64), inputs)
    taps = np.arange(int((end - first).max()))
    pixel = first[:, None] + taps
    weights = method.weights((pixel - center[:, None] + 0.5) * (1.0 / wide))
    weights[pixel >= end[:, None]] = 0.0
    weights /= np.add.accumulate(weights, axis=1)[:, -1:]  # one after the other: the sum of a loop, to the last bit
    weights = np.trunc(weights * UNIT + np.copysign(0.5, weights)) / UNIT
    return [
        _block(first[at : at + BLOCK], end[at : at + BLOCK], weights[at : at + BLOCK], at)
        for at in range(0, outputs, BLOCK)
    ]


def _block(first: NDArray[np.int64], end: NDArray[np.int64], weights: Floats, at: int) -> Block:
    low, high = int(first.min()), int(end.max())
    matrix = np.zeros((high - low, len(first)))
    output, tap = np.nonzero(weights)
    matrix[first[output] + tap - low, output] = weights[output, tap]
    return Block(slice(at, at + len(first)), slice(low, high), matrix)


def _along_rows(pixels: Pixels, axis: list[Block]) -> Steps:
    rows, columns, channels = pixels.shape
    result = np.empty((rows, axis[-1].outputs.stop, channels), np.uint8)
    step = max(1, _share(axis) // channels)
    for at in range(0, rows, step):
        part = pixels[at : at + step].transpose(0, 2, 1).astype(np.float64, order="C").reshape(-1, columns)
        for block in axis:
            found = _rounded(part[:, block.inputs] @ block.matrix).reshape(-1, channels, block.matrix.shape[1])
            result[at : at + step, block.outputs] = found.transpose(0, 2, 1)
        yield
    return result


def _along_columns(pixels: Pixels, axis: list[Block]) -> Steps:
    rows, columns, channels = pixels.shape
    result = np.empty((axis[-1].outputs.stop, columns * channels), np.uint8)
    flat, step = pixels.reshape(rows, -1), _share(axis)
    for block in axis:
        for at in range(0, columns * channels, step):
            part = flat[block.inputs, at : at + step].astype(np.float64)
            result[block.outputs, at : at + step] = _rounded(block.matrix.T @ part)
        yield
    return result.reshape(-1, columns, channels)


def _share(axis: list[Block]) -> int:
    """How many rows (or columns) a product takes at a time."""
    return max(LEAST, PRODUCT // max(block.matrix.size for block in axis))


def _rounded(sums: Floats) -> Pixels:
    sums += 0.5
    return np.clip(sums, 0.0, 255.0, out=sums).astype(np.uint8)
