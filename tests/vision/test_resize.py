"""Resizing, against Pillow's own `resize` of whole images: two calls, width first, are the same with all versions."""

from __future__ import annotations

import numpy as np
import pytest

from rlx.vision import processors as module
from rlx.vision.processors import BICUBIC, BILINEAR, finish, resized

pillow = pytest.importorskip("PIL.Image")

SIZES = [
    (1, 1, 7, 5), (3, 400, 400, 3), (37, 64, 64, 37), (200, 10, 11, 333), (150, 150, 75, 300), (5, 9, 96, 96),
    (333, 77, 16, 16), (2, 3000, 24, 48), (64, 64, 63, 65), (20, 30, 20, 60), (20, 30, 10, 30), (9, 9, 9, 9),
]  # fmt: skip


@pytest.mark.parametrize("strip", [module.STRIP, 700])
@pytest.mark.parametrize("method", [BILINEAR, BICUBIC])
def test_strips_leave_no_seam(method: int, strip: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STRIP", strip)
    generator = np.random.default_rng(4)
    for height, width, rows, columns in SIZES:
        pixels = generator.integers(0, 256, (height, width, 3), np.uint8)
        between = pillow.fromarray(pixels).resize((columns, height), method)
        expected = np.asarray(between.resize((columns, rows), method))
        np.testing.assert_array_equal(finish(resized(pixels, rows, columns, method)), expected)


def test_the_weights_by_hand() -> None:
    """Half the size, linear: 4 inputs an output, weights 1/8, 3/8, 3/8, 1/8; at the edge 3/7, 3/7, 1/7."""
    row = np.array([0, 80, 160, 240, 120, 40], np.uint8)
    expected = [round((3 * 0 + 3 * 80 + 160) / 7), round((80 + 3 * 160 + 3 * 240 + 120) / 8)]
    expected.append(round((240 + 3 * 120 + 3 * 40) / 7))
    pixels = np.repeat(row[None, :, None], 3, axis=2)
    assert finish(resized(pixels, 1, 3, BILINEAR))[0, :, 0].tolist() == expected
    assert finish(resized(pixels.transpose(1, 0, 2), 3, 1, BILINEAR))[:, 0, 2].tolist() == expected
