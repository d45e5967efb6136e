"""Looking up rows of a packed table (layout r16k4, see layouts.py), dequantized to f32.

A row is one of the 16 lanes of its row block. Values are computed in the order of the reference dequantization,
d * sc * q - dmin * mn, each step rounded to f32, so they are equal to it bit for bit before the scale. Quantized types
share one kernel, filled with what their row of `blocks.py` says.
"""

from __future__ import annotations

from typing import Any

from rlx.codegen.blocks import BLOCKS, LEVELS, Blocks
from rlx.codegen.kernel import Kernel
from rlx.codegen.layouts import PACKINGS
from rlx.codegen.loops import HOLE, Helper, Ptr, Scalar, loop_kernel
from rlx.codegen.scalars import bf16_to_f32, f16_to_f32, f32, i32, i64, load_f32, load_u16, u32, u64
from rlx.errors import CompileError, ShapeError
from rlx.ir.dtypes import BF16, F16, F32, I32, U8, DType

#: Holes: elements of a row, bytes of a row block, superblocks of a row with their elements and bytes.
WIDTH: int = HOLE
BLOCK_BYTES: int = HOLE
SUPERBLOCKS: int = HOLE
SUPERBLOCK: int = HOLE
SUPERBLOCK_BYTES: int = HOLE
#: The factor of every value; `VALUES(table, at, lane, out, to)` writes a superblock's values of one lane.
SCALE: float = HOLE
VALUES: Helper = HOLE
#: Of a quantized type: where its sub-blocks start, how many there are, their bytes, where their codes start, scales a
#: sub-block, the code that means 0, the widths of a code's two planes.
HEAD_BYTES: int = HOLE
SUBS: int = HOLE
SUB_BYTES: int = HOLE
CODES_AT: int = HOLE
PARTS: int = HOLE
ZERO: int = HOLE
FIRST_BITS: int = HOLE
SECOND_BITS: int = HOLE
#: `FACTOR(table, at, start, lane, part)` and `LOW` of the same make a scale and a low of the superblock at `at` and the
#: sub-block at `start`; `CODE(table, start, group, byte)` reads a code, `LEVEL(code)` is what it stands for.
FACTOR: Helper = HOLE
LOW: Helper = HOLE
CODE: Helper = HOLE
LEVEL: Helper = HOLE
#: Bytes of `LEVELS`, as two words.
FIRST_LEVELS: int = HOLE
LAST_LEVELS: int = HOLE


def embedding(dtype: DType, width: int, scale: float = 1.0) -> Kernel:
    """Packed table [vocab, width], ids i32[seq] -> f32[seq, width], times scale. A unit is a row.

    Buffers table, ids, out. The ids are not checked: the caller vouches for them.

    Raises:
        CompileError: the type has no packed layout.
        ShapeError: its superblocks do not divide the width.
    """
    if dtype not in PACKINGS:
        known = ", ".join(map(str, PACKINGS))
        raise CompileError(f"no embedding kernel reads {dtype}", hint=f"Packed types: {known}")
    packing = PACKINGS[dtype]
    if width % packing.superblock or width <= 0:
        raise ShapeError(f"rows of {width} do not hold whole superblocks of {dtype}, {packing.superblock} elements")
    count = width // packing.superblock
    holes: dict[str, Any] = {"WIDTH": width, "SUPERBLOCKS": count, "SUPERBLOCK": packing.superblock}
    holes |= {"SUPERBLOCK_BYTES": packing.nbytes, "BLOCK_BYTES": count * packing.nbytes}
    holes |= _block_holes(BLOCKS[dtype]) if dtype in BLOCKS else {"VALUES": _VALUES[dtype]}
    params = [("table", U8), ("ids", I32), ("out", F32)]
    return loop_kernel(_embedding, {**holes, "SCALE": float(scale)}, params)


def _block_holes(row: Blocks) -> dict[str, Any]:
    factor, low = _SCALES[row.scales]
    holes = {"VALUES": block_values, "FACTOR": factor, "LOW": low, "PARTS": row.parts, "ZERO": row.zero}
    holes |= {"HEAD_BYTES": row.head_bytes, "SUBS": row.subs, "SUB_BYTES": row.stride, "CODES_AT": row.codes_at}
    holes |= {"FIRST_BITS": row.planes[0], "CODE": one_plane, "LEVEL": itself}
    if len(row.planes) > 1:
        holes |= {"SECOND_BITS": row.planes[1], "CODE": two_planes}
    if row.levels:
        words = (int.from_bytes(bytes(LEVELS[i : i + 8]), "little") for i in (0, 8))
        holes |= {"LEVEL": level, **dict(zip(("FIRST_LEVELS", "LAST_LEVELS"), words, strict=True))}
    return holes


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
    out[to] = bf16_to_f32(load_u16(table, at + lane * 2)) * f32(SCALE)


def half_at(table: Ptr, at: int, lane: int) -> Scalar:
    """The f16 of a lane in a vector of 16 of them."""
    return f16_to_f32(load_u16(table, at + lane * 2))


def signed(byte: Scalar) -> Scalar:
    """A byte as the i8 it holds."""
    return i32(byte) - i32(256) if i32(byte) > i32(127) else i32(byte)


def block_values(table: Ptr, at: int, lane: int, out: Ptr, to: int) -> None:
    """A superblock of a quantized type."""
    for sub in range(SUBS):
        start = at + HEAD_BYTES + sub * SUB_BYTES
        for part in range(PARTS):
            factor = FACTOR(table, at, start, lane, part)
            low = LOW(table, at, start, lane, part)
            for g in range(8 // PARTS):
                group = part * (8 // PARTS) + g
                for j in range(4):
                    q = i32(LEVEL(CODE(table, start + CODES_AT, group, lane * 4 + j))) - i32(ZERO)
                    out[to + sub * 32 + group * 4 + j] = (factor * f32(q) - low) * f32(SCALE)


# --- scales and lows --------------------------------------------------------------------------------------------------


def own(table: Ptr, at: int, start: int, lane: int, part: int) -> Scalar:
    return half_at(table, start, lane)


def own_minimum(table: Ptr, at: int, start: int, lane: int, part: int) -> Scalar:
    return -half_at(table, start + 32, lane)


def nothing(table: Ptr, at: int, start: int, lane: int, part: int) -> Scalar:
    return f32(0.0)


def signed_byte(table: Ptr, at: int, start: int, lane: int, part: int) -> Scalar:
    return half_at(table, at, lane) * f32(signed(table[start + part * 16 + lane]))


def first_byte(table: Ptr, at: int, start: int, lane: int, part: int) -> Scalar:
    return half_at(table, at, lane) * f32(table[start + lane])


def second_byte(table: Ptr, at: int, start: int, lane: int, part: int) -> Scalar:
    return half_at(table, at + 32, lane) * f32(table[start + 16 + lane])


def low_nibble(table: Ptr, at: int, start: int, lane: int, part: int) -> Scalar:
    return half_at(table, at, lane) * f32(u32(table[start + part * 16 + lane]) & u32(15))


def high_nibble(table: Ptr, at: int, start: int, lane: int, part: int) -> Scalar:
    return half_at(table, at + 32, lane) * f32(u32(table[start + part * 16 + lane]) >> u32(4))


#: Scale and low of each way to make them: see `blocks.py`.
_SCALES: dict[str, tuple[Helper, Helper]] = {
    "d": (own, nothing),
    "d_m": (own, own_minimum),
    "d_s": (signed_byte, nothing),
    "d_s_m": (first_byte, second_byte),
    "d_sm": (low_nibble, high_nibble),
}


# --- codes ------------------------------------------------------------------------------------------------------------


def piece(table: Ptr, at: int, group: int, byte: int, bits: int) -> Scalar:
    """The bits of a code that one plane holds."""
    shift = group // bits * bits
    return (u32(table[at + group % bits * 64 + byte]) >> u32(shift)) & u32((1 << bits) - 1)


def one_plane(table: Ptr, at: int, group: int, byte: int) -> Scalar:
    return piece(table, at, group, byte, FIRST_BITS)


def two_planes(table: Ptr, at: int, group: int, byte: int) -> Scalar:
    low = piece(table, at, group, byte, FIRST_BITS)
    return low | (piece(table, at + 64 * FIRST_BITS, group, byte, SECOND_BITS) << u32(FIRST_BITS))


def itself(code: Scalar) -> Scalar:
    return code


def level(code: Scalar) -> Scalar:
    """The byte of `LEVELS` at `code`."""
    word = u64(FIRST_LEVELS) if code < u32(8) else u64(LAST_LEVELS)
    return u32(word >> u64((code & u32(7)) * u32(8))) & u32(255)


_VALUES: dict[DType, Helper] = {F32: f32_values, F16: f16_values, BF16: bf16_values}
