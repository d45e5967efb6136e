"""The memory of a cache pool: pages of full caches, and slots of rings and recurrent states.

Runtime, under `pool.py`. The full caches of all sequences lie in one array per state, [heads, CTX, head_dim], whose
CTX is the pool's capacity. Page p is the places 64 p to 64 p + 63 of every head, in every such array. Rings and
recurrent states have a leading axis of slots. Memory is anonymous: what was never written takes none. It starts as
zeros, and what is released becomes zeros again.

A page of a head is contiguous, whatever the layout of keys and values. So copies between pages, and copies that come
back to where they were made, move bytes. Only `StateMemory.read` and `write`, which serve snapshots, know the layouts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlx.backends.memory import Memory
from rlx.compiler.kv import StateMemory, capacities, states_of
from rlx.env import size
from rlx.errors import ResourceError
from rlx.ir.graph import Graph
from rlx.passes.capabilities import Layouts

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class SlotCopy:
    """A copy of a slot: of each ring the pages from position `first` on, and the recurrent states."""

    first: int
    length: int
    arrays: tuple[Array, ...]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)


@dataclass(frozen=True)
class Sizes:
    """Bytes and capacities of the states of a model.

    Attributes:
        page: positions per page.
        page_bytes: bytes of a page, over all full caches.
        slot_bytes: bytes of a slot, over all rings and recurrent states.
        window_ctx: capacity of rings in positions.
    """

    page: int
    page_bytes: int
    slot_bytes: int
    window_ctx: int

    @staticmethod
    def of(graph: Graph, layouts: Layouts, max_seq: int, rows: int) -> Sizes:
        """The sizes for sequences of at most `max_seq` positions and calls of at most `rows` rows."""
        window_ctx = capacities(graph, max_seq, rows, layouts)["WINDOW_CTX"]
        table = list(states_of(graph, {"CTX": layouts.page, "WINDOW_CTX": window_ctx}, layouts))
        full = sum(state.nbytes for state in table if state.kind == "full")
        return Sizes(layouts.page, full, sum(state.nbytes for state in table) - full, window_ctx)

    def sequence_bytes(self, length: int) -> int:
        """Bytes of a sequence of so many positions."""
        return -(-length // self.page) * self.page_bytes + self.slot_bytes


class PoolMemory(StateMemory):
    """Memory for every state of a graph, for many sequences.

    Args:
        memory: of the device.
        layouts: those of the device.
        sizes: those of the graph.
        pages: number of pages.
        slots: number of slots; 0 if the model has neither rings nor recurrent states.

    Raises:
        ResourceError: the system refuses the memory.
    """

    def __init__(self, graph: Graph, memory: Memory, layouts: Layouts, sizes: Sizes, pages: int, slots: int) -> None:
        extents = {"CTX": pages * sizes.page, "WINDOW_CTX": sizes.window_ctx, "SLOTS": max(1, slots)}
        try:
            super().__init__(graph, memory, layouts, extents, sizes.page, paged=True)
        except ResourceError as error:
            what = f"the system refuses {size(pages * sizes.page_bytes + slots * sizes.slot_bytes)}"
            each = f"a page of {sizes.page} positions takes {size(sizes.page_bytes)}, a slot {size(sizes.slot_bytes)}"
            hint = "Give the pool less (kv_bytes), or raise the memory limit of this process."
            found = f"{what} for the pool of caches ({each})"
            raise ResourceError(found, where="kv_bytes", hint=hint) from error
        # Made once, because prompts that share a beginning copy a page each.
        self._full_pages = {name: self._pages_of(name) for name in self.full}

    @property
    def has_slots(self) -> bool:
        """Whether the model has rings or recurrent states."""
        return bool(self.strides)

    # -- pages ----------------------------------------------------------------------------------------------------

    def copy_page(self, source: int, target: int) -> None:
        """Copies a page to another one."""
        for pages in self._full_pages.values():
            pages.copy(source, target)

    def save_pages(self, pages: Any) -> list[Array]:
        """Copies of pages, one array per full cache: uint8 [heads, pages, bytes]."""
        return [each.take(pages) for each in self._full_pages.values()]

    def load_pages(self, pages: Any, saved: Iterable[Array]) -> None:
        """The inverse of `save_pages`."""
        for each, value in zip(self._full_pages.values(), saved, strict=True):
            each.put(pages, value)

    def page_shape(self, name: str) -> tuple[int, int]:
        """Of a page of a full cache: the heads, and the bytes of each."""
        pages = self._full_pages[name]
        return pages.rows, pages.nbytes

    def release_pages(self, pages: list[int]) -> None:
        """Gives the memory of pages back to the system; they are zeros then."""
        for each in self._full_pages.values():
            each.discard(pages)

    # -- slots ----------------------------------------------------------------------------------------------------

    def save_slot(self, slot: int, length: int) -> SlotCopy:
        """A copy of what a sequence of `length` positions needs of its slot."""
        first = self.first_read(length)
        places = self.ring_pages(first, length)
        arrays = [self._pages_of(name, slot).take(places) for name in self.rings]
        return SlotCopy(first, length, (*arrays, *(self.copy_state(name, slot) for name in self.recurrent)))

    def slot_shapes(self, length: int) -> list[tuple[str, tuple[int, ...]]]:
        """NumPy type and shape of each array that `save_slot` copies at a length."""
        places = len(self.ring_pages(self.first_read(length), length))
        rings = [self._pages_of(name) for name in self.rings]
        own = [(self.table[name].element, self.table[name].values) for name in self.recurrent]
        return [*(("uint8", (ring.rows, places, ring.nbytes)) for ring in rings), *own]

    def load_slot(self, slot: int, saved: SlotCopy) -> None:
        """The inverse of `save_slot`, into any slot."""
        places = self.ring_pages(saved.first, saved.length)
        for name, value in zip(self.rings, saved.arrays, strict=False):
            self._pages_of(name, slot).put(places, value)
        for name, value in zip(self.recurrent, saved.arrays[len(self.rings) :], strict=True):
            self.slot_of(name, slot).write(value)

    def copy_recurrent(self, source: int, target: int) -> None:
        """Copies the recurrent states of a slot to another one."""
        for name in self.recurrent:
            self.slot_of(name, source).copy_to(self.slot_of(name, target))

    def release_slot(self, slot: int) -> None:
        """Sets a slot to zeros, and gives its memory back to the system as far as it consists of whole memory pages."""
        for name in self.strides:
            self.slot_of(name, slot).discard()

    def close(self) -> None:
        """Releases the memory."""
        self._full_pages = {}
        super().close()
