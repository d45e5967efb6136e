"""Memory of the states between steps: KV caches and recurrent states. All are updated in place.

There are three kinds (docs/caches.md). A full cache has room for `ctx` positions. A ring holds only the newest
positions, as many as the sliding windows over it need; its writes wrap. A recurrent state is one value for all
positions so far. Memory is anonymous: unused positions take none, and everything starts as zeros.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlx.backends.kv_tiles import TILE, row_width, rows_of, tiles_of
from rlx.backends.memory import Buffer, Memory
from rlx.errors import ArgumentError, GraphError
from rlx.ir import dims
from rlx.ir.dtypes import KV_DTYPES, DType
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.ir.op_table import OPS
from rlx.passes.program import root

Array = np.ndarray[Any, Any]

_LINE = 64  # alignment of a recurrent state in bytes
RING = 64  # ring capacities are multiples of it: attention reads positions in aligned groups of this size


def kv_dtype(name: str | None, exact: bool, default: str = "f16") -> DType:
    """The cache's type: by default f32 for exact precision, else `default`; docs/caches.md lists the error of each."""
    chosen = name or ("f32" if exact else default)
    known = {dtype.name: dtype for dtype in KV_DTYPES}
    if chosen not in known:
        raise ArgumentError(f"KV cache type {chosen!r} is unknown", hint=f"Choose one of {', '.join(known)}.")
    return known[chosen]


def capacities(graph: Graph, ctx: int, rows: int) -> dict[str, int]:
    """The symbols of cache sizes, for sessions of `ctx` positions and calls of at most `rows` rows.

    CTX is `ctx` rounded up to whole tiles. WINDOW_CTX is window + rows - 1 (the positions that the first row sees plus
    the rows of the call), plus 63 (attention reads aligned groups of 64, and the first may begin before the window),
    rounded up to a multiple of 64. `window` is the largest over all rings. WINDOW_CTX never exceeds `ctx`, rounded up
    in the same way, and equals it if attention without a window reads such a cache.
    """
    needed, window = _round_up(ctx, RING), largest_window(graph)
    if window is not None:
        needed = min(needed, _round_up(window + rows - 1 + RING - 1, RING))
    return {"CTX": _round_up(ctx, TILE), "WINDOW_CTX": needed}


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


def state_bytes(graph: Graph, ctx: int, rows: int) -> int:
    """Bytes of `States(graph, ctx, rows)` when every position is used."""
    sizes = capacities(graph, ctx, rows)
    return sum(n.dtype.size([dims.value(d, sizes) for d in n.shape]) for n in graph.leaves("state").values())


def _round_up(x: int, to: int) -> int:
    return -(-x // to) * to


@dataclass(frozen=True)
class State:
    """One state.

    Attributes:
        kind: "full", "ring", "recurrent", or "fixed" if nothing updates it.
        shape: of a cache [heads, capacity, head_dim].
        tiled: whether it is a key cache, with tiles of 16 positions in memory (see `kv_tiles.py`).
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
        return row_width(self.dtype, self.shape[-1])

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


class States:
    """Memory for every state of a graph.

    Args:
        graph: a graph before or after specialization.
        memory: of the device.
        ctx: positions the caches have room for; rounded up to a multiple of 16.
        rows: maximum number of rows in a call.
        window_ctx: capacity of rings instead of that of `capacities`; rounded up to a multiple of 64.
        slots: number of sequences to hold. Each state has one copy per slot, one after the other. This object is the
            first slot; `slot` returns the others.

    Attributes:
        extents: values of CTX, WINDOW_CTX and SLOTS, which programs take at run time.
        window: the largest sliding window over rings; None without rings.

    Raises:
        GraphError: a key cache of fixed size is not a multiple of a tile, or a ring not a multiple of 64.
    """

    def __init__(
        self, graph: Graph, memory: Memory, ctx: int, rows: int, window_ctx: int | None = None, slots: int = 1
    ) -> None:
        self.extents = {**capacities(graph, ctx, rows), "SLOTS": slots}
        if window_ctx is not None:
            self.extents["WINDOW_CTX"] = _round_up(window_ctx, RING)
        self.window = largest_window(graph)
        self.table = {state.name: state for state in states_of(graph, self.extents)}
        for state in self.table.values():
            _check_capacity(state)
        caches = {name: s for name, s in self.table.items() if s.kind != "recurrent"}
        self._buffers = {name: memory.allocate(slots * s.nbytes) for name, s in caches.items()}
        sizes = {name: _round_up(slots * self.table[name].nbytes, _LINE) for name in self.names("recurrent")}
        ends = list(itertools.accumulate(sizes.values(), initial=0))
        self._starts = dict(zip(sizes, ends, strict=False))
        self._recurrent = memory.allocate(ends[-1], huge=True)
        self._slot = 0

    @property
    def ctx(self) -> int:
        return self.extents["CTX"]

    def slot(self, number: int) -> States:
        """The states of another slot: a view, valid as long as this object."""
        view = copy(self)
        view._slot = number
        return view

    @property
    def buffers(self) -> dict[str, Buffer]:
        """The memory of each state: of this slot, followed by the next slots."""
        return {name: self._from(name) for name in self.table}

    def _from(self, name: str) -> Buffer:
        """The memory of a state from this slot on."""
        state = self.table[name]
        buffer, start = (self._recurrent, self._starts[name]) if name in self._starts else (self._buffers[name], 0)
        return buffer.part(start + self._slot * state.nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots when every position is used."""
        return sum(buffer.nbytes for buffer in (*self._buffers.values(), self._recurrent))

    def names(self, kind: str) -> list[str]:
        """The states of a kind."""
        return [name for name, state in self.table.items() if state.kind == kind]

    @property
    def ring_capacity(self) -> int | None:
        """Capacity of the rings in positions; None without rings."""
        return min((self.table[name].shape[1] for name in self.names("ring")), default=None)

    def first_read(self, length: int) -> int:
        """First ring position that a step at `length` reads, masked or not: the start of its group of 64."""
        oldest = max(0, length - self.window + 1) if self.window else 0
        return oldest // RING * RING

    def zero(self) -> None:
        """Resets recurrent states to zeros. Caches need no reset: dropped positions are not read."""
        for name in self.names("recurrent"):
            self._from(name).part(0, self.table[name].nbytes).zero()

    def copy(self, name: str) -> Array:
        """A read-only copy of a whole state: `State.element` [..., `State.width`]."""
        return _frozen(self._whole(name).copy())

    def put(self, name: str, value: Array) -> None:
        """The inverse of `copy`."""
        self._whole(name)[...] = value

    def copy_positions(self, name: str, start: int, stop: int) -> Array:
        """A read-only copy of positions [start, stop) of a cache: `State.element` [heads, stop - start, width]."""
        state = self.table[name]
        out = np.empty((state.shape[0], stop - start, state.width), state.element)
        for at, begin, end in _pieces(start, stop, state.shape[1]):
            out[:, at : at + end - begin] = self._rows(name, begin, end)
        return _frozen(out)

    def put_positions(self, name: str, start: int, values: Array) -> None:
        """The inverse of `copy_positions`: values [heads, n, width] become positions start .. start + n."""
        for at, begin, end in _pieces(start, start + values.shape[1], self.table[name].shape[1]):
            self._put_rows(name, begin, values[:, at : at + end - begin])

    def _whole(self, name: str) -> Array:
        state = self.table[name]
        found = self._from(name).part(0, state.nbytes).view(state.element, (*state.shape[:-1], state.width))
        assert found is not None, "the memory of the host"
        return found

    def _tiles(self, name: str, begin: int, end: int) -> tuple[Array, slice]:
        """The tiles [heads, tiles, 16 * width] that hold places begin .. end, and the range of those places in them."""
        heads, capacity, _ = self.table[name].shape
        whole = self._whole(name).reshape(heads, capacity // TILE, -1)
        first = begin // TILE
        return whole[:, first : -(-end // TILE)], slice(begin - first * TILE, end - first * TILE)

    def _rows(self, name: str, begin: int, end: int) -> Array:
        """Places begin .. end of a cache: [heads, places, width]."""
        if not self.table[name].tiled:
            return self._whole(name)[:, begin:end]
        tiles, inside = self._tiles(name, begin, end)
        return rows_of(tiles, self.table[name].dtype)[:, inside]

    def _put_rows(self, name: str, begin: int, values: Array) -> None:
        end = begin + values.shape[1]
        if not self.table[name].tiled:
            self._whole(name)[:, begin:end] = values
            return
        tiles, inside = self._tiles(name, begin, end)
        dtype = self.table[name].dtype
        rows = rows_of(tiles, dtype).copy()  # preserves the other places of the first and the last tile
        rows[:, inside] = values
        tiles[...] = tiles_of(rows, dtype)

    def close(self) -> None:
        for buffer in (*self._buffers.values(), self._recurrent):
            buffer.close()


def _frozen(array: Array) -> Array:
    array.flags.writeable = False
    return array


def _pieces(start: int, stop: int, capacity: int) -> Iterator[tuple[int, int, int]]:
    """Contiguous runs of positions start .. stop: (position - start, first place, end place) of each."""
    at = start
    while at < stop:
        place = at % capacity
        count = min(stop - at, capacity - place)
        yield at - start, place, place + count
        at += count


def states_of(graph: Graph, sizes: Mapping[str, int]) -> Iterator[State]:
    """The states of a graph, with the sizes of CTX and WINDOW_CTX."""
    kinds, attentions = _uses(graph)
    keys = {root(n.inputs[1]) for n in attentions}
    for name, node in graph.leaves("state").items():
        shape = tuple(dims.value(d, sizes) for d in node.shape)
        # The layout pass marks tiled caches. Before it, these are the caches that attention reads as keys.
        yield State(name, kinds.get(node, "fixed"), node.dtype, shape, node["layout"] == "tiles" or node in keys)


def _check_capacity(state: State) -> None:
    where = f"state {state.name!r}"
    if state.tiled and state.shape[1] % TILE:
        hint = f"Keys lie in tiles of {TILE} positions: take a multiple of it, or CTX."
        raise GraphError(f"the cache has {state.shape[1]} positions", where=where, hint=hint)
    if state.kind == "ring" and state.shape[1] % RING:
        hint = f"Rings are read in groups of {RING} positions: take a multiple of it, or WINDOW_CTX."
        raise GraphError(f"the ring has {state.shape[1]} positions", where=where, hint=hint)
