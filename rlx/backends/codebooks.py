"""Codebooks of the IQ types: the file stores the index of an entry, and an entry is 4 or 8 small codes.

The tables come from the `gguf` package, which is imported only to pack such weights.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray


@cache
def codes(name: str) -> NDArray[np.uint8]:
    """The codebook of a type, `uint8[entries, 4 or 8]`. Code i stands for the i-th magnitude of the type."""
    from gguf import quants

    kind: Any = getattr(quants, name.upper())
    kind.init_grid()
    found = np.searchsorted(kind.grid_map, kind.grid.reshape(kind.grid_shape))
    return np.asarray(found, np.uint8)
