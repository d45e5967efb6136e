"""Files, data URIs and Pillow images as pixels, with limits that hold before anything is decoded.

First step of the vision stage, under `image.py`. Pillow decodes, and only the five formats here: each further one is
code that reads what strangers send. It is imported when the first file is read.
"""

from __future__ import annotations

import base64
import io
import os
import re
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote_to_bytes

import numpy as np

from rlx.errors import ImageError, RlxError, file_error, named_refusals
from rlx.vision.image import MAX_PIXELS, MAX_SIDE, Pixels

if TYPE_CHECKING:
    from PIL.Image import Image as PillowImage

MAX_BYTES = 1 << 27  # of a file
STRIP = 1 << 20  # pixels that are converted at a time
MAX_SCANS = 100  # of a JPEG: a tiny file can make the decoder go over all pixels any number of times
PILLOW = (12, 2)

_DAMAGED = "the file is cut short or damaged: download it again, or save it again with an image editor"
_CONVERT = "save it as PNG or JPEG"
_STARTS = {
    "PNG": rb"\x89PNG\r\n\x1a\n",
    "JPEG": rb"\xff\xd8\xff",
    "WEBP": rb"RIFF....WEBP",
    "GIF": rb"GIF8[79]a",
    "BMP": rb"BM",
}
_OTHER_STARTS = {
    "TIFF": rb"II\*\0|MM\0\*|II\+\0|MM\0\+",
    "AVIF": rb"....ftypavi[fs]",
    "HEIC": rb"....ftyp(hei[cmsx]|hev[cmsx]|mif1|msf1)",
    "JPEG XL": rb"\xff\x0a|\0\0\0\x0cJXL ",
    "JPEG 2000": rb"\0\0\0\x0cjP  |\xff\x4f\xff\x51",
    "SVG": rb"\s*(<\?xml.{0,500})?<svg",
    "PDF": rb"%PDF",
    "a video": rb"....ftyp|\x1a\x45\xdf\xa3",
    "a web page": rb"\s*<(!doctype html|html)",
}
_SCHEME = re.compile(r"(data):|([a-z][a-z0-9+.-]*)://", re.IGNORECASE)
_MARKER = re.compile(rb"\xff[\xc0-\xcf\xd8-\xfe]")  # of a JPEG; neither a stuffed byte nor a restart

# EXIF orientation -> step along the rows, step along the columns, whether the two are then exchanged
_TURNS = {
    2: (1, -1, False), 3: (-1, -1, False), 4: (-1, 1, False),
    5: (1, 1, True), 6: (-1, 1, True), 7: (-1, -1, True), 8: (1, -1, True),
}  # fmt: skip
_ORIENTATION = 0x0112


def from_path(path: str | PathLike[str]) -> Pixels:
    """The pixels of a file.

    Raises:
        ImageError: it is missing, no file, larger than 128 MiB, or as for `from_bytes`.
    """
    name = os.fspath(path)
    try:
        with named_refusals(name):
            found = os.stat(name)
            if not stat.S_ISREG(found.st_mode):  # a pipe or a device may never end
                kind = "a directory" if stat.S_ISDIR(found.st_mode) else "no regular file"
                raise ImageError(f"this is {kind}", where=Path(name), hint="give the path of an image file")
            check_bytes(found.st_size, name)
            with open(name, "rb") as file:
                data = file.read(MAX_BYTES + 1)
    except FileNotFoundError as error:
        raise ImageError("there is no such file", where=Path(name), hint="check the path") from error
    except (OSError, ValueError) as error:  # no permission, a name that is too long or has a zero byte
        raise file_error(ImageError, "the file cannot be read", error, short(name), "check the path") from error
    return from_bytes(data, where=Path(name))


def is_uri(text: str) -> bool:
    """Whether a text is a data URI or an address, and not a path."""
    return _SCHEME.match(text) is not None


def from_uri(text: str) -> Pixels:
    """The pixels of a data URI, such as "data:image/png;base64,iVBORw0...".

    Raises:
        ImageError: it is another address or not in base64, or as for `from_bytes`.
    """
    scheme, where = _SCHEME.match(text), short(text)
    if scheme is None or scheme[1] is None:
        hint = "give the path itself" if text.lower().startswith("file:") else "download it, and give the file"
        raise ImageError("an image is given by an address, and rlx opens none", where=where, hint=hint)
    return from_bytes(file_of_uri(text, where), where=where)


def file_of_uri(text: str, where: str | None = None, most: int = MAX_BYTES) -> bytes:
    """The file in a data URI.

    Raises:
        ImageError: it is not in base64, or larger than `most` bytes.
    """
    head, comma, body = text.partition(",")
    if not comma or not head.lower().rstrip().endswith(";base64"):
        raise ImageError("a data URI is not in base64", where=where, hint="expected data:image/png;base64,...")
    check_bytes(len(body) * 3 // 4 - 2, where, most)
    try:
        raw = unquote_to_bytes(body) if "%" in body else body.encode("ascii")
        return base64.b64decode(b"".join(raw.split()), validate=True)
    except ValueError as error:
        raise ImageError(f"the base64 of a data URI is damaged: {error}", where=where, hint=_DAMAGED) from error


def from_bytes(data: bytes, *, where: str | Path | None = None, max_pixels: int = MAX_PIXELS) -> Pixels:
    """The pixels of a PNG, JPEG, WebP, GIF or BMP file.

    Args:
        where: the file, for the messages.
        max_pixels: an image with more is refused, before it is decoded.

    Raises:
        ImageError: it is of another format, damaged, truncated, an animation, larger than 128 MiB or `max_pixels`, or
            Pillow is not installed.
    """
    check_bytes(len(data), where)
    kind = _format(data, where)
    library = pillow(where)
    if kind == "WEBP":  # its decoder takes memory for all pixels when it is opened
        _check_webp(data, where, max_pixels)
    if kind == "JPEG" and (scans := sum(_scans(data))) > MAX_SCANS:
        raise ImageError(f"the JPEG file has {scans} scans, at most {MAX_SCANS} are read", where=where, hint=_CONVERT)
    max_pixels = min(max_pixels, 2 * (library.MAX_IMAGE_PIXELS or max_pixels))  # beyond it Pillow itself refuses
    with _named_errors(kind, where, max_pixels), library.open(io.BytesIO(data), formats=[kind]) as image:
        return _decoded(image, where, max_pixels)


def is_pillow(value: Any) -> bool:
    """Whether a value is an image of Pillow; does not import it."""
    module = sys.modules.get("PIL.Image")
    return module is not None and isinstance(value, module.Image)


def from_pillow(image: PillowImage) -> Pixels:
    """The pixels of a Pillow image.

    Raises:
        ImageError: it has more than 64 megapixels, is an animation, or its file is damaged.
    """
    pillow(None)
    with _named_errors(image.format or "Pillow", None):
        return _decoded(image, None)


def short(text: str) -> str:
    """A text for a message: an address may hold a whole file."""
    return text if len(text) <= 200 else f"{text[:60]}..."


def check_bytes(count: int, where: str | Path | None = None, most: int = MAX_BYTES) -> None:
    """`ImageError` for a file of more than `most` bytes."""
    if count > most:
        what = f"the image file has {count / 1e6:.4g} MB, at most {most / 1e6:.4g} are read"
        raise ImageError(what, where=where, hint="make the image smaller")


def _smaller(max_pixels: int) -> str:
    megapixels = f"{max_pixels / (1 << 20):.3g} megapixels"
    return f"at most {megapixels} are read, and {MAX_SIDE} pixels of a side; make the image smaller"


def _check_size(width: int, height: int, where: str | Path | None, max_pixels: int = MAX_PIXELS) -> None:
    if width * height > max_pixels or max(width, height) > MAX_SIDE:
        what = f"the image has {width} x {height} pixels"
        raise ImageError(what, where=where, hint=_smaller(max_pixels))


def _format(data: bytes, where: str | Path | None) -> str:
    """The format by the first bytes; the name of a file says nothing."""
    for name, start in _STARTS.items():
        if re.match(start, data, re.DOTALL):
            return name
    known = "PNG, JPEG, WebP, GIF and BMP are read"
    if not data:
        raise ImageError("the image file is empty", where=where, hint=known)
    head = data[:1000]
    other = (name for name, start in _OTHER_STARTS.items() if re.match(start, head, re.DOTALL | re.IGNORECASE))
    found = next(other, "of an unknown format")
    raise ImageError(f"the image file is {found}", where=where, hint=f"{known}; {_CONVERT}")


def pillow(where: str | Path | None = None) -> Any:
    """Pillow's module `Image`; `ImageError` if it is not installed."""
    install = 'install it with pip install "rlx[images]"'
    try:
        import PIL
        from PIL import Image, WebPImagePlugin  # noqa: F401 it registers itself; else Pillow imports all formats
    except ImportError as error:
        raise ImageError(
            "images are read and resized with Pillow, which is not installed", where=where, hint=install
        ) from error
    if tuple(int(part) for part in re.findall(r"\d+", PIL.__version__)[:2]) < PILLOW:
        needed = ".".join(str(part) for part in PILLOW)
        what = f"images are read and resized with Pillow {needed} or later, and {PIL.__version__} is installed"
        raise ImageError(what, where=where, hint=install)
    return Image


@contextmanager
def _named_errors(kind: str, where: str | Path | None, max_pixels: int = MAX_PIXELS) -> Iterator[None]:
    """Turns errors of Pillow into `ImageError`: its decoders raise anything for a damaged file."""
    try:
        with named_refusals(where):
            yield
    except RlxError:
        raise
    except Exception as error:
        name, text = type(error).__name__, str(error)
        if name == "DecompressionBombError":
            raise ImageError("the image has too many pixels", where=where, hint=_smaller(max_pixels)) from error
        why = "its header is damaged" if name == "UnidentifiedImageError" else text[:200] or name
        raise ImageError(f"the {kind} image cannot be read: {why}", where=where, hint=_DAMAGED) from error


def _check_webp(data: bytes, where: str | Path | None, max_pixels: int) -> None:
    """Checks the size in a WebP's header. Source: RFC 9649."""
    kind, number = data[12:16], int.from_bytes(data[21:25], "little")
    width, height = {
        b"VP8X": (1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little")),
        b"VP8L": (1 + (number & 0x3FFF), 1 + (number >> 14 & 0x3FFF)),
    }.get(kind, (0, 0))  # at most 16383 x 16383 in the third kind
    if kind == b"VP8 ":
        width, height = (int.from_bytes(data[at : at + 2], "little") & 0x3FFF for at in (26, 28))
    _check_size(width, height, where, max_pixels)
    if kind == b"VP8X" and data[20:21] and data[20] & 2:
        _refuse_animation(where)


def _scans(data: bytes) -> Iterator[bool]:
    """For each marker of a JPEG up to its end, whether a scan begins there. Source: ITU T.81, annex B."""
    at = 2
    while (marker := _MARKER.search(data, at)) and data[at := marker.end() - 1] != 0xD9:
        yield data[at] == 0xDA
        at += 1 if data[at] == 0xD8 else 1 + int.from_bytes(data[at + 1 : at + 3], "big")


def _refuse_animation(where: str | Path | None) -> None:
    raise ImageError("the image is an animation", where=where, hint="give one frame of it, saved as PNG or JPEG")


def _decoded(image: PillowImage, where: str | Path | None, max_pixels: int = MAX_PIXELS) -> Pixels:
    _check_size(*image.size, where, max_pixels)
    if getattr(image, "is_animated", False) and image.format != "MPO":  # a photo with further ones for depth or light
        _refuse_animation(where)
    image.load()
    _check_size(*image.size, where, max_pixels)
    turned = _TURNS.get(image.getexif().get(_ORIENTATION, 1))
    pixels = _rgb(image, where)
    if turned:
        down, right, exchanged = turned
        pixels = pixels[::down, ::right]
        pixels = pixels.swapaxes(0, 1) if exchanged else pixels
    return pixels


def _rgb(image: PillowImage, where: str | Path | None) -> Pixels:
    """Red, green and blue. A strip at a time: a second copy of a large photo would take as much memory as the first."""
    if image.mode in ("I", "F"):
        what = f"the Pillow image has the mode '{image.mode}', whose values have no fixed range"
        raise ImageError(what, where=where, hint="scale its values to 0 to 255, and convert it to 'L'")
    width, height = image.size
    pixels = np.empty((height, width, 3), np.uint8)
    step = max(1, STRIP // width)
    for top in range(0, height, step):
        pixels[top : top + step] = _strip(image.crop((0, top, width, min(top + step, height))))
    return pixels


def _strip(image: PillowImage) -> Pixels:
    """As the reference processors convert: alpha and colour profiles are dropped."""
    if image.mode.startswith("I;16"):  # Pillow would make white what is above 255
        high = (np.asarray(image) >> 8).astype(np.uint8)
        return np.repeat(high[:, :, None], 3, axis=2)
    if image.mode != "RGB":
        image.info.pop("transparency", None)  # dropped as well; a palette of it would only warn
        image = image.convert("RGB")
    return np.asarray(image)
