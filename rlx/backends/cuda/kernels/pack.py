"""Packs matrices on the card: loop kernels from the bytes of the file to the tiles of `layouts.py`.

A unit is a superblock of rows g and g + 8, or 32 k of a row of plain numbers. A superblock goes through the layout of
the CPU (`rlx.backends.cpu.layouts`), in scratch memory: its functions read every type of file, and after them all types
are alike. The scratch memory of a unit is written and read by the same thread alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rlx.backends.blocks import BLOCKS
from rlx.backends.cpu import grids
from rlx.backends.cpu.kernel import Kernel
from rlx.backends.cpu.kernels.packing.pack import REPACK
from rlx.backends.cpu.kernels.rows.embedding import value_holes
from rlx.backends.cpu.layouts import PACKINGS
from rlx.backends.cpu.loops import loop_kernel
from rlx.backends.cuda.layouts import DEPTH, form_of, item_bytes
from rlx.ir.dtypes import U8, DType
from rlx.scalars import (
    HOLE,
    Helper,
    Ptr,
    Scalar,
    f32_to_bf16,
    i32,
    load_u16,
    load_u32,
    store_u16,
    store_u32,
    u16,
    u32,
)

#: Holes of quantized types: elements of a superblock, its bytes in the file and its packed bytes, see `packing.pack`.
SUPERBLOCK: int = HOLE
FILE_BYTES: int = HOLE
PACKED_BYTES: int = HOLE
MOVE: Helper = HOLE
#: What a superblock has in that layout, see `embedding.py`.
HEAD_BYTES: int = HOLE
SUBS: int = HOLE
SUB_BYTES: int = HOLE
CODES_AT: int = HOLE
CODE: Helper = HOLE
NUMBER: Helper = HOLE
ZERO: int = HOLE
#: Numbers of a superblock, fields of a sub-block and bytes of one; `FIELD(scratch, from, out, to)` copies a field.
NUMBERS: int = HOLE
FIELDS: int = HOLE
FIELD_BYTES: int = HOLE
FIELD: Helper = HOLE
#: 32 k of a unit of the card's layout. `PUT(scratch, codes, g, out, group)` writes the codes of 32 k of both rows.
UNIT_GROUPS: int = HOLE
PUT: Helper = HOLE
#: Of plain types: bytes of an element, and the function that copies one.
ELEMENT_BYTES: int = HOLE
COPY: Helper = HOLE

#: What each kernel takes: sizes of the rows in `raw`; the first tile that they are, and where fields of sub-blocks and
#: numbers of superblocks begin.
EXTENTS = ("n", "k", "first", "fields", "heads")


def pack(dtype: DType) -> Kernel:
    """Rows of a matrix as they lie in a file -> their tiles of the packed matrix. Buffers: raw, scratch, out."""
    form = form_of(dtype)
    if dtype not in BLOCKS:
        holes: dict[str, Any] = {"ELEMENT_BYTES": dtype.nbytes, "COPY": copy_4 if form.kind == "f32" else copy_2}
        return loop_kernel(_pack_plain, holes, [("raw", U8), ("scratch", U8), ("out", U8)], EXTENTS)
    packing = PACKINGS[dtype]
    row, found = BLOCKS[dtype], value_holes(dtype)
    names = ["HEAD_BYTES", "SUBS", "SUB_BYTES", "CODES_AT", "CODE", "FIRST_BITS", "SECOND_BITS"]
    names += ["NUMBER", "ZERO", "FIRST_LEVELS", "LAST_LEVELS"] * (form.kind != "codes4")
    holes = {name: found[name] for name in names if name in found}
    put = {"codes4": put_codes4, "codes6": put_codes6, "codes8": put_codes8, "bf16": put_bf16}[form.kind]
    holes |= {"UNIT_GROUPS": form.unit // DEPTH, "PUT": put, "NUMBERS": row.head}
    item = item_bytes(row)
    field = {1: field_1, 2: field_2, 4: field_4}[item]
    holes |= {"FIELDS": row.field_bytes // item, "FIELD_BYTES": item, "FIELD": field}
    holes |= {"SUPERBLOCK": packing.superblock, "PACKED_BYTES": packing.nbytes, "MOVE": REPACK[dtype]}
    holes |= {"FILE_BYTES": dtype.row_bytes(packing.superblock)}
    kernel = loop_kernel(_pack_blocks, holes, [("raw", U8), ("scratch", U8), ("out", U8)], EXTENTS)
    return replace(kernel, llvm=grids.define(kernel.llvm))


def _pack_blocks(
    raw: Ptr, scratch: Ptr, out: Ptr, n: int, k: int, first: int, fields: int, heads: int, begin: int, end: int
) -> None:
    count = k // SUPERBLOCK
    groups = (count * SUBS + UNIT_GROUPS - 1) // UNIT_GROUPS * UNIT_GROUPS
    for unit in range(begin, end):
        g = unit & 7
        s = (unit >> 3) % count
        tile = (unit >> 3) // count
        at = (tile * count + s) * PACKED_BYTES
        for half in range(2):
            row = g + half * 8
            real = tile * 16 + row < n
            source = tile * 16 + row if real else tile * 16
            keep = u32(0xFFFFFFFF) if real else u32(0)
            MOVE(raw, (source * count + s) * FILE_BYTES, scratch, at, row, keep)
            for number in range(NUMBERS):
                place = ((((first + tile) * count + s) * 8 + g) * NUMBERS + number) * 2 + half
                store_u16(out, heads + place * 2, load_u16(scratch, at + number * 32 + row * 2))
        for sub in range(SUBS):
            group = (first + tile) * groups + s * SUBS + sub
            start = at + HEAD_BYTES + sub * SUB_BYTES
            PUT(scratch, start + CODES_AT, g, out, group)
            for field in range(FIELDS):
                for half in range(2):
                    place = ((group * 8 + g) * FIELDS + field) * 2 + half
                    source = start + (field * 16 + g + half * 8) * FIELD_BYTES
                    FIELD(scratch, source, out, fields + place * FIELD_BYTES)


# --- codes of 32 k of rows g and g + 8 --------------------------------------------------------------------------------


def word_of(scratch: Ptr, codes: int, g: int, t: int, i: int, zero: int) -> Scalar:
    """Word i of a lane: [row g, row g + 8][k 0..15, k 16..31]. Four numbers plus `zero` as bytes, of k 0, 2, 1, 3."""
    word = u32(0)
    for j in range(4):
        number = u32(i32(NUMBER(CODE(scratch, codes, t + (i & 1) * 4, (g + (i >> 1) * 8) * 4 + j))) + i32(zero))
        word = u32(word | ((number & u32(255)) << u32(16 * (j & 1) + 8 * (j >> 1))))
    return word


def put_codes8(scratch: Ptr, codes: int, g: int, out: Ptr, group: int) -> None:
    for t in range(4):
        for i in range(4):
            store_u32(out, group * 512 + (g * 4 + t) * 16 + i * 4, word_of(scratch, codes, g, t, i, 0))


def put_codes6(scratch: Ptr, codes: int, g: int, out: Ptr, group: int) -> None:
    for t in range(4):
        last = word_of(scratch, codes, g, t, 3, ZERO)
        for i in range(3):
            high = (last >> u32(2 * i)) & u32(0x03030303)
            word = u32(word_of(scratch, codes, g, t, i, ZERO) | (high << u32(6)))
            store_u32(out, group * 384 + i * 128 + (g * 4 + t) * 4, word)


def put_codes4(scratch: Ptr, codes: int, g: int, out: Ptr, group: int) -> None:
    for t in range(4):
        for rows in range(2):
            word = u32(0)
            for half in range(2):
                for j in range(4):
                    code = u32(CODE(scratch, codes, half * 4 + t, (g + rows * 8) * 4 + j))
                    word = u32(word | (code << u32(16 * (j & 1) + 8 * (j >> 1) + 4 * half)))
            store_u32(out, (group >> 1) * 512 + (g * 4 + t) * 16 + (group & 1) * 8 + rows * 4, word)


def put_bf16(scratch: Ptr, codes: int, g: int, out: Ptr, group: int) -> None:
    for quad in range(8):
        for rows in range(2):
            at = group * 1024 + rows * 512 + (g * 4 + (quad & 3)) * 16 + (quad >> 2) * 8
            for j in range(4):
                store_u16(out, at + j * 2, f32_to_bf16(NUMBER(CODE(scratch, codes, quad, (g + rows * 8) * 4 + j))))


def field_1(scratch: Ptr, start: int, out: Ptr, to: int) -> None:
    out[to] = scratch[start]


def field_2(scratch: Ptr, start: int, out: Ptr, to: int) -> None:
    store_u16(out, to, load_u16(scratch, start))


def field_4(scratch: Ptr, start: int, out: Ptr, to: int) -> None:
    store_u32(out, to, load_u32(scratch, start))


# --- plain numbers ----------------------------------------------------------------------------------------------------


def _pack_plain(
    raw: Ptr, scratch: Ptr, out: Ptr, n: int, k: int, first: int, fields: int, heads: int, begin: int, end: int
) -> None:
    groups = (k + 31) // 32
    for unit in range(begin, end):
        row = unit & 15
        group = (unit >> 4) % groups
        tile = (unit >> 4) // groups
        real = tile * 16 + row < n
        for i in range(32):
            column = group * 32 + i
            source = ((tile * 16 + row) * k + column) * ELEMENT_BYTES
            inside = real and column < k
            COPY(raw, source if inside else 0, out, (first + tile) * groups + group, row, i, inside)


def copy_2(raw: Ptr, source: int, out: Ptr, group: int, row: int, i: int, inside: Scalar) -> None:
    at = group * 1024 + (row >> 3) * 512 + ((row & 7) * 4 + ((i >> 2) & 3)) * 16 + (i >> 4) * 8 + (i & 3) * 2
    value = load_u16(raw, source)
    store_u16(out, at, value if inside else u16(0))


def copy_4(raw: Ptr, source: int, out: Ptr, group: int, row: int, i: int, inside: Scalar) -> None:
    at = group * 2048 + ((row >> 3) * 2 + (i >> 4)) * 512 + ((row & 7) * 4 + ((i >> 2) & 3)) * 16 + (i & 3) * 4
    value = load_u32(raw, source)
    store_u32(out, at, value if inside else u32(0))
