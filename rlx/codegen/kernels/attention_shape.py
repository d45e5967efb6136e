"""What an attention kernel is made for: the numbers that are literals in its code, and how its work is cut up."""

from __future__ import annotations

from dataclasses import dataclass

from llvmlite import ir

from rlx.codegen.kernels.attention_split import Split
from rlx.codegen.tiles import LANES, Index
from rlx.ir.dtypes import DType

CHUNK = 64  # positions whose scores are held at once
_QUERIES = 32  # queries (rows times heads of a group) of a unit, about
_BF16_QUERIES = 128  # with products of bf16: they share the conversion of keys and values


def row_tile(heads: int, kv_heads: int, head_dim: int, rows_static: int | None = None, *, bf16: bool = False) -> int:
    """Rows of a unit: there are ceil(seq / row_tile) * kv_heads units."""
    most = max(1, (_BF16_QUERIES if bf16 else _QUERIES) // (heads // kv_heads))
    return most if rows_static is None else min(most, rows_static)


def units(
    seq: int, heads: int, kv_heads: int, head_dim: int, rows_static: int | None = None, *, bf16: bool = False
) -> int:
    """Work units for `seq` rows."""
    return -(-seq // row_tile(heads, kv_heads, head_dim, rows_static, bf16=bf16)) * kv_heads


@dataclass(frozen=True)
class Shape:
    """The literals of one attention kernel, see `rlx.codegen.kernels.attention`."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: DType
    scale: float
    window: int | None
    softcap: float | None
    rows_static: int | None
    split: Split | None
    bias: int | None
    bf16: bool = False
    out: str = "f32"

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.heads // self.kv_heads

    @property
    def row_tile(self) -> int:
        return row_tile(self.heads, self.kv_heads, self.head_dim, self.rows_static, bf16=self.bf16)

    @property
    def vectors(self) -> int:
        """Vectors of a head, the last one possibly partial."""
        return -(-self.head_dim // LANES)

    def outline(self) -> str:
        """What a person reads instead of the vector code."""
        unit = (
            f"{self.row_tile} rows of one KV head" if self.split is None else "positions of one KV head, then added up"
        )
        seen = "t < past + seq" if self.bias else "t <= past + row"
        seen += f" and past + row - t < {self.window}" if self.window is not None else ""
        score = f"dot(q[row, head], k[head // {self.group}, t]) * {self.scale!r}"
        if self.softcap is not None:
            score = f"{self.softcap!r} * tanh({score} / {self.softcap!r})"
        if self.bias:
            score += f" + bias[row, {'0' if self.bias == 1 else 'head'}, t]"
        return (
            f"# {self.heads} heads of {self.head_dim} on {self.kv_heads} KV heads, {self.dtype} cache"
            f"{', products of bf16' if self.bf16 else ''}\n"
            f"for unit in range(begin, end):  # {unit}\n"
            f"    for row, head in unit:\n"
            f"        weight = softmax([{score} for t if {seen}])  # online, chunks of {CHUNK} positions\n"
            f"        out[row, head] = sum(weight[t] * v[head // {self.group}, t])\n"
        )


@dataclass(frozen=True)
class Unit:
    """One unit at run time.

    Attributes:
        head: its KV head.
        row, rows: its rows are [row, row + rows).
        queries: rows times group.
        first, last: the positions it sees are [first, last); `first` is rounded down to a chunk.
    """

    head: ir.Value
    row: ir.Value
    rows: ir.Value
    queries: ir.Value
    first: ir.Value
    last: ir.Value


@dataclass(frozen=True)
class Chunks:
    """Chunks that are weighed at once, at run time.

    Attributes:
        first: the position where they begin.
        count: how many there are.
    """

    first: ir.Value
    count: Index


@dataclass(frozen=True)
class Chunk:
    """64 positions at run time.

    Attributes:
        slot: its number among those that are weighed at once.
        start: the first of them.
        place: where they begin in the caches.
        following: where the next 64 begin.
    """

    slot: Index
    start: ir.Value
    place: ir.Value
    following: ir.Value
