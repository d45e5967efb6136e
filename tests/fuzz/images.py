"""Image files of every format and mode that is read, with something wrong in them, and what is done with them."""

from __future__ import annotations

import base64
import io
import random
import struct
import zlib
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tests.fuzz import mutate


def make_image(rng: random.Random, folder: Path) -> None:
    data = rng.choice(sound_files())
    if data.startswith(b"\x89PNG") and rng.random() < 0.7:
        data = mutated_png(rng, data)
    else:
        data = mutate.mutated_bytes(rng, data, within=rng.choice((40, 200, None)))
    if rng.random() < 0.1:
        text = f"data:image/png;base64,{base64.b64encode(data).decode()}"
        uri = mutate.mutated_text(rng, text, ["%3D", ",", "http://"])
        (folder / "uri").write_text(uri, errors="surrogatepass")
    else:
        (folder / "image").write_bytes(data)


def use_image(folder: Path) -> None:
    """Reads the image, and makes of it what the towers of all families take."""
    from rlx.models.vision_config import VisionConfig
    from rlx.vision.image import Image, ImageOptions
    from rlx.vision.processors import ImageProcessor

    uri = folder / "uri"
    image = Image.of(uri.read_text(errors="surrogatepass") if uri.exists() else folder / "image")
    assert image.pixels.dtype == np.uint8 and image.pixels.shape == (*image.size, 3)
    same: dict[str, Any] = {
        "hidden": 64, "positions": 40, "out_hidden": 64, "eps": 1e-6, "mean": (0.5,) * 3, "std": (0.5,) * 3, "patch": 8,
        "image_token": 1, "begin_token": None, "end_token": None,
    }  # fmt: skip
    families = {
        "qwen35": {"merge": 2, "min_pixels": 2048, "max_pixels": 65536},
        "gemma3": {"merge": 4, "image_size": 96},
        "gemma4": {"merge": 3, "budget": 70},
    }
    for family, sizes in families.items():
        config = VisionConfig(family=family, **same, **sizes)
        patches = ImageProcessor.of(config, ImageOptions()).preprocess(image)
        assert patches.tokens * config.patches_per_row == len(patches.patches)


@cache
def sound_files() -> list[bytes]:
    from PIL import Image

    pixels = np.random.default_rng(3).integers(0, 256, (24, 37, 3), np.uint8)
    image, exif = Image.fromarray(pixels), Image.Exif()
    exif[0x0112], exif[0x010E] = 6, "a text"
    grey = Image.fromarray(np.arange(600, dtype=np.uint16).reshape(20, 30) * 100)
    forms: list[tuple[Any, str, dict[str, Any]]] = [
        (image, "PNG", {"exif": exif.tobytes()}),
        (image.convert("P"), "PNG", {"transparency": bytes(range(256))}),
        *((image.convert(mode), "PNG", {}) for mode in ("1", "LA", "RGBA")),
        (grey, "PNG", {}),
        (image, "PNG", {"save_all": True, "append_images": [image.rotate(9)]}),
        (image, "JPEG", {"exif": exif.tobytes()}),
        (image, "JPEG", {"progressive": True}),
        (image.convert("CMYK"), "JPEG", {}),
        (image, "MPO", {"save_all": True, "append_images": [image]}),
        (image, "WEBP", {"exif": exif.tobytes()}),
        (image.convert("RGBA"), "WEBP", {"lossless": True}),
        (image.convert("P"), "GIF", {"transparency": 3}),
        (image, "GIF", {"save_all": True, "append_images": [image.rotate(9)]}),
        *((image.convert(mode), "BMP", {}) for mode in ("1", "P", "RGB", "RGBA")),
    ]
    return [_saved(*form) for form in forms]


def _saved(image: Any, kind: str, options: dict[str, Any]) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def mutated_png(rng: random.Random, data: bytes) -> bytes:
    """A PNG with a chunk changed, whose checksum is right again; pixels are changed before they are compressed."""
    chunks, at = [], 8
    while at < len(data):
        length = int.from_bytes(data[at : at + 4], "big")
        chunks.append((data[at + 4 : at + 8], data[at + 8 : at + 8 + length]))
        at += 12 + length
    index = rng.randrange(len(chunks))
    name, body = chunks[index]
    if name == b"IDAT" and rng.random() < 0.8:
        body = zlib.compress(mutate.mutated_bytes(rng, zlib.decompress(body)))
    else:
        body = mutate.mutated_bytes(rng, body)
    chunks[index] = name, body
    if rng.random() < 0.2:
        chunks.insert(index, rng.choice(chunks))
    parts = (struct.pack(">I", len(b)) + n + b + struct.pack(">I", zlib.crc32(n + b)) for n, b in chunks)
    return data[:8] + b"".join(parts)
