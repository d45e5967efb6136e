"""Prepares activation rows: f32 to int8 "q8a" (see layouts.py) or bf16. Fused norms use the same row helpers.

    scale = max|x| / 127 over 32 elements        code = x / scale, rounded half to even, within +-127

A block of zeros has scale 0 and codes 0. A block with NaN or infinity has codes 0 and that value as its scale, so every
product with it is NaN. bf16 is rounded to nearest even; NaN stays NaN.
"""

from __future__ import annotations

from rlx.backends.cpu.kernel import Kernel
from rlx.backends.cpu.layouts import q8a_bytes
from rlx.backends.cpu.loops import loop_kernel
from rlx.errors import ArgumentError, ShapeError
from rlx.ir.dtypes import ACTIVATIONS, F32
from rlx.scalars import (
    HOLE,
    Helper,
    Ptr,
    Scalar,
    as_bits,
    as_f32,
    f32,
    f32_to_bf16,
    i32,
    round_even,
    store_f32,
    store_i32,
    u8,
    u32,
)

#: Holes: elements of a row, size of a prepared row. `VALUE(x, w, b, src, i, factor, mean)` returns element i of a row:
#: norms compute it from their weight w, bias b, factor and mean.
WIDTH: int = HOLE
ROW_SIZE: int = HOLE
VALUE: Helper = HOLE
#: `PREPARE(x, w, b, out, src, dst, width, factor, mean)` writes a prepared row, see `quantize_row`.
PREPARE: Helper = HOLE


def quantize(width: int, out: str = "q8a") -> Kernel:
    """f32[rows, width] -> prepared rows. Buffers: x, out. No extents. A unit is a row.

    Raises:
        ArgumentError: `out` is neither q8a nor bf16.
        ShapeError: the width is not a multiple of 32 (of 2 for bf16).
    """
    holes = {**row_holes(width, out), "VALUE": plain}
    return loop_kernel(_quantize, holes, [("x", F32), ("out", ACTIVATIONS[out])])


def row_holes(width: int, out: str) -> dict[str, object]:
    """The holes `WIDTH`, `ROW_SIZE` (in bytes for q8a, in elements otherwise) and `PREPARE` of rows.

    Raises:
        ArgumentError: `out` is none of f32, q8a and bf16.
        ShapeError: the width is not a multiple of 32 (of 2 for bf16).
    """
    if out not in _PREPARE:
        raise ArgumentError(f"no activation row is made of {out!r}", hint=f"Rows: {', '.join(_PREPARE)}.")
    part = {"f32": 1, "q8a": 32, "bf16": 2}[out]
    if width % part or width <= 0:
        raise ShapeError(f"a {out} row needs a multiple of {part} elements, found {width}")
    size = q8a_bytes(width) if out == "q8a" else width
    return {"WIDTH": width, "ROW_SIZE": size, "PREPARE": _PREPARE[out]}


def plain(x: Ptr, w: Ptr, b: Ptr, src: int, i: int, factor: Scalar, mean: Scalar) -> Scalar:
    return x[src + i]


def quantize_row(
    x: Ptr, w: Ptr, b: Ptr, out: Ptr, src: int, dst: int, width: int, factor: Scalar, mean: Scalar
) -> None:
    """Writes the q8a row of VALUE(x, w, b, src, 0 .. width - 1, factor, mean) at byte `dst` of out.

    The width is a parameter and not a hole, so that all widths share one lowering. It becomes a literal by inlining.
    """
    scales = dst + width
    sums = scales + (width >> 3)
    for block in range(width >> 5):
        start = block * 32
        top = u32(0)
        for i in range(start, start + 32):
            # Without the sign bit, the bits of floats compare like integers, with NaN as the greatest.
            size = u32(as_bits(VALUE(x, w, b, src, i, factor, mean)) & u32(0x7FFFFFFF))
            top = size if size > top else top
        scale = as_f32(top) / f32(127.0)
        keep = i32(-1) if top < u32(0x7F800000) else i32(0)
        keep = keep if scale != f32(0.0) else i32(0)
        for half in range(2):
            first = start + half * 16
            total = i32(0)
            for i in range(first, first + 16):
                code = round_even(VALUE(x, w, b, src, i, factor, mean) / scale)
                code = i32(127) if code > i32(127) else code  # only where the scale is a subnormal
                code = i32(-127) if code < i32(-127) else code
                code = i32(code & keep)
                out[dst + i] = u8(code)
                total = i32(total + code)
            store_i32(out, sums + (block * 2 + half) * 4, total)
        store_f32(out, scales + block * 4, scale)


def round_row(x: Ptr, w: Ptr, b: Ptr, out: Ptr, src: int, dst: int, width: int, factor: Scalar, mean: Scalar) -> None:
    """Writes the bf16 row of VALUE(x, w, b, src, 0 .. width - 1, factor, mean) at element `dst` of out."""
    for i in range(width):
        out[dst + i] = f32_to_bf16(VALUE(x, w, b, src, i, factor, mean))


def keep_row(x: Ptr, w: Ptr, b: Ptr, out: Ptr, src: int, dst: int, width: int, factor: Scalar, mean: Scalar) -> None:
    """Writes the f32 row of VALUE(x, w, b, src, 0 .. width - 1, factor, mean) at element `dst` of out."""
    for i in range(width):
        out[dst + i] = VALUE(x, w, b, src, i, factor, mean)


def _quantize(x: Ptr, out: Ptr, begin: int, end: int) -> None:
    for row in range(begin, end):
        PREPARE(x, x, x, out, row * WIDTH, row * ROW_SIZE, WIDTH, f32(1.0), f32(0.0))


_PREPARE: dict[str, Helper] = {"f32": keep_row, "q8a": quantize_row, "bf16": round_row}
