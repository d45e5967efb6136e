"""Embedding lookup: rows of a packed table (layout r16k4, see layouts.py), dequantized to f32.

A row is one of the 16 lanes of its row block. Values are computed in the order of the reference dequantization,
d * sc * q - dmin * mn, with each step rounded to f32. So before the scale they equal the reference bit by bit. All
quantized types share one kernel. The type's row of `blocks.py` determines its holes.
"""

from __future__ import annotations

from typing import Any

from rlx.backends import blocks
from rlx.backends.blocks import BLOCKS, Blocks
from rlx.backends.cpu.kernel import Kernel
from rlx.backends.cpu.layouts import PACKINGS, Packing
from rlx.backends.cpu.loops import loop_kernel
from rlx.errors import CompileError, ShapeError
from rlx.ir.dtypes import BF16, F16, F32, I32, U8, DType
from rlx.scalars import (
    HOLE,
    Helper,
    Ptr,
    Scalar,
    as_f32,
    bf16_to_f32,
    f16_to_f32,
    f32,
    i32,
    i64,
    load_f32,
    load_u16,
    u32,
    u64,
)

#: Holes: elements of a row, bytes of a row block, superblocks of a row with their elements and bytes.
WIDTH: int = HOLE
BLOCK_BYTES: int = HOLE
SUPERBLOCKS: int = HOLE
SUPERBLOCK: int = HOLE
SUPERBLOCK_BYTES: int = HOLE
#: The factor of every value. `VALUES(table, at, lane, out, to)` writes the values of one lane of a superblock.
SCALE: float = HOLE
VALUES: Helper = HOLE
#: For a quantized type: the offset of the sub-blocks in a superblock, their number, their size in bytes, the offset of
#: the codes in a sub-block, scales per sub-block, the code that means 0, the widths of a code's two planes.
HEAD_BYTES: int = HOLE
SUBS: int = HOLE
SUB_BYTES: int = HOLE
CODES_AT: int = HOLE
PARTS: int = HOLE
ZERO: int = HOLE
FIRST_BITS: int = HOLE
SECOND_BITS: int = HOLE
#: `FACTOR(table, at, start, lane, part)` and `LOW` with the same arguments return a scale and a low, for the superblock
#: at `at` and the sub-block at `start`. `CODE(table, start, group, byte)` reads a code, and `NUMBER(code)` is its f32.
FACTOR: Helper = HOLE
LOW: Helper = HOLE
CODE: Helper = HOLE
NUMBER: Helper = HOLE
#: The factor of a superblock's f16 numbers, for scales of the form `d_s`.
UNIT: float = HOLE
#: The levels of the type, one byte each, in two 64-bit words.
FIRST_LEVELS: int = HOLE
LAST_LEVELS: int = HOLE


def embedding(dtype: DType, width: int, scale: float = 1.0, *, signed: bool = False) -> Kernel:
    """A kernel: packed table [vocab, width], ids i32[seq] -> f32[seq, width], times scale. A unit is a row.

    Buffers: table, ids, out. The kernel does not check the ids; the caller must.

    Args:
        signed: codes of 8 bits in the table are signed bytes, see `pack.py`.

    Raises:
        CompileError: the type has no packed layout.
        ShapeError: its superblocks do not divide the width.
    """
    packing, count = packed_row(dtype, width)
    holes: dict[str, Any] = {"WIDTH": width, "SUPERBLOCKS": count, "SUPERBLOCK": packing.superblock}
    holes |= {"SUPERBLOCK_BYTES": packing.nbytes, "BLOCK_BYTES": count * packing.nbytes}
    holes |= value_holes(dtype, signed=signed)
    params = [("table", U8), ("ids", I32), ("out", F32)]
    return loop_kernel(_embedding, {**holes, "SCALE": float(scale)}, params)


def packed_row(dtype: DType, width: int) -> tuple[Packing, int]:
    """The packing of a type, and the number of superblocks in a row of a table.

    Raises:
        CompileError: the type has no packed layout.
        ShapeError: its superblocks do not divide the width.
    """
    if dtype not in PACKINGS:
        known = ", ".join(map(str, PACKINGS))
        raise CompileError(f"no kernel looks up rows of {dtype}", hint=f"Types that can be looked up: {known}")
    packing = PACKINGS[dtype]
    if width % packing.superblock or width <= 0:
        raise ShapeError(f"rows of {width} do not hold whole superblocks of {dtype}, {packing.superblock} elements")
    return packing, width // packing.superblock


def value_holes(dtype: DType, *, signed: bool = False) -> dict[str, Any]:
    """The hole `VALUES` of a type, and the holes that it reads except `SCALE`."""
    if dtype not in BLOCKS:
        return {"VALUES": _VALUES[dtype]}
    row = blocks.of(dtype, signed=signed)
    return _block_holes(BLOCKS[dtype] if row.levels else row)  # indices of levels are the same


def _block_holes(row: Blocks) -> dict[str, Any]:
    factor, low = _SCALES[row.scales]
    holes = {"VALUES": block_values, "FACTOR": factor, "LOW": low, "PARTS": row.parts, "ZERO": row.zero}
    holes |= {"HEAD_BYTES": row.head_bytes, "SUBS": row.subs, "SUB_BYTES": row.stride, "CODES_AT": row.codes_at}
    holes |= {"FIRST_BITS": row.planes[0], "CODE": one_plane, "NUMBER": _number(row)}
    holes |= {"UNIT": row.unit} if row.scales == "d_s" else {}
    if len(row.planes) > 1:
        holes |= {"SECOND_BITS": row.planes[1], "CODE": two_planes}
    if row.levels:
        words = (int.from_bytes(bytes(row.levels[i : i + 8]), "little") for i in (0, 8))
        holes |= {"NUMBER": level, **dict(zip(("FIRST_LEVELS", "LAST_LEVELS"), words, strict=True))}
    if row.floats or row.signed:
        del holes["ZERO"]
    return holes


def _number(row: Blocks) -> Helper:
    """The hole `NUMBER` of a type without levels."""
    if row.floats:
        return e4m3
    return signed_integer if row.signed else integer


def _embedding(table: Ptr, ids: Ptr, out: Ptr, begin: int, end: int) -> None:
    for row in range(begin, end):
        token = i64(ids[row])
        lane = token & 15
        at = (token >> 4) * BLOCK_BYTES
        for s in range(SUPERBLOCKS):
            VALUES(table, at + s * SUPERBLOCK_BYTES, lane, out, row * WIDTH + s * SUPERBLOCK)


def f32_values(table: Ptr, at: int, lane: int, out: Ptr, to: int) -> None:
    out[to] = load_f32(table, at + lane * 4) * f32(SCALE)


def f16_values(table: Ptr, at: int, lane: int, out: Ptr, to: int) -> None:
    out[to] = f16_to_f32(load_u16(table, at + lane * 2)) * f32(SCALE)


def bf16_values(table: Ptr, at: int, lane: int, out: Ptr, to: int) -> None:
    for j in range(2):
        out[to + j] = bf16_to_f32(load_u16(table, at + lane * 4 + j * 2)) * f32(SCALE)


def half_at(table: Ptr, at: int, lane: int) -> Scalar:
    """The f16 number of a lane in a vector of 16."""
    return f16_to_f32(load_u16(table, at + lane * 2))


def signed(byte: Scalar) -> Scalar:
    """A byte read as i8."""
    return i32(byte) - i32(256) if i32(byte) > i32(127) else i32(byte)


def block_values(table: Ptr, at: int, lane: int, out: Ptr, to: int) -> None:
    """Writes the values of one lane of a superblock of a quantized type."""
    for sub in range(SUBS):
        start = at + HEAD_BYTES + sub * SUB_BYTES
        for part in range(PARTS):
            factor = FACTOR(table, at, start, lane, part)
            low = LOW(table, at, start, lane, part)
            for g in range(8 // PARTS):
                group = part * (8 // PARTS) + g
                for j in range(4):
                    number = NUMBER(CODE(table, start + CODES_AT, group, lane * 4 + j))
                    out[to + sub * 32 + group * 4 + j] = (factor * number - low) * f32(SCALE)


# --- scales and lows --------------------------------------------------------------------------------------------------


def own(table: Ptr, at: int, start: int, lane: int, part: int) -> Scalar:
    return half_at(table, start, lane)


def own_minimum(table: Ptr, at: int, start: int, lane: int, part: int) -> Scalar:
    return -half_at(table, start + 32, lane)


def nothing(table: Ptr, at: int, start: int, lane: int, part: int) -> Scalar:
    return f32(0.0)


def signed_byte(table: Ptr, at: int, start: int, lane: int, part: int) -> Scalar:
    return half_at(table, at, lane) * f32(UNIT) * f32(signed(table[start + part * 16 + lane]))


def first_byte(table: Ptr, at: int, start: int, lane: int, part: int) -> Scalar:
    return half_at(table, at, lane) * f32(table[start + lane])


def second_byte(table: Ptr, at: int, start: int, lane: int, part: int) -> Scalar:
    return half_at(table, at + 32, lane) * f32(table[start + 16 + lane])


def low_nibble(table: Ptr, at: int, start: int, lane: int, part: int) -> Scalar:
    return half_at(table, at, lane) * f32(u32(table[start + part * 16 + lane]) & u32(15))


def high_nibble(table: Ptr, at: int, start: int, lane: int, part: int) -> Scalar:
    return half_at(table, at + 32, lane) * f32(u32(table[start + part * 16 + lane]) >> u32(4))


def one_number(table: Ptr, at: int, start: int, lane: int, part: int) -> Scalar:
    return half_at(table, at, lane)


def own_f32(table: Ptr, at: int, start: int, lane: int, part: int) -> Scalar:
    return load_f32(table, start + lane * 4)


def power(table: Ptr, at: int, start: int, lane: int, part: int) -> Scalar:
    """2^(x - 128): x - 1 is the f32 exponent field, except for the two subnormal results."""
    x = u32(table[start + lane])
    subnormal = u32(1 << 21) if x == u32(0) else u32(1 << 22)
    return as_f32(subnormal if x < u32(2) else u32(u32(x - u32(1)) << u32(23)))


def half_e4m3(table: Ptr, at: int, start: int, lane: int, part: int) -> Scalar:
    """Half of an e4m3 number without its sign; 0x7f gives 0."""
    x = u32(table[start + part * 16 + lane])
    return f32(0.0) if x == u32(127) else e4m3_size(x) * f32(0.5)


#: Functions for scale and low, by the name of the formula (`Blocks.scales`, see `blocks.py`).
_SCALES: dict[str, tuple[Helper, Helper]] = {
    "d": (own, nothing),
    "d_m": (own, own_minimum),
    "d_s": (signed_byte, nothing),
    "d_s_m": (first_byte, second_byte),
    "d_sm": (low_nibble, high_nibble),
    "one": (one_number, nothing),
    "f32": (own_f32, nothing),
    "e8m0": (power, nothing),
    "e4m3": (half_e4m3, nothing),
}


# --- codes ------------------------------------------------------------------------------------------------------------


def piece(table: Ptr, at: int, group: int, byte: int, bits: int) -> Scalar:
    """The bits of a code that are stored in one plane."""
    shift = group // bits * bits
    return (u32(table[at + group % bits * 64 + byte]) >> u32(shift)) & u32((1 << bits) - 1)


def one_plane(table: Ptr, at: int, group: int, byte: int) -> Scalar:
    return piece(table, at, group, byte, FIRST_BITS)


def two_planes(table: Ptr, at: int, group: int, byte: int) -> Scalar:
    low = piece(table, at, group, byte, FIRST_BITS)
    return low | (piece(table, at + 64 * FIRST_BITS, group, byte, SECOND_BITS) << u32(FIRST_BITS))


def integer(code: Scalar) -> Scalar:
    return f32(i32(code) - i32(ZERO))


def signed_integer(code: Scalar) -> Scalar:
    return f32(signed(code))


def level(code: Scalar) -> Scalar:
    """The number that a code stands for, by the levels of the type."""
    word = u64(FIRST_LEVELS) if code < u32(8) else u64(LAST_LEVELS)
    return integer(u32(word >> u64((code & u32(7)) * u32(8))) & u32(255))


def e4m3(code: Scalar) -> Scalar:
    """The value of an e4m3fn number (see `blocks.py`)."""
    sign = f32(-1.0) if code > u32(127) else f32(1.0)
    is_nan = (code & u32(127)) == u32(127)
    return as_f32(u32(0x7FC00000)) if is_nan else e4m3_size(code) * sign


def e4m3_size(code: Scalar) -> Scalar:
    """The magnitude of an e4m3fn number; NaN is not handled.

    Exponent and mantissa are moved to their places in an f16. Its exponent bias is 8 larger, hence the factor 2^8.
    """
    return f16_to_f32(u32(code & u32(127)) << u32(7)) * f32(256.0)


_VALUES: dict[DType, Helper] = {F32: f32_values, F16: f16_values, BF16: bf16_values}
