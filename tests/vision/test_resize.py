"""Resizing, against Pillow: two calls of its `resize`, width first, give the same bits with every version."""

from __future__ import annotations

import numpy as np
import pytest

from rlx.vision.resize import Filter, resize

SIZES = [
    (1, 1, 7, 5), (3, 400, 400, 3), (37, 64, 64, 37), (200, 10, 11, 333), (150, 150, 75, 300), (5, 9, 96, 96),
    (333, 77, 16, 16), (2, 3000, 24, 48), (64, 64, 63, 65),
]  # fmt: skip


@pytest.mark.parametrize("method", list(Filter))
def test_every_bit_is_that_of_pillow(method: Filter) -> None:
    pillow = pytest.importorskip("PIL.Image")
    number, generator = pillow.Resampling[method.name], np.random.default_rng(4)
    for height, width, rows, columns in SIZES:
        noise = generator.integers(0, 256, (height, width, 3), np.uint8)
        edges = np.where(noise < 128, 0, 255).astype(np.uint8)  # the cubic overshoots, and is cut off
        for pixels in (noise, edges):
            between = pillow.fromarray(pixels).resize((columns, height), number)
            expected = np.asarray(between.resize((columns, rows), number))
            np.testing.assert_array_equal(resize(pixels, rows, columns, method), expected)


def test_the_weights_by_hand() -> None:
    """Half the size, linear: 4 inputs an output, weights 1/8, 3/8, 3/8, 1/8; at the edge 3/7, 3/7, 1/7."""
    row = np.array([0, 80, 160, 240, 120, 40], np.uint8)
    expected = [round((3 * 0 + 3 * 80 + 160) / 7), round((80 + 3 * 160 + 3 * 240 + 120) / 8)]
    expected.append(round((240 + 3 * 120 + 3 * 40) / 7))
    pixels = np.repeat(row[None, :, None], 3, axis=2)
    assert resize(pixels, 1, 3, Filter.BILINEAR)[0, :, 0].tolist() == expected
    assert resize(pixels.transpose(1, 0, 2), 3, 1, Filter.BILINEAR)[:, 0, 2].tolist() == expected


def test_blocks_of_rows_and_columns_leave_no_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlx.vision import resize as module

    pixels = np.random.default_rng(5).integers(0, 256, (90, 70, 3), np.uint8)
    whole = resize(pixels, 41, 133, Filter.BICUBIC)
    monkeypatch.setattr(module, "PRODUCT", 1)
    monkeypatch.setattr(module, "LEAST", 7)
    np.testing.assert_array_equal(resize(pixels, 41, 133, Filter.BICUBIC), whole)
