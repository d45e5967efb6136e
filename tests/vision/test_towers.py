"""Vision towers: rows of images against those of transformers, from both kinds of files, in chunks and alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tower_files import as_checkpoint, gemma4_as_mmproj, golden

from rlx import backends, models
from rlx.compiler.compile import Compiler
from rlx.profile import CompileProfile
from rlx.vision.image import Image, ImageOptions
from rlx.vision.opening import open_tower
from rlx.vision.processors import ImageProcessor, Patches
from rlx.vision.tower import Tower
from rlx.weights import open_weights

# Folder -> a text model in GGUF that its tower goes with.
TEXTS = {
    "qwen35-mm": "qwen35",
    "qwen3vl-mm": "qwen3vl-mm",
    "gemma3-mm": "gemma3",
    "gemma4-e2b-mm": "gemma4-e2b",
    "gemma4-unified-mm": "gemma4-e2b",
}
KINDS = ("embedding", "keys", "layer", "head")
TOLERANCE = 1e-5  # of the largest value; the same sums in another order


def tower_of(folder: Path, goldens: Path, tmp_path: Path, form: str, device: str = "cpu", most: int = 32) -> Tower:
    """The tower of a fixture, opened from a checkpoint or from an mmproj, with the limits of the checkpoint."""
    mmproj = next(iter(folder.glob("mmproj-*.gguf")), None)
    checkpoint = folder / "hf" if mmproj is None else as_checkpoint(folder, mmproj, tmp_path / "hf")
    own = open_weights(checkpoint)
    text = models.from_hf(own.metadata)
    config, weights = open_tower(own, text)
    if form == "gguf":
        beside = mmproj or gemma4_as_mmproj(folder, tmp_path / "mmproj-f16.gguf")
        loader = open_weights(goldens / TEXTS[folder.name] / "model-f16.gguf")
        text = models.config_from("gguf", loader.metadata, loader.tensors.__contains__, where=loader.path)
        found, weights = open_tower(loader, text, beside)
        limits = {name: getattr(config, name) for name in ("min_pixels", "max_pixels", "budget")}
        config = replace(found, **limits)
    profile = CompileProfile.load({"buckets": {"seq": [1, most]}}).with_precision("exact", "auto")
    compiler = Compiler(backends.backend(device).target())
    workers = compiler.workers(2)
    return Tower(config, weights, profile, compiler, lambda: workers)


def patches_of(tower: Tower, image: np.ndarray) -> Patches:
    return ImageProcessor.of(tower.config, ImageOptions()).preprocess(Image.of(image))


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize(("form", "device"), [("gguf", "cpu"), ("hf", "reference")])
def test_the_rows_of_an_image_are_those_of_transformers(
    name: str, form: str, device: str, goldens: Path, tmp_path: Path
) -> None:
    expected = golden(goldens / name)
    tower = tower_of(goldens / name, goldens, tmp_path, form, device)
    patches = patches_of(tower, expected["image"])
    found = tower.encode(patches)
    parts = np.split(found, 1 + len(tower.config.deepstack), axis=1)
    for part, want in zip(parts, [expected["image_features"], *expected.get("deepstack_features", [])], strict=True):
        assert part.shape == (patches.tokens, tower.config.out_hidden)
        assert np.abs(part[:, : want.shape[1]] - want).max() / np.abs(want).max() < TOLERANCE


@pytest.fixture(scope="module")
def unified(goldens: Path, tmp_path_factory: pytest.TempPathFactory) -> Tower:
    """A tower with programs of at most 32 rows, for images of 60 patches."""
    return tower_of(goldens / "gemma4-unified-mm", goldens, tmp_path_factory.mktemp("tower"), "gguf")


@pytest.fixture(scope="module")
def gemma4(goldens: Path, tmp_path_factory: pytest.TempPathFactory) -> Tower:
    return tower_of(goldens / "gemma4-e2b-mm", goldens, tmp_path_factory.mktemp("tower"), "gguf")


def test_two_images_may_be_encoded_in_turns(gemma4: Tower, goldens: Path) -> None:
    image = golden(goldens / "gemma4-e2b-mm")["image"]
    both = [patches_of(gemma4, each) for each in (image, image[::-1, :60])]
    alone = [gemma4.encode(patches) for patches in both]
    steps = [gemma4.steps(patches) for patches in both]
    found: dict[int, np.ndarray] = {}
    while len(found) < 2:
        for number, each in enumerate(steps):
            try:
                next(each)
            except StopIteration as done:
                found.setdefault(number, done.value)
    assert [np.array_equal(found[i], alone[i]) for i in (0, 1)] == [True, True]


def test_layers_of_equal_formats_share_programs(gemma4: Tower, goldens: Path) -> None:
    gemma4.encode(patches_of(gemma4, golden(goldens / "gemma4-e2b-mm")["image"]))
    assert gemma4.config.layers == 2
    assert [program.name for program in gemma4.programs.values()] == [f"{kind}-1-32" for kind in KINDS]


def test_chunks_stay_in_the_bucket_of_all_rows(gemma4: Tower) -> None:
    """Other buckets have programs of their own."""
    assert gemma4._ranges == ((1, 32),)
    sizes = [end - begin for begin, end in gemma4._chunks("layer", 70, None)]
    assert sizes == [24, 23, 23]
    gemma4._ranges = ((1, 16), (17, 32))
    try:
        assert [end - begin for begin, end in gemma4._chunks("layer", 33, None)] == [17, 16], "too many for one"
        gemma4._ranges = ((1, 16), (17, 64))
        gemma4._seconds["layer"] = 1.0
        assert [end - begin for begin, end in gemma4._chunks("layer", 33, 1e-3)] == [33]
        assert [end - begin for begin, end in gemma4._chunks("layer", 96, 1e-3)] == [32, 32, 32]
    finally:
        gemma4._ranges = ((1, 32),)
