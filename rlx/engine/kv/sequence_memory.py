"""Where the states of a sequence lie in the pool: its page table and its slots.

Runtime, between `sequence.py` and `pool.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.compiler.state_memory import SlotCopy
from rlx.engine.kv.pages import Pages, page_count

if TYPE_CHECKING:
    from rlx.engine.kv.pool import CachePool

NO_SLOT = -1


@dataclass(frozen=True)
class Saved:
    """A paused sequence in ordinary memory: copies of its pages and of its slot."""

    pages: list[np.ndarray[Any, Any]]
    slot: SlotCopy | None

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.pages) + (self.slot.nbytes if self.slot else 0)


class SequenceMemory:
    """The pages and slots that a sequence holds.

    Attributes:
        pages: i32 [pages], the page table: page p / 64 holds position p.
        slot: the slot of its rings and recurrent states, or -1.
        spare: the slot that drafts write recurrent states to, or -1.
        has_slot: whether the model has rings or recurrent states.
        recurrent: whether it has recurrent states.
    """

    def __init__(self, pool: CachePool) -> None:
        self._pool, self._size = pool, pool.sizes.page
        self.pages: Pages = np.zeros(0, np.int32)
        self.slot = self.spare = NO_SLOT
        self._own_from = 0  # writes from this position on destroy nothing that others rely on
        self.has_slot, self.recurrent = pool.memory.has_slots, bool(pool.memory.recurrent)

    @property
    def slots(self) -> list[int]:
        """The slots that it holds."""
        return [slot for slot in (self.slot, self.spare) if slot != NO_SLOT]

    def is_ready(self, start: int, rows: int, drafts: bool) -> bool:
        """Whether `rows` positions from `start` on can be written as it is; quick, for every step."""
        if start < self._own_from or start + rows > len(self.pages) * self._size:
            return False
        return not self.has_slot or (self.slot >= 0 and (self.spare >= 0 or not (drafts and self.recurrent)))

    def protect(self, length: int) -> None:
        """Notes that others rely on the first positions from now on."""
        self._own_from = max(self._own_from, length)

    def missing(self, start: int, rows: int, drafts: bool) -> tuple[int, int]:
        """How many pages and slots are needed to write `rows` positions from `start` on, beyond those that it holds.

        Args:
            drafts: whether rows may be rejected.
        """
        fresh = page_count(start + rows, self._size) - len(self.pages)
        slots = (self.has_slot and self.slot == NO_SLOT) + (drafts and self.recurrent and self.spare == NO_SLOT)
        return max(0, fresh) + (rows > 0 and self._must_copy(start)), slots

    def grow(self, start: int, rows: int, drafts: bool) -> None:
        """Takes these pages and slots; `CachePool.make_room` must have been called."""
        pool = self._pool
        if rows > 0 and self._must_copy(start):
            self._own(start // self._size)
        fresh = page_count(start + rows, self._size) - len(self.pages)
        if fresh > 0:
            table = self.pages.tolist()
            for _ in range(fresh):
                table.append(pool.take_page(table[-1] if table else None))
            self.pages = np.array(table, np.int32)
        self._own_from = start if rows else self._own_from
        if self.has_slot and self.slot == NO_SLOT:
            self.slot = pool.take_slot()
        if drafts and self.recurrent and self.spare == NO_SLOT:
            self.spare = pool.take_slot()

    def share(self, pages: list[int], length: int) -> int:
        """Takes over the pages of a known prefix, as an empty table. The last one is copied, unless it is whole.

        Returns:
            The number of positions that it holds then: fewer than `length` if there was no room for the copy.
        """
        pool = self._pool
        pool.pages.share(pages)  # before anything can evict them
        self.pages, self._own_from = np.array(pages, np.int32), length + 1
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
        if count < len(self.pages):
            dropped = self.pages[count:].tolist()
            self.pages = self.pages[:count]
            self._pool.drop_pages(dropped)

    @property
    def can_alternate(self) -> bool:
        """Whether slot and spare slot may change places: rings stay where they are."""
        return not self._pool.memory.rings

    def take_spare(self) -> None:
        """Makes the recurrent states of the spare slot those of the sequence."""
        if self.can_alternate:
            self.slot, self.spare = self.spare, self.slot
        else:
            self._pool.memory.copy_recurrent(self.spare, self.slot)

    def put(self, saved: SlotCopy | None) -> None:
        """Restores rings and recurrent states from a copy, or recurrent states that are empty."""
        memory = self._pool.memory
        if self.slot == NO_SLOT:
            return
        if saved is None:
            memory.zero_recurrent(self.slot)
        else:
            memory.load_slot(self.slot, saved)

    def save(self, length: int) -> Saved:
        """Copies of what a sequence of `length` positions needs."""
        memory = self._pool.memory
        slot = memory.save_slot(self.slot, length) if self.slot != NO_SLOT else None
        return Saved(memory.save_pages(self.pages[: page_count(length, self._size)]), slot)

    def load(self, saved: Saved, length: int) -> None:
        """Takes pages and a slot for what `save` has copied, and restores it.

        Raises:
            PoolFullError: there is no room; nothing has changed.
        """
        pool = self._pool
        pool.make_room(page_count(length, self._size), int(saved.slot is not None))
        self.grow(0, length, False)
        pool.memory.load_pages(self.pages, saved.pages)
        if saved.slot is not None:
            self.put(saved.slot)

    def free(self) -> None:
        """Gives everything back."""
        slots, self.slot, self.spare = self.slots, NO_SLOT, NO_SLOT
        self.cut(0)
        for slot in slots:
            self._pool.drop_slot(slot)

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
