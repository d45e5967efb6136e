"""The memory of all states of a graph: pages of full caches, and slots of rings and recurrent states.

Runtime. A state lies in one buffer. With pages, a full cache [heads, CTX, head_dim] holds the positions of all
sequences: page p is the places p * page to (p + 1) * page - 1 of every head, in every such cache. Without, it belongs
to one sequence. Other states have a leading axis of slots. Memory is anonymous: what was never written takes none. It
starts as zeros, and what is released becomes zeros again.

A page of a head is contiguous, whatever the layout of keys and values. So copies between pages, and copies that come
back to where they were made, move bytes. Only `read` and `write`, which serve snapshots, know the layouts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlx.backends.memory import Buffer, Grid, Memory
from rlx.compiler.kv import State, largest_window, states_of
from rlx.errors import GraphError
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


class StateMemory:
    """Memory for every state of a graph.

    Args:
        graph: a graph before or after specialization.
        memory: of the device.
        layouts: of the device.
        extents: values of CTX, WINDOW_CTX and SLOTS, see `extents_of`.
        paged: whether full caches have pages in place of slots.

    Attributes:
        page: positions of a page; of a tile without pages.
        full, rings, recurrent: names of the states of each kind.
        table: the states by name, with the shape of one slot.
        extents: as given; programs take them at run time.
        window: the largest sliding window over rings; None without rings.
        buffers: of each state: all its pages or slots.
        strides: bytes from a slot to the next, of states that have slots.

    Raises:
        GraphError: a key cache of fixed size is not a multiple of a tile, or a ring not one of a page.
        ResourceError: the system refuses the memory.
    """

    def __init__(
        self, graph: Graph, memory: Memory, layouts: Layouts, extents: Mapping[str, int], paged: bool = False
    ) -> None:
        self.extents, self.window, self._layouts = dict(extents), largest_window(graph), layouts
        self.page = layouts.page if paged else layouts.tile
        self.table = {state.name: state for state in states_of(graph, extents, layouts)}
        for state in self.table.values():
            _check_capacity(state, layouts)
        kinds = ("full", "ring", "recurrent")
        self.full, self.rings, self.recurrent = ([n for n, s in self.table.items() if s.kind == k] for k in kinds)
        self.strides = {name: s.nbytes for name, s in self.table.items() if not (paged and s.kind == "full")}
        self.buffers: dict[str, Buffer] = {}
        try:
            for name, state in self.table.items():
                slots = extents["SLOTS"] if name in self.strides else 1
                self.buffers[name] = memory.allocate(slots * state.nbytes, huge=name in self.recurrent)
        except BaseException:
            self.close()
            raise
        # Made once, because prompts that share a beginning copy a page each.
        self._full_pages = {name: self._pages_of(name) for name in self.full} if paged else {}

    @property
    def has_slots(self) -> bool:
        """Whether the model has rings or recurrent states."""
        return bool(self.strides)

    @property
    def ring_capacity(self) -> int | None:
        """Capacity of the rings in positions; None without rings."""
        return min((self.table[name].shape[1] for name in self.rings), default=None)

    def first_read(self, length: int) -> int:
        """First ring position that a step at `length` reads, masked or not: the start of its page."""
        oldest = max(0, length - self.window + 1) if self.window else 0
        return oldest // self._layouts.page * self._layouts.page

    def _pages_of(self, name: str, slot: int = 0) -> Grid:
        """A cache as pages, which have a row for each head."""
        state = self.table[name]
        heads, pages = state.shape[0], state.shape[1] // self.page
        buffer = self.slot_of(name, slot) if name in self.strides else self.buffers[name]
        return Grid(buffer, heads, pages, state.nbytes // heads // pages)

    def ring_pages(self, first: int, length: int) -> Array:
        """The pages of a ring that hold positions first .. length; `first` begins a page."""
        count = (self.ring_capacity or self.page) // self.page
        return np.arange(first // self.page, -(-length // self.page)) % count

    def slot_of(self, name: str, slot: int) -> Buffer:
        """The memory of a state of a slot."""
        nbytes = self.table[name].nbytes
        return self.buffers[name].part(slot * nbytes, nbytes)

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
                rows = self._layouts.stored_of(rows, state.dtype)
            pages.put([place], np.ascontiguousarray(rows).view(np.uint8).reshape(pages.rows, 1, -1))
            at = 0

    def _rows(self, state: State, pages: Array) -> Array:
        """Pages uint8 [heads, pages, bytes] as positions [heads, positions, width]."""
        values = np.ascontiguousarray(pages).view(state.element)
        heads = values.shape[0]
        if state.tiled and values.size:
            tiles = values.reshape(heads, -1, self._layouts.tile * state.width)
            return self._layouts.rows_of(tiles, state.dtype)
        return values.reshape(heads, values.size // heads // state.width, state.width)

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

    def copy_state(self, name: str, slot: int) -> Array:
        """A read-only copy of a recurrent state: `State.element` [..., `State.width`]."""
        state = self.table[name]
        out = self.slot_of(name, slot).read(state.element, state.values)
        out.flags.writeable = False
        return out

    def copy_recurrent(self, source: int, target: int) -> None:
        """Copies the recurrent states of a slot to another one."""
        for name in self.recurrent:
            self.slot_of(name, source).copy_to(self.slot_of(name, target))

    def zero_recurrent(self, slot: int) -> None:
        """Sets the recurrent states of a slot to zeros."""
        for name in self.recurrent:
            self.slot_of(name, slot).zero()

    def release_slot(self, slot: int) -> None:
        """Sets a slot to zeros, and gives its memory back to the system as far as it consists of whole memory pages."""
        for name in self.strides:
            self.slot_of(name, slot).discard()

    def close(self) -> None:
        """Releases the memory."""
        self._full_pages = {}
        for buffer in self.buffers.values():
            buffer.close()


def _check_capacity(state: State, layouts: Layouts) -> None:
    where = f"state {state.name!r}"
    if state.tiled and state.shape[1] % layouts.tile:
        hint = f"Keys lie in tiles of {layouts.tile} positions: take a multiple of it, or CTX."
        raise GraphError(f"the cache has {state.shape[1]} positions", where=where, hint=hint)
    if state.kind == "ring" and state.shape[1] % layouts.page:
        hint = f"Rings are read in groups of {layouts.page} positions: take a multiple of it, or WINDOW_CTX."
        raise GraphError(f"the ring has {state.shape[1]} positions", where=where, hint=hint)
