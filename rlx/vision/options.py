"""The options of images: how many pixels or tokens a model sees of an image, and whether it sees crops."""

from __future__ import annotations

from dataclasses import dataclass

from rlx.errors import ArgumentError
from rlx.profile.option import option, options_of
from rlx.vision.decode import MAX_PIXELS


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
        kind=int,
        low=1024,
        high=MAX_PIXELS,
        metavar="N",
    )
    min_pixels: int | None = option(
        None,
        "Minimum pixels of an image (Qwen); smaller images are scaled up",
        default="the model's",
        kind=int,
        low=1,
        high=MAX_PIXELS,
        metavar="N",
    )
    image_tokens: int | None = option(
        None,
        "Maximum tokens of an image (Gemma 4), such as 70, 280 or 1120",
        default="the model's, mostly 280",
        kind=int,
        low=1,
        high=4096,
        metavar="N",
    )
    pan_and_scan: bool | None = option(
        None,
        "Also show Gemma 3 up to 4 crops of a long or wide image",
        default="no",
        kind=bool,
    )

    def __post_init__(self) -> None:
        for name, each in options_of(ImageOptions).items():
            if (value := getattr(self, name)) is not None:
                each.check(name, value)
        self.check_pixels()

    @property
    def chosen(self) -> tuple[str, ...]:
        """The names of the options that are set."""
        return tuple(name for name in options_of(ImageOptions) if getattr(self, name) not in (None, False))

    def check_pixels(self) -> None:
        """Raises `ArgumentError` if `min_pixels` is above `max_pixels`."""
        if self.min_pixels is not None and self.max_pixels is not None and self.min_pixels > self.max_pixels:
            raise ArgumentError(f"min_pixels is {self.min_pixels}, above max_pixels, which is {self.max_pixels}")
