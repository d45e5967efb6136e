"""Looking up rows of a table that stays in the model file, its bytes as they are there, dequantized to f32.

Such a table is only looked up: a few rows are read of what may be gigabytes, so nothing is packed at load. There is no
second set of decoders. Each superblock of a row is moved into scratch memory, as the first row of a packed block, by
the function that packs, and its values are read there by the function that looks up in packed tables. So they are
those of the reference dequantization bit for bit before the scale. Plain numbers are read where they lie.

Wide rows are cut into pieces, so that workers share a single row.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rlx.codegen import grids
from rlx.codegen.kernel import Kernel
from rlx.codegen.kernels.embedding import superblocks, value_holes
from rlx.codegen.kernels.pack import MOVES
from rlx.codegen.layouts import PACKINGS
from rlx.codegen.loops import HOLE, Helper, Ptr, loop_kernel
from rlx.codegen.scalars import i64, stack_memory, u32
from rlx.errors import CompileError
from rlx.ir.dtypes import F32, I32, U8, DType

#: Holes: elements of a row, its bytes in the file; superblocks of a row, their elements and bytes in the file.
WIDTH: int = HOLE
ROW_BYTES: int = HOLE
SUPERBLOCKS: int = HOLE
SUPERBLOCK: int = HOLE
FILE_BYTES: int = HOLE
#: Pieces of a row, superblocks of a piece.
PIECES: int = HOLE
PIECE: int = HOLE
#: `SCRATCH()` is memory for a packed superblock; the other two are those of `pack.py` and `embedding.py`.
SCRATCH: Helper = HOLE
MOVE: Helper = HOLE
VALUES: Helper = HOLE

#: Elements of a piece, at least.
_LEAST = 1024


def pieces(dtype: DType, width: int) -> int:
    """Work units of a row."""
    count = width // PACKINGS[dtype].superblock
    return -(-count // _piece(dtype, count))


def _piece(dtype: DType, count: int) -> int:
    """Superblocks of a piece: equal pieces but for the last one."""
    most = max(1, count * PACKINGS[dtype].superblock // _LEAST)
    return -(-count // most)


def lookup(dtype: DType, width: int, scale: float = 1.0) -> Kernel:
    """Table [vocab, width] as a file holds it, ids i32[rows] -> f32[rows, width], times scale.

    Buffers table (at any address), ids, out. The ids are not checked: the caller vouches for them. Units:
    `pieces(dtype, width)` a row.

    Raises:
        CompileError: the type has no packed layout.
        ShapeError: its superblocks do not divide the width.
    """
    if dtype not in PACKINGS:
        known = ", ".join(map(str, PACKINGS))
        raise CompileError(f"no kernel looks up rows of {dtype}", hint=f"Types that can be looked up: {known}")
    packing, count = PACKINGS[dtype], superblocks(dtype, width)
    holes: dict[str, Any] = {"WIDTH": width, "SUPERBLOCKS": count, "FILE_BYTES": dtype.row_bytes(packing.superblock)}
    holes |= {"ROW_BYTES": dtype.row_bytes(width), "PIECES": pieces(dtype, width), "PIECE": _piece(dtype, count)}
    holes |= {**value_holes(dtype), "SCALE": float(scale)}
    if dtype.is_quantized:
        holes |= {"SUPERBLOCK": packing.superblock, "MOVE": MOVES[dtype], "SCRATCH": stack_memory("u8", packing.nbytes)}
    params = [("table", U8), ("ids", I32), ("out", F32)]
    kernel = loop_kernel(_lookup if dtype.is_quantized else _lookup_numbers, holes, params)
    return replace(kernel, llvm=grids.define(kernel.llvm))


def _lookup(table: Ptr, ids: Ptr, out: Ptr, begin: int, end: int) -> None:
    scratch = SCRATCH()
    for unit in range(begin, end):
        row = unit // PIECES
        at = i64(ids[row]) * ROW_BYTES
        first = unit % PIECES * PIECE
        stop = first + PIECE if first + PIECE < SUPERBLOCKS else SUPERBLOCKS
        for s in range(first, stop):
            MOVE(table, at + s * FILE_BYTES, scratch, 0, 0, u32(0xFFFFFFFF))
            VALUES(scratch, 0, 0, out, row * WIDTH + s * SUPERBLOCK)


def _lookup_numbers(table: Ptr, ids: Ptr, out: Ptr, begin: int, end: int) -> None:
    for unit in range(begin, end):
        row = unit // PIECES
        at = i64(ids[row]) * ROW_BYTES
        first = unit % PIECES * PIECE
        stop = first + PIECE if first + PIECE < SUPERBLOCKS else SUPERBLOCKS
        for i in range(first, stop):
            VALUES(table, at + i * FILE_BYTES, 0, out, row * WIDTH + i)
