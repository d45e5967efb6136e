"""Pages: which groups of 64 positions of the pool's full caches are in use, and by how many owners.

Runtime, under `pool.py`. A page is a number. Its memory lies in every full cache of the model (`StateMemory`).
Owners are sequences and nodes of the prefix index; each of them counts once for each page that it holds.

Truth lies with the owners: `recount` restores the counters from them, after an interrupt at any instruction.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Pages = npt.NDArray[np.int32]

_LOOK = 1024  # pages looked at in one go


class PageAllocator:
    """Counted references to pages.

    Args:
        count: how many pages there are.
        apart: how many pages lie between the beginnings of two sequences, if they are free.

    Attributes:
        owners: i32 [count], how many owners hold each page; 0 is a free page.
        indexed: i32 [count], how many of them are nodes of the prefix index.
        frozen: i32 [count], how many positions of each page other owners rely on. A sequence may write behind them; to
            write before them it copies the page first, unless it is the only owner.
        used: number of pages that are not free.
    """

    def __init__(self, count: int, apart: int) -> None:
        self.count, self._apart_by, self._next = count, apart, 0
        self.owners, self.indexed, self.frozen = (np.zeros(count, np.int32) for _ in range(3))
        self.used = 0

    @property
    def free(self) -> int:
        """Number of free pages."""
        return self.count - self.used

    def take(self, after: int | None = None) -> int:
        """A free page, which then has one owner. There must be one.

        Args:
            after: the page of the positions before. The next page is preferred, so that a sequence's pages lie in a
                row, which attention reads fastest.
        """
        following = -1 if after is None else after + 1
        page = following if 0 <= following < self.count and not self.owners[following] else self._apart()
        self.owners[page], self.frozen[page] = 1, 0
        self.used += 1
        return page

    def _apart(self) -> int:
        """The first free page at or after the place where the next sequence begins."""
        for begin, end in (self._next, self.count), (0, self._next):
            for at in range(begin, end, _LOOK):
                free = np.flatnonzero(self.owners[at : min(at + _LOOK, end)] == 0)
                if len(free):
                    page = at + int(free[0])
                    self._next = (page + self._apart_by) % self.count
                    return page
        raise AssertionError("no page is free")

    def share(self, pages: Iterable[int], *, index: bool = False) -> None:
        """One more owner for each of the pages."""
        for page in pages:
            self.owners[page] += 1
            self.indexed[page] += index

    def drop(self, pages: Iterable[int], *, index: bool = False) -> list[int]:
        """One owner less for each of the pages; returns those that are free now."""
        freed = []
        for page in pages:
            self.owners[page] -= 1
            self.indexed[page] -= index
            if not self.owners[page]:
                self.frozen[page] = 0
                self.used -= 1
                freed.append(page)
        return freed

    def freeze(self, page: int, positions: int) -> None:
        """Notes that others rely on the first positions of a page."""
        self.frozen[page] = max(self.frozen[page], positions)

    def must_copy(self, page: int, position: int) -> bool:
        """Whether a write at this position of the page, 0 to 63, would destroy what another owner relies on."""
        return bool(self.owners[page] > 1 and position < self.frozen[page])

    def is_reclaimable(self, page: int) -> bool:
        """Whether only the prefix index holds it."""
        return bool(self.owners[page] == self.indexed[page])

    def recount(self, sequences: Iterable[Iterable[int]], index: Iterable[Iterable[int]]) -> None:
        """Sets the counters to what the owners hold: the pages of each sequence, and of each node of the index."""
        owners, indexed = np.zeros_like(self.owners), np.zeros_like(self.indexed)
        for pages in sequences:
            for page in pages:
                owners[page] += 1
        for pages in index:
            for page in pages:
                owners[page] += 1
                indexed[page] += 1
        self.frozen[owners == 0] = 0
        self.owners[:], self.indexed[:] = owners, indexed
        self.used = int(np.count_nonzero(owners))


def page_count(positions: int, page: int) -> int:
    """How many pages so many positions take."""
    return -(-positions // page)
