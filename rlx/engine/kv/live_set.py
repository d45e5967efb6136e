"""A set of objects that some threads add to while others look through it.

Runtime, for whoever keeps account of what is open. `weakref.WeakSet` refuses to be iterated while another thread adds.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class LiveSet(Generic[T]):
    """Objects as long as somebody else refers to them. Any thread may call its methods at any time.

    Example:
        >>> files = LiveSet()
        >>> files.add(file)
        >>> sum(each.nbytes for each in files)
    """

    def __init__(self) -> None:
        self._refs: dict[weakref.ref[T], None] = {}

    def add(self, item: T) -> None:
        """Adds an object, which must be hashable."""
        self._refs[weakref.ref(item, self._drop)] = None

    def discard(self, item: T) -> None:
        """Removes an object if it is there."""
        self._drop(weakref.ref(item))

    def _drop(self, ref: weakref.ref[T]) -> None:
        self._refs.pop(ref, None)

    def __iter__(self) -> Iterator[T]:
        """The objects that were there at the call, those that still live."""
        refs = list(self._refs)  # one step for other threads
        return (item for ref in refs if (item := ref()) is not None)
