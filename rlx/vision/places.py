"""The inputs of a tower that follow from the places of its patches: rows of position tables, and positions of the rope.

Vision stage, under `tower.py`. They depend on the size of the grid only, so those of the last grids are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isqrt
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx.errors import MultimodalError
from rlx.models.vision_config import VisionConfig

Inputs = Mapping[str, npt.NDArray[Any]]
Places = npt.NDArray[np.int32]


def place_inputs(config: VisionConfig, places: Places) -> Inputs:
    """Input name -> values, with one entry for each patch on the first axis.

    Args:
        places: i32 [N, 2], row and column of each patch.

    Raises:
        MultimodalError: the image has more rows or columns than the position table.
    """
    if config.family == "qwen35":
        return {**_interpolated(places, isqrt(config.positions)), "positions": places}
    rows, columns = places[:, 0], places[:, 1]
    if config.family == "gemma3":
        side = config.image_size // config.patch
        _check(max(rows.max(), columns.max()), side, config)
        return {"places": rows * side + columns}
    _check(max(rows.max(), columns.max()), config.positions, config)
    found = {"rows": rows, "columns": columns}
    return found if config.family == "gemma4_unified" else {**found, "positions": places}


def _check(most: int, size: int, config: VisionConfig) -> None:
    if most >= size:
        unit = config.patch * (config.merge if config.family == "gemma4_unified" else 1)
        what = f"the resized image has a side of {(most + 1) * unit} pixels, the model's positions end at {size * unit}"
        raise MultimodalError(what, where="image", hint="choose fewer tokens for an image, or cut the image")


def _interpolated(places: Places, side: int) -> Inputs:
    """Four rows of a square table for each patch, and their shares: bilinear, the corners of table and image meet."""
    low, high, part = [], [], []
    for axis in (0, 1):
        last = int(places[:, axis].max())
        at = places[:, axis] * ((side - 1) / last if last else 0.0)
        low.append(np.minimum(at.astype(np.int32), side - 1))
        high.append(np.minimum(low[-1] + 1, side - 1))
        part.append((at - low[-1]).astype(np.float32))
    (top, left), (bottom, right), (down, along) = low, high, part
    taps = np.stack([row * side + column for row in (top, bottom) for column in (left, right)], axis=1)
    shares = np.stack([a * b for a in (1 - down, down) for b in (1 - along, along)], axis=1)
    return {"taps": taps.astype(np.int32), "shares": shares.astype(np.float32)[:, None]}
