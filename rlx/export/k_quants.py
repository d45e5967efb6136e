"""Encoders of Q4_K, Q5_K and Q6_K as loop kernels: f32 elements -> superblocks of 256, with a search for the scales.

Export stage, under `quantizers.py`. The formats are those of GGUF's K-quants; the package `gguf` (`gguf.quants`)
decodes them independently, and tests compare with it. docs/formats.md lists the sizes.

A superblock holds, for each element, a code q:

    Q4_K, Q5_K   x ~ (d * s) * q - (dmin * m)   q of 4 or 5 bits; s and m of 6 bits for each sub-block of 32
    Q6_K         x ~ (d * s) * q                q of -32 .. 31; s of 8 bits, signed, for each sub-block of 16

d and dmin are f16, one each per superblock. The encoder minimizes the sum of squared errors of a superblock:

1. For each sub-block it tries several step widths. Each gives codes; a least-squares fit of the elements to their
   codes tells how good they are. The best fit gives the step d * s and the subtrahend dmin * m, as real numbers.
2. The largest of them give d and dmin. Each sub-block then takes, of the integers s and m next to its fit, those with
   the smallest error.
3. With codes, s and m fixed, d and dmin are solved for by least squares over the superblock. They are taken if they
   make the error smaller, and step 2 is repeated.

With an importance matrix each squared error counts as much as the element's column says, its weight w; without one
every w is 1.

Between the steps the f32 numbers of the sub-blocks are kept in the part of the output that is written last.

In all functions `x` are the f32 elements, `w` their f32 weights (not read without an importance matrix), `at` the index
of the first one that is meant, `out` the bytes of the output and `to` the index of the first byte of the superblock.
"""

from __future__ import annotations

from rlx.scalars import (
    HOLE,
    SUM_FLAGS,
    Helper,
    Ptr,
    Scalar,
    f16_to_f32,
    f32,
    f32_to_f16,
    fastmath,
    i32,
    load_f32,
    load_u16,
    round_even,
    store_f32,
    store_u16,
    u8,
    u16,
)

#: Holes: the largest code of Q4_K or Q5_K; bytes of a superblock; the function that writes the codes.
TOP: int = HOLE
BYTES: int = HOLE
WRITE: Helper = HOLE
#: The weight of an element: `unweighted` or `weighted`.
WEIGHT: Helper = HOLE
#: Whether the subtrahend of a line may be negative. Of scales: the elements that have one, and the code that is 0.
SIGNED: bool = HOLE
GROUP: int = HOLE
ZERO: int = HOLE
#: The step widths that are tried: how many, then the first one and their distance. They are counted in codes beyond the
#: number that spans the sub-block exactly: -1 tries a step that is wider by one part in TOP.
TRIES: int = HOLE
FIRST: float = HOLE
GAP: float = HOLE
#: How often d and dmin are solved for again (step 3).
ROUNDS: int = HOLE

_TINY = 1e-30  # smaller steps count as 0: products with their inverses would overflow
_NEVER = -3e38


def unweighted(w: Ptr, i: int) -> Scalar:
    """The weight of every element without an importance matrix."""
    return f32(1.0)


def weighted(w: Ptr, i: int) -> Scalar:
    """The weight of an element."""
    return w[i]


@fastmath(*SUM_FLAGS)
def lowest(x: Ptr, at: int, n: int) -> Scalar:
    """The smallest of n elements; 0 if all are positive, unless lines may have a negative subtrahend."""
    low = x[at] if SIGNED else f32(0.0)
    for i in range(at, at + n):
        low = x[i] if x[i] < low else low
    return low


@fastmath(*SUM_FLAGS)
def highest(x: Ptr, at: int, n: int) -> Scalar:
    """The largest of n elements; 0 if all are negative, with the same exception."""
    high = x[at] if SIGNED else f32(0.0)
    for i in range(at, at + n):
        high = x[i] if x[i] > high else high
    return high


@fastmath(*SUM_FLAGS)
def total(x: Ptr, w: Ptr, at: int, n: int) -> Scalar:
    """The weighted sum of n elements."""
    acc = f32(0.0)
    for i in range(at, at + n):
        acc += WEIGHT(w, i) * x[i]
    return acc


@fastmath(*SUM_FLAGS)
def weight_of(w: Ptr, at: int, n: int) -> Scalar:
    """The sum of the weights of n elements."""
    acc = f32(0.0)
    for i in range(at, at + n):
        acc += WEIGHT(w, i)
    return acc


def inverse(step: Scalar) -> Scalar:
    """1 / step; 0 for a step that counts as 0."""
    return f32(1.0) / step if step > f32(_TINY) or step < f32(-_TINY) else f32(0.0)


def code(value: Scalar, bottom: int, top: int) -> Scalar:
    """The integer nearest to a value, clamped to bottom .. top, as f32."""
    value = f32(top) if value > f32(top) else value
    value = f32(bottom) if value < f32(bottom) else value
    return f32(round_even(value))


def half(value: Scalar) -> Scalar:
    """The bits of a value as f16. A value other than 0 that f16 would round to 0 becomes the smallest f16 of its sign.

    As a d or dmin of 0 it would erase the superblock; the integers s and m make up for a factor that is too large.
    """
    bits = f32_to_f16(value)
    smallest = u16(0x8001) if value < f32(0.0) else u16(1)
    return smallest if (bits & 0x7FFF) == 0 and value != f32(0.0) else bits


# ------------------------------------------------------------------------------------------------ lines: Q4_K, Q5_K


@fastmath(*SUM_FLAGS)
def fitted_line(x: Ptr, w: Ptr, at: int, low: Scalar, inv: Scalar, mean: Scalar, whole: Scalar, gain: bool) -> Scalar:
    """Fits the line x ~ step * q - minus to 32 elements by least squares. Their codes are those of the step 1 / inv
    from `low` on.

    Args:
        low: the value with code 0.
        mean, whole: the mean of the elements, and the sum of their weights.
        gain: whether to return the sum of squares that the line explains, minus whole * mean^2, instead of the step. A
            line with minus < 0 is replaced by the best one through 0, unless minus may be negative.
    """
    s_q, s_qq, s_qx = f32(0.0), f32(0.0), f32(0.0)
    for i in range(at, at + 32):
        q = code((x[i] - low) * inv, 0, TOP)
        wq = WEIGHT(w, i) * q
        s_q += wq
        s_qq += wq * q
        s_qx += wq * x[i]
    spread = s_qq - s_q * s_q / whole
    common = s_qx - s_q * mean
    free = spread > f32(0.0) and (SIGNED or spread * mean <= common * s_q / whole)
    if gain:
        through_0 = s_qx * s_qx / s_qq - whole * mean * mean if s_qq > f32(0.0) else f32(_NEVER)
        return common * common / spread if free else through_0
    return common / spread if free else (s_qx / s_qq if s_qq > f32(0.0) else f32(0.0))


@fastmath(*SUM_FLAGS)
def mean_code(x: Ptr, w: Ptr, at: int, low: Scalar, inv: Scalar, whole: Scalar) -> Scalar:
    """The mean of the codes of 32 elements, as in `fitted_line`."""
    acc = f32(0.0)
    for i in range(at, at + 32):
        acc += WEIGHT(w, i) * code((x[i] - low) * inv, 0, TOP)
    return acc / whole


def fit_line(x: Ptr, w: Ptr, at: int, out: Ptr, to: int) -> None:
    """Finds the best line for 32 elements (step 1). Stores its step >= 0 and its subtrahend as f32 at byte `to`."""
    low = lowest(x, at, 32)
    whole = weight_of(w, at, 32)
    mean = total(x, w, at, 32) / whole
    unit = inverse(highest(x, at, 32) - low)
    best, inv = f32(_NEVER), f32(0.0)
    for t in range(TRIES):
        trial = (f32(TOP) + f32(FIRST) + f32(GAP) * f32(t)) * unit
        gain = fitted_line(x, w, at, low, trial, mean, whole, True)
        better = gain > best
        best = gain if better else best
        inv = trial if better else inv
    step = fitted_line(x, w, at, low, inv, mean, whole, False)
    minus = step * mean_code(x, w, at, low, inv, whole) - mean
    store_f32(out, to, step if step > f32(0.0) else f32(0.0))
    store_f32(out, to + 4, minus if SIGNED or minus > f32(0.0) else f32(0.0))


@fastmath(*SUM_FLAGS)
def line_error(x: Ptr, w: Ptr, at: int, step: Scalar, minus: Scalar) -> Scalar:
    """The squared error of 32 elements as step * q - minus, each with its best code q."""
    inv = inverse(step)
    acc = f32(0.0)
    for i in range(at, at + 32):
        e = x[i] + minus - step * code((x[i] + minus) * inv, 0, TOP)
        acc += WEIGHT(w, i) * e * e
    return acc


def choose_line(x: Ptr, w: Ptr, at: int, out: Ptr, to: int, d: Scalar, dmin: Scalar, s: Scalar, m: Scalar) -> Scalar:
    """Of the integers next to s and m, takes the pair with the smallest squared error (step 2), and returns that error.

    The pair is stored as two f32 at byte `to`.
    """
    best, best_s, best_m = f32(3e38), f32(0.0), f32(0.0)
    for ds in range(-1, 2):
        for dm in range(-1, 2):
            try_s = code(s + f32(ds), 0, 63)
            try_m = code(m + f32(dm), 0, 63)
            error = line_error(x, w, at, d * try_s, dmin * try_m)
            better = error < best
            best = error if better else best
            best_s = try_s if better else best_s
            best_m = try_m if better else best_m
    store_f32(out, to, best_s)
    store_f32(out, to + 4, best_m)
    return best


def choose_lines(x: Ptr, w: Ptr, at: int, out: Ptr, to: int, unit_s: Scalar, unit_m: Scalar) -> Scalar:
    """`choose_line` for the 8 sub-blocks of a superblock. Returns the sum of their squared errors.

    Args:
        unit_s, unit_m: factors that turn the stored numbers into s and m: 1 / d and 1 / dmin for steps and subtrahends,
            1 for integers.
    """
    d, dmin = f16_to_f32(load_u16(out, to)), f16_to_f32(load_u16(out, to + 2))
    error = f32(0.0)
    for j in range(8):
        place = to + 16 + j * 8
        s, m = load_f32(out, place) * unit_s, load_f32(out, place + 4) * unit_m
        error += choose_line(x, w, at + j * 32, out, place, d, dmin, s, m)
    return error


@fastmath(*SUM_FLAGS)
def line_sum(x: Ptr, w: Ptr, at: int, step: Scalar, minus: Scalar, f: Scalar, g: Scalar, h: Scalar) -> Scalar:
    """The sum of q (f q + g x + h) over 32 elements with codes q: the sums that `solve_lines` needs, one at a time."""
    inv = inverse(step)
    acc = f32(0.0)
    for i in range(at, at + 32):
        q = code((x[i] + minus) * inv, 0, TOP)
        acc += WEIGHT(w, i) * q * (f * q + g * x[i] + h)
    return acc


def solve_lines(x: Ptr, w: Ptr, at: int, out: Ptr, to: int, error: Scalar) -> None:
    """Solves for d and dmin with codes, s and m fixed (step 3), and stores them if they make the error smaller.

    With u = s q and v = m for each element, and uv for the sum of u v over the superblock, the sum of
    (x - d u + dmin v)^2 is smallest where d uu - dmin uv = ux and d uv - dmin vv = vx.

    Args:
        error: the squared error of the stored numbers.
    """
    d, dmin = f16_to_f32(load_u16(out, to)), f16_to_f32(load_u16(out, to + 2))
    zero, one = f32(0.0), f32(1.0)
    uu, uv, vv, ux, vx = zero, zero, zero, zero, zero
    for j in range(8):
        first = at + j * 32
        s, m = load_f32(out, to + 16 + j * 8), load_f32(out, to + 20 + j * 8)
        uu += s * s * line_sum(x, w, first, d * s, dmin * m, one, zero, zero)
        uv += s * m * line_sum(x, w, first, d * s, dmin * m, zero, zero, one)
        ux += s * line_sum(x, w, first, d * s, dmin * m, zero, one, zero)
        vv += m * m * weight_of(w, first, 32)
        vx += m * total(x, w, first, 32)
    det = uu * vv - uv * uv
    if det > uu * vv * f32(1e-4):
        new, newmin = half((ux * vv - vx * uv) / det), half((ux * uv - vx * uu) / det)
        if new < 0x8000 and newmin < 0x8000:
            better = held_error(x, w, at, out, to, f16_to_f32(new), f16_to_f32(newmin)) < error
            store_u16(out, to, new if better else load_u16(out, to))
            store_u16(out, to + 2, newmin if better else load_u16(out, to + 2))


def held_error(x: Ptr, w: Ptr, at: int, out: Ptr, to: int, d: Scalar, dmin: Scalar) -> Scalar:
    """The squared error of a superblock with the stored s and m, and these d and dmin."""
    error = f32(0.0)
    for j in range(8):
        s, m = load_f32(out, to + 16 + j * 8), load_f32(out, to + 20 + j * 8)
        error += line_error(x, w, at + j * 32, d * s, dmin * m)
    return error


def encode_lines(x: Ptr, w: Ptr, out: Ptr, begin: int, end: int) -> None:
    """Kernel: x f32 [256 * superblocks] -> out u8 [BYTES * superblocks] in Q4_K or Q5_K. A unit is a superblock."""
    for block in range(begin, end):
        at, to = block * 256, block * BYTES
        most_s, most_m = f32(0.0), f32(0.0)
        for j in range(8):
            fit_line(x, w, at + j * 32, out, to + 16 + j * 8)
            s, m = load_f32(out, to + 16 + j * 8), load_f32(out, to + 20 + j * 8)
            most_s = s if s > most_s else most_s
            most_m = m if m > most_m else most_m
        store_u16(out, to, half(most_s * f32(1.0 / 63.0)))
        store_u16(out, to + 2, half(most_m * f32(1.0 / 63.0)))
        unit_s, unit_m = inverse(f16_to_f32(load_u16(out, to))), inverse(f16_to_f32(load_u16(out, to + 2)))
        error = choose_lines(x, w, at, out, to, unit_s, unit_m)
        for _ in range(ROUNDS):
            solve_lines(x, w, at, out, to, error)
            error = choose_lines(x, w, at, out, to, f32(1.0), f32(1.0))
        write_integers(out, to)
        WRITE(x, at, out, to)


def integer(out: Ptr, at: int) -> Scalar:
    """The whole number that is stored as f32 at byte `at`, as i32."""
    return i32(load_f32(out, at))


def write_integers(out: Ptr, to: int) -> None:
    """Packs the eight s and eight m, 6 bits each, into bytes 4 to 15 of a superblock of Q4_K or Q5_K.

    Bytes 4 to 7 hold s of sub-blocks 0 to 3 and, in the upper two bits, the upper two bits of s of sub-blocks 4 to 7.
    Bytes 8 to 11 hold m in the same way. Bytes 12 to 15 hold the lower four bits of s and of m of sub-blocks 4 to 7.
    """
    for j in range(4):
        s, m = integer(out, to + 16 + j * 8), integer(out, to + 20 + j * 8)
        s4, m4 = integer(out, to + 48 + j * 8), integer(out, to + 52 + j * 8)
        out[to + 4 + j] = u8(s | ((s4 >> i32(4)) << i32(6)))
        out[to + 8 + j] = u8(m | ((m4 >> i32(4)) << i32(6)))
        out[to + 12 + j] = u8((s4 & i32(15)) | ((m4 & i32(15)) << i32(4)))


def step_of(out: Ptr, to: int, j: int) -> Scalar:
    """d * s of sub-block j of Q4_K or Q5_K, decoded from the written bytes: codes must fit what a reader sees."""
    low = i32(out[to + 4 + j]) & i32(63)
    high = (i32(out[to + 8 + j]) & i32(15)) | ((i32(out[to + j]) >> i32(6)) << i32(4))
    return f16_to_f32(load_u16(out, to)) * f32(low if j < 4 else high)


def minus_of(out: Ptr, to: int, j: int) -> Scalar:
    """dmin * m of sub-block j of Q4_K or Q5_K, decoded from the written bytes."""
    low = i32(out[to + 8 + j if j < 4 else to]) & i32(63)
    high = (i32(out[to + 8 + j]) >> i32(4)) | ((i32(out[to + 4 + j]) >> i32(6)) << i32(4))
    return f16_to_f32(load_u16(out, to + 2)) * f32(low if j < 4 else high)


def write_q4_k(x: Ptr, at: int, out: Ptr, to: int) -> None:
    """Writes the 256 codes of a superblock of Q4_K from byte 16 on: 32 bytes for each pair of sub-blocks, the first
    one's codes in the lower four bits.
    """
    for pair in range(4):
        a, b = at + pair * 64, at + pair * 64 + 32
        minus_a, minus_b = minus_of(out, to, pair * 2), minus_of(out, to, pair * 2 + 1)
        inv_a, inv_b = inverse(step_of(out, to, pair * 2)), inverse(step_of(out, to, pair * 2 + 1))
        for i in range(32):
            low = i32(code((x[a + i] + minus_a) * inv_a, 0, 15))
            high = i32(code((x[b + i] + minus_b) * inv_b, 0, 15))
            out[to + 16 + pair * 32 + i] = u8(low | (high << i32(4)))


def write_q5_k(x: Ptr, at: int, out: Ptr, to: int) -> None:
    """Writes the 256 codes of a superblock of Q5_K: the lower four bits from byte 48 on, as in Q4_K. Bit j of byte
    16 + i is the fifth bit of element i of sub-block j.
    """
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
def fitted_scale(x: Ptr, w: Ptr, at: int, inv: Scalar, gain: bool) -> Scalar:
    """Fits x ~ scale * q to GROUP elements by least squares. Their codes are those of the scale 1 / inv.

    Args:
        gain: whether to return the sum of squares that the fit explains instead of the scale.
    """
    s_qq, s_qx = f32(0.0), f32(0.0)
    for i in range(at, at + GROUP):
        q = code(x[i] * inv, -ZERO, ZERO - 1)
        wq = WEIGHT(w, i) * q
        s_qq += wq * q
        s_qx += wq * x[i]
    if gain:
        return s_qx * s_qx / s_qq if s_qq > f32(0.0) else f32(_NEVER)
    return s_qx / s_qq if s_qq > f32(0.0) else f32(0.0)


def best_scale(x: Ptr, w: Ptr, at: int) -> Scalar:
    """The best scale for GROUP elements (step 1). Its sign gives the element of largest magnitude a negative code,
    because codes reach from -ZERO to ZERO - 1.
    """
    low, high = lowest(x, at, GROUP), highest(x, at, GROUP)
    unit = inverse(f32(0.0) - (high if high > f32(0.0) - low else low))
    best, inv = f32(_NEVER), f32(0.0)
    for t in range(TRIES):
        trial = (f32(ZERO) + f32(FIRST) + f32(GAP) * f32(t)) * unit
        gain = fitted_scale(x, w, at, trial, True)
        better = gain > best
        best = gain if better else best
        inv = trial if better else inv
    return fitted_scale(x, w, at, inv, False)


@fastmath(*SUM_FLAGS)
def scale_error(x: Ptr, w: Ptr, at: int, step: Scalar) -> Scalar:
    """The squared error of 16 elements as step * q, each with its best code q."""
    inv = inverse(step)
    acc = f32(0.0)
    for i in range(at, at + 16):
        e = x[i] - step * code(x[i] * inv, -32, 31)
        acc += WEIGHT(w, i) * e * e
    return acc


def choose_scales(x: Ptr, w: Ptr, at: int, out: Ptr, to: int, unit: Scalar) -> Scalar:
    """Of the integers next to each of the 16 stored scales takes the one with the smallest squared error (step 2).

    Returns the sum of the errors. The integers are stored as f32 in place of the scales.

    Args:
        unit: factor that turns the stored numbers into s: 1 / d for scales, 1 for integers.
    """
    d = f16_to_f32(load_u16(out, to + 208))
    total_error = f32(0.0)
    for j in range(16):
        s = load_f32(out, to + j * 4) * unit
        best, best_s = f32(3e38), f32(0.0)
        for ds in range(-1, 2):
            try_s = code(s + f32(ds), -128, 127)
            error = scale_error(x, w, at + j * 16, d * try_s)
            better = error < best
            best = error if better else best
            best_s = try_s if better else best_s
        store_f32(out, to + j * 4, best_s)
        total_error += best
    return total_error


@fastmath(*SUM_FLAGS)
def scale_sum(x: Ptr, w: Ptr, at: int, step: Scalar, f: Scalar, g: Scalar) -> Scalar:
    """The sum of q (f q + g x) over 16 elements with codes q: the sums that `solve_scale` needs, one at a time."""
    inv = inverse(step)
    acc = f32(0.0)
    for i in range(at, at + 16):
        q = code(x[i] * inv, -32, 31)
        acc += WEIGHT(w, i) * q * (f * q + g * x[i])
    return acc


def solve_scale(x: Ptr, w: Ptr, at: int, out: Ptr, to: int, error: Scalar) -> None:
    """Solves for d with codes and s fixed (step 3), and stores it if it makes the error smaller.

    Args:
        error: the squared error of the stored numbers.
    """
    d = f16_to_f32(load_u16(out, to + 208))
    uu, ux = f32(0.0), f32(0.0)
    for j in range(16):
        s = load_f32(out, to + j * 4)
        uu += s * s * scale_sum(x, w, at + j * 16, d * s, f32(1.0), f32(0.0))
        ux += s * scale_sum(x, w, at + j * 16, d * s, f32(0.0), f32(1.0))
    new = half(ux / uu if uu > f32(0.0) else d)
    after = f32(0.0)
    for j in range(16):
        after += scale_error(x, w, at + j * 16, f16_to_f32(new) * load_f32(out, to + j * 4))
    store_u16(out, to + 208, new if after < error else load_u16(out, to + 208))


def encode_q6_k(x: Ptr, w: Ptr, out: Ptr, begin: int, end: int) -> None:
    """Kernel: x f32 [256 * superblocks] -> out u8 [BYTES * superblocks] in Q6_K. A unit is a superblock."""
    for block in range(begin, end):
        at, to = block * 256, block * BYTES
        most = f32(0.0)
        for j in range(16):
            s = best_scale(x, w, at + j * 16)
            most = s if s * s > most * most else most
            store_f32(out, to + j * 4, s)
        store_u16(out, to + 208, half(most * f32(-1.0 / 128.0)))
        error = choose_scales(x, w, at, out, to, inverse(f16_to_f32(load_u16(out, to + 208))))
        for _ in range(ROUNDS):
            solve_scale(x, w, at, out, to, error)
            error = choose_scales(x, w, at, out, to, f32(1.0))
        for j in range(16):
            out[to + 192 + j] = u8(integer(out, to + j * 4))
        for part in range(2):
            write_q6_k(x, at + part * 128, out, to, part)


def scale_of(out: Ptr, to: int, j: int) -> Scalar:
    """d * s of sub-block j of Q6_K, decoded from the written bytes."""
    s = i32(out[to + 192 + j])
    return f16_to_f32(load_u16(out, to + 208)) * f32(s - i32(256) if s > i32(127) else s)


def write_q6_k(x: Ptr, at: int, out: Ptr, to: int, part: int) -> None:
    """Writes the codes, plus 32, of half a superblock of Q6_K: 128 elements in four quarters a, b, c and d.

    From byte 64 * part on: the lower four bits of a and, above them, of c; 32 bytes later those of b and d. From byte
    128 + 32 * part on: the upper two bits of a, b, c and d, from the lowest bits up.

    Args:
        part: number of the half, 0 or 1.
    """
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
