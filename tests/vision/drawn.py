"""Images that are the same on every machine: noise, blocks and ramps, computed with whole numbers from a seed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def drawn(height: int, width: int, seed: int) -> NDArray[np.uint8]:
    """uint8 [height, width, 3]. The expected values in `pixels/` were made from these images."""
    u = np.uint32
    row = np.arange(height, dtype=u)[:, None, None]
    column, colour = np.arange(width, dtype=u)[None, :, None], np.arange(3, dtype=u)
    noise = (row * u(width) + column) * u(3) + colour + u(seed * 2654435761 & 0xFFFFFFFF)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        noise = (noise ^ (noise >> u(shift))) * u(factor)
    blocks = (row * u(9) // u(height)) * u(83) + (column * u(7) // u(width)) * u(59) + colour * u(97)
    blocks = (blocks + u(seed & 255) * u(31)) & u(255)
    ramp = (row * u(255) // u(height) + colour * column * u(127) // u(width)) & u(255)
    return (((noise >> u(24)) + u(3) * blocks + u(2) * ramp) // u(6)).astype(np.uint8)
