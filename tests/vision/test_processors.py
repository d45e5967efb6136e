"""What the processors make of an image, against the image processors of transformers.

`pixels/*.npz` was made with transformers 5.23.0 (the classes `*ImageProcessorPil`, Pillow 12.3). Of images that are
drawn from a seed it has the size, the grid, a SHA-256 of the resized pixels in the order of `pixel_values`, and 64 of
the values.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drawn import drawn

from rlx.errors import ImageError
from rlx.models.vision_config import VisionConfig
from rlx.vision.image import Image, ImageOptions
from rlx.vision.processors import ImageProcessor

FOLDER = Path(__file__).parent / "pixels"
TOWER: dict[str, Any] = {
    "hidden": 64, "positions": 40, "out_hidden": 64, "eps": 1e-6, "image_token": 1, "begin_token": None,
    "end_token": None,
}  # fmt: skip
SETTINGS = [
    (path.stem, setting) for path in sorted(FOLDER.glob("*.npz")) for setting in json.loads(str(np.load(path)["about"]))
]


def config(family: str, setting: dict[str, Any]) -> VisionConfig:
    """The configuration that a setting of `pixels/*.npz` describes, with the sizes of the tiny towers as defaults."""
    tower, image = setting["config"].get("vision_config", {}), setting["preprocessor"]
    patch = tower.get("patch_size", 8)
    match family:
        case "qwen35":
            sizes = {
                "merge": 2,
                "min_pixels": image.get("min_pixels", 2048),
                "max_pixels": image.get("max_pixels", 1 << 16),
            }
        case "gemma3":
            side = tower.get("image_size", 96)
            sizes = {"image_size": side, "merge": side // patch // {9: 3, 256: 16}[image.get("image_seq_length", 9)]}
        case _:
            sizes = {"merge": 3, "budget": image.get("max_soft_tokens", 70)}
    mean, std = (setting["mean"],) * 3, (setting["std"],) * 3
    return VisionConfig(family=family, patch=patch, mean=mean, std=std, **sizes, **TOWER)


QWEN = config("qwen35", {"config": {}, "preprocessor": {}, "mean": 0.5, "std": 0.5})
GEMMA3 = config("gemma3", {"config": {}, "preprocessor": {}, "mean": 0.5, "std": 0.5})
GEMMA4 = config("gemma4", {"config": {}, "preprocessor": {}, "mean": 0.0, "std": 1.0})
UNIFIED = replace(GEMMA4, family="gemma4_unified")


VIDEOS = [
    (2, 48, 64, 64, 64), (3, 100, 37, 96, 32), (5, 720, 1280, 704, 1280), (9, 1080, 1920, 1088, 1920),
    (40, 500, 333, 512, 320), (7, 10, 300, 32, 960), (2, 17, 29, 32, 64), (64, 1080, 1920, 448, 832),
]  # fmt: skip


@pytest.mark.parametrize(("frames", "height", "width", "rows", "columns"), VIDEOS)
def test_the_size_of_a_video(frames: int, height: int, width: int, rows: int, columns: int) -> None:
    """From `smart_resize` of transformers 5.24's `video_processing_qwen3_vl`."""
    tower = VisionConfig(family="qwen35", patch=16, merge=2, mean=(0.5,) * 3, std=(0.5,) * 3, **TOWER)
    processor = ImageProcessor.of(tower, ImageOptions(max_pixels=1 << 26))
    parts = processor.video([Image.of(np.zeros((height, width, 3), np.uint8))] * frames, 2.0)
    images = [part for part in parts if isinstance(part, Image)]
    assert len(parts) == 2 * len(images) == 2 * -(-frames // 2)
    assert {image.target for image in images} == {(rows, columns)}
    assert processor.grid(images[0]) == (rows // 32, columns // 32)


@pytest.mark.parametrize(("family", "setting"), SETTINGS, ids=[f"{f}-{s['name']}" for f, s in SETTINGS])
def test_pixels_equal_the_reference_processors(family: str, setting: dict[str, Any]) -> None:
    processor = ImageProcessor.of(config(family, setting), ImageOptions())
    values = np.load(FOLDER / f"{family}.npz")[f"{setting['name']}_values"]
    for case, expected in zip(setting["cases"], values, strict=True):
        pixels = drawn(case["height"], case["width"], case["seed"])
        assert hashlib.sha256(pixels.tobytes()).hexdigest()[:16] == case["picture"], "NumPy draws another image"
        image = Image.of(pixels)
        if "refused" in case:
            with pytest.raises(ImageError, match="more than 200 times as long as wide"):
                processor.preprocess(image)
            continue
        found = processor.preprocess(image)
        assert found.pixel_values.dtype == np.float32 and list(found.pixel_values.shape) == case["shape"]
        assert found.grid == processor.grid(image) == tuple(case["grid"]) and found.tokens == case["tokens"]
        back = np.rint((found.pixel_values.astype(np.float64) * setting["std"] + setting["mean"]) * 255)
        assert hashlib.sha256(back.astype(np.uint8).tobytes()).hexdigest() == case["sha256"]
        places = (np.arange(64, dtype=np.int64) * 2654435761 + 12345) % back.size
        np.testing.assert_allclose(found.pixel_values.reshape(-1)[places], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("tower", [QWEN, GEMMA3, GEMMA4, UNIFIED], ids=lambda tower: tower.family)
def test_a_patch_is_the_part_of_the_image_at_its_place(tower: VisionConfig) -> None:
    tower = replace(tower, mean=(0.0,) * 3, std=(1.0,) * 3, max_pixels=1 << 16)
    side = tower.patch * tower.merge
    shape = {"gemma3": (96, 96), "qwen35": (64, 96)}.get(tower.family, (168, 240))  # no resize
    pixels = drawn(*shape, 5)
    found = ImageProcessor.of(tower, ImageOptions()).preprocess(Image.of(pixels))
    patch = side if tower.family == "gemma4_unified" else tower.patch
    assert found.patches.shape == (len(found.places), tower.patch_values)
    for (row, column), values in zip(found.places, found.patches, strict=True):
        part = pixels[row * patch : (row + 1) * patch, column * patch : (column + 1) * patch] / 255
        if tower.family == "qwen35":  # two equal frames
            part = np.repeat(part.transpose(2, 0, 1)[:, None], 2, axis=1)
        elif tower.family == "gemma3":
            part = part.transpose(2, 0, 1)
        np.testing.assert_allclose(values, part.reshape(-1), rtol=0, atol=1e-6)
    token = found.places // (side // patch)  # patches of one token are consecutive, tokens go row by row
    number = token[:, 0] * found.grid[1] + token[:, 1]
    np.testing.assert_array_equal(number, np.arange(len(number)) // tower.patches_per_row)


def test_a_large_image_is_made_ready_in_pieces_with_the_same_result() -> None:
    processor, image = ImageProcessor.of(GEMMA4, ImageOptions()), Image.of(drawn(900, 1200, 2))
    work, pauses = processor.steps(image, seconds=0.0), 0
    while True:
        try:
            next(work)
            pauses += 1
        except StopIteration as end:
            found = end.value
            break
    assert pauses > 5 and next(processor.steps(image, seconds=0.0)) is None
    whole = processor.preprocess(image)
    np.testing.assert_array_equal(found.patches, whole.patches)
    np.testing.assert_array_equal(found.pixel_values, whole.pixel_values)


@pytest.mark.parametrize(
    ("height", "width", "crops"),
    [
        (500, 1000, [(500, 500)] * 2),
        (900, 300, [(300, 300)] * 3),
        (2000, 400, [(500, 400)] * 4),
        (500, 700, [(500, 350)] * 2),
        (1001, 500, [(501, 500), (500, 500)]),
        (1100, 1000, []),  # nearly square
        (600, 200, []),  # too narrow
    ],
)
def test_pan_and_scan_adds_crops_along_the_longer_side(height: int, width: int, crops: list[tuple[int, int]]) -> None:
    image = Image.of(drawn(height, width, 1))
    parts = ImageProcessor.of(GEMMA3, ImageOptions(pan_and_scan=True)).parts(image)
    images = [part for part in parts if isinstance(part, Image)]
    assert images[0] is image and [each.size for each in images[1:]] == crops
    text = "".join("{I}" if isinstance(part, Image) else part for part in parts)
    if crops:
        many = " ".join(["{I}"] * len(crops))
        assert text == f"Here is the original image {{I}} and here are some crops to help you see better {many}"
        joined = np.concatenate([each.pixels for each in images[1:]], axis=0 if height > width else 1)
        np.testing.assert_array_equal(joined, image.pixels)
    assert ImageProcessor.of(GEMMA3, ImageOptions()).parts(image) == [image]
