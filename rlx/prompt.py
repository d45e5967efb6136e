"""A prompt of token ids, images and audio.

Beside the runners, which take it wherever they take token ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from rlx.audio.audio import Audio
from rlx.errors import AudioError, ImageError, MultimodalError, PromptError
from rlx.vision.image import Image

T = TypeVar("T")
TokenIds = Sequence[int] | npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, init=False, eq=False)
class Prompt:
    """Token ids, and the images and the audio in them.

        prompt = rlx.Prompt(ids, images=["cat.png", array])
        print(runner.generate(prompt, 20).text)

    `runner.chat_ids(messages)` returns one if the messages contain images.

    Args:
        ids: token ids. A run of the model's placeholder id stands for one image, whether the run has one id or as many
            as the image has rows in the model. Placeholders of two images need another id between them.
        images: the images in the order of their runs: arrays of uint8 [height, width, 3], paths, bytes of files, data
            URIs or Pillow images.
        audio: clips of audio in the order of their runs, for models that take audio: float arrays [samples] at 16,000
            a second, paths or bytes of WAV files. Their placeholder is another id than that of images.

    Attributes:
        ids: as given.
        images, audio: what was given; files are read at once.

    Raises:
        PromptError: `images` or `audio` is no list.
        ImageError: an image cannot be used: see `rlx.vision.image.Image.of`.
        AudioError: a clip cannot be used: see `rlx.audio.audio.Audio.of`.
    """

    ids: TokenIds
    images: tuple[Image, ...]
    audio: tuple[Audio, ...]

    def __init__(self, ids: TokenIds, images: Sequence[Any] = (), audio: Sequence[Any] = ()) -> None:
        object.__setattr__(self, "ids", ids)
        object.__setattr__(self, "images", read_images(images))
        object.__setattr__(self, "audio", read_audio(audio))

    def __repr__(self) -> str:
        clips = f" and {len(self.audio)} clips of audio" if self.audio else ""
        return f"<Prompt of {len(self.ids)} ids and {len(self.images)} images{clips}>"


def read_images(values: Sequence[Any], where: str = "image") -> tuple[Image, ...]:
    """The images that a caller means, see `Image.of`.

    Args:
        where: what an image is called in messages, followed by its number.

    Raises:
        PromptError: `values` is no list.
        ImageError: an image cannot be used.
    """
    return _read(values, Image.of, ImageError, where, ("images", "images", "image"))


def read_audio(values: Sequence[Any]) -> tuple[Audio, ...]:
    """The clips of audio that a caller means, see `Audio.of`.

    Raises:
        PromptError: `values` is no list.
        AudioError: a clip cannot be used.
    """
    return _read(values, Audio.of, AudioError, "audio", ("audio", "clips", "clip"))


def _read(
    values: Any, read: Callable[[Any], T], error: type[MultimodalError], where: str, names: tuple[str, str, str]
) -> tuple[T, ...]:
    """Each value as `read` takes it. `names` are those of the argument, of several and of one, for messages."""
    argument, several, one = names
    if not isinstance(values, list | tuple):
        hint = f"give [{one}], also for a single one"
        raise PromptError(f"expected a list of {several}, found a {type(values).__name__}", where=argument, hint=hint)
    found = []
    for i, value in enumerate(values):
        try:
            found.append(read(value))
        except error as wrong:
            raise error(wrong.what, where=wrong.where or f"{where} {i}", hint=wrong.hint) from wrong
    return tuple(found)
