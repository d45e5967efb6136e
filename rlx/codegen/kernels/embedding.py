"""Looking up rows of a packed table (layout r16k4, see layouts.py), dequantized to f32.

A row is one of the 16 lanes of its row block. Values are computed in the order of the reference dequantization,
d * sc * q - dmin * mn, each step rounded to f32, so they are equal to it bit for bit before the scale.
"""

from __future__ import annotations

from rlx.codegen.kernel import Kernel
from rlx.codegen.layouts import PACKINGS
from rlx.codegen.loops import HOLE, Helper, Ptr, Scalar, loop_kernel
from rlx.codegen.scalars import bf16_to_f32, f16_to_f32, f32, i32, i64, load_f32, load_u16, u32
from rlx.errors import CompileError, ShapeError
from rlx.ir.dtypes import BF16, F16, F32, I32, Q4_0, Q4_K, Q5_K, Q6_K, Q8_0, U8, DType

#: Holes: elements of a row, bytes of a row block, superblocks of a row with their elements and bytes.
WIDTH: int = HOLE
BLOCK_BYTES: int = HOLE
SUPERBLOCKS: int = HOLE
SUPERBLOCK: int = HOLE
SUPERBLOCK_BYTES: int = HOLE
#: The factor of every value; `VALUES(table, at, lane, out, to)` writes a superblock's values of one lane.
SCALE: float = HOLE
VALUES: Helper = HOLE


def embedding(dtype: DType, width: int, scale: float = 1.0) -> Kernel:
    """Packed table [vocab, width], ids i32[seq] -> f32[seq, width], times scale. A unit is a row.

    Buffers table, ids, out. The ids are not checked: the caller vouches for them.

    Raises:
        CompileError: the type has no packed layout.
        ShapeError: its superblocks do not divide the width.
    """
    if dtype not in _VALUES:
        known = ", ".join(map(str, _VALUES))
        raise CompileError(f"no embedding kernel reads {dtype}", hint=f"Packed types: {known}")
    packing = PACKINGS[dtype]
    if width % packing.superblock or width <= 0:
        raise ShapeError(f"rows of {width} do not hold whole superblocks of {dtype}, {packing.superblock} elements")
    count = width // packing.superblock
    holes = {"WIDTH": width, "SUPERBLOCKS": count, "SUPERBLOCK": packing.superblock}
    holes |= {"SUPERBLOCK_BYTES": packing.nbytes, "BLOCK_BYTES": count * packing.nbytes}
    params = [("table", U8), ("ids", I32), ("out", F32)]
    return loop_kernel(_embedding, {**holes, "SCALE": float(scale), "VALUES": _VALUES[dtype]}, params)


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


def q8_0_values(table: Ptr, at: int, lane: int, out: Ptr, to: int) -> None:
    d = half_at(table, at, lane)
    for group in range(8):
        for j in range(4):
            q = i32(table[at + 32 + group * 64 + lane * 4 + j]) - i32(128)
            out[to + group * 4 + j] = f32(q) * d * f32(SCALE)


def q4_0_values(table: Ptr, at: int, lane: int, out: Ptr, to: int) -> None:
    d = half_at(table, at, lane)
    for group in range(4):
        for j in range(4):
            byte = i32(table[at + 32 + group * 64 + lane * 4 + j])
            first = to + group * 4 + j
            out[first] = d * f32(i32(byte & i32(15)) - i32(8)) * f32(SCALE)
            out[first + 16] = d * f32(i32(byte >> i32(4)) - i32(8)) * f32(SCALE)


def q4_k_values(table: Ptr, at: int, lane: int, out: Ptr, to: int) -> None:
    for sub in range(8):
        start = at + 64 + sub * 288
        factor = half_at(table, at, lane) * f32(table[start + lane])
        offset = half_at(table, at + 32, lane) * f32(table[start + 16 + lane])
        for group in range(4):
            for j in range(4):
                byte = u32(table[start + 32 + group * 64 + lane * 4 + j])
                first = to + sub * 32 + group * 4 + j
                out[first] = (factor * f32(byte & u32(15)) - offset) * f32(SCALE)
                out[first + 16] = (factor * f32(byte >> u32(4)) - offset) * f32(SCALE)


def q5_k_values(table: Ptr, at: int, lane: int, out: Ptr, to: int) -> None:
    for sub in range(8):
        start = at + 64 + sub * 352
        factor = half_at(table, at, lane) * f32(table[start + lane])
        offset = half_at(table, at + 32, lane) * f32(table[start + 16 + lane])
        for group in range(4):
            for j in range(4):
                byte = u32(table[start + 32 + group * 64 + lane * 4 + j])
                fifth = u32(table[start + 288 + lane * 4 + j]) >> u32(group)
                low = (byte & u32(15)) | ((fifth & u32(1)) << u32(4))
                high = (byte >> u32(4)) | (fifth & u32(16))
                first = to + sub * 32 + group * 4 + j
                out[first] = (factor * f32(low) - offset) * f32(SCALE)
                out[first + 16] = (factor * f32(high) - offset) * f32(SCALE)


def q6_k_values(table: Ptr, at: int, lane: int, out: Ptr, to: int) -> None:
    for sub in range(8):
        start = at + 32 + sub * 416
        d = half_at(table, at, lane)
        first_factor = d * f32(signed(table[start + lane]))
        second_factor = d * f32(signed(table[start + 16 + lane]))
        for group in range(4):
            for j in range(4):
                byte = i32(table[start + 32 + group * 64 + lane * 4 + j])
                low_bits = i32(table[start + 288 + lane * 4 + j]) >> i32(2 * group)
                high_bits = i32(table[start + 352 + lane * 4 + j]) >> i32(2 * group)
                low = i32((byte & i32(15)) | ((low_bits & i32(3)) << i32(4))) - i32(32)
                high = i32((byte >> i32(4)) | ((high_bits & i32(3)) << i32(4))) - i32(32)
                first = to + sub * 32 + group * 4 + j
                out[first] = first_factor * f32(low) * f32(SCALE)
                out[first + 16] = second_factor * f32(high) * f32(SCALE)


def signed(byte: Scalar) -> Scalar:
    """A byte as the i8 it holds."""
    return i32(byte) - i32(256) if i32(byte) > i32(127) else i32(byte)


_VALUES: dict[DType, Helper] = {
    F32: f32_values,
    F16: f16_values,
    BF16: bf16_values,
    Q8_0: q8_0_values,
    Q4_0: q4_0_values,
    Q4_K: q4_k_values,
    Q5_K: q5_k_values,
    Q6_K: q6_k_values,
}
