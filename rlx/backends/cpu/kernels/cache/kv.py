"""Writes rows of K and V to their caches, in the type and layout of the cache.

    "rows":    [heads][ctx][head_dim]
    "k_tiles": [heads][ctx / 16][head_dim][16], position t of a head at (t // 16, d, t % 16)

f16 and bf16 are rounded to nearest even; q8_0 and q4_0 are quantized in blocks, see `kv_blocks.py`. A ring (`wrap`)
keeps only the newest positions: position p is stored at p modulo ctx.
"""

from __future__ import annotations

from typing import Any

from rlx.backends.cpu.kernel import Kernel
from rlx.backends.cpu.kernels.cache.kv_blocks import PLACE, QUANTIZED, block_holes, put_head
from rlx.backends.cpu.loops import loop_kernel
from rlx.errors import ArgumentError
from rlx.ir.dtypes import BF16, DTYPES, F16, F32, DType
from rlx.scalars import HOLE, Helper, Ptr, f32_to_bf16, f32_to_f16, keep_f32

#: Holes besides `PLACE` of `kv_blocks.py`: number of heads, elements of a head.
HEADS: int = HOLE
HEAD_DIM: int = HOLE
#: Stride in the cache from one element of a head to the next, in elements: 1 in rows, 16 in tiles. `STORE` converts to
#: the stored type.
SPREAD: int = HOLE
STORE: Helper = HOLE
#: `PUT` is `put_head`, or `put_numbers`. `SOURCE(row, head, rows)` is the number of a row's head in plain values.
PUT: Helper = HOLE
SOURCE: Helper = HOLE

EXTENTS = ("past", "ctx")
_STORE: dict[DType, Helper] = {F32: keep_f32, F16: f32_to_f16, BF16: f32_to_bf16}
_SPREAD = {"rows": 1, "k_tiles": 16}


def kv_write(
    heads: int,
    head_dim: int,
    kv_dtype: str | DType,
    layout: str = "rows",
    *,
    wrap: bool = False,
) -> Kernel:
    """A kernel that writes x f32[seq, heads, head_dim] to the cache, row r at position past + r.

    Buffers: x, cache. Extents: past, ctx. A unit is row * heads + head.

    Args:
        kv_dtype: type of the cache: f32, f16, bf16, q8_0 or q4_0.
        layout: `rows` or `k_tiles`.
        wrap: positions are taken modulo ctx; a call has at most ctx rows.

    Raises:
        ArgumentError: the type or the layout is not supported.
        ShapeError: the block size of the type does not divide the head.
    """
    dtype = cache_dtype(kv_dtype)
    holes: dict[str, Any] = {"HEADS": heads, "HEAD_DIM": head_dim}
    holes |= {"PUT": put_head if dtype in QUANTIZED else put_numbers, **cache_holes(dtype, head_dim, layout, wrap)}
    return loop_kernel(_kv_write, holes, [("x", F32), ("cache", dtype)], EXTENTS)


def as_cache(heads: int, head_dim: int, dtype: str | DType, layout: str, order: str) -> Kernel:
    """A kernel that copies plain keys or values into the form of a cache of ctx positions.

    Buffers: x f32[rows, heads, head_dim], or f32[heads, rows, head_dim] if `order` is "heads"; cache, of f32, f16 or
    bf16. Extents: rows, ctx, which is at least rows rounded up to 16. A unit is row * heads + head.

    Raises:
        ArgumentError: the type or the layout is not supported.
    """
    kind = cache_dtype(dtype)
    holes: dict[str, Any] = {"HEADS": heads, "HEAD_DIM": head_dim, "SOURCE": _SOURCE[order]}
    holes |= cache_holes(kind, head_dim, layout)
    return loop_kernel(_as_cache, holes, [("x", F32), ("cache", kind)], ("rows", "ctx"))


def cache_dtype(kv_dtype: str | DType) -> DType:
    """The type of a cache, given as a type or by name.

    Raises:
        ArgumentError: caches cannot have this type.
    """
    dtype = DTYPES.get(str(kv_dtype))
    if dtype not in (*_STORE, *QUANTIZED):
        raise ArgumentError(f"a KV cache holds {', '.join(map(str, (*_STORE, *QUANTIZED)))}, not {kv_dtype}")
    return dtype


def cache_holes(dtype: DType, head_dim: int, layout: str, wrap: bool = False) -> dict[str, Any]:
    """The holes of kernels that write a cache: `SPREAD`, `STORE` and `PLACE`; for block types those of `put_head`.

    Raises:
        ArgumentError: the layout is unknown.
        ShapeError: the block size of the type does not divide the head.
    """
    if layout not in _SPREAD:
        raise ArgumentError(f"the layout of a cache is rows or k_tiles, not {layout!r}")
    place = {"PLACE": place_in_ring if wrap else place_in_row}
    if dtype in QUANTIZED:
        return place | block_holes(dtype, head_dim, _SPREAD[layout])
    return place | {"SPREAD": _SPREAD[layout], "STORE": _STORE[dtype]}


def place_in_row(position: int, ctx: int) -> int:
    """The place of a position in a full cache: positions are stored in order."""
    return position


def place_in_ring(position: int, ctx: int) -> int:
    """The place of a position in a ring."""
    return position % ctx


def cache_offset(head: int, position: int, ctx: int) -> int:
    """The index in the cache of element 0 of a head at a position. The head's elements are `SPREAD` apart."""
    place: int = PLACE(position, ctx)
    inside = place & (SPREAD - 1)
    return (head * ctx + place - inside) * HEAD_DIM + inside


def put_numbers(x: Ptr, src: int, cache: Ptr, head: int, position: int, ctx: int) -> None:
    """As `put_head`, for a cache of numbers."""
    dst = cache_offset(head, position, ctx)
    for i in range(HEAD_DIM):
        cache[dst + i * SPREAD] = STORE(x[src + i])


def _kv_write(x: Ptr, cache: Ptr, past: int, ctx: int, begin: int, end: int) -> None:
    for unit in range(begin, end):
        row = unit // HEADS
        PUT(x, unit * HEAD_DIM, cache, unit - row * HEADS, past + row, ctx)


def rows_first(row: int, head: int, rows: int) -> int:
    return row * HEADS + head


def heads_first(row: int, head: int, rows: int) -> int:
    return head * rows + row


_SOURCE: dict[str, Helper] = {"rows": rows_first, "heads": heads_first}


def _as_cache(x: Ptr, cache: Ptr, rows: int, ctx: int, begin: int, end: int) -> None:
    for unit in range(begin, end):
        row = unit // HEADS
        head = unit - row * HEADS
        put_numbers(x, SOURCE(row, head, rows) * HEAD_DIM, cache, head, row, ctx)
