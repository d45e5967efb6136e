"""Images in prompts: from placeholders to rows that stand in a sequence.

Runners stage, between `rlx.vision`, which encodes them, and the engine loop. A placeholder is found by its id, never
by its text.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from itertools import groupby
from threading import Lock
from typing import TYPE_CHECKING, Any

from rlx import models, text, vision
from rlx.engine.kv.prompt_embeddings import PAD, EmbeddedSpan, PromptEmbeddings
from rlx.engine.request import Context, check_ids
from rlx.errors import ImageError, MultimodalError
from rlx.prompt import Prompt

if TYPE_CHECKING:
    from rlx.text.image_parts import ImageTokens
    from rlx.vision.encoder import Encoder, Encoding
    from rlx.vision.image import Image, ImageOptions
    from rlx.vision.opening import Vision


@dataclass(frozen=True, eq=False)
class PlacedImages:
    """The images of one prompt, each at the position of its first row.

    Attributes:
        encoder: encodes them.
        places: (position, image) in order.
    """

    encoder: Encoder
    places: tuple[tuple[int, Encoding], ...]

    @property
    def rows(self) -> int:
        """The number of positions of all images."""
        return sum(each.tokens for _, each in self.places)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """The first position of each image, and the one after its last."""
        return [(start, start + each.tokens) for start, each in self.places]

    def without_rows(self, ids: list[int]) -> list[int]:
        """The ids that stand for no row of an image."""
        found: list[int] = []
        end = 0
        for start, each in self.places:
            found += ids[end:start]
            end = start + each.tokens
        return found + ids[end:]

    def encoded(self) -> Generator[None, None, PromptEmbeddings]:
        """For the engine loop: encodes what is lacking, a piece between two `yield`s; the rows at their positions.

        Raises:
            RlxError: an image cannot be encoded.
        """
        for _, each in self.places:
            self.encoder.take(each)
        try:
            for _, each in self.places:
                while not each.is_ready:
                    self.encoder.advance(each)
                    yield
            return self.embeddings()
        finally:
            for _, each in self.places:
                self.encoder.drop(each)

    def embeddings(self) -> PromptEmbeddings:
        """The rows of encoded images, at their positions."""
        return PromptEmbeddings(tuple(self._spans()))

    def _spans(self) -> Iterator[EmbeddedSpan]:
        for start, each in self.places:
            assert each.features is not None
            yield EmbeddedSpan(start, each.features.rows, each.key, each.grid, two_way=True)


def placed(prompt: Prompt, encoder: Encoder, vocab_size: int, what: str) -> Context:
    """The context of a prompt with images; errors as `checked_prompt`."""
    token = encoder.config.image_token
    prompt_ids = check_ids(prompt.ids, max(vocab_size, token + 1), what)
    check_ids([PAD if each == token else each for each in prompt_ids], vocab_size, what)
    runs = [(is_image, list(group)) for is_image, group in groupby(prompt_ids, key=lambda each: each == token)]
    if (count := sum(is_image for is_image, _ in runs)) != len(prompt.images):
        found = f"the number of images is {len(prompt.images)}, and that of placeholders is {count}"
        hint = f"a run of the id {token} stands for one image; between those of two images there must be another id"
        raise MultimodalError(found, where=what, hint=hint)
    left = enumerate(prompt.images)
    ids: list[int] = []
    places: list[tuple[int, Encoding]] = []
    for is_image, run in runs:
        if is_image:
            number, image = next(left)
            encoding = _encoding(encoder, image, f"{what}, image {number}", len(run))
            places.append((len(ids), encoding))
            run = [PAD] * encoding.tokens
        ids += run
    return Context(ids, PlacedImages(encoder, tuple(places)) if places else None)


def _encoding(encoder: Encoder, image: Image, where: str, length: int) -> Encoding:
    try:
        encoding = encoder.encoding(image)
    except ImageError as error:
        raise ImageError(error.what, where=where, hint=error.hint) from error
    if length not in (1, encoding.tokens):
        what = f"the image has {encoding.tokens} rows, and its placeholder stands there {length} times"
        raise MultimodalError(what, where=where, hint="write it once; its rows then follow from the image")
    return encoding


class ImageInput:
    """How images come into the prompts of one model. Its vision tower is opened with the first image.

    Args:
        vision: gives what finds and opens the tower.
        arch: the architecture of the text model.
        options: how many pixels or tokens the model sees.
        capacity: bytes of the cache of encoded images.
        seconds: how long a piece of encoding should take at most, while others wait.

    Raises:
        MultimodalError, ModelFileError: an option of images is given, and the model has no tower that can be used.
        ArgumentError: an option of images does not apply to this model.
    """

    def __init__(
        self, vision: Callable[[], Vision], arch: str, options: ImageOptions, capacity: int, seconds: float
    ) -> None:
        self._vision, self._arch, self._options = vision, arch, options
        self._capacity, self.seconds = capacity, seconds
        self._encoder: Encoder | None = None
        self._lock = Lock()
        if options.chosen:  # whoever sets one has images: what is wrong is said now, not with the first of them
            _ = self.encoder

    @cached_property
    def is_supported(self) -> bool:
        """Whether the model has a tower."""
        return self._vision().tower is not None

    def placed(self, prompt: Prompt, vocab_size: int, what: str) -> Context | None:
        """The context of a prompt, whose images take as many positions as they have rows; None if it is text alone.

        Raises:
            PromptError: there is no id, or an invalid one.
            MultimodalError: the model takes no images, or placeholders and images do not match.
            ImageError: the model takes no image of such a size.
        """
        return placed(prompt, self.encoder, vocab_size, what) if prompt.images or self.is_supported else None

    @property
    def encoder(self) -> Encoder:
        """Encodes images.

        Raises:
            MultimodalError, ModelFileError: the model has no tower that can be used.
            ArgumentError: an option of images does not apply to this model.
        """
        with self._lock:
            if self._encoder is None:
                tower, cache = self._vision().required(), vision.FeatureCache(self._capacity)
                processor = vision.ImageProcessor.of(tower.config, self._options)
                model = repr((tower.config, self._options, tower.weights.loader.stamps()))
                key = blake2b(model.encode(), digest_size=32).digest()
                self._encoder = vision.Encoder(tower, processor, key, cache, self.seconds)
            return self._encoder

    @property
    def tokens(self) -> ImageTokens | None:
        """The tokens of images; None if no model of the architecture takes images. Does not open the tower."""
        if self._encoder is not None:
            config = self._encoder.config
            return _tokens(config.family, (config.image_token, config.begin_token, config.end_token))
        rows = models.vision_config.VISION_FAMILIES.items()
        found = next(((name, row.image_token) for name, row in rows if self._arch in row.archs), None)
        return None if found is None else _tokens(found[0], (found[1], None, None))

    def stats(self) -> dict[str, Any]:
        """The counters of the encoder; empty before the first image."""
        return {} if self._encoder is None else {"images": self._encoder.stats()}


def _tokens(family: str, ids: tuple[int, int | None, int | None]) -> ImageTokens:
    texts = models.vision_config.VISION_FAMILIES[family].tokens
    if family == "gemma3":  # whose processor writes blank lines around each image
        return text.image_parts.ImageTokens(*ids, texts, texts[1], margin="\n\n")
    return text.image_parts.ImageTokens(*ids, texts, texts[0])
