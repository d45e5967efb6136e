"""An image as the models' processors take it: pixels in rows, upright, and a digest that names them.

First step of the vision stage. Whatever a caller has (array, file, bytes, data URI, Pillow image) becomes an `Image`
here; `decode.py` reads files, and `processors.py` makes of an `Image` what a tower takes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from os import PathLike
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlx import vision
from rlx.errors import ArgumentError, ImageError
from rlx.profile.option import check_options, option, options_of

Pixels: TypeAlias = NDArray[np.uint8]

MAX_PIXELS = 1 << 26  # of an image
MAX_SIDE = 1 << 16  # pixels: a JPEG has no longer side; it bounds the memory that resizing takes
TAKEN = "an array of uint8 [height, width, 3], a path, the bytes of a file, a data URI or a Pillow image"


@dataclass(frozen=True, eq=False)
class Image:
    """An image of red, green and blue. Two are equal if their pixels are, wherever they come from.

    Attributes:
        pixels: uint8 [height, width, 3], read-only, rows from top to bottom.
        digest: 32 bytes, blake2b of the shape and the pixels.
        later: the pixels of the frame after it, where the two are a pair of a video; of the same size.
        target: height and width that it is resized to, where the whole video decides.
    """

    pixels: Pixels = field(repr=False)
    digest: bytes
    later: Pixels | None = field(default=None, repr=False)
    target: tuple[int, int] | None = None

    @classmethod
    def of(cls, value: Any) -> Image:
        """The image that a caller means.

        Args:
            value: an array of uint8 [height, width, 3] (or [height, width], [height, width, 1]: grey; or [height,
                width, 4], whose alpha is dropped), which is copied; the bytes of a PNG, JPEG, WebP, GIF or BMP file;
                the path of one; a `data:` URI with one in base64; a Pillow image; or an `Image`, which is returned.
                All but arrays need Pillow, the extra `images`. A photo is turned upright as its EXIF data says.

        Raises:
            ImageError: it is none of these, the file is missing, damaged, truncated, too large, of an unknown format
                or an animation, or Pillow is not installed.

        Example:
            >>> Image.of(np.zeros((480, 640, 3), np.uint8)).size
            (480, 640)
        """
        if isinstance(value, Image):
            return value
        if isinstance(value, np.ndarray):
            return cls.from_pixels(_of_array(value))
        if isinstance(value, bytes | bytearray | memoryview):
            return cls.from_pixels(vision.decode.from_bytes(bytes(value)))
        if isinstance(value, str) and vision.decode.is_uri(value):
            return cls.from_pixels(vision.decode.from_uri(value))
        if isinstance(value, str | PathLike):
            return cls.from_pixels(vision.decode.from_path(value))
        if vision.decode.is_pillow(value):
            return cls.from_pixels(vision.decode.from_pillow(value))
        if hasattr(value, "__array__"):  # a tensor of another library
            return cls.from_pixels(_of_array(_as_array(value)))
        raise ImageError(f"an image is {type(value).__name__}", hint=f"give {TAKEN}")

    @classmethod
    def from_pixels(cls, pixels: Pixels) -> Image:
        """The image of an array of uint8 [height, width, 3] that nobody else changes; it becomes read-only.

        Raises:
            ImageError: a side has more than 65536 pixels.
        """
        pixels = np.ascontiguousarray(pixels)
        if max(pixels.shape) > MAX_SIDE:
            what = f"an image has {pixels.shape[1]} x {pixels.shape[0]} pixels, and a side has at most {MAX_SIDE}"
            raise ImageError(what, hint="cut it into pieces, or make it smaller")
        pixels.flags.writeable = False
        digest = blake2b(np.array(pixels.shape, "<i8").tobytes(), digest_size=32)
        digest.update(pixels.data)
        return cls(pixels, digest.digest())

    def with_later(self, frame: Image, target: tuple[int, int]) -> Image:
        """The pair of this frame of a video and another one of its size, which are resized to `target`."""
        digest = blake2b(self.digest + frame.digest + np.array(target, "<i8").tobytes(), digest_size=32).digest()
        return Image(self.pixels, digest, frame.pixels, target)

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return self.pixels.shape[0], self.pixels.shape[1]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Image) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)


def _of_array(array: NDArray[Any]) -> Pixels:
    """A copy of the caller's array as uint8 [height, width, 3]."""
    shape = f"{array.dtype} {list(array.shape)}"
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (1, 3, 4)):
        planes = array.ndim == 3 and array.shape[0] in (1, 3, 4)
        hint = "put the channels last: array.transpose(1, 2, 0)" if planes else "give uint8 [height, width, 3]"
        raise ImageError(f"an image is an array of {shape}", hint=hint)
    if array.dtype != np.uint8:
        unit = "if its values are from 0 to 1: (array * 255).round().astype(np.uint8)"
        hint = unit if array.dtype.kind == "f" else "give values from 0 to 255 as uint8: array.astype(np.uint8)"
        raise ImageError(f"an image is an array of {shape}, expected uint8", hint=hint)
    if not array.size:
        raise ImageError(f"an image is an array of {shape}, without a pixel")
    channels = array.reshape(*array.shape[:2], -1)
    pixels = np.empty((*channels.shape[:2], 3), np.uint8)
    pixels[:] = channels[:, :, :3]  # one channel of grey becomes three
    return pixels


def _as_array(value: Any) -> NDArray[Any]:
    try:
        return np.asarray(value)
    except Exception as error:  # other libraries raise what they like, such as for a tensor of another device
        kind = type(value).__name__
        raise ImageError(f"an image is {kind}, which is no array: {error}", hint=f"give {TAKEN}") from error


@dataclass(frozen=True, kw_only=True)
class ImageOptions:
    """The options of images; None takes the model's value.

    Raises:
        ArgumentError: a value is out of its range, or `min_pixels` is above `max_pixels`.
    """

    max_pixels: int | None = option(
        None,
        "Maximum pixels of an image (Qwen); larger images are scaled down; 1024 pixels are one token",
        default="the model's, at most 1048576",
        low=1024,
        high=MAX_PIXELS,
        metavar="N",
    )
    min_pixels: int | None = option(
        None,
        "Minimum pixels of an image (Qwen); smaller images are scaled up",
        default="the model's",
        low=1,
        high=MAX_PIXELS,
        metavar="N",
    )
    image_tokens: int | None = option(
        None,
        "Maximum tokens of an image (Gemma 4), such as 70, 280 or 1120",
        default="the model's, mostly 280",
        low=1,
        high=4096,
        metavar="N",
    )
    pan_and_scan: bool | None = option(None, "Also show Gemma 3 up to 4 crops of a long or wide image", default="no")

    def __post_init__(self) -> None:
        check_options(self)
        self.check_pixels()

    @property
    def chosen(self) -> tuple[str, ...]:
        """The names of the options that are set."""
        return tuple(name for name in options_of(ImageOptions) if getattr(self, name) not in (None, False))

    def check_pixels(self) -> None:
        """Raises `ArgumentError` if `min_pixels` is above `max_pixels`."""
        if self.min_pixels is not None and self.max_pixels is not None and self.min_pixels > self.max_pixels:
            raise ArgumentError(f"min_pixels is {self.min_pixels}, above max_pixels, which is {self.max_pixels}")
