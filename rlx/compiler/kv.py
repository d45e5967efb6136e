"""The states of a graph, KV caches and recurrent states: kinds, types and sizes. `state_memory.py` holds them.

There are three kinds (docs/caches.md). A full cache has room for `ctx` positions. A ring holds only the newest
positions, as many as the sliding windows over it need; its writes wrap. A recurrent state is one value for all
positions so far.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rlx.errors import ArgumentError
from rlx.ir import dims
from rlx.ir.dtypes import KV_DTYPES, DType
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.ir.op_table import OPS
from rlx.passes.capabilities import Layouts
from rlx.passes.program import root


def kv_dtype(name: str | None, exact: bool, default: str = "f16") -> DType:
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

    def extents(self, pages: int, slots: int) -> dict[str, int]:
        """The symbols of the sizes of states with so many pages and slots; PAGES is that of a table of all pages."""
        return {"CTX": pages * self.page, "WINDOW_CTX": self.window_ctx, "SLOTS": max(1, slots), "PAGES": pages}

    def sequence_bytes(self, length: int) -> int:
        """Bytes of a sequence of so many positions."""
        return self.bytes_of(-(-length // self.page), 1)

    def bytes_of(self, pages: int, slots: int) -> int:
        """Bytes of so many pages and slots."""
        return pages * self.page_bytes + slots * self.slot_bytes
