"""The rows that images became, kept for the next time: nobody encodes the same image twice.

Vision stage, beside the tower. An entry is found by what decides the rows: the pixels, the options of images, and the
model.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from threading import Lock
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Features:
    """An image as the text model takes it.

    Attributes:
        rows: float32 [rows * columns of the grid, hidden], read-only.
        grid: rows and columns.
    """

    rows: Floats
    grid: tuple[int, int]


class FeatureCache:
    """Features by key, bounded in bytes; the ones that were not used for longest go first. Threads may share it.

    Args:
        capacity: maximum number of bytes; 0 keeps nothing.

    Attributes:
        hits: how many images were found.
        evicted: how many went to make room.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity, self.nbytes, self.hits, self.evicted = capacity, 0, 0, 0
        self._found: OrderedDict[bytes, Features] = OrderedDict()
        self._lock = Lock()

    def get(self, key: bytes) -> Features | None:
        """The features of a key, or None."""
        with self._lock:
            found = self._found.get(key)
            if found is not None:
                self._found.move_to_end(key)
                self.hits += 1
            return found

    def put(self, key: bytes, features: Features) -> None:
        """Keeps features, unless they alone are larger than the cache."""
        with self._lock:
            if key in self._found or features.rows.nbytes > self.capacity:
                return
            self._found[key] = features
            self.nbytes += features.rows.nbytes
            while self.nbytes > self.capacity:
                _, oldest = self._found.popitem(last=False)
                self.nbytes -= oldest.rows.nbytes
                self.evicted += 1

    def __len__(self) -> int:
        return len(self._found)
