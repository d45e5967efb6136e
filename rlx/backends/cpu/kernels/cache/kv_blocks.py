"""Writes heads to caches of q8_0 and q4_0: blocks of 32 elements, quantized like the encoders of the GGUF registry.

    q8_0    scale = max|x| / 127, code = x / scale rounded to nearest, halves away from zero
    q4_0    scale = m / -8 with m the first element of largest magnitude, code = floor(x / scale + 8.5), at most 15

x / scale is computed as a product with the f32 inverse, and scales are stored as f16. `attention/cache.py` defines the
layout of the bytes. A block with NaN or infinity reads as all NaN: its scale is that value, and its codes stand for 0.
"""

from __future__ import annotations

from typing import Any

from rlx.errors import ShapeError
from rlx.ir.dtypes import Q4_0, Q8_0, DType
from rlx.scalars import HOLE, Helper, Ptr, Scalar, as_bits, as_f32, f32, f32_to_f16, i32, store_u16, u8, u32

#: Holes: bytes of a block, blocks of a head, positions that are interleaved: 1 in rows, 16 in tiles.
BLOCK_BYTES: int = HOLE
BLOCKS: int = HOLE
TOGETHER: int = HOLE
#: Strides in a q4_0 block, in elements: from one byte to the next, and from the low nibble of a byte to the high one.
LOW_STEP: int = HOLE
HIGH: int = HOLE
#: `ENCODE(x, src, cache, scale, codes, inside)` writes 32 elements.
ENCODE: Helper = HOLE
#: `PLACE(position, ctx)` is the index of a position in a cache of ctx positions.
PLACE: Helper = HOLE

QUANTIZED = (Q8_0, Q4_0)


def block_holes(dtype: DType, head_dim: int, together: int) -> dict[str, Any]:
    """The holes of `put_head` except `PLACE`.

    Raises:
        ShapeError: the block size does not divide the head.
    """
    if head_dim % dtype.block:
        hint = "Choose f16: block types need heads of whole blocks."
        raise ShapeError(f"heads of {head_dim} hold no whole blocks of {dtype}", where="KV cache", hint=hint)
    holes: dict[str, Any] = {"BLOCK_BYTES": dtype.nbytes, "BLOCKS": head_dim // dtype.block, "TOGETHER": together}
    if dtype is Q8_0:
        return holes | {"ENCODE": put_q8_0}
    return holes | {"ENCODE": put_q4_0, "LOW_STEP": 1 if together == 1 else 2, "HIGH": 16 if together == 1 else 1}


def put_head(x: Ptr, src: int, cache: Ptr, head: int, position: int, ctx: int) -> None:
    """Writes the head that starts at element `src` of x to a position of the cache."""
    place: int = PLACE(position, ctx)
    inside = place & (TOGETHER - 1)
    start = (head * ctx + place - inside) * (BLOCKS * BLOCK_BYTES)
    for block in range(BLOCKS):
        at = start + block * (TOGETHER * BLOCK_BYTES)
        ENCODE(x, src + block * 32, cache, at + 2 * inside, at + 2 * TOGETHER, inside)


def magnitude(x: Scalar) -> Scalar:
    """The bits of |x|. They have the same order as the magnitudes, with NaN as the greatest."""
    return u32(as_bits(x) & u32(0x7FFFFFFF))


def largest(x: Ptr, src: int) -> Scalar:
    """The greatest magnitude of 32 elements."""
    top = u32(0)
    for i in range(src, src + 32):
        size = magnitude(x[i])
        top = size if size > top else top
    return top


def first_of(x: Ptr, src: int, top: Scalar) -> Scalar:
    """The first of 32 elements with this magnitude."""
    found = x[src + 31]
    for i in range(31):
        value = x[src + 30 - i]
        found = value if magnitude(value) == top else found
    return found


def inverse(step: Scalar) -> Scalar:
    """1 / step, or 0 if that is not finite. With 0, all codes are those of 0."""
    inv = f32(1.0) / step if step != f32(0.0) else f32(0.0)
    return inv if magnitude(inv) < u32(0x7F800000) else f32(0.0)


def finite_or_zero(x: Scalar) -> Scalar:
    return x if magnitude(x) < u32(0x7F800000) else f32(0.0)


def put_q8_0(x: Ptr, src: int, cache: Ptr, scale: int, codes: int, inside: int) -> None:
    step = as_f32(largest(x, src)) / f32(127.0)
    inv = inverse(step)
    store_u16(cache, scale, f32_to_f16(step))
    for i in range(32):
        value = finite_or_zero(x[src + i] * inv)
        size = as_f32(magnitude(value))
        down = i32(size)
        code = down + i32(1) if size - f32(down) >= f32(0.5) else down
        cache[codes + i * TOGETHER + inside] = u8(i32(0) - code if value < f32(0.0) else code)


def nibble(x: Scalar, inv: Scalar) -> Scalar:
    code = i32(finite_or_zero(x * inv) + f32(8.5))
    return i32(15) if code > i32(15) else code


def put_q4_0(x: Ptr, src: int, cache: Ptr, scale: int, codes: int, inside: int) -> None:
    step = first_of(x, src, largest(x, src)) / f32(-8.0)
    inv = inverse(step)
    store_u16(cache, scale, f32_to_f16(step))
    for i in range(16):
        low = nibble(x[src + i * LOW_STEP], inv)
        high = nibble(x[src + i * LOW_STEP + HIGH], inv)
        cache[codes + (i >> 2) * (4 * TOGETHER) + inside * 4 + (i & 3)] = u8(low | (high << i32(4)))
