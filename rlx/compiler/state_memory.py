"""The memory of all states of a graph: pages of full caches, and slots of rings and recurrent states.

Runtime. A state lies in one buffer. With pages, a full cache [heads, CTX, head_dim] holds the positions of all
sequences: page p is the places p * page to (p + 1) * page - 1 of every head, in every such cache. Without, it belongs
to one sequence. Other states have a leading axis of slots. Memory is anonymous: what was never written takes none. It
starts as zeros, and what is released becomes zeros again.

A page of a head is contiguous, whatever the layout of keys and values. So copies between pages, and copies that come
back to where they were made, move bytes. Only `read` and `write`, which serve snapshots, know the layouts.

There are three kinds of states (docs/caches.md). A full cache has room for `ctx` positions. A ring holds only the
newest positions, as many as the sliding windows over it need; its writes wrap. A recurrent state is one value for all
positions so far.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlx.backends.memory import Buffer, Grid, Memory
from rlx.closing import on_error
from rlx.errors import ArgumentError, GraphError
from rlx.ir import dims
from rlx.ir.dtypes import KV_DTYPES, DType
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.ir.op_table import OPS
from rlx.passes.capabilities import Layouts
from rlx.passes.program import root


def kv_dtype(name: str | None, exact: bool, default: str) -> DType:
    """The cache's type: by default f32 for exact precision, else `default`; docs/caches.md lists the error of each."""
    chosen = name or ("f32" if exact else default)
    known = {dtype.name: dtype for dtype in KV_DTYPES}
    if chosen not in known:
        raise ArgumentError(f"KV cache type {chosen!r} is unknown", hint=f"Choose one of {', '.join(known)}.")
    return known[chosen]


def capacities(graph: Graph, ctx: int, rows: int, layouts: Layouts) -> dict[str, int]:
    """The symbols of cache sizes, for sessions of `ctx` positions and calls of at most `rows` rows.

    CTX is `ctx` rounded up to whole tiles. WINDOW_CTX is window + rows - 1 (the positions that the first row sees plus
    the rows of the call), plus a page less 1 (attention reads whole pages, and the first may begin before the window),
    rounded up to whole pages. `window` is the largest over all rings. WINDOW_CTX never exceeds `ctx`, rounded up
    in the same way, and equals it if attention without a window reads such a cache.
    """
    page, window = layouts.page, largest_window(graph)
    needed = _round_up(ctx, page)
    if window is not None:
        needed = min(needed, _round_up(window + rows - 1 + page - 1, page))
    return {"CTX": _round_up(ctx, layouts.tile), "WINDOW_CTX": needed}


def extents_of(
    graph: Graph, layouts: Layouts, ctx: int, rows: int, window_ctx: int | None = None, slots: int = 1
) -> dict[str, int]:
    """`capacities`, and the number of slots.

    Args:
        window_ctx: the capacity of rings instead; rounded up to whole pages.
    """
    found = {**capacities(graph, ctx, rows, layouts), "SLOTS": slots}
    return found if window_ctx is None else {**found, "WINDOW_CTX": _round_up(window_ctx, layouts.page)}


def largest_window(graph: Graph) -> int | None:
    """The largest sliding window over rings; None if there is no ring, or attention reads one without a window."""
    kinds, attentions = _uses(graph)
    windows = [n["window"] for n in attentions if kinds.get(root(n.inputs[1])) == "ring"]
    return max(windows) if windows and None not in windows else None


def _uses(graph: Graph) -> tuple[dict[Node, str], list[Node]]:
    """The kind of each state that a graph updates, and the nodes that read caches."""
    kinds, attentions = dict[Node, str](), list[Node]()
    for node in graph.nodes():
        op = OPS[node.op]
        if op.writes:
            kinds[root(node)] = "ring" if node["wrap"] else "full"
        if op.effect:
            kinds[node.inputs[0]] = "recurrent"
        if node.op == "attention":
            attentions.append(node)
    return kinds, attentions


def state_bytes(graph: Graph, ctx: int, rows: int, layouts: Layouts) -> int:
    """Bytes of the states of `capacities(graph, ctx, rows)` when every position is used."""
    sizes = capacities(graph, ctx, rows, layouts)
    return sum(n.dtype.size([dims.value(d, sizes) for d in n.shape]) for n in graph.leaves("state").values())


def _round_up(x: int, to: int) -> int:
    return -(-x // to) * to


@dataclass(frozen=True)
class State:
    """One state.

    Attributes:
        kind: "full", "ring", "recurrent", or "fixed" if nothing updates it.
        shape: of a cache [heads, capacity, head_dim].
        tiled: whether it is a key cache, in the layout that the device has for keys (`Layouts.keys`).
    """

    name: str
    kind: str
    dtype: DType
    shape: tuple[int, ...]
    tiled: bool

    @property
    def element(self) -> str:
        """The NumPy type of copies: uint16 for bf16, uint8 for blocks."""
        return self.dtype.numpy or "uint8"

    @property
    def width(self) -> int:
        """Elements per row of a copy: numbers, or the bytes of blocks."""
        return self.dtype.row_bytes(self.shape[-1]) if self.dtype.is_quantized else self.shape[-1]

    @property
    def values(self) -> tuple[int, ...]:
        """Shape of a copy."""
        return *self.shape[:-1], self.width

    @property
    def nbytes(self) -> int:
        """Bytes of one slot."""
        return self.dtype.size(self.shape)

    @property
    def format(self) -> str:
        """Kind, type and shape without the capacity; a snapshot must have the same."""
        shape = self.shape if self.kind in ("recurrent", "fixed") else (self.shape[0], self.shape[2])
        return f"{self.kind} {self.dtype.name} {list(shape)}"


def states_of(graph: Graph, sizes: Mapping[str, int], layouts: Layouts) -> Iterator[State]:
    """The states of a graph, with the sizes of CTX and WINDOW_CTX."""
    kinds, attentions = _uses(graph)
    keys = {root(n.inputs[1]) for n in attentions}
    for name, node in graph.leaves("state").items():
        shape = tuple(dims.value(d, sizes) for d in node.shape)
        # The layout pass marks key caches. Before it, these are the caches that attention reads as keys.
        is_key = node["layout"] != "rows" or node in keys
        yield State(name, kinds.get(node, "fixed"), node.dtype, shape, is_key and layouts.keys != "rows")


@dataclass(frozen=True)
class Sizes:
    """Bytes and capacities of the states of a model.

    Attributes:
        page: positions per page.
        page_bytes: bytes of a page, over all full caches.
        slot_bytes: bytes of a slot, over all rings and recurrent states.
        window_ctx: capacity of rings in positions.
        share: of these bytes the part that one memory of the device has, if it has several.
    """

    page: int
    page_bytes: int
    slot_bytes: int
    window_ctx: int
    share: float = 1.0

    @staticmethod
    def of(graph: Graph, layouts: Layouts, max_seq: int, rows: int) -> Sizes:
        """The sizes for sequences of at most `max_seq` positions and calls of at most `rows` rows."""
        window_ctx = capacities(graph, max_seq, rows, layouts)["WINDOW_CTX"]
        table = list(states_of(graph, {"CTX": layouts.page, "WINDOW_CTX": window_ctx}, layouts))
        full = sum(state.nbytes for state in table if state.kind == "full")
        share = max((_share(state, layouts) for state in table), default=1.0)
        return Sizes(layouts.page, full, sum(state.nbytes for state in table) - full, window_ctx, share)

    def extents(self, pages: int, slots: int) -> dict[str, int]:
        """The symbols of the sizes of states with so many pages and slots; PAGES is that of a table of all pages."""
        return {"CTX": pages * self.page, "WINDOW_CTX": self.window_ctx, "SLOTS": max(1, slots), "PAGES": pages}

    def sequence_bytes(self, length: int) -> int:
        """Bytes of a sequence of so many positions."""
        return self.bytes_of(-(-length // self.page), 1)

    def bytes_of(self, pages: int, slots: int) -> int:
        """Bytes of so many pages and slots."""
        return pages * self.page_bytes + slots * self.slot_bytes


def _share(state: State, layouts: Layouts) -> float:
    """The part of a state that one memory has."""
    return layouts.own_heads(state.shape[0]) / state.shape[0] if state.kind in ("full", "ring") else 1.0


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
        has_slots: whether the model has rings or recurrent states.
        ring_capacity: capacity of the rings in positions; None without rings.

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
        self.has_slots = bool(self.strides)
        self.ring_capacity = min((self.table[name].shape[1] for name in self.rings), default=None)
        self.buffers: dict[str, Buffer] = {}
        with on_error(self.close):
            for name, state in self.table.items():
                slots = extents["SLOTS"] if name in self.strides else 1
                if state.kind in ("full", "ring"):
                    heads = state.shape[0]
                    self.buffers[name] = memory.allocate_cache(slots, heads, state.nbytes // heads)
                else:
                    self.buffers[name] = memory.allocate(slots * state.nbytes, huge=name in self.recurrent)
        # Made once, because prompts that share a beginning copy a page each.
        self._full_pages = {name: self._pages_of(name) for name in self.full} if paged else {}

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
