"""The page table of a sequence: which page of the pool holds which positions.

Runtime, under `sequence.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rlx.runtime.pages import Pages, page_count

if TYPE_CHECKING:
    from rlx.runtime.pool import CachePool


class PageTable:
    """The pages that a sequence holds, and their order.

    Attributes:
        pages: i32 [pages]; page p / 64 holds position p.
    """

    def __init__(self, pool: CachePool) -> None:
        self._pool, self._size = pool, pool.sizes.page
        self.pages: Pages = np.zeros(0, np.int32)

    def missing(self, start: int, rows: int) -> int:
        """How many pages are needed to write `rows` positions from `start` on, beyond those that it holds."""
        fresh = page_count(start + rows, self._size) - len(self.pages)
        return max(0, fresh) + self._must_copy(start)

    def grow(self, start: int, rows: int) -> None:
        """Takes these pages; `CachePool.make_room` must have been called."""
        pool = self._pool
        if self._must_copy(start):
            self._own(start // self._size)
        fresh = page_count(start + rows, self._size) - len(self.pages)
        if fresh > 0:
            table = self.pages.tolist()
            for _ in range(fresh):
                table.append(pool.take_page(table[-1] if table else None))
            self.pages = np.array(table, np.int32)

    def share(self, pages: list[int], length: int) -> int:
        """Takes over the pages of a known prefix, as an empty table. The last one is copied, unless it is whole.

        Returns:
            The number of positions that it holds then: fewer than `length` if there was no room for the copy.
        """
        pool = self._pool
        pool.pages.share(pages)  # before anything can evict them
        self.pages = np.array(pages, np.int32)
        if not length % self._size:
            return length
        if not pool.has_room(1):
            length -= length % self._size
            self.cut(length)
            return length
        self._own(len(pages) - 1)
        return length

    def cut(self, length: int) -> None:
        """Drops the pages behind a length."""
        count = page_count(length, self._size)
        dropped = self.pages[count:].tolist()
        self.pages = self.pages[:count]
        self._pool.drop_pages(dropped)

    def _must_copy(self, start: int) -> bool:
        """Whether a write at `start` would destroy positions that others rely on."""
        at, inside = divmod(start, self._size)
        return at < len(self.pages) and self._pool.pages.must_copy(int(self.pages[at]), inside)

    def _own(self, at: int) -> None:
        """Replaces the page at a place of the table by a copy."""
        pool, old = self._pool, int(self.pages[at])
        page = pool.take_page(int(self.pages[at - 1]) if at else None)
        pool.memory.copy_page(old, page)
        table = self.pages.copy()
        table[at] = page
        self.pages = table
        pool.drop_pages([old])
