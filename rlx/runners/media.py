"""Prompts with images, and what the towers make of them.

Runners stage, under `model.py`. `images.py` puts images into prompts, the engine loop encodes them.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rlx.arguments import bound, whole
from rlx.engine.images import ImageInput, PlacedImages
from rlx.engine.loop.handle import Generation
from rlx.engine.request import Logits, no_tower
from rlx.errors import ArgumentError, MultimodalError
from rlx.prompt import Prompt, read_images
from rlx.text.chat import EscapedMessages
from rlx.text.image_parts import ImageTokens
from rlx.vision.image import Image

if TYPE_CHECKING:
    from rlx.runners.model import Model

MEDIA = "<__media__>"  # stands for an image in prompts for llama.cpp
USUAL_FPS = 24
_ORDERS = ("n_new", "on_token"), ("width", "height", "tokenizer", "n_new", "on_token")


def _from_rgb(rgb: Any, width: Any, height: Any) -> npt.NDArray[np.uint8]:
    """The array of an image in rows of red, green and blue."""
    where = "generate_multimodal"
    width, height = (whole(name, value, 1, 1 << 16) for name, value in (("width", width), ("height", height)))
    if isinstance(rgb, np.ndarray) and rgb.dtype == np.uint8:
        rgb = rgb.tobytes()
    if not isinstance(rgb, bytes | bytearray | memoryview):
        hint = "leave width and height out for images of another form"
        raise ArgumentError(f"expected the bytes of an image, found a {type(rgb).__name__}", where=where, hint=hint)
    pixels = np.frombuffer(rgb, np.uint8)
    if pixels.size != width * height * 3:
        what = f"{pixels.size} bytes, expected {width} x {height} x 3 = {width * height * 3}"
        raise ArgumentError(what, where=where, hint="give 3 bytes a pixel, in rows from top to bottom")
    return pixels.reshape(height, width, 3)


def generated(
    model: Model, prompt: Any, images: Any, arguments: Sequence[Any], options: Mapping[str, Any]
) -> Generation:
    """`generate` for a prompt with images: see `Model.generate_multimodal`."""
    found = bound("generate_multimodal", arguments, options, *_ORDERS)
    size = [found.pop(name, None) for name in ("width", "height")]
    if found.pop("tokenizer", None) is not None:
        what, hint = "the tokenizer is always that of the model", "give None"
        raise ArgumentError(what, where="generate_multimodal, tokenizer", hint=hint)
    if size != [None, None]:
        images = [_from_rgb(images, *size)]
    return model.generate(with_images(model, prompt, images), **found)


def with_images(model: Model, prompt: Any, images: Any) -> Prompt | list[int]:
    """The prompt that `generate_multimodal` makes of a prompt and its images.

    Raises:
        MultimodalError, ImageError, ArgumentError: as there.
    """
    if isinstance(prompt, Prompt):
        hint = "give the ids, or call generate with the Prompt"
        raise ArgumentError("the prompt has its own images", where="generate_multimodal, prompt", hint=hint)
    images = list(images) if isinstance(images, list | tuple) else [images]
    tokens = required(model, len(images)).tokens
    assert tokens is not None, "there is a tower"
    if not isinstance(prompt, str):
        return Prompt(prompt, images)
    text = prompt.replace(MEDIA, tokens.text)
    if tokens.text in text:
        return _formatted(model, text, images, tokens)
    parts = [image if _is_video(image) else {"type": "image", "image": image} for image in images]
    if model.tokenizer.chat_template:
        content = [*parts, {"type": "text", "text": prompt}]
        return model.chat_ids([{"role": "user", "content": content}])
    return _formatted(model, tokens.text * len(images) + text, images, tokens)


def frames(model: Model, values: Any, fps: Any, where: str) -> list[str | Image]:
    """The texts and images that stand for a video.

    Args:
        values: its frames in order, each as for `Prompt`.
        fps: frames in a second; None for 24, as the reference processors take it.

    Raises:
        MultimodalError: the model takes no videos, or there is no frame.
        ImageError: a frame cannot be used, or they differ in size.
        ArgumentError: `fps` is no number above 0.
    """
    if fps is not None and (isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps < inf):
        raise ArgumentError(f"fps is {fps!r}, expected frames in a second", where=where, hint="give 2, for example")
    found = read_images(list(values), "frame")
    if not found:
        raise MultimodalError("a video has no frame", where=where, hint="give at least one")
    return required(model, len(found)).encoder.processor.video(found, fps or USUAL_FPS)


def _formatted(model: Model, text: str, images: list[Any], tokens: ImageTokens) -> Prompt:
    """The prompt of a text in which the model's token stands for each image, and control tokens count as such."""
    parts = [required(model, 1).encoder.processor.parts(image) for image in read_images(images)]
    tokens = tokens.laid_out(parts)
    if (places := text.count(tokens.text)) != len(images):
        what = f"the number of images is {len(images)}, and that of their places in the prompt is {places}"
        hint = f"write {tokens.text} or {MEDIA} for each image"
        raise MultimodalError(what, where="generate_multimodal", hint=hint)
    ids = tokens.expanded(EscapedMessages(model.tokenizer, [], tokens).encode(text))
    prefix = model.tokenizer.prefix
    ids = ids if tuple(ids[: len(prefix)]) == prefix else [*prefix, *ids]
    return Prompt(ids, [part for each in parts for part in each if not isinstance(part, str)])


def features(model: Model, source: Image) -> Logits:
    """The rows that an image becomes, float32[rows, hidden]."""
    encoder = required(model, 1).encoder
    encoding = encoder.encoding(source)

    def work() -> Generator[None, None, Logits]:
        yield from PlacedImages(encoder, ((0, encoding),)).encoded()
        assert encoding.features is not None
        return encoding.features.rows[:, : encoder.config.out_hidden].copy()

    return model._loop.call(work)


def _is_video(value: Any) -> bool:
    return isinstance(value, Mapping) and value.get("type") == "video"


def required(model: Model, count: int) -> ImageInput:
    """How images come into prompts; `MultimodalError` if the model has no vision tower."""
    if model._images is None:
        raise no_tower(f"{model.family} model", "images", count)
    _ = model._images.encoder
    return model._images


def preprocessed(model: Model, image: Any) -> dict[str, Any]:
    """An image as the vision tower takes it: see `Model.preprocess_image`."""
    encoder = required(model, 1).encoder
    (read,) = read_images([image])
    patches = encoder.processor.preprocess(read)
    return {"pixel_values": patches.pixel_values, "grid": patches.grid}
