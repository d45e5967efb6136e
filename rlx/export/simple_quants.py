"""Encoders of the formats that a formula defines: Q4_0, Q5_0, Q5_1, Q8_0, F16 and BF16, as loop kernels.

Part of the export stage, under `quantizers.py`. The formulas are those of the GGUF registry's reference encoders; a
test compares every bit with the `gguf` package's.
"""

from __future__ import annotations

from rlx.backends.cpu.loops import HOLE, Helper, Ptr, Scalar
from rlx.backends.cpu.scalars import f32, f32_to_bf16, f32_to_f16, i32, store_u16, store_u32, u8, u32

#: Holes: bytes of a block; the code that means 0, half the number of codes; the conversion of one number.
BYTES: int = HOLE
ZERO: int = HOLE
CONVERT: Helper = HOLE

__all__ = [
    "encode_halves", "encode_q4_0", "encode_q5_0", "encode_q5_1", "encode_q8_0", "f32_to_bf16", "f32_to_f16",
]  # fmt: skip

CHUNK = 1024  # numbers a unit of `encode_halves`


def largest(x: Ptr, at: int) -> Scalar:
    """The greatest magnitude of 32 elements."""
    top = f32(0.0)
    for i in range(at, at + 32):
        size = f32(0.0) - x[i] if x[i] < f32(0.0) else x[i]
        top = size if size > top else top
    return top


def first_of_size(x: Ptr, at: int, size: Scalar) -> Scalar:
    """The first of 32 elements with this magnitude, sign and all."""
    found = f32(0.0)
    for i in range(32):
        value = x[at + 31 - i]
        found = value if value == size or value == f32(0.0) - size else found
    return found


def inverse(step: Scalar) -> Scalar:
    """1 / step, or 0 where that is no finite number."""
    inv = f32(1.0) / step if step != f32(0.0) else f32(0.0)
    return inv if inv < f32(3.4e38) and inv > f32(-3.4e38) else f32(0.0)


def floor_code(value: Scalar, top: int) -> Scalar:
    """A positive value without its fraction, at most `top`."""
    code = i32(value)
    return i32(top) if code > i32(top) else code


def encode_q8_0(x: Ptr, out: Ptr, begin: int, end: int) -> None:
    """A unit is a block of 32; codes are rounded to nearest, halves away from zero."""
    for block in range(begin, end):
        at, to = block * 32, block * 34
        step = largest(x, at) / f32(127.0)
        inv = inverse(step)
        store_u16(out, to, f32_to_f16(step))
        for i in range(32):
            scaled = x[at + i] * inv
            size = f32(0.0) - scaled if scaled < f32(0.0) else scaled
            down = i32(size)
            code = down + i32(1) if size - f32(down) >= f32(0.5) else down
            out[to + 2 + i] = u8(i32(0) - code if scaled < f32(0.0) else code)


def symmetric_code(value: Scalar, inv: Scalar) -> Scalar:
    return floor_code(value * inv + f32(ZERO + 0.5), 2 * ZERO - 1)


def encode_q4_0(x: Ptr, out: Ptr, begin: int, end: int) -> None:
    """A unit is a block of 32: the element of largest magnitude gets code 0, byte i the codes of i and i + 16."""
    for block in range(begin, end):
        at, to = block * 32, block * BYTES
        step = first_of_size(x, at, largest(x, at)) / f32(-ZERO)
        inv = inverse(step)
        store_u16(out, to, f32_to_f16(step))
        for i in range(16):
            low, high = symmetric_code(x[at + i], inv), symmetric_code(x[at + 16 + i], inv)
            out[to + 2 + i] = u8(low | (high << i32(4)))


def encode_q5_0(x: Ptr, out: Ptr, begin: int, end: int) -> None:
    """As Q4_0 with a fifth bit of each code in a word before the nibbles."""
    for block in range(begin, end):
        at, to = block * 32, block * BYTES
        step = first_of_size(x, at, largest(x, at)) / f32(-ZERO)
        inv = inverse(step)
        store_u16(out, to, f32_to_f16(step))
        bits = u32(0)
        for i in range(16):
            low, high = symmetric_code(x[at + i], inv), symmetric_code(x[at + 16 + i], inv)
            out[to + 6 + i] = u8((low & i32(15)) | ((high & i32(15)) << i32(4)))
            bits = u32(bits | (u32(low >> i32(4)) << u32(i)) | (u32(high >> i32(4)) << u32(i + 16)))
        store_u32(out, to + 2, bits)


def encode_q5_1(x: Ptr, out: Ptr, begin: int, end: int) -> None:
    """A unit is a block of 32: codes 0 to 31 span its least and its greatest element."""
    for block in range(begin, end):
        at, to = block * 32, block * BYTES
        low, high = x[at], x[at]
        for i in range(at, at + 32):
            low = x[i] if x[i] < low else low
            high = x[i] if x[i] > high else high
        step = (high - low) / f32(31.0)
        inv = inverse(step)
        store_u16(out, to, f32_to_f16(step))
        store_u16(out, to + 2, f32_to_f16(low))
        bits = u32(0)
        for i in range(16):
            a = floor_code((x[at + i] - low) * inv + f32(0.5), 31)
            b = floor_code((x[at + 16 + i] - low) * inv + f32(0.5), 31)
            out[to + 8 + i] = u8((a & i32(15)) | ((b & i32(15)) << i32(4)))
            bits = u32(bits | (u32(a >> i32(4)) << u32(i)) | (u32(b >> i32(4)) << u32(i + 16)))
        store_u32(out, to + 4, bits)


def encode_halves(x: Ptr, out: Ptr, n: int, begin: int, end: int) -> None:
    """F16 and BF16 of n numbers; a unit is `CHUNK` of them."""
    for unit in range(begin, end):
        first = unit * CHUNK
        last = n if n < first + CHUNK else first + CHUNK
        for i in range(first, last):
            out[i] = CONVERT(x[i])
