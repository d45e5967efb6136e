"""Images from arrays, files, bytes, data URIs and Pillow, against Pillow's own reading; and what is refused."""

from __future__ import annotations

import base64
import io
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drawn import drawn
from numpy.typing import NDArray

from rlx.errors import ImageError, MultimodalError
from rlx.vision import decode
from rlx.vision.image import Image

pillow = pytest.importorskip("PIL.Image")
PIXELS = drawn(20, 31, 1)
RGB = pillow.fromarray(PIXELS)


def saved(image: Any, kind: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def exif(orientation: int) -> bytes:
    found = pillow.Exif()
    found[0x0112] = orientation
    return bytes(found.tobytes())


def expected(data: bytes) -> NDArray[np.uint8]:
    """What the reference processors see: transformers' `load_image`, then `convert("RGB")`."""
    from PIL import ImageOps

    return np.asarray(ImageOps.exif_transpose(pillow.open(io.BytesIO(data))).convert("RGB"))


FILES = {
    **{kind: saved(RGB, kind) for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP")},
    **{f"PNG {mode}": saved(RGB.convert(mode), "PNG") for mode in ("1", "L", "LA", "RGBA", "P")},
    "PNG, one colour transparent": saved(RGB, "PNG", transparency=(1, 2, 3)),
    "PNG, a palette with alpha": saved(RGB.convert("P"), "PNG", transparency=bytes(range(256))),
    "GIF, transparent": saved(RGB.convert("P"), "GIF", transparency=3),
    "JPEG, progressive": saved(RGB, "JPEG", progressive=True),
    "JPEG, CMYK": saved(RGB.convert("CMYK"), "JPEG"),
    "JPEG, grey": saved(RGB.convert("L"), "JPEG"),
    "JPEG with a second image": saved(RGB, "MPO", save_all=True, append_images=[RGB]),
    "WEBP, lossless, alpha": saved(RGB.convert("RGBA"), "WEBP", lossless=True),
    **{f"JPEG, orientation {n}": saved(RGB, "JPEG", exif=exif(n)) for n in range(1, 9)},
    "PNG, orientation 6": saved(RGB, "PNG", exif=exif(6)),
    "WEBP, orientation 8": saved(RGB, "WEBP", exif=exif(8)),
}
FRAMES = {"save_all": True, "append_images": [RGB.rotate(90)]}


def uri(data: bytes) -> str:
    return f"data:image/x;base64,{base64.b64encode(data).decode()}"


@pytest.mark.filterwarnings("ignore:Palette images with Transparency")  # of the expected value
@pytest.mark.parametrize("name", FILES)
def test_a_file_is_seen_as_the_reference_processors_see_it(name: str, tmp_path: Path) -> None:
    data = FILES[name]
    image = Image.of(data)
    np.testing.assert_array_equal(image.pixels, expected(data))
    (tmp_path / "file").write_bytes(data)
    others = (tmp_path / "file", str(tmp_path / "file"), memoryview(data), uri(data), uri(data).replace("+", "%2B"))
    for same in (*others, pillow.open(io.BytesIO(data)), expected(data), image):
        assert Image.of(same) == image and Image.of(same).digest == image.digest


def test_grey_of_16_bits_keeps_the_high_8() -> None:
    """Pillow's `convert` would make all that is above 255 white."""
    deep = np.arange(600, dtype=np.uint16).reshape(20, 30) * 109
    image = Image.of(saved(pillow.fromarray(deep), "PNG"))
    np.testing.assert_array_equal(image.pixels, np.repeat((deep // 256)[:, :, None], 3, axis=2))


def png(width: int, height: int) -> bytes:
    """A small file that says it is a large image."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")


def webp(width: int, height: int, flags: int = 0) -> bytes:
    size = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return b"RIFF\x20\0\0\0WEBPVP8X\x0a\0\0\0" + bytes([flags, 0, 0, 0]) + size


def many_scans() -> bytes:
    data = FILES["JPEG, progressive"]
    return data[:-2] + data[data.index(b"\xff\xda") : -2] * 40 + data[-2:]


REFUSED = {
    "empty": (b"", "the image file is empty"),
    "text": (b"hello", r"of an unknown format\. PNG, JPEG, WebP, GIF and BMP are read"),
    "TIFF": (saved(RGB, "TIFF"), "the image file is TIFF"),
    "HEIC": (b"\0\0\0\x18ftypheic\0\0", "the image file is HEIC"),
    **{f"cut {k}": (FILES[k][:-60], f"the {k} image cannot be read") for k in ("PNG", "JPEG", "WEBP", "GIF", "BMP")},
    "animated PNG": (saved(RGB, "PNG", **FRAMES), "animation"),
    "animated GIF": (saved(RGB, "GIF", **FRAMES), "animation"),
    "animated WEBP": (saved(RGB, "WEBP", **FRAMES), "animation"),
    "Pillow, animated": (pillow.open(io.BytesIO(saved(RGB, "GIF", **FRAMES))), "animation"),
    "a bomb": (png(60_000, 60_000), "too many pixels"),
    "a large image": (png(9000, 8000), r"9000 x 8000 pixels\. At most 64 megapixels"),
    "a long image": (png(70_000, 1), r"70000 x 1 pixels.*65536 pixels of a side"),
    "a large WEBP": (webp(16000, 16000), "16000 x 16000 pixels"),
    "an animated WEBP header": (webp(16, 16, flags=2), "animation"),
    "many scans": (many_scans(), r"has \d+ scans, at most 100 are read"),
    "an address": ("https://example.com/a.png", r"opens none\. Download it"),
    "a file address": ("file:///a.png", "Give the path itself"),
    "a data URI as text": ("data:image/png,abc", "not in base64"),
    "a data URI without data": ("data:image/png;base64", "not in base64"),
    "damaged base64": ("data:image/png;base64,@@@@", "base64 of a data URI is damaged"),
    "other letters in base64": ("data:image/png;base64,é", "base64 of a data URI is damaged"),
    "no file": ("/nowhere.png", "/nowhere.png: there is no such file"),
    "a folder": ("/", "this is a directory"),
    "a device": ("/dev/zero", "this is no regular file"),
    "a zero byte": ("a\0b", "embedded null byte"),
    "a long name": ("x" * 5000, "x" * 60 + r"\.\.\.: the file cannot be read: File name too long"),
    "None": (None, "an image is NoneType"),
    "a list": ([[1, 2, 3]], "an image is list"),
    "planes": (np.zeros((3, 8, 8), np.uint8), "Put the channels last"),
    "floats": (np.zeros((8, 8, 3)), r"float64 \[8, 8, 3\], expected uint8.*\(array \* 255\)"),
    "integers": (np.zeros((8, 8, 3), np.int64), "expected uint8"),
    "no pixels": (np.zeros((0, 8, 3), np.uint8), "without a pixel"),
    "a batch": (np.zeros((1, 8, 8, 3), np.uint8), r"an array of uint8 \[1, 8, 8, 3\]"),
    "a very long array": (np.zeros((1, 70_000), np.uint8), "a side has at most 65536"),
    "floats of Pillow": (pillow.new("F", (3, 3)), "mode 'F', whose values have no fixed range"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_image_is_refused_by_name(name: str) -> None:
    value, message = REFUSED[name]
    with pytest.raises(ImageError, match=message) as caught:
        Image.of(value)
    assert isinstance(caught.value, MultimodalError) and len(str(caught.value)) < 400


@pytest.mark.parametrize(("most", "said"), [(1 << 27, "at most 128 mega"), (1 << 40, "at most 171 mega")])
def test_a_bomb_is_refused_with_the_limit_that_holds(most: int, said: str) -> None:
    """Of the caller's and Pillow's own the smaller."""
    with pytest.raises(ImageError, match=f"(?i){said}"):
        decode.from_bytes(png(60_000, 60_000), max_pixels=most)


def test_strips_leave_no_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "STRIP", 100)
    for name in ("PNG RGBA", "JPEG, orientation 6", "PNG P"):
        np.testing.assert_array_equal(Image.of(FILES[name]).pixels, expected(FILES[name]))


def test_files_have_a_limit(tmp_path: Path) -> None:
    with (tmp_path / "large.png").open("wb") as file:
        file.truncate(192 << 20)  # no disk blocks
    with pytest.raises(ImageError, match=r"large\.png: the image file has 201.3 MB, at most 134.2 are read"):
        Image.of(tmp_path / "large.png")
    os.mkfifo(tmp_path / "pipe")  # to open it would wait for ever
    with pytest.raises(ImageError, match="no regular file"):
        Image.of(tmp_path / "pipe")
