"""A prompt of token ids and images.

Beside the runners, which take it wherever they take token ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx.errors import PromptError

TokenIds = Sequence[int] | npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, init=False, eq=False)
class Prompt:
    """Token ids and the images in them.

        prompt = rlx.Prompt(ids, images=["cat.png", array])
        print(runner.generate(prompt, 20).text)

    `runner.chat_ids(messages)` returns one if the messages contain images.

    Args:
        ids: token ids. A run of the model's placeholder id stands for one image, whether the run has one id or as many
            as the image has rows in the model. Placeholders of two images need another id between them.
        images: the images in the order of their runs.

    Attributes:
        ids: as given.
        images: as given.

    Raises:
        PromptError: `images` is no sequence of images.
    """

    ids: TokenIds
    images: tuple[Any, ...]

    def __init__(self, ids: TokenIds, images: Sequence[Any] = ()) -> None:
        if not isinstance(images, list | tuple):
            what = f"expected a list of images, found a {type(images).__name__}"
            raise PromptError(what, where="images", hint="give [image], also for a single one")
        object.__setattr__(self, "ids", ids)
        object.__setattr__(self, "images", tuple(images))

    def __repr__(self) -> str:
        return f"<Prompt of {len(self.ids)} ids and {len(self.images)} images>"
