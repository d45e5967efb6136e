"""Embedding lookup in a table that stays in the model file, in the layout of the file, dequantized to f32.

Such a table is used for lookup only. A step reads a few rows of possibly gigabytes, so packing it at load would be a
waste. The kernel reuses the decoders of packed tables: the packing function of `pack.py` moves each superblock of a row
to scratch memory, as row 0 of a packed block, and the function of `embedding.py` reads its values there. So before the
scale the values equal the reference dequantization bit by bit. Plain numbers are read directly from the file.

Wide rows are split into pieces, so that workers share a single row.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rlx.backends.cpu import grids
from rlx.backends.cpu.kernel import Kernel
from rlx.backends.cpu.kernels.packing.pack import FILE_BYTES, MOVE, REPACK
from rlx.backends.cpu.kernels.rows.embedding import (
    SUPERBLOCK,
    SUPERBLOCKS,
    VALUES,
    WIDTH,
    packed_row,
    value_holes,
)
from rlx.backends.cpu.layouts import PACKINGS
from rlx.backends.cpu.loops import loop_kernel
from rlx.ir.dtypes import F32, I32, U8, DType
from rlx.scalars import HOLE, Helper, Ptr, i64, stack_memory, u32

#: Holes besides those of `embedding.py` and `pack.py`: bytes of a row in the file, pieces of a row, superblocks of a
#: piece.
ROW_BYTES: int = HOLE
PIECES: int = HOLE
PIECE: int = HOLE
#: `READ(table, at, out, to)` writes the values of a superblock of the file. `SCRATCH()` is memory for a packed one.
READ: Helper = HOLE
SCRATCH: Helper = HOLE

#: Fewest elements of a piece.
_LEAST = 1024


def pieces(dtype: DType, width: int) -> int:
    """Number of work units per row."""
    count = width // PACKINGS[dtype].superblock
    return -(-count // _piece(dtype, count))


def _piece(dtype: DType, count: int) -> int:
    """Superblocks of a piece. All pieces of a row are equal, except that the last one may be shorter."""
    most = max(1, count * PACKINGS[dtype].superblock // _LEAST)
    return -(-count // most)


def lookup(dtype: DType, width: int, scale: float = 1.0) -> Kernel:
    """A kernel: table [vocab, width] in the layout of the file, ids i32[rows] -> f32[rows, width], times scale.

    Buffers: table (at any address), ids, out. The kernel does not check the ids; the caller must. Units:
    `pieces(dtype, width)` per row.

    Raises:
        CompileError: the type has no packed layout.
        ShapeError: its superblocks do not divide the width.
    """
    packing, count = packed_row(dtype, width)
    holes: dict[str, Any] = {"WIDTH": width, "SUPERBLOCKS": count, "FILE_BYTES": dtype.row_bytes(packing.superblock)}
    holes |= {"ROW_BYTES": dtype.row_bytes(width), "PIECES": pieces(dtype, width), "PIECE": _piece(dtype, count)}
    holes |= {**value_holes(dtype), "SUPERBLOCK": packing.superblock, "SCALE": float(scale)}
    if dtype.is_quantized:
        holes |= {"READ": read_packed, "MOVE": REPACK[dtype], "SCRATCH": stack_memory("u8", packing.nbytes)}
    else:
        holes |= {"READ": read_numbers}
    kernel = loop_kernel(_lookup, holes, [("table", U8), ("ids", I32), ("out", F32)])
    return replace(kernel, llvm=grids.define(kernel.llvm))


def read_packed(table: Ptr, at: int, out: Ptr, to: int) -> None:
    scratch = SCRATCH()
    MOVE(table, at, scratch, 0, 0, u32(0xFFFFFFFF))
    VALUES(scratch, 0, 0, out, to)


def read_numbers(table: Ptr, at: int, out: Ptr, to: int) -> None:
    VALUES(table, at, 0, out, to)


def _lookup(table: Ptr, ids: Ptr, out: Ptr, begin: int, end: int) -> None:
    for unit in range(begin, end):
        row = unit // PIECES
        at = i64(ids[row]) * ROW_BYTES
        first = unit % PIECES * PIECE
        stop = first + PIECE if first + PIECE < SUPERBLOCKS else SUPERBLOCKS
        for s in range(first, stop):
            READ(table, at + s * FILE_BYTES, out, row * WIDTH + s * SUPERBLOCK)
