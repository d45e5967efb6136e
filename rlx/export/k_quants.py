"""Encoders of the 256-element formats Q4_K, Q5_K and Q6_K, as loop kernels: where their scales are searched for.

Part of the export stage, under `quantizers.py`. What is minimized is the sum of squared errors of a superblock.

Q4_K and Q5_K hold x ~ (d * s) * q - (dmin * m) with 6-bit s and m for 32 elements, Q6_K x ~ (d * s) * q with an 8-bit
s for 16. The search has three steps. For each sub-block, codes are tried with several widths of the step; a
least-squares fit of the elements to their codes says how good they are. From the best fits come d and dmin, and each
sub-block takes those of the integers s and m around its fit that lose least. Then, with all codes, s and m held, d and
dmin are solved for over the whole superblock, by least squares; they are taken where that is better, and s and m are
chosen again.

Between the steps a sub-block's numbers stand, as f32, in the part of the output that is written last.
"""

from __future__ import annotations

from rlx.backends.cpu.loops import HOLE, SUM_FLAGS, Helper, Ptr, Scalar, fastmath
from rlx.backends.cpu.scalars import (
    f16_to_f32,
    f32,
    f32_to_f16,
    i32,
    load_f32,
    load_u16,
    round_even,
    store_f32,
    store_u16,
    u8,
    u16,
)

#: Holes: greatest code of a line; bytes of a superblock; how the codes of a line are laid out.
TOP: int = HOLE
BYTES: int = HOLE
WRITE: Helper = HOLE
#: Steps that are tried, in codes more than those that just span the sub-block: how many, the first, their distance.
TRIES: int = HOLE
FIRST: float = HOLE
GAP: float = HOLE
#: How often the superblock's numbers are solved for again.
ROUNDS: int = HOLE

_TINY = 1e-30  # what is smaller counts as 0: its inverse times anything finite stays finite
_NEVER = -3e38


@fastmath(*SUM_FLAGS)
def lowest(x: Ptr, at: int, n: int) -> Scalar:
    """The least element, at most 0."""
    low = f32(0.0)
    for i in range(at, at + n):
        low = x[i] if x[i] < low else low
    return low


@fastmath(*SUM_FLAGS)
def highest(x: Ptr, at: int, n: int) -> Scalar:
    """The greatest element, at least 0."""
    high = f32(0.0)
    for i in range(at, at + n):
        high = x[i] if x[i] > high else high
    return high


@fastmath(*SUM_FLAGS)
def total(x: Ptr, at: int, n: int) -> Scalar:
    acc = f32(0.0)
    for i in range(at, at + n):
        acc += x[i]
    return acc


def inverse(step: Scalar) -> Scalar:
    """1 / step, or 0 where there is no step."""
    return f32(1.0) / step if step > f32(_TINY) or step < f32(-_TINY) else f32(0.0)


def code(value: Scalar, bottom: int, top: int) -> Scalar:
    """The integer next to a value, between two others, as f32."""
    value = f32(top) if value > f32(top) else value
    value = f32(bottom) if value < f32(bottom) else value
    return f32(round_even(value))


def half(value: Scalar) -> Scalar:
    """Half-precision bits, those of 0 for 0 only: next to 0 the sub-blocks' integers make up for what is too much."""
    bits = f32_to_f16(value)
    smallest = u16(0x8001) if value < f32(0.0) else u16(1)
    return smallest if (bits & 0x7FFF) == 0 and value != f32(0.0) else bits


# ------------------------------------------------------------------------------------------------ lines: Q4_K, Q5_K


@fastmath(*SUM_FLAGS)
def fitted_line(x: Ptr, at: int, low: Scalar, inv: Scalar, mean: Scalar, gain: bool) -> Scalar:
    """The step of the line fitted to 32 elements; or, for `gain`, how much of the squares around the mean the line
    explains, which is at most 0 at code 0.
    """
    s_q, s_qq, s_qx = f32(0.0), f32(0.0), f32(0.0)
    for i in range(at, at + 32):
        q = code((x[i] - low) * inv, 0, TOP)
        s_q += q
        s_qq += q * q
        s_qx += q * x[i]
    spread = s_qq - s_q * s_q * f32(1.0 / 32.0)
    common = s_qx - s_q * mean
    free = spread > f32(0.0) and spread * mean <= common * s_q * f32(1.0 / 32.0)
    if gain:
        through_0 = s_qx * s_qx / s_qq - f32(32.0) * mean * mean if s_qq > f32(0.0) else f32(_NEVER)
        return common * common / spread if free else through_0
    return common / spread if free else (s_qx / s_qq if s_qq > f32(0.0) else f32(0.0))


@fastmath(*SUM_FLAGS)
def mean_code(x: Ptr, at: int, low: Scalar, inv: Scalar) -> Scalar:
    acc = f32(0.0)
    for i in range(at, at + 32):
        acc += code((x[i] - low) * inv, 0, TOP)
    return acc * f32(1.0 / 32.0)


def fit_line(x: Ptr, at: int, out: Ptr, to: int) -> None:
    """Stores the step and the subtrahend, neither negative, of the best line found for 32 elements."""
    low = lowest(x, at, 32)
    mean = total(x, at, 32) * f32(1.0 / 32.0)
    unit = inverse(highest(x, at, 32) - low)
    best, inv = f32(_NEVER), f32(0.0)
    for t in range(TRIES):
        trial = (f32(TOP) + f32(FIRST) + f32(GAP) * f32(t)) * unit
        gain = fitted_line(x, at, low, trial, mean, True)
        better = gain > best
        best = gain if better else best
        inv = trial if better else inv
    step = fitted_line(x, at, low, inv, mean, False)
    minus = step * mean_code(x, at, low, inv) - mean
    store_f32(out, to, step if step > f32(0.0) else f32(0.0))
    store_f32(out, to + 4, minus if minus > f32(0.0) else f32(0.0))


@fastmath(*SUM_FLAGS)
def line_error(x: Ptr, at: int, step: Scalar, minus: Scalar) -> Scalar:
    """Squared error of 32 elements on a line, each with its best code."""
    inv = inverse(step)
    acc = f32(0.0)
    for i in range(at, at + 32):
        e = x[i] + minus - step * code((x[i] + minus) * inv, 0, TOP)
        acc += e * e
    return acc


def choose_line(x: Ptr, at: int, out: Ptr, to: int, d: Scalar, dmin: Scalar, s: Scalar, m: Scalar) -> Scalar:
    """Stores the integers next to s and m that lose least, as f32; -> the squared error."""
    best, best_s, best_m = f32(3e38), f32(0.0), f32(0.0)
    for ds in range(-1, 2):
        for dm in range(-1, 2):
            try_s = code(s + f32(ds), 0, 63)
            try_m = code(m + f32(dm), 0, 63)
            error = line_error(x, at, d * try_s, dmin * try_m)
            better = error < best
            best = error if better else best
            best_s = try_s if better else best_s
            best_m = try_m if better else best_m
    store_f32(out, to, best_s)
    store_f32(out, to + 4, best_m)
    return best


def choose_lines(x: Ptr, at: int, out: Ptr, to: int, unit_s: Scalar, unit_m: Scalar) -> Scalar:
    """Integers for all sub-blocks next to what is stored, in these units; -> the squared error of all."""
    d, dmin = f16_to_f32(load_u16(out, to)), f16_to_f32(load_u16(out, to + 2))
    error = f32(0.0)
    for j in range(8):
        place = to + 16 + j * 8
        s, m = load_f32(out, place) * unit_s, load_f32(out, place + 4) * unit_m
        error += choose_line(x, at + j * 32, out, place, d, dmin, s, m)
    return error


@fastmath(*SUM_FLAGS)
def line_sum(x: Ptr, at: int, step: Scalar, minus: Scalar, f: Scalar, g: Scalar, h: Scalar) -> Scalar:
    """Sum of q (f q + g x + h) over 32 elements with codes q."""
    inv = inverse(step)
    acc = f32(0.0)
    for i in range(at, at + 32):
        q = code((x[i] + minus) * inv, 0, TOP)
        acc += q * (f * q + g * x[i] + h)
    return acc


def solve_lines(x: Ptr, at: int, out: Ptr, to: int, error: Scalar) -> None:
    """Replaces d and dmin by the least-squares ones for the codes, s and m that stand, if that makes a smaller error.

    With u = s q and v = m for each element, the sum of (x - d u + dmin v)^2 has its minimum where
    d uu - dmin uv = ux and d uv - dmin vv = vx.
    """
    d, dmin = f16_to_f32(load_u16(out, to)), f16_to_f32(load_u16(out, to + 2))
    zero, one = f32(0.0), f32(1.0)
    uu, uv, vv, ux, vx = zero, zero, zero, zero, zero
    for j in range(8):
        first = at + j * 32
        s, m = load_f32(out, to + 16 + j * 8), load_f32(out, to + 20 + j * 8)
        uu += s * s * line_sum(x, first, d * s, dmin * m, one, zero, zero)
        uv += s * m * line_sum(x, first, d * s, dmin * m, zero, zero, one)
        ux += s * line_sum(x, first, d * s, dmin * m, zero, one, zero)
        vv += m * m * f32(32.0)
        vx += m * total(x, first, 32)
    det = uu * vv - uv * uv
    if det > uu * vv * f32(1e-4):
        new, newmin = half((ux * vv - vx * uv) / det), half((ux * uv - vx * uu) / det)
        if new < 0x8000 and newmin < 0x8000 and held_error(x, at, out, to, f16_to_f32(new), f16_to_f32(newmin)) < error:
            store_u16(out, to, new)
            store_u16(out, to + 2, newmin)


def held_error(x: Ptr, at: int, out: Ptr, to: int, d: Scalar, dmin: Scalar) -> Scalar:
    """Squared error of a superblock with the s and m that stand."""
    error = f32(0.0)
    for j in range(8):
        s, m = load_f32(out, to + 16 + j * 8), load_f32(out, to + 20 + j * 8)
        error += line_error(x, at + j * 32, d * s, dmin * m)
    return error


def encode_lines(x: Ptr, out: Ptr, begin: int, end: int) -> None:
    """The kernel of Q4_K and Q5_K; a unit is a superblock."""
    for block in range(begin, end):
        at, to = block * 256, block * BYTES
        most_s, most_m = f32(0.0), f32(0.0)
        for j in range(8):
            fit_line(x, at + j * 32, out, to + 16 + j * 8)
            s, m = load_f32(out, to + 16 + j * 8), load_f32(out, to + 20 + j * 8)
            most_s = s if s > most_s else most_s
            most_m = m if m > most_m else most_m
        store_u16(out, to, half(most_s * f32(1.0 / 63.0)))
        store_u16(out, to + 2, half(most_m * f32(1.0 / 63.0)))
        unit_s, unit_m = inverse(f16_to_f32(load_u16(out, to))), inverse(f16_to_f32(load_u16(out, to + 2)))
        error = choose_lines(x, at, out, to, unit_s, unit_m)
        for _ in range(ROUNDS):
            solve_lines(x, at, out, to, error)
            error = choose_lines(x, at, out, to, f32(1.0), f32(1.0))
        write_integers(out, to)
        WRITE(x, at, out, to)


def integer(out: Ptr, at: int) -> Scalar:
    return i32(load_f32(out, at))


def write_integers(out: Ptr, to: int) -> None:
    """Eight s and eight m of 6 bits in bytes 4 to 15; `rlx.backends.cpu.blocks` says how."""
    for j in range(4):
        s, m = integer(out, to + 16 + j * 8), integer(out, to + 20 + j * 8)
        s4, m4 = integer(out, to + 48 + j * 8), integer(out, to + 52 + j * 8)
        out[to + 4 + j] = u8(s | ((s4 >> i32(4)) << i32(6)))
        out[to + 8 + j] = u8(m | ((m4 >> i32(4)) << i32(6)))
        out[to + 12 + j] = u8((s4 & i32(15)) | ((m4 & i32(15)) << i32(4)))


def step_of(out: Ptr, to: int, j: int) -> Scalar:
    """d * s of a sub-block, from what is written."""
    low = i32(out[to + 4 + j]) & i32(63)
    high = (i32(out[to + 8 + j]) & i32(15)) | ((i32(out[to + j]) >> i32(6)) << i32(4))
    return f16_to_f32(load_u16(out, to)) * f32(low if j < 4 else high)


def minus_of(out: Ptr, to: int, j: int) -> Scalar:
    """dmin * m of a sub-block, from what is written."""
    low = i32(out[to + 8 + j if j < 4 else to]) & i32(63)
    high = (i32(out[to + 8 + j]) >> i32(4)) | ((i32(out[to + 4 + j]) >> i32(6)) << i32(4))
    return f16_to_f32(load_u16(out, to + 2)) * f32(low if j < 4 else high)


def write_q4_k(x: Ptr, at: int, out: Ptr, to: int) -> None:
    """Codes of two sub-blocks in the nibbles of 32 bytes."""
    for pair in range(4):
        a, b = at + pair * 64, at + pair * 64 + 32
        minus_a, minus_b = minus_of(out, to, pair * 2), minus_of(out, to, pair * 2 + 1)
        inv_a, inv_b = inverse(step_of(out, to, pair * 2)), inverse(step_of(out, to, pair * 2 + 1))
        for i in range(32):
            low = i32(code((x[a + i] + minus_a) * inv_a, 0, 15))
            high = i32(code((x[b + i] + minus_b) * inv_b, 0, 15))
            out[to + 16 + pair * 32 + i] = u8(low | (high << i32(4)))


def write_q5_k(x: Ptr, at: int, out: Ptr, to: int) -> None:
    """Codes as in Q4_K from byte 48 on, their fifth bits in bytes 16 to 47: one sub-block a bit."""
    for i in range(32):
        out[to + 16 + i] = u8(0)
    for pair in range(4):
        a, b = at + pair * 64, at + pair * 64 + 32
        minus_a, minus_b = minus_of(out, to, pair * 2), minus_of(out, to, pair * 2 + 1)
        inv_a, inv_b = inverse(step_of(out, to, pair * 2)), inverse(step_of(out, to, pair * 2 + 1))
        for i in range(32):
            low = i32(code((x[a + i] + minus_a) * inv_a, 0, 31))
            high = i32(code((x[b + i] + minus_b) * inv_b, 0, 31))
            out[to + 48 + pair * 32 + i] = u8((low & i32(15)) | ((high & i32(15)) << i32(4)))
            bits = (low >> i32(4)) | ((high >> i32(4)) << i32(1))
            out[to + 16 + i] = u8(i32(out[to + 16 + i]) | (bits << i32(2 * pair)))


# ------------------------------------------------------------------------------------------------ scales: Q6_K


@fastmath(*SUM_FLAGS)
def fitted_scale(x: Ptr, at: int, inv: Scalar, gain: bool) -> Scalar:
    """The scale fitted to 16 elements; or, for `gain`, how much of their squares it explains."""
    s_qq, s_qx = f32(0.0), f32(0.0)
    for i in range(at, at + 16):
        q = code(x[i] * inv, -32, 31)
        s_qq += q * q
        s_qx += q * x[i]
    if gain:
        return s_qx * s_qx / s_qq if s_qq > f32(0.0) else f32(_NEVER)
    return s_qx / s_qq if s_qq > f32(0.0) else f32(0.0)


def best_scale(x: Ptr, at: int) -> Scalar:
    """The best scale found for 16 elements, with the sign that gives the largest of them a negative code."""
    low, high = lowest(x, at, 16), highest(x, at, 16)
    unit = inverse(f32(0.0) - (high if high > f32(0.0) - low else low))
    best, inv = f32(_NEVER), f32(0.0)
    for t in range(TRIES):
        trial = (f32(32.0) + f32(FIRST) + f32(GAP) * f32(t)) * unit
        gain = fitted_scale(x, at, trial, True)
        better = gain > best
        best = gain if better else best
        inv = trial if better else inv
    return fitted_scale(x, at, inv, False)


@fastmath(*SUM_FLAGS)
def scale_error(x: Ptr, at: int, step: Scalar) -> Scalar:
    """Squared error of 16 elements, each with its best code."""
    inv = inverse(step)
    acc = f32(0.0)
    for i in range(at, at + 16):
        e = x[i] - step * code(x[i] * inv, -32, 31)
        acc += e * e
    return acc


def choose_scales(x: Ptr, at: int, out: Ptr, to: int, unit: Scalar) -> Scalar:
    """Replaces each stored scale by the integer next to it, in this unit, that loses least; -> squared error of all."""
    d = f16_to_f32(load_u16(out, to + 208))
    total_error = f32(0.0)
    for j in range(16):
        s = load_f32(out, to + j * 4) * unit
        best, best_s = f32(3e38), f32(0.0)
        for ds in range(-1, 2):
            try_s = code(s + f32(ds), -128, 127)
            error = scale_error(x, at + j * 16, d * try_s)
            better = error < best
            best = error if better else best
            best_s = try_s if better else best_s
        store_f32(out, to + j * 4, best_s)
        total_error += best
    return total_error


@fastmath(*SUM_FLAGS)
def scale_sum(x: Ptr, at: int, step: Scalar, f: Scalar, g: Scalar) -> Scalar:
    """Sum of q (f q + g x) over 16 elements with codes q."""
    inv = inverse(step)
    acc = f32(0.0)
    for i in range(at, at + 16):
        q = code(x[i] * inv, -32, 31)
        acc += q * (f * q + g * x[i])
    return acc


def solve_scale(x: Ptr, at: int, out: Ptr, to: int, error: Scalar) -> None:
    """Replaces d by the least-squares one for the codes and s that stand, if that makes a smaller error."""
    d = f16_to_f32(load_u16(out, to + 208))
    uu, ux = f32(0.0), f32(0.0)
    for j in range(16):
        s = load_f32(out, to + j * 4)
        uu += s * s * scale_sum(x, at + j * 16, d * s, f32(1.0), f32(0.0))
        ux += s * scale_sum(x, at + j * 16, d * s, f32(0.0), f32(1.0))
    new = half(ux / uu if uu > f32(0.0) else d)
    after = f32(0.0)
    for j in range(16):
        after += scale_error(x, at + j * 16, f16_to_f32(new) * load_f32(out, to + j * 4))
    store_u16(out, to + 208, new if after < error else load_u16(out, to + 208))


def encode_q6_k(x: Ptr, out: Ptr, begin: int, end: int) -> None:
    """The kernel of Q6_K; a unit is a superblock."""
    for block in range(begin, end):
        at, to = block * 256, block * BYTES
        most = f32(0.0)
        for j in range(16):
            s = best_scale(x, at + j * 16)
            most = s if s * s > most * most else most
            store_f32(out, to + j * 4, s)
        store_u16(out, to + 208, half(most * f32(-1.0 / 128.0)))
        error = choose_scales(x, at, out, to, inverse(f16_to_f32(load_u16(out, to + 208))))
        for _ in range(ROUNDS):
            solve_scale(x, at, out, to, error)
            error = choose_scales(x, at, out, to, f32(1.0))
        for j in range(16):
            out[to + 192 + j] = u8(integer(out, to + j * 4))
        for part in range(2):
            write_q6_k(x, at + part * 128, out, to, part)


def scale_of(out: Ptr, to: int, j: int) -> Scalar:
    """d * s of a sub-block, from what is written."""
    s = i32(out[to + 192 + j])
    return f16_to_f32(load_u16(out, to + 208)) * f32(s - i32(256) if s > i32(127) else s)


def write_q6_k(x: Ptr, at: int, out: Ptr, to: int, part: int) -> None:
    """128 elements, a quarter of them each: nibbles of a and c, of b and d, then two bits of all four in a byte."""
    for side in range(2):
        first, j = at + side * 16, part * 8 + side
        inv_a, inv_b = inverse(scale_of(out, to, j)), inverse(scale_of(out, to, j + 2))
        inv_c, inv_d = inverse(scale_of(out, to, j + 4)), inverse(scale_of(out, to, j + 6))
        low, high = to + part * 64 + side * 16, to + 128 + part * 32 + side * 16
        for i in range(16):
            a = i32(code(x[first + i] * inv_a, -32, 31)) + i32(32)
            b = i32(code(x[first + i + 32] * inv_b, -32, 31)) + i32(32)
            c = i32(code(x[first + i + 64] * inv_c, -32, 31)) + i32(32)
            d = i32(code(x[first + i + 96] * inv_d, -32, 31)) + i32(32)
            out[low + i] = u8((a & i32(15)) | ((c & i32(15)) << i32(4)))
            out[low + 32 + i] = u8((b & i32(15)) | ((d & i32(15)) << i32(4)))
            ab = (a >> i32(4)) | ((b >> i32(4)) << i32(2))
            cd = ((c >> i32(4)) << i32(4)) | ((d >> i32(4)) << i32(6))
            out[high + i] = u8(ab | cd)
