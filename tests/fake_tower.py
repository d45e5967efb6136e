"""A vision tower without arithmetic: enough of one to test how images come into prompts."""

from __future__ import annotations

from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

import numpy as np

from rlx.engine.images import ImageInput
from rlx.errors import MultimodalError
from rlx.models.vision_config import VisionConfig
from rlx.vision.encoder import Floats
from rlx.vision.image import ImageOptions
from rlx.vision.processors import Patches

HIDDEN, PLACEHOLDER, BEGIN, END = 8, 30, 28, 29
PIECES = 4


def config(family: str = "qwen35", **more: Any) -> VisionConfig:
    """Images of 64 pixels a token, 1 to 64 of them."""
    sizes: dict[str, Any] = {"hidden": 4, "patch": 4, "merge": 2, "positions": 1024, "out_hidden": HIDDEN, "eps": 1e-6}
    colours = {"mean": (0.5,) * 3, "std": (0.5,) * 3}
    ids: dict[str, Any] = {"image_token": PLACEHOLDER, "begin_token": BEGIN, "end_token": END}
    return VisionConfig(family, **sizes, **colours, **ids, **{"min_pixels": 64, "max_pixels": 4096, **more})


class FakeTower:
    """Rows are the mean of a patch; it takes `PIECES` pieces of work.

    Attributes:
        begun, closed: the number of images that were begun, and given up.
        pieces: the number of pieces that were computed.
        trouble: raised by the next piece, once.
    """

    def __init__(self, made: VisionConfig | None = None) -> None:
        self.config = made or config()
        self.begun = self.pieces = self.closed = 0
        self.trouble: BaseException | None = None
        self.value: float | None = None
        self.weights = SimpleNamespace(loader=SimpleNamespace(stamps=lambda: ()))

    def steps(self, patches: Patches, seconds: float | None = None) -> Generator[None, None, Floats]:
        self.begun += 1
        try:
            for _ in range(PIECES):
                if (trouble := self.trouble) is not None:
                    self.trouble = None
                    raise trouble
                self.pieces += 1
                yield
        except GeneratorExit:
            self.closed += 1
            raise
        rows = patches.patches.reshape(patches.tokens, -1).mean(1, keepdims=True, dtype=np.float32)
        return np.repeat(rows if self.value is None else rows * self.value, HIDDEN, axis=1)


class FakeVision:
    """What finds the tower of a model; None for a model without one."""

    def __init__(self, tower: FakeTower | None) -> None:
        self.tower = tower

    def required(self) -> FakeTower:
        if self.tower is None:
            raise MultimodalError("the model takes text only", where="model.gguf")
        return self.tower


def images(tower: FakeTower | None, capacity: int = 1 << 20, **options: Any) -> ImageInput:
    """The images of a model with this tower."""
    vision: Any = FakeVision(tower)
    return ImageInput(lambda: vision, tower.config.family if tower else "llama", ImageOptions(**options), capacity, 0.1)


def image(seed: int = 0, height: int = 16, width: int = 24) -> np.ndarray[Any, Any]:
    """An image of 2 x 3 tokens."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
