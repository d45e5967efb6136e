"""A message of the user: its text, and the images that were attached to it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlx.cli.answering import Message
from rlx.errors import ChatError, ImageError
from rlx.vision.image import Image

_DATA = "data:"  # begins the URI of an image that stands in a conversation's file itself


@dataclass(frozen=True)
class AttachedImage:
    """An image, and where it comes from: an absolute path or a data URI."""

    source: str
    image: Image

    @staticmethod
    def of(name: str) -> AttachedImage:
        """The image in a file, as a user types its name: also in quotes or with backslashes, as terminals paste it.

        Raises:
            ImageError: the file is missing, or no image that can be used.
        """
        if name.startswith(_DATA):
            return AttachedImage(name, Image.of(name))
        path = Path(name).expanduser()
        if not path.exists():
            try:
                path = Path(" ".join(shlex.split(name))).expanduser()
            except ValueError:  # a quote without its end
                path = Path(name)
        return AttachedImage(os.path.abspath(path), Image.of(path))

    def __str__(self) -> str:
        return "an image" if self.source.startswith(_DATA) else os.path.basename(self.source)


@dataclass(frozen=True)
class Question:
    """What the user says: a text, behind images if there are any."""

    text: str
    images: tuple[AttachedImage, ...] = ()

    def message(self) -> Message:
        """The message for the chat template."""
        parts = [{"type": "image", "image": each.image} for each in self.images]
        return _message(self.text, parts)

    def saved(self) -> Message:
        """The message for a file, which has the paths of images."""
        return _message(self.text, [_part(each.source) for each in self.images])

    def __str__(self) -> str:
        return f"[{', '.join(map(str, self.images))}] {self.text}" if self.images else self.text


def _message(text: str, parts: list[dict[str, Any]]) -> Message:
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}] if parts else text}


def _part(source: str) -> dict[str, Any]:
    if source.startswith(_DATA):
        return {"type": "image_url", "image_url": {"url": source}}
    return {"type": "image", "path": source}


def question_of(content: Any, where: str) -> Question:
    """The question in a saved message.

    Raises:
        ChatError: the content is neither a text nor parts of text and images, or an image cannot be used.
    """
    if isinstance(content, str):
        return Question(content)
    if not isinstance(content, Sequence) or not all(isinstance(part, Mapping) for part in content):
        raise ChatError("the content is no text", where=where)
    texts, images = [], []
    for part in content:
        source = _source(part)
        if part.get("type") == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif isinstance(source, str):
            images.append(_loaded(source, where))
        else:
            raise ChatError(f"a part has type {str(part.get('type'))!r}, expected text or an image", where=where)
    return Question("".join(texts), tuple(images))


def _source(part: Mapping[str, Any]) -> Any:
    """Path or data URI of an image in a saved message."""
    if part.get("type") == "image":
        return part.get("path")
    url = part.get("image_url") if part.get("type") == "image_url" else None
    url = url.get("url") if isinstance(url, Mapping) else url
    return url if isinstance(url, str) and url.startswith(_DATA) else None


def _loaded(source: str, where: str) -> AttachedImage:
    try:
        return AttachedImage.of(source)
    except ImageError as error:
        place = f": {error.where}" if error.where else ""
        raise ChatError(f"an image cannot be used{place}: {error.what}", where=where, hint=error.hint) from error
