"""A prompt of token ids and images.

Beside the runners, which take it wherever they take token ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rlx import vision
from rlx.errors import ImageError, PromptError

if TYPE_CHECKING:
    from rlx.vision.image import Image

TokenIds = Sequence[int] | npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, init=False, eq=False)
class Prompt:
    """Token ids, and the images in them.

        prompt = rlx.Prompt(ids, images=["cat.png", array])
        print(runner.generate(prompt, 20).text)

    `runner.chat_ids(messages)` returns one if the messages contain images.

    Args:
        ids: token ids. A run of the model's placeholder id stands for one image, whether the run has one id or as many
            as the image has rows in the model. Placeholders of two images need another id between them.
        images: the images in the order of their runs: arrays of uint8 [height, width, 3], paths, bytes of files, data
            URIs or Pillow images.

    Attributes:
        ids: as given.
        images: what was given; files are read at once.

    Raises:
        PromptError: `ids` is no sequence, or `images` no list.
        ImageError: an image cannot be used: see `rlx.vision.image.Image.of`.
    """

    ids: TokenIds
    images: tuple[Image, ...]

    def __init__(self, ids: TokenIds, images: Sequence[Any] = ()) -> None:
        check_is_sequence(ids, "ids")
        object.__setattr__(self, "ids", ids)
        object.__setattr__(self, "images", read_images(images))

    def __repr__(self) -> str:
        return f"<Prompt of {len(self.ids)} ids and {len(self.images)} images>"


def check_is_sequence(ids: Any, what: str) -> None:
    """`PromptError` for what cannot be token ids: a text, or anything but a sequence."""
    if isinstance(ids, str | bytes):
        hint = "convert it to ids first: runner.tokenizer.encode(text), or runner.chat_ids(messages)"
        raise PromptError(f"expected token ids, found a {type(ids).__name__}", where=what, hint=hint)
    if not isinstance(ids, Sequence | np.ndarray):
        raise PromptError(f"expected a sequence of token ids, found a {type(ids).__name__}", where=what)
    if isinstance(ids, np.ndarray) and ids.ndim == 0:
        raise PromptError("expected a sequence of token ids, found one number", where=what, hint="give [id]")


def read_images(values: Sequence[Any], where: str = "image") -> tuple[Image, ...]:
    """The images that a caller means, see `Image.of`.

    Args:
        where: what an image is called in messages, followed by its number.

    Raises:
        PromptError: `values` is no list.
        ImageError: an image cannot be used.
    """
    if not isinstance(values, list | tuple):
        hint = "give [image], also for a single one"
        raise PromptError(f"expected a list of images, found a {type(values).__name__}", where="images", hint=hint)
    found = []
    for i, value in enumerate(values):
        try:
            found.append(vision.Image.of(value))
        except ImageError as wrong:
            raise ImageError(wrong.what, where=wrong.where or f"{where} {i}", hint=wrong.hint) from wrong
    return tuple(found)
