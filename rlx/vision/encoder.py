"""Encodes images for the engine loop: in pieces, one at a time, and each once.

Vision stage, over the processors, the tower and the feature cache. What an image becomes is known at once, in the
caller's thread: how many rows, in which grid. The loop's thread computes the rows, piece by piece.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator
from dataclasses import dataclass
from hashlib import blake2b
from threading import Lock
from typing import Any, Protocol, TypeAlias
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from rlx.errors import NumericalError
from rlx.models.vision_config import VisionConfig
from rlx.vision.image import Image
from rlx.vision.processors import ImageProcessor, Patches

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


class Tower(Protocol):
    """The part of a tower that encodes; `rlx.vision.tower.Tower` implements it."""

    config: VisionConfig

    def steps(self, patches: Patches, seconds: float | None = None) -> Generator[None, None, Floats]:
        """Yields after each piece of work of about at most `seconds`; returns rows f32 [patches.tokens, hidden]."""
        ...


class Encoding:
    """One image on its way into a text model.

    Attributes:
        key: names its rows: two encodings of equal keys have equal rows.
        source: what it is made of.
        grid: rows and columns of its tokens.
        features: the rows, once they are computed.
        users: how many requests wait for it. Only the thread that encodes changes it.
        error: why it could not be encoded, until somebody who waits for it is told.
    """

    def __init__(self, key: bytes, source: Image, grid: tuple[int, int], features: Features | None = None) -> None:
        self.key, self.source, self.grid, self.features = key, source, grid, features
        self.users = 0
        self.error: Exception | None = None

    @property
    def tokens(self) -> int:
        """How many rows it has."""
        return self.grid[0] * self.grid[1]

    @property
    def is_ready(self) -> bool:
        """Whether its rows are computed."""
        return self.features is not None


class Encoder:
    """Encodes images with one tower.

    `encoding` may be called in any thread, the other methods in one only.

    Args:
        tower: computes the rows.
        processor: makes patches of images.
        model: names the model and the options: what besides pixels decides the rows.
        cache: keeps rows.
        seconds: how long a piece of work should take at most.
    """

    def __init__(
        self, tower: Tower, processor: ImageProcessor, model: bytes, cache: FeatureCache, seconds: float | None = None
    ) -> None:
        self.tower, self.processor, self.cache = tower, processor, cache
        self._model, self._lock, self._seconds = model, Lock(), seconds
        self._known: WeakValueDictionary[bytes, Encoding] = WeakValueDictionary()  # those that somebody waits for
        self._current: Encoding | None = None
        self._work: Generator[None, None, Floats] | None = None
        self.encoded = self.abandoned = 0

    @property
    def config(self) -> VisionConfig:
        """The configuration of the tower."""
        return self.tower.config

    def encoding(self, source: Image) -> Encoding:
        """The encoding of an image: the one that is under way, if there is one.

        Raises:
            ImageError: the model takes no image of this size.
        """
        key = blake2b(source.digest, key=self._model, digest_size=16).digest()
        with self._lock:
            found = self._known.get(key)
            if found is None:
                found = self._known[key] = Encoding(key, source, self.processor.grid(source), self.cache.get(key))
            return found

    def take(self, encoding: Encoding) -> None:
        """Notes that a request waits for an encoding; `drop` undoes it."""
        encoding.users += 1

    def drop(self, encoding: Encoding) -> None:
        """Notes that a request waits no longer. What was begun for nobody is given up."""
        encoding.users -= 1
        if encoding.users:
            return
        encoding.error = None
        if encoding is self._current:
            self.abandoned += 1
            self._give_up()

    def advance(self, encoding: Encoding) -> None:
        """Computes the next piece for an encoding that somebody has taken, or of the one that is under way before it.

        Raises:
            NumericalError: a row is NaN or infinite.
            RlxError: what the tower raises; a later call begins anew.
        """
        if self._current is None and not (encoding.is_ready or encoding.error):
            self._current, self._work = encoding, self._pieces(encoding.source)
        if self._current is not None and self._work is not None:
            self._step(self._current, self._work)
        if (error := encoding.error) is not None:
            encoding.error = None
            raise error

    def _step(self, encoding: Encoding, work: Generator[None, None, Floats]) -> None:
        try:
            next(work)
        except StopIteration as end:
            self._current = self._work = None
            self._finish(encoding, end.value)
        except Exception as error:  # of this image, not of the one for which the caller asks
            self._give_up()
            encoding.error = error

    def _pieces(self, source: Image) -> Generator[None, None, Floats]:
        patches = yield from self.processor.steps(source, self._seconds)
        yield
        return (yield from self.tower.steps(patches, self._seconds))

    def _finish(self, encoding: Encoding, rows: Floats) -> None:
        if not np.isfinite(rows).all():
            hint = "the weights or the arithmetic are broken: check the file, or try precision='exact'"
            what = "a row of an image is not finite"
            encoding.error = NumericalError(what, where="vision tower", hint=hint)
            return
        rows.flags.writeable = False
        encoding.features = Features(rows, encoding.grid)
        self.cache.put(encoding.key, encoding.features)
        self.encoded += 1

    def _give_up(self) -> None:
        work, self._current, self._work = self._work, None, None
        if work is not None:
            work.close()

    def stats(self) -> dict[str, Any]:
        """How many images were encoded, found, given up; and what the cache holds."""
        cache = self.cache
        return {
            "encoded": self.encoded,
            "found": cache.hits,
            "abandoned": self.abandoned,
            "kept": len(cache),
            "kept_bytes": cache.nbytes,
            "evicted": cache.evicted,
        }
