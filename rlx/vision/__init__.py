"""Vision: from an image to rows of a text model. Between the weights and the runners.

`image.py` reads an image, `processors.py` resizes it and cuts it into patches as the family's reference processor does,
`tower.py` runs the family's tower over the patches. The equations of the towers are in `rlx.models`.
"""

from typing import TYPE_CHECKING

from rlx.lazy import names_of

if TYPE_CHECKING:
    from rlx.vision import decode, opening, tower
    from rlx.vision.encoder import Encoder, FeatureCache
    from rlx.vision.image import Image
    from rlx.vision.opening import Vision
    from rlx.vision.processors import ImageProcessor
    from rlx.vision.tower import Tower

__all__ = ["Encoder", "FeatureCache", "Image", "ImageProcessor", "Tower", "Vision", "decode", "opening", "tower"]

#: Text alone needs none of them.
_HOMES = {
    **{name: f"rlx.vision.{name}" for name in ("decode", "opening", "tower")},
    "Encoder": "rlx.vision.encoder",
    "FeatureCache": "rlx.vision.encoder",
    "Image": "rlx.vision.image",
    "ImageProcessor": "rlx.vision.processors",
    "Tower": "rlx.vision.tower",
    "Vision": "rlx.vision.opening",
}

__getattr__ = names_of("rlx.vision", _HOMES)
