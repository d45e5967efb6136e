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
        "Pixels that a Qwen model sees of an image: larger images are scaled down; 1024 pixels are one token",
        default="the model's own limit, at most 1048576",
        kind=int,
        low=1024,
        high=MAX_PIXELS,
        metavar="N",
    )
    min_pixels: int | None = option(
        None,
        "Pixels that a Qwen model sees of an image at least: smaller images are scaled up",
        default="the model's own limit",
        kind=int,
        low=1,
        high=MAX_PIXELS,
        metavar="N",
    )
    image_tokens: int | None = option(
        None,
        "Tokens that an image becomes at most in Gemma 4, such as 70, 280 or 1120: more show finer details",
        default="the model's own number, mostly 280",
        kind=int,
        low=1,
        high=4096,
        metavar="N",
    )
    pan_and_scan: bool | None = option(
        None,
        "Whether Gemma 3 sees a long or a wide image as a whole and in up to 4 crops",
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
