"""Images and prompts with images: what runners of models with a vision tower offer besides chat.

Runners stage, over `text_runner.py`. `images.py` puts images into prompts, the engine loop encodes them.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx.arguments import bound, whole
from rlx.audio.audio import Audio
from rlx.engine.images import ImageInput, PlacedImages, placed
from rlx.engine.request.context import PromptLike, no_tower
from rlx.engine.request.output import Generation, Logits
from rlx.errors import ArgumentError, MultimodalError
from rlx.prompt import Prompt, read_audio, read_images
from rlx.runners.text_runner import TextRunner
from rlx.text.fence import Fence
from rlx.text.image_parts import ImageTokens
from rlx.vision.image import Image

MEDIA = "<__media__>"  # stands for an image in prompts for llama.cpp
_ORDERS = ("n_new", "on_token"), ("width", "height", "tokenizer", "n_new", "on_token")


class MultimodalRunner(TextRunner):
    """A `TextRunner` whose prompts may have images, if the model was opened with a vision tower."""

    def generate_multimodal(
        self,
        prompt: str | PromptLike | Sequence[Mapping[str, Any]],
        images: Any,
        *arguments: Any,
        **options: Any,
    ) -> Generation:
        """`generate` for a prompt with images.

            answer = runner.generate_multimodal("What is this?", ["cat.png"], 50)
            print(answer.text)

        Args:
            prompt: a question, which is asked in the model's chat template behind the images. Or a formatted prompt, in
                which the model's own image token or `<__media__>` stands for each image and control tokens count as
                such: do not put a stranger's text into it. Or token ids with placeholders, see `Prompt`.
            images: a list of images, see `Prompt`; or one.
            arguments: `n_new` and `on_token`, as for `generate`. Or in RLX's order, where `images` are the bytes of one
                image in rows of red, green and blue: width, height, tokenizer (None), `n_new` and `on_token`.
            options: further arguments of `generate`, or those of RLX by name.

        Raises:
            MultimodalError: the model was opened without a vision tower, or the number of images is not that of their
                places in the prompt.
            ImageError: an image cannot be used.
            PromptError, ArgumentError, NumericalError, BusyError: as `generate`.
        """
        found = bound("generate_multimodal", arguments, options, *_ORDERS)
        size = [found.pop(name, None) for name in ("width", "height")]
        if found.pop("tokenizer", None) is not None:
            what, hint = "the tokenizer is always that of the model", "give None"
            raise ArgumentError(what, where="generate_multimodal, tokenizer", hint=hint)
        if size != [None, None]:
            images = [_from_rgb(images, *size)]
        images = list(images) if isinstance(images, list | tuple) else [images]
        return self.generate(self.with_images(prompt, images), **found)

    def with_images(self, prompt: Any, images: list[Any]) -> Prompt | list[int]:
        """The prompt that `generate_multimodal` makes of a prompt and its images.

        Raises:
            MultimodalError, ImageError, ArgumentError: as there.
        """
        if isinstance(prompt, Prompt):
            hint = "give the ids, or call generate with the Prompt"
            raise ArgumentError("the prompt has its own images", where="generate_multimodal, prompt", hint=hint)
        tokens = self._required(len(images)).tokens
        assert tokens is not None, "there is a tower"
        if not isinstance(prompt, str):
            return Prompt(prompt, images)
        text = prompt.replace(MEDIA, tokens.text)
        if tokens.text in text:
            return self._formatted(text, images, tokens)
        parts = [{"type": "image", "image": image} for image in images]
        if self.tokenizer.chat_template:
            content = [*parts, {"type": "text", "text": prompt}]
            return self.chat_ids([{"role": "user", "content": content}])
        return self._formatted(tokens.text * len(images) + text, images, tokens)

    def _formatted(self, text: str, images: list[Any], tokens: ImageTokens) -> Prompt:
        """The prompt of a text in which the model's token stands for each image, and control tokens count as such."""
        parts = [self._required(1).encoder.processor.parts(image) for image in read_images(images)]
        tokens = tokens.laid_out(parts)
        if (places := text.count(tokens.text)) != len(images):
            what = f"the number of images is {len(images)}, and that of their places in the prompt is {places}"
            hint = f"write {tokens.text} or {MEDIA} for each image"
            raise MultimodalError(what, where="generate_multimodal", hint=hint)
        ids = tokens.expanded(Fence(self.tokenizer, [], tokens).encode(text))
        prefix = self.tokenizer.prefix
        ids = ids if tuple(ids[: len(prefix)]) == prefix else [*prefix, *ids]
        return Prompt(ids, [part for each in parts for part in each if not isinstance(part, str)])

    def image_features(self, image: Any) -> Logits:
        """What the vision tower makes of an image: the rows that stand for it in the text model. Stateless.

        Args:
            image: as for `Prompt`.

        Returns:
            float32[rows, hidden], in the order of the rows in a prompt.

        Raises:
            MultimodalError: the model was opened without a vision tower.
            ImageError: the image cannot be used.
            NumericalError: a value is NaN or infinite.
        """
        (read,) = read_images([image])
        return self._features(read)

    def audio_features(self, audio: Any) -> Logits:
        """The rows that stand for a clip of audio in the text model (Gemma 4 unified). Stateless.

        Args:
            audio: as for `Prompt`.

        Returns:
            float32[rows, hidden], a row for each 40 ms.

        Raises:
            MultimodalError: the model takes no audio, or its matrix for audio is not open (`mmproj`).
            AudioError: the clip cannot be used.
            NumericalError: a value is NaN or infinite.
        """
        (read,) = read_audio([audio])
        return self._features(read)

    def _features(self, source: Image | Audio) -> Logits:
        encoder = self._required(1).encoder
        encoding = encoder.encoding(source)

        def work() -> Generator[None, None, Logits]:
            yield from PlacedImages(encoder, ((0, encoding),)).encoded()
            assert encoding.features is not None
            return encoding.features.rows.copy()

        return self._loop.call(work)

    def preprocess_image(self, image: Any) -> dict[str, Any]:
        """An image as the vision tower takes it.

        Args:
            image: as for `Prompt`.

        Returns:
            `pixel_values`: float32, the values and the shape of the model's reference processor; `grid`: the rows and
            columns of the tokens that the image becomes.

        Raises:
            MultimodalError: the model was opened without a vision tower.
            ImageError: the image cannot be used.
        """
        encoder = self._required(1).encoder
        (read,) = read_images([image])
        patches = encoder.processor.preprocess(read)
        return {"pixel_values": patches.pixel_values, "grid": patches.grid}

    def count_tokens(self, prompt: PromptLike) -> int:
        """How many tokens a prompt has, the rows of its images included. It may be more than the context holds.

        Raises:
            PromptError, MultimodalError, ImageError: the prompt is invalid, as for `generate`.
        """
        return len(placed(prompt, self._images, self.vocab_size, None, "prompt", f"{self.family} model"))

    def _required(self, count: int) -> ImageInput:
        """How images come into prompts; `MultimodalError` if the model has no vision tower."""
        if self._images is None:
            raise no_tower(f"{self.family} model", "images", count)
        _ = self._images.encoder
        return self._images


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
