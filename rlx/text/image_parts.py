"""Images in conversations: the parts that stand for them, and the tokens that a prompt has in their place.

Text stage, used by `chat.py`. A part may have the form of the OpenAI, the transformers or the Anthropic API. What an
image is, and how it is decoded, is not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlx.errors import MultimodalError
from rlx.text.tokenizer import Tokenizer

IMAGE = {"type": "image"}  # the part that templates know
_VIDEOS = ("video", "video_url", "input_video")
_VALUES = ("image", "path", "url", "base64")  # keys of transformers' part that hold the image
_REMOTE = "rlx downloads no images: give the path, the bytes or a data URI"


def taken_images(
    messages: Any, frames: Callable[[Any, Any, str], Iterable[Any]] | None = None
) -> tuple[Any, list[Any]]:
    """Messages in which every image is the part `{"type": "image"}`, and the images in order.

    The forms of a part:

        {"type": "image", "image": value}                                    also "path", "url", "base64"
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}
        {"type": "input_image", "image_url": "data:image/png;base64,..."}
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "..."}}
        {"type": "video", "video": [frame, ...], "fps": 2}

    Args:
        frames: makes the texts and images that stand for a video of the frames and the frames per second of its part,
            whose place is the third argument; None leaves videos as they are.

    Raises:
        MultimodalError: a part of an image has none of these forms, or a part is a file or an address of a video.
    """
    images, found = list[Any](), list[Any]()
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
        return messages, images  # what is wrong with it is said where messages are checked
    for i, message in enumerate(messages):
        content, where = message.get("content") if isinstance(message, Mapping) else None, f"messages[{i}].content"
        if isinstance(content, list | tuple):
            parts = content if frames is None else _without_videos(content, where, frames)
            message = {**message, "content": _without_images(parts, where, images)}
        found.append(message)
    return found, images


def _without_videos(content: Sequence[Any], where: str, frames: Callable[[Any, Any, str], Iterable[Any]]) -> list[Any]:
    found: list[Any] = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if not isinstance(kind, str) or kind not in _VIDEOS:
            found.append(part)
            continue
        place, shown = f"{where}[{i}]", part.get("video")
        if not isinstance(shown, list | tuple) and not hasattr(shown, "shape"):
            hint = 'give its frames: {"type": "video", "video": [frame, ...], "fps": 2}'
            raise MultimodalError("rlx reads no video files", where=place, hint=hint)
        for each in frames(shown, part.get("fps"), place):
            found.append({"type": "text", "text": each} if isinstance(each, str) else {**IMAGE, "image": each})
    return found


def _without_images(content: Sequence[Any], where: str, images: list[Any]) -> list[Any]:
    parts = []
    for i, part in enumerate(content):
        value = _image_of(part, f"{where}[{i}]") if isinstance(part, Mapping) else None
        if value is not None:
            images.append(value)
        parts.append(part if value is None else IMAGE)
    return parts


def _image_of(part: Mapping[str, Any], where: str) -> Any:
    """The image of a part; None if it is a part of another kind."""
    kind = part.get("type")
    if not isinstance(kind, str):
        return None
    if kind in ("image_url", "input_image"):
        url = part.get("image_url")
        return _data(url.get("url") if isinstance(url, Mapping) else url, where, "image_url")
    if kind != "image":
        return None
    if (source := part.get("source")) is not None:
        return _source(source, f"{where}.source")
    keys = [key for key in _VALUES if part.get(key) is not None]
    if len(keys) != 1:
        found = "has no image" if not keys else f"has {' and '.join(keys)}"
        hint = f"give it under one of the keys {', '.join(_VALUES)}"
        raise MultimodalError(f"the part of an image {found}", where=where, hint=hint)
    value = part[keys[0]]
    if isinstance(value, str) and value.lower().startswith(("http:", "https:")):
        raise MultimodalError(f"the image is an address, {value[:80]!r}", where=where, hint=_REMOTE)
    if keys[0] == "base64":
        return _data(value, where, "base64") if str(value).startswith("data:") else f"data:;base64,{value}"
    return value.removeprefix("file://") if isinstance(value, str) else value


def _source(source: Any, where: str) -> str:
    """The image of an Anthropic part, as a data URI."""
    found = source if isinstance(source, Mapping) else {}
    if found.get("type") == "url":
        return _data(found.get("url"), where, "url")
    if found.get("type") != "base64" or not isinstance(found.get("data"), str):
        hint = 'give {"type": "base64", "media_type": "image/png", "data": "..."}'
        raise MultimodalError(f"expected an image in base64, found {str(source)[:80]!r}", where=where, hint=hint)
    return f"data:{found.get('media_type', '')};base64,{found['data']}"


def _data(url: Any, where: str, key: str) -> str:
    """A data URI. Other addresses are refused: messages of this form may come from strangers."""
    if not isinstance(url, str) or not url.lower().startswith("data:"):
        found = f"{url[:80]!r}" if isinstance(url, str) else f"a {type(url).__name__}"
        hint = _REMOTE if isinstance(url, str) and url.lower().startswith("http") else (
            'give "data:image/png;base64,...", or the part {"type": "image", "path": ...} for a file'
        )  # fmt: skip
        raise MultimodalError(f"{key} is {found}, expected a data URI", where=where, hint=hint)
    return url


@dataclass(frozen=True)
class ImageTokens:
    """The tokens of an image in the prompts of a family.

    Attributes:
        placeholder: stands for the rows of an image; it may lie outside the vocabulary.
        begin, end: before and after it; None if unknown.
        texts: of placeholder, begin and end, which no message may contain as tokens.
        text: the one of them that chat templates write for an image: that of the placeholder, or of `begin`.
        margin: the text that belongs before and after an image.
        layout: for each image of a conversation, the texts that belong around it, and None for it, or several times for
            it and for crops of it.
    """

    placeholder: int
    begin: int | None
    end: int | None
    texts: tuple[str, str, str]
    text: str
    margin: str = ""
    layout: tuple[tuple[str | None, ...], ...] = ()

    def laid_out(self, parts: Iterable[Iterable[Any]]) -> ImageTokens:
        """The same for a conversation with these images.

        Args:
            parts: for each image the texts that belong around it, and images, which may be anything else.
        """
        layout = tuple(tuple(part if isinstance(part, str) else None for part in each) for each in parts)
        return replace(self, layout=layout)

    @property
    def images(self) -> int:
        """The number of images that there will be."""
        return sum(part is None for each in self.layout for part in each)

    def spread(self, text: str) -> str:
        """A rendered text with everything that belongs around its images."""
        pieces = text.split(self.text)
        if len(pieces) != len(self.layout) + 1:
            return text  # which is an error: `chat_ids` counts images
        image = f"{self.margin}{self.text}{self.margin}"
        around = ["".join(image if part is None else part for part in each) for each in self.layout]
        return "".join(a + b for a, b in zip(pieces, [*around, ""], strict=True))

    @property
    def written(self) -> int:
        """The id that chat templates write for an image."""
        return self.begin if self.writes_begin and self.begin is not None else self.placeholder

    @property
    def writes_begin(self) -> bool:
        """Whether templates write `begin`, and nothing else of an image."""
        return self.text == self.texts[1]

    def names(self, tokenizer: Tokenizer) -> dict[str, int]:
        """Text -> id of those that the vocabulary has, and of the one that templates write."""
        ids = [token for token in (self.placeholder, self.begin, self.end) if token is not None]
        named = {text: tokenizer.token_to_id(text) for text in self.texts}
        found = {text: token for text, token in named.items() if token is not None}
        known = {tokenizer.id_to_token(token): token for token in ids if token < tokenizer.vocab_size}
        return {self.text: self.written, **found, **known}

    def expanded(self, ids: Iterable[int]) -> list[int]:
        """Ids with `begin`, one placeholder and `end` for each image, from those that a template writes."""
        found: list[int] = []
        tokens = list(ids)
        for at, token in enumerate(tokens):
            if token != self.written:
                found.append(token)
                continue
            if self.begin is not None and (self.writes_begin or tokens[max(0, at - 1)] != self.begin):
                found.append(self.begin)
            found.append(self.placeholder)
            if self.end is not None and self.end not in tokens[at + 1 : at + 2]:
                found.append(self.end)
        return found

    def count(self, ids: Iterable[int]) -> int:
        """How many images a template has written."""
        return sum(token == self.written for token in ids)
