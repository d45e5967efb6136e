"""Parameters of attention kernels: the constants of the code, and the division of the work into units and chunks."""

from __future__ import annotations

from dataclasses import dataclass

from llvmlite import ir

from rlx.backends.cpu.kernels.attention.split import Split
from rlx.backends.cpu.layouts import PAGE
from rlx.backends.cpu.tiles import LANES, Index
from rlx.ir.dtypes import DType

CHUNK = PAGE  # positions of a chunk, whose scores are in scratch memory together
KEY_TILES = CHUNK // LANES  # tiles of keys of a chunk
_QUERIES = 32  # approximate number of queries (rows times heads of a group) of a unit
_BF16_QUERIES = 128  # the same with bf16 products: more, because queries share the conversion of keys and values


def row_tile(heads: int, kv_heads: int, rows_static: int | None = None, *, bf16: bool = False) -> int:
    """Rows of a unit. There are ceil(seq / row_tile) * kv_heads units."""
    most = max(1, (_BF16_QUERIES if bf16 else _QUERIES) // (heads // kv_heads))
    return most if rows_static is None else min(most, rows_static)


def joined(heads: int, kv_heads: int) -> int:
    """Most sequences that a kernel for a row each of several of them takes at once."""
    return max(1, _QUERIES // (heads // kv_heads))


@dataclass(frozen=True)
class Shape:
    """The compile-time parameters of an attention kernel, see `rlx.backends.cpu.kernels.attention.attention`."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: DType
    scale: float
    window: int | None
    softcap: float | None
    rows_static: int | None
    split: Split | None
    mask: str
    bias: int | None
    bf16: bool = False
    out: str = "f32"
    sinks: bool = False
    paged: bool = False
    columns: int = 0

    @property
    def joined(self) -> int:
        """Most sequences whose rows are computed together, over the positions that they share."""
        return joined(self.heads, self.kv_heads) if self.columns else 1

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads

    @property
    def row_tile(self) -> int:
        return row_tile(self.heads, self.kv_heads, self.rows_static, bf16=self.bf16)

    @property
    def shared(self) -> bool:
        """Whether several units share the pieces of a single row."""
        return self.split is not None and self.rows_static == 1

    @property
    def vectors(self) -> int:
        """Vectors of a head, the last one possibly partial."""
        return -(-self.head_dim // LANES)

    def outline(self) -> str:
        """The readable outline of the kernel."""
        unit = "positions of one KV head, then added up" if self.shared else f"{self.row_tile} rows of one KV head"
        texts = {"causal": "t <= past + row", "visible": "t <= visible[row]"}
        seen = texts.get(self.mask, "t < past + seq")
        seen += f" and t - past - row < {self.window}" if self.mask == "around" else ""
        seen += f" and past + row - t < {self.window}" if self.window is not None else ""
        score = f"dot(q[row, head], k[head // {self.group}, t]) * {self.scale!r}"
        if self.softcap is not None:
            score = f"{self.softcap!r} * tanh({score} / {self.softcap!r})"
        if self.bias:
            score += f" + bias[row, {'0' if self.bias == 1 else 'head'}, t]"
        sink = "sinks[head], " * self.sinks
        return (
            f"# {self.heads} heads of {self.head_dim} on {self.kv_heads} KV heads, {self.dtype} cache"
            f"{' in pages' if self.paged else ''}"
            f"{', products of bf16' if self.bf16 else ''}\n"
            f"for unit in range(begin, end):  # {unit}\n"
            f"    for row, head in unit:\n"
            f"        weight = softmax([{sink}{score} for t if {seen}])  # online, chunks of {CHUNK} positions\n"
            f"        out[row, head] = sum(weight[t] * v[head // {self.group}, t])\n"
        )


@dataclass(frozen=True)
class Unit:
    """One unit, as run-time values.

    Attributes:
        head: its KV head.
        row, rows: its rows are [row, row + rows). `rows` is an int if it is known at compile time.
        start, end: its queries in scratch memory, rows times group.
        position: the position of its first row.
        first, last: its rows see positions in [first, last). `first` is rounded down to the start of a chunk.
        pages: address of its page table, if the cache has pages.
    """

    head: ir.Value
    row: ir.Value
    rows: Index
    start: Index
    end: Index
    position: ir.Value
    first: ir.Value
    last: ir.Value
    pages: ir.Value | None


@dataclass(frozen=True)
class Chunks:
    """Chunks whose weights are computed together, as run-time values.

    Attributes:
        first: the position of the first chunk.
        count: the number of chunks.
    """

    first: ir.Value
    count: Index


@dataclass(frozen=True)
class Chunk:
    """A chunk of 64 positions, as run-time values.

    Attributes:
        slot: its number in `Chunks`.
        start: its first position.
        place: its place in the caches.
    """

    slot: Index
    start: ir.Value
    place: ir.Value


@dataclass(frozen=True)
class Ahead:
    """Keys to prefetch.

    Attributes:
        keys: their address.
        rows: number of positions; they are prefetched with as many positions of values.
        final: the last of them, or 0.
        whole: whether there are always as many as in a chunk.
    """

    keys: ir.Value
    rows: Index
    final: Index
    whole: bool
