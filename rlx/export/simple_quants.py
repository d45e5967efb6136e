"""Encoders of Q4_0, Q5_0, Q5_1, Q8_0, F16 and BF16 as loop kernels: formats whose encoding is a formula.

Export stage, under `quantizers.py`. A block holds 32 elements: a step d (f16), for Q5_1 also the smallest element
(f16), then the codes. The formulas are those of the reference encoders in the package `gguf` (`gguf.quants`); a test
compares every bit with them. docs/formats.md lists the sizes. With an importance matrix the steps of Q4_0, Q5_0 and
Q5_1 are searched for, as those of the K-quants are (`k_quants.py`).

In all functions `x` are the f32 elements, `w` their weights, `at` the index of the first element of a block, `out` the
output (bytes, or u16 for F16 and BF16) and `to` the index of a block's first byte.
"""

from __future__ import annotations

from rlx.scalars import (
    HOLE,
    Helper,
    Ptr,
    Scalar,
    f32,
    f32_to_bf16,
    f32_to_f16,
    i32,
    load_f32,
    store_f32,
    store_u16,
    store_u32,
    u8,
    u32,
)

#: Holes: bytes of a block; the code that stands for 0, which is half the number of codes; the conversion f32 -> u16.
BYTES: int = HOLE
ZERO: int = HOLE
CONVERT: Helper = HOLE
#: The step of a block whose codes are symmetric: `step_of_largest` or a search. The line of one of Q5_1 likewise.
STEP: Helper = HOLE
LINE: Helper = HOLE

__all__ = [
    "encode_halves", "encode_q4_0", "encode_q5_0", "encode_q5_1", "encode_q8_0", "f32_to_bf16", "f32_to_f16",
]  # fmt: skip

CHUNK = 1024  # elements of a unit of `encode_halves`


def largest(x: Ptr, at: int) -> Scalar:
    """The largest magnitude of 32 elements."""
    top = f32(0.0)
    for i in range(at, at + 32):
        size = f32(0.0) - x[i] if x[i] < f32(0.0) else x[i]
        top = size if size > top else top
    return top


def first_of_size(x: Ptr, at: int, size: Scalar) -> Scalar:
    """The first of 32 elements with this magnitude, with its sign; 0 if there is none."""
    found = f32(0.0)
    for i in range(32):
        value = x[at + 31 - i]
        found = value if value == size or value == f32(0.0) - size else found
    return found


def finite_inverse(step: Scalar) -> Scalar:
    """1 / step; 0 if that is not finite."""
    inv = f32(1.0) / step if step != f32(0.0) else f32(0.0)
    return inv if inv < f32(3.4e38) and inv > f32(-3.4e38) else f32(0.0)


def floor_code(value: Scalar, top: int) -> Scalar:
    """A value rounded down, between 0 and `top`, as i32."""
    code = i32(value)
    code = i32(0) if code < i32(0) else code
    return i32(top) if code > i32(top) else code


def step_of_largest(x: Ptr, w: Ptr, at: int) -> Scalar:
    """The step with which the element of largest magnitude has code 0, which stands for -ZERO."""
    return first_of_size(x, at, largest(x, at)) / f32(-ZERO)


def line_of_range(x: Ptr, w: Ptr, at: int, out: Ptr, to: int) -> None:
    """Stores the step that spans 32 elements and minus the smallest of them, as f32 at byte `to`."""
    low, high = x[at], x[at]
    for i in range(at, at + 32):
        low = x[i] if x[i] < low else low
        high = x[i] if x[i] > high else high
    store_f32(out, to, (high - low) / f32(31.0))
    store_f32(out, to + 4, f32(-1.0) * low)


def encode_q8_0(x: Ptr, out: Ptr, begin: int, end: int) -> None:
    """Kernel: x f32 [32 * blocks] -> out u8 [34 * blocks] in Q8_0. A unit is a block.

    d = largest magnitude / 127; codes x / d are rounded to nearest, halves away from zero, and stored as i8.
    """
    for block in range(begin, end):
        at, to = block * 32, block * 34
        step = largest(x, at) / f32(127.0)
        inv = finite_inverse(step)
        store_u16(out, to, f32_to_f16(step))
        for i in range(32):
            scaled = x[at + i] * inv
            size = f32(0.0) - scaled if scaled < f32(0.0) else scaled
            down = i32(size)
            code = down + i32(1) if size - f32(down) >= f32(0.5) else down
            out[to + 2 + i] = u8(i32(0) - code if scaled < f32(0.0) else code)


def symmetric_code(value: Scalar, inv: Scalar) -> Scalar:
    """The code of a value in steps of 1 / inv, from 0 to 2 * ZERO - 1; ZERO stands for 0."""
    return floor_code(value * inv + f32(ZERO + 0.5), 2 * ZERO - 1)


def encode_q4_0(x: Ptr, w: Ptr, out: Ptr, begin: int, end: int) -> None:
    """Kernel: x f32 [32 * blocks] -> out u8 [18 * blocks] in Q4_0. A unit is a block.

    Codes stand for -8 d to 7 d. Byte 2 + i holds the codes of elements i and, in the upper four bits, i + 16.
    """
    for block in range(begin, end):
        at, to = block * 32, block * BYTES
        step = STEP(x, w, at)
        inv = finite_inverse(step)
        store_u16(out, to, f32_to_f16(step))
        for i in range(16):
            low, high = symmetric_code(x[at + i], inv), symmetric_code(x[at + 16 + i], inv)
            out[to + 2 + i] = u8(low | (high << i32(4)))


def encode_q5_0(x: Ptr, w: Ptr, out: Ptr, begin: int, end: int) -> None:
    """Kernel: x f32 [32 * blocks] -> out u8 [22 * blocks] in Q5_0. A unit is a block.

    As Q4_0 with codes of 5 bits: bit i of the u32 at byte 2 is the fifth bit of element i. The other four bits follow
    from byte 6 on.
    """
    for block in range(begin, end):
        at, to = block * 32, block * BYTES
        step = STEP(x, w, at)
        inv = finite_inverse(step)
        store_u16(out, to, f32_to_f16(step))
        bits = u32(0)
        for i in range(16):
            low, high = symmetric_code(x[at + i], inv), symmetric_code(x[at + 16 + i], inv)
            out[to + 6 + i] = u8((low & i32(15)) | ((high & i32(15)) << i32(4)))
            bits = u32(bits | (u32(low >> i32(4)) << u32(i)) | (u32(high >> i32(4)) << u32(i + 16)))
        store_u32(out, to + 2, bits)


def encode_q5_1(x: Ptr, w: Ptr, out: Ptr, begin: int, end: int) -> None:
    """Kernel: x f32 [32 * blocks] -> out u8 [24 * blocks] in Q5_1. A unit is a block.

    x ~ d q + m. Bytes 0 to 3 are d and m, bytes 4 to 7 the fifth bits as in Q5_0, then the other four.
    """
    for block in range(begin, end):
        at, to = block * 32, block * BYTES
        LINE(x, w, at, out, to)
        step, low = load_f32(out, to), f32(-1.0) * load_f32(out, to + 4)
        inv = finite_inverse(step)
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
    """Kernel: x f32 [n] -> out u16 [n], the bits in F16 or BF16. A unit is `CHUNK` elements, the last one the rest."""
    for unit in range(begin, end):
        first = unit * CHUNK
        last = n if n < first + CHUNK else first + CHUNK
        for i in range(first, last):
            out[i] = CONVERT(x[i])
