"""Images of a request: from the forms of the APIs to pixels, with limits that hold before anything is decoded.

Server stage, used by all APIs. Their translations put an `ImageSource` where a message has an image, or leave OpenAI's
part `image_url` there. `load_images` makes pixels of them, in a worker thread. What a client sends names a file or an
address only where the server's options allow it. A part that is neither a text nor an image reaches no template.
"""

from __future__ import annotations

import base64
import binascii
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, unquote_to_bytes

from rlx import platform
from rlx.errors import ImageError, MultimodalError
from rlx.serve.download import Allowed, download
from rlx.vision import decode
from rlx.vision.image import Image

_FLAGS = os.O_RDONLY | platform.flags("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY")

if TYPE_CHECKING:
    from rlx.serve.options import ServerOptions

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class MediaOptions:
    """The limits of images of requests.

    Attributes:
        domains: hosts that images may be downloaded from: a name, a name with its subdomains as ".example.com", an
            address, or a network as "10.0.0.0/8". Empty: nothing is downloaded.
        path: folder of files that requests may name as "file:NAME"; None: no files.
        max_images: of a request.
        max_bytes: of the file of one image.
        max_pixels: of all images of a request together.
        seconds: for one download, redirects included.
    """

    domains: tuple[str, ...] = ()
    path: Path | None = None
    max_images: int = 64
    max_bytes: int = 20_000_000
    max_pixels: int = 1 << 27
    seconds: float = 10.0

    @staticmethod
    def of(options: ServerOptions) -> MediaOptions:
        """Those of a server."""
        path = None if options.media_path is None else Path(options.media_path).expanduser()
        pixels = int(options.max_image_megapixels * (1 << 20))
        return MediaOptions(
            options.media_domains, path, options.max_images, int(options.max_image_mb * 1_000_000), pixels
        )


@dataclass(frozen=True)
class ImageSource:
    """An image as a request names it.

    Attributes:
        url: a data URI, or an address of the schemes http, https or file.
        where: the field of the request, such as "messages[0].content[1].image_url", for messages.
    """

    url: str = field(repr=False)
    where: str

    @property
    def part(self) -> dict[str, Any]:
        """The part of a message."""
        return {"type": "image", "image": self}


def base64_source(data: Any, where: str, media_type: str = "") -> ImageSource:
    """The source of an image whose file is given in base64."""
    if not isinstance(data, str):
        raise ImageError(f"an image is a {type(data).__name__}", where=where, hint="give its file in base64")
    return ImageSource(data if data[:5].lower() == "data:" else f"data:{media_type};base64,{data}", where)


def load_images(messages: Sequence[Mapping[str, Any]], options: MediaOptions, takes_images: bool) -> Messages:
    """Messages whose images are pixels.

    Args:
        messages: contents are texts or lists of parts; images are parts `image_url` or `ImageSource.part`.
        takes_images: whether the model does; if not, nothing is downloaded or decoded.

    Raises:
        MultimodalError: there is an image, and the model takes none; or a part that is neither a text nor an image.
        ImageError: an image cannot be read, is too large, or may not be read; or there are too many.
    """
    if all(isinstance(message.get("content"), str) for message in messages):
        return [dict(message) for message in messages]
    reader = _Reader(options, takes_images)
    return [_read_message(message, i, reader) for i, message in enumerate(messages)]


def _read_message(message: Mapping[str, Any], number: int, reader: _Reader) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return dict(message)
    where = f"messages[{number}].content"
    return {**message, "content": [_read_part(part, f"{where}[{i}]", reader) for i, part in enumerate(content)]}


def _read_part(part: Any, where: str, reader: _Reader) -> Any:
    if not isinstance(part, Mapping):
        return part  # refused with the other malformed messages
    source = _url_source(part, f"{where}.image_url") if part.get("type") == "image_url" else part.get("image")
    if isinstance(source, ImageSource):
        return {"type": "image", "image": reader.read(source)}
    if part.get("type") != "text":
        takes = "text and images" if reader.takes_images else "text only"
        what = f"a part has type {part.get('type')!r}, and the model takes {takes}"
        raise MultimodalError(what, where=where, hint="leave the part out")
    return part


def _url_source(part: Mapping[str, Any], where: str) -> ImageSource:
    """The image of OpenAI's part, `{"type": "image_url", "image_url": {"url": ...}}`."""
    found = part.get("image_url")
    url = found.get("url") if isinstance(found, Mapping) else found
    if not isinstance(url, str):
        raise ImageError("the part has no address", where=where, hint='give {"url": "data:image/png;base64,..."}')
    return ImageSource(url, where)


class _Reader:
    """Reads the images of one request, and counts them and their pixels."""

    def __init__(self, options: MediaOptions, takes_images: bool) -> None:
        self._options, self.takes_images = options, takes_images
        self._count, self._pixels = 0, options.max_pixels
        self._allowed = Allowed.of(options.domains)

    def read(self, source: ImageSource) -> Image:
        """The pixels of an image."""
        if not self.takes_images:
            hint = "leave the image out, or serve a model with a vision tower (`--mmproj`)"
            raise MultimodalError("the model takes no images", where=source.where, hint=hint)
        self._count += 1
        if self._count > self._options.max_images:
            what = f"the request has more than {self._options.max_images} images"
            raise ImageError(what, where=source.where, hint="leave older images out")
        try:
            image = Image.from_pixels(decode.from_bytes(self._file(source.url), max_pixels=max(1, self._pixels)))
        except ImageError as error:
            raise ImageError(error.what, where=source.where, hint=error.hint) from error
        self._pixels -= image.size[0] * image.size[1]
        return image

    def _file(self, url: str) -> bytes:
        """The bytes of an image's file."""
        scheme = url.partition(":")[0].strip().lower()
        if scheme == "data":
            return _of_data_uri(url, self._options.max_bytes)
        if scheme in ("http", "https"):
            return download(url, self._allowed, self._options.max_bytes, self._options.seconds)
        if scheme == "file":
            return _of_file(url, self._options)
        hint = 'give "data:image/png;base64,...", or an http(s) or file address that the server allows'
        raise ImageError(f"an image is given as {_short(url)!r}, which is no address", hint=hint)


def _of_data_uri(url: str, most: int) -> bytes:
    head, comma, body = url.partition(",")
    if not comma or not head.lower().rstrip().endswith(";base64"):
        raise ImageError("a data URI is not in base64", hint='expected "data:image/png;base64,..."')
    _check_bytes(len(body) * 3 // 4 - 2, most)
    try:
        raw = unquote_to_bytes(body) if "%" in body else body.encode("ascii")
        return base64.b64decode(b"".join(raw.split()), validate=True)
    except (ValueError, binascii.Error) as error:
        hint = "give the bytes of an image file in base64, with its padding"
        raise ImageError(f"the base64 of an image is damaged: {error}", hint=hint) from error


def _of_file(url: str, options: MediaOptions) -> bytes:
    """The bytes of a file below the named folder, links followed: "file:NAME", "file://NAME" or "file:///PATH"."""
    if options.path is None:
        hint = "send the image as a data URI, or start the server with --media-path FOLDER"
        raise ImageError("the server reads no files of its own", hint=hint)
    name, folder = unquote(url.partition(":")[2].removeprefix("//")), options.path.resolve()
    try:
        path = folder.joinpath(name).resolve()
        if not path.is_relative_to(folder) or path == folder:
            hint = "name a file in that folder, which --media-path has named"
            raise ImageError("the file is not below the folder of images that the server may read", hint=hint)
        return _regular_file(path, options.max_bytes)
    except (OSError, ValueError, RuntimeError) as error:  # a zero byte, a name too long, a loop of links
        text = error.strerror if isinstance(error, OSError) else str(error)
        raise ImageError(f"the file {_short(name)!r} cannot be read: {text}", hint="check its name") from error


def _regular_file(path: Path, most: int) -> bytes:
    """The bytes of a file, which is no link, pipe or device."""
    number = os.open(path, _FLAGS)
    with open(number, "rb") as file:
        found = os.fstat(number)
        if not stat.S_ISREG(found.st_mode):
            raise ImageError("this is no regular file", hint="name an image file")
        _check_bytes(found.st_size, most)
        return file.read(most)


def _check_bytes(count: int, most: int) -> None:
    if count > most:
        what = f"the image file has {count / 1e6:.3g} MB, at most {most / 1e6:g} are read"
        raise ImageError(what, hint="make the image smaller")


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:60]}..."
