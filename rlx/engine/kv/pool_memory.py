"""The memory of a cache pool: pages of full caches, and slots of rings and recurrent states.

Runtime, under `pool.py`. The full caches of all sequences lie in one array per state, [heads, CTX, head_dim], whose
CTX is the pool's capacity. Page p is the places 64 p to 64 p + 63 of every head, in every such array. Rings and
recurrent states have a leading axis of slots. Memory is anonymous: what was never written takes none. It starts as
zeros, and what is released becomes zeros again.

A page of a head is contiguous, whatever the layout of keys and values. So copies between pages, and copies that come
back to where they were made, move bytes. Only `read` and `write`, which serve snapshots, know the layouts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlx.backends.kv_tiles import TILE, rows_of, tiles_of
from rlx.backends.memory import Buffer, Grid, Memory
from rlx.compiler import kv
from rlx.compiler.kv import State, capacities, largest_window, states_of
from rlx.env import size
from rlx.errors import ResourceError
from rlx.ir.graph import Graph

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
    def of(graph: Graph, max_seq: int, rows: int) -> Sizes:
        """The sizes for sequences of at most `max_seq` positions and calls of at most `rows` rows."""
        window_ctx = capacities(graph, max_seq, rows)["WINDOW_CTX"]
        table = list(states_of(graph, {"CTX": kv.RING, "WINDOW_CTX": window_ctx}))
        full = sum(state.nbytes for state in table if state.kind == "full")
        return Sizes(kv.RING, full, sum(state.nbytes for state in table) - full, window_ctx)

    def sequence_bytes(self, length: int) -> int:
        """Bytes of a sequence of so many positions."""
        return -(-length // self.page) * self.page_bytes + self.slot_bytes


class PoolMemory:
    """Memory for every state of a graph, for many sequences.

    Args:
        memory: of the device.
        sizes: those of the graph.
        pages: number of pages.
        slots: number of slots; 0 if the model has neither rings nor recurrent states.

    Attributes:
        table: the states by name; the shape of a full cache is that of all pages, the others are of one slot.
        extents: values of CTX, WINDOW_CTX and SLOTS, which programs take at run time.
        window: the largest sliding window over rings; None without rings.
        buffers: of each state: all its pages or slots.
        strides: bytes from a slot to the next, of states that have slots.

    Raises:
        ResourceError: the system refuses the memory.
    """

    def __init__(self, graph: Graph, memory: Memory, sizes: Sizes, pages: int, slots: int) -> None:
        self.page, self.window = sizes.page, largest_window(graph)
        self.extents = {"CTX": pages * sizes.page, "WINDOW_CTX": sizes.window_ctx, "SLOTS": max(1, slots)}
        self.table = {state.name: state for state in states_of(graph, self.extents)}
        self.full, self.rings, self.recurrent = (self._names(kind) for kind in ("full", "ring", "recurrent"))
        self.buffers: dict[str, Buffer] = {}
        self._in_slots = [*self.rings, *self.recurrent, *self._names("fixed")]
        nbytes = {name: state.nbytes for name, state in self.table.items()}
        nbytes |= {name: slots * nbytes[name] for name in self._in_slots}
        try:
            for name, count in nbytes.items():
                self.buffers[name] = memory.allocate(count, huge=name in self.recurrent)
        except ResourceError as error:
            self.close()
            what = f"the system refuses {size(sum(nbytes.values()))} for the pool of caches"
            each = f"a page of {sizes.page} positions takes {size(sizes.page_bytes)}, a slot {size(sizes.slot_bytes)}"
            hint = "Give the pool less (kv_bytes), or raise the memory limit of this process."
            raise ResourceError(f"{what} ({each})", where="kv_bytes", hint=hint) from error
        # Made once, because prompts that share a beginning copy a page each.
        self._full_pages = {name: self._pages_of(name) for name in self.full}
        self.strides = {name: self.table[name].nbytes for name in self._in_slots}

    def _names(self, kind: str) -> list[str]:
        return [name for name, state in self.table.items() if state.kind == kind]

    @property
    def has_slots(self) -> bool:
        """Whether the model has rings or recurrent states."""
        return bool(self._in_slots)

    @property
    def ring_capacity(self) -> int | None:
        """Capacity of the rings in positions; None without rings."""
        return min((self.table[name].shape[1] for name in self.rings), default=None)

    def first_read(self, length: int) -> int:
        """First ring position that a step at `length` reads, masked or not: the start of its page."""
        oldest = max(0, length - self.window + 1) if self.window else 0
        return oldest // self.page * self.page

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

    def _pages_of(self, name: str, slot: int = 0) -> Grid:
        """A cache as pages, which have a row for each head."""
        state = self.table[name]
        heads, pages = state.shape[0], state.shape[1] // self.page
        buffer = self._slot_of(name, slot) if name in self.rings else self.buffers[name]
        return Grid(buffer, heads, pages, state.nbytes // heads // pages)

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
            self._slot_of(name, slot).write(value)

    def copy_recurrent(self, source: int, target: int) -> None:
        """Copies the recurrent states of a slot to another one."""
        for name in self.recurrent:
            self._slot_of(name, source).copy_to(self._slot_of(name, target))

    def zero_recurrent(self, slot: int) -> None:
        """Sets the recurrent states of a slot to zeros."""
        for name in self.recurrent:
            self._slot_of(name, slot).zero()

    def release_slot(self, slot: int) -> None:
        """Sets a slot to zeros, and gives its memory back to the system as far as it consists of whole memory pages."""
        for name in self._in_slots:
            self._slot_of(name, slot).discard()

    def ring_pages(self, first: int, length: int) -> Array:
        """The pages of a ring that hold positions first .. length; `first` begins a page."""
        count = (self.ring_capacity or self.page) // self.page
        return np.arange(first // self.page, -(-length // self.page)) % count

    def _slot_of(self, name: str, slot: int) -> Buffer:
        """The memory of a state of a slot."""
        nbytes = self.table[name].nbytes
        return self.buffers[name].part(slot * nbytes, nbytes)

    # -- positions, for snapshots -----------------------------------------------------------------------------------

    def read(self, name: str, places: Any, slot: int, start: int, stop: int) -> Array:
        """A read-only copy of positions start .. stop of a cache: `State.element` [heads, stop - start, width].

        Args:
            places: the pages that hold them, from the one with `start` on.
        """
        state, skip = self.table[name], start % self.page
        rows = self._rows(state, self._pages_of(name, slot).take(places))
        out = rows[:, skip : skip + stop - start].copy()
        out.flags.writeable = False
        return out

    def write(self, name: str, places: Any, slot: int, start: int, values: Array) -> None:
        """The inverse of `read`; other positions of these pages keep what they hold."""
        state, pages, at = self.table[name], self._pages_of(name, slot), start % self.page
        for place in places:  # one by one: in a ring the first and the last may be the same
            rows = self._rows(state, pages.take([place])).copy()
            part, values = values[:, : self.page - at], values[:, self.page - at :]
            rows[:, at : at + part.shape[1]] = part
            if state.tiled:
                rows = tiles_of(rows, state.dtype)
            pages.put([place], np.ascontiguousarray(rows).view(np.uint8).reshape(pages.rows, 1, -1))
            at = 0

    def copy_state(self, name: str, slot: int) -> Array:
        """A read-only copy of a recurrent state: `State.element` [..., `State.width`]."""
        state = self.table[name]
        out = self._slot_of(name, slot).read(state.element, state.values)
        out.flags.writeable = False
        return out

    def put_state(self, name: str, slot: int, value: Array) -> None:
        """The inverse of `copy_state`."""
        self._slot_of(name, slot).write(value)

    @staticmethod
    def _rows(state: State, pages: Array) -> Array:
        """Pages uint8 [heads, pages, bytes] as positions [heads, positions, width]."""
        values = np.ascontiguousarray(pages).view(state.element)
        heads = values.shape[0]
        if state.tiled and values.size:
            return rows_of(values.reshape(heads, -1, TILE * state.width), state.dtype)
        return values.reshape(heads, values.size // heads // state.width, state.width)

    def close(self) -> None:
        """Releases the memory."""
        self._full_pages = {}
        for buffer in self.buffers.values():
            buffer.close()
