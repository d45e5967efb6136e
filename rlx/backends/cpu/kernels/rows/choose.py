"""The choice of a token from a row of logits, as `rlx.sampling.choice.choose` means it: changes, filters and the draw.

A row is first gathered: the values of the tokens that may be chosen, float64, and their ids, ascending. Each filter
shortens it in place.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir

from rlx.backends.cpu.kernel import Kernel
from rlx.backends.cpu.kernels.rows.reduce import BLOCK, first_with_key, largest_key, largest_size
from rlx.backends.cpu.loops import loop_kernel
from rlx.ir.dtypes import F32, F64, I32
from rlx.sampling.choice import LEAST_SHARE, LOG_MIN_P, NUMBERS, UNIFORM
from rlx.sampling.filters import EXP_LEAST, EXP_TERMS, GRID, INTERVALS, LN2_HIGH, LN2_LOW, LOG2_E, PER_NAT, ROUND
from rlx.scalars import Primitive, Ptr, Scalar, as_f32, i32, i64, outlined, u32

(TEMPERATURE, TOP_N_SIGMA, TOP_K, TYPICAL_P, TOP_P, XTC_PROBABILITY, XTC_THRESHOLD,
 REPETITION, FREQUENCY, PRESENCE, MIROSTAT) = range(len(NUMBERS) - 3)  # fmt: skip
LEAST = -1.7976931348623157e308  # the least finite number
WIDE = 2048  # elements of a block that is read twice, the second time from the first-level cache
INFINITE = 0x7F800000  # the order key of +inf; that of NaN is larger, that of -inf its negative

_I64, _F64 = ir.IntType(64), ir.DoubleType()


def _sqrt(builder: ir.IRBuilder, operands: list[ir.Value]) -> ir.Value:
    kind = ir.FunctionType(_F64, [_F64])
    return builder.call(builder.module.declare_intrinsic("llvm.sqrt", [_F64], kind), operands)


def _bits(builder: ir.IRBuilder, operands: list[ir.Value]) -> ir.Value:
    return builder.bitcast(operands[0], _I64)


def _number(builder: ir.IRBuilder, operands: list[ir.Value]) -> ir.Value:
    return builder.bitcast(operands[0], _F64)


as_i64 = Primitive("as_i64", ("f64",), "i64", lambda x: np.float64(x).view(np.int64), _bits)
as_f64 = Primitive("as_f64", ("i64",), "f64", lambda x: np.int64(x).view(np.float64), _number)
sqrt = Primitive("sqrt_f64", ("f64",), "f64", np.sqrt, _sqrt)

TINY = 5e-324  # the least number above 0

#: The kernel's memory for each worker, with room for the vocabulary, or for `INTERVALS`; then what belongs to a row.
SCRATCH = (("values", F64), ("masses", F64), ("keys", F64), ("places", I32), ("heap", I32), ("sums", F64))
ROW = (
    ("logits", F32), ("mask", I32), ("ids", I32), ("counts", F64), ("amounts", F64), ("numbers", F64), ("chosen", F64),
)  # fmt: skip
EXTENTS = ("vocab", "masked", "changes")


def choose() -> Kernel:
    """Chooses a token. `masked` and `changes` are the numbers of words of the mask and of changes, 0 for none.

    `chosen` receives the token, whether all logits are finite, and with Mirostat how far the token is below the
    likeliest one and the sum of all weights.
    """
    return loop_kernel(_choose, {}, [*SCRATCH, *ROW], EXTENTS)


def _choose(
    values: Ptr, masses: Ptr, keys: Ptr, places: Ptr, heap: Ptr, sums: Ptr,
    logits: Ptr, mask: Ptr, ids: Ptr, counts: Ptr, amounts: Ptr, numbers: Ptr, chosen: Ptr,
    vocab: int, masked: int, changes: int, begin: int, end: int,
) -> None:  # fmt: skip
    for _ in range(begin, end):
        top_key = i32(-0x80000000)
        size = i32(0)
        first = 0  # of the block with the largest logit
        for start in range(0, vocab, WIDE):
            stop = start + WIDE if start + WIDE < vocab else vocab
            key = largest_key(logits, start, stop)
            own = largest_size(logits, start, stop)
            first = start if key > top_key else first
            top_key = key if key > top_key else top_key
            size = own if own > size else size
        chosen[0] = -1.0
        chosen[1] = 1.0 if size < i32(INFINITE) else 0.0
        if top_key < i32(INFINITE) and top_key > i32(-INFINITE):
            if numbers[TEMPERATURE] == 0.0 and masked + changes == 0:
                chosen[0] = float(first_with_key(logits, first, vocab, top_key))
            else:
                n = 0
                if masked > 0:
                    n = gather_masked(logits, mask, values, places, vocab, masked)
                else:
                    border = useful(logits, values, keys, heap, numbers, vocab, changes, top_key)
                    n = gather(logits, values, places, vocab, border)
                    if n < vocab:
                        n = include(logits, values, places, ids, vocab, changes, n)
                if change(ids, counts, amounts, numbers, values, places, n, vocab, changes) == 1 and n > 0:
                    top = largest(values, n)
                    if top - top == 0.0:
                        pick(values, masses, keys, places, heap, sums, numbers, chosen, n, top)


def pick(
    values: Ptr, masses: Ptr, keys: Ptr, places: Ptr, heap: Ptr, sums: Ptr,
    numbers: Ptr, chosen: Ptr, n: int, top: Scalar,
) -> None:  # fmt: skip
    """The likeliest token or a draw."""
    if numbers[TEMPERATURE] == 0.0:
        at = 0
        while values[at] < top:
            at += 1
        chosen[0] = float(places[at])
    elif numbers[MIROSTAT] > 0.0:
        at = mirostat(values, masses, heap, numbers, chosen, n, top)
        chosen[0] = float(places[at])
        chosen[2] = (values[at] - top) / numbers[TEMPERATURE]
    else:
        left = filtered(values, masses, keys, places, heap, sums, numbers, n, top)
        top = largest(values, left)
        weigh(values, masses, left, top, numbers[TEMPERATURE])
        if numbers[XTC_PROBABILITY] > 0.0:
            mix(values, masses, keys, numbers, left, top)
        chosen[0] = float(places[draw(masses, left, numbers[UNIFORM])])


# ------------------------------------------------------------------------------------------------ the row


@outlined
def gather(logits: Ptr, values: Ptr, places: Ptr, vocab: int, border: Scalar) -> int:
    """Writes the values and the ids of the tokens from a border on, or of all if it is the least number."""
    if border == LEAST:
        for i in range(vocab):
            values[i] = float(logits[i])
            places[i] = i32(i)
        return vocab
    n = 0
    for start in range(0, vocab, BLOCK):
        stop = start + BLOCK if start + BLOCK < vocab else vocab
        if block_top(logits, start, stop) >= border:
            for i in range(start, stop):
                if float(logits[i]) >= border:
                    values[n] = float(logits[i])
                    places[n] = i32(i)
                    n += 1
    return n


@outlined
def gather_masked(logits: Ptr, mask: Ptr, values: Ptr, places: Ptr, vocab: int, words: int) -> int:
    """Writes the values and the ids of the tokens that the mask allows; their number."""
    n = 0
    for word in range(words):
        bits = mask[word]
        if bits != 0:
            for bit in range(32):
                token = word * 32 + bit
                if (bits >> bit) & 1 == 1 and token < vocab:
                    values[n] = float(logits[token])
                    places[n] = i32(token)
                    n += 1
    return n


def block_top(logits: Ptr, start: int, stop: int) -> Scalar:
    return float(from_key(largest_key(logits, start, stop)))


def from_key(key: Scalar) -> Scalar:
    """The number with an order key."""
    return as_f32(u32(key if key >= i32(0) else i32(i32(-key) | i32(-0x80000000))))


@outlined
def useful(
    logits: Ptr, values: Ptr, keys: Ptr, heap: Ptr, numbers: Ptr, vocab: int, changes: int, top_key: Scalar
) -> Scalar:
    """A border below which no token is chosen unless it is changed; the least number if none is known.

    At least as many blocks have a value from the border on as there are changes and tokens that top-k keeps.
    """
    count = float(changes) + (numbers[TOP_K] if numbers[TEMPERATURE] > 0.0 else 1.0)
    is_greedy = numbers[TEMPERATURE] == 0.0
    if not is_greedy and (numbers[MIROSTAT] > 0.0 or numbers[TOP_N_SIGMA] > 0.0):
        return LEAST
    if is_greedy or numbers[TOP_K] > 0.0:
        blocks = (vocab + BLOCK - 1) // BLOCK
        if count >= float(blocks):
            return LEAST
        for i in range(blocks):
            start = i * BLOCK
            values[i] = block_top(logits, start, start + BLOCK if start + BLOCK < vocab else vocab)
        return values[kth_largest(values, keys, heap, blocks, i64(count))]
    if changes == 0 and numbers[TYPICAL_P] == 1.0 and numbers[TOP_P] == 1.0 and numbers[LOG_MIN_P] >= LEAST:
        return float(from_key(top_key)) + numbers[LOG_MIN_P]
    return LEAST


@outlined
def include(logits: Ptr, values: Ptr, places: Ptr, ids: Ptr, vocab: int, changes: int, count: Scalar) -> Scalar:
    """Adds the tokens that changes name to those that were gathered; their number."""
    n = count
    for i in range(changes):
        token = ids[i]
        if token >= 0 and token < vocab and place_of(places, n, token) < 0:
            at = n
            while at > 0 and places[at - 1] > token:
                places[at] = places[at - 1]
                values[at] = values[at - 1]
                at -= 1
            places[at] = token
            values[at] = float(logits[token])
            n += 1
    return n


@outlined
def change(
    ids: Ptr, counts: Ptr, amounts: Ptr, numbers: Ptr, values: Ptr, places: Ptr, n: int, vocab: int, changes: int
) -> int:
    """Applies the changes in order; 0 if one of the results is no number."""
    for i in range(changes):
        at = i64(ids[i]) if n == vocab else place_of(places, n, ids[i])
        if at >= 0 and at < n:
            value = values[at]
            if counts[i] > 0.0:
                scaled = value / numbers[REPETITION] if value > 0.0 else value * numbers[REPETITION]
                value = scaled - counts[i] * numbers[FREQUENCY] - numbers[PRESENCE]
            value += amounts[i]
            if value != value:
                return 0
            values[at] = value
    return 1


@outlined
def place_of(places: Ptr, n: int, token: Scalar) -> int:
    """Where a token stands among the ids; -1 if it is not there."""
    low = 0
    high = n
    while low < high:
        middle = (low + high) >> 1
        if places[middle] < token:
            low = middle + 1
        else:
            high = middle
    if low < n and places[low] == token:
        return low
    return -1


@outlined
def largest(values: Ptr, n: int) -> Scalar:
    """The largest value, by four running maxima, which do not wait for each other."""
    a = b = c = d = values[0]
    for i in range(0, n - 3, 4):
        a = values[i] if values[i] > a else a
        b = values[i + 1] if values[i + 1] > b else b
        c = values[i + 2] if values[i + 2] > c else c
        d = values[i + 3] if values[i + 3] > d else d
    for i in range(n - n % 4, n):
        a = values[i] if values[i] > a else a
    a = b if b > a else a
    c = d if d > c else c
    return c if c > a else a


# ------------------------------------------------------------------------------------------------ weights


def exp(x: Scalar) -> Scalar:
    """As `rlx.sampling.filters.exp`, bit for bit."""
    y = EXP_LEAST if x < EXP_LEAST else x
    shifted = y * LOG2_E + ROUND
    n = shifted - ROUND
    r = (y - n * LN2_HIGH) - n * LN2_LOW
    p = EXP_TERMS[0] * r + EXP_TERMS[1]
    p = p * r + EXP_TERMS[2]
    p = p * r + EXP_TERMS[3]
    p = p * r + EXP_TERMS[4]
    p = p * r + EXP_TERMS[5]
    p = p * r + EXP_TERMS[6]
    p = p * r + EXP_TERMS[7]
    p = p * r + EXP_TERMS[8]
    p = p * r + EXP_TERMS[9]
    p = p * r + EXP_TERMS[10]
    p = p * r + EXP_TERMS[11]
    p = (r * r * p + r) + 1.0
    scale = as_f64((as_i64(shifted) + 1023) << 52)  # the low bits of `shifted` are the integer n
    return ((0.0 if x < EXP_LEAST else p * scale) + GRID) - GRID


@outlined
def weigh(values: Ptr, masses: Ptr, n: int, top: Scalar, temperature: Scalar) -> None:
    """Unnormalized probabilities."""
    for i in range(n):
        masses[i] = exp((values[i] - top) / temperature)


@outlined
def total(masses: Ptr, n: int) -> Scalar:
    found = 0.0
    for i in range(n):
        found += masses[i]
    return found


@outlined
def draw(masses: Ptr, n: int, uniform: Scalar) -> Scalar:
    """The first place where the running sum exceeds a share of the whole sum, or reaches the whole sum."""
    found = 0.0
    for i in range(n):
        found += masses[i]
        masses[i] = found
    target = uniform * found
    low = 0
    high = n - 1
    while low < high:
        middle = (low + high) >> 1
        if masses[middle] > target or masses[middle] == found:
            high = middle
        else:
            low = middle + 1
    return low


# ------------------------------------------------------------------------------------------------ filters


def filtered(
    values: Ptr, masses: Ptr, keys: Ptr, places: Ptr, heap: Ptr, sums: Ptr, numbers: Ptr, count: int, first: Scalar
) -> int:
    """Applies the filters; the number of tokens that are left."""
    n = count
    top = first
    if numbers[TOP_N_SIGMA] > 0.0:
        n = keep_above(values, places, n, top - numbers[TOP_N_SIGMA] * deviation(values, n))
    if numbers[TOP_K] > 0.0 and numbers[TOP_K] < float(n):
        n = keep_first(values, places, values, n, kth_largest(values, keys, heap, n, i64(numbers[TOP_K])))
    if numbers[TYPICAL_P] < 1.0:
        n = typical_p(values, masses, keys, places, heap, sums, n, top, numbers[TYPICAL_P])
        top = largest(values, n)
    if numbers[TOP_P] < 1.0:
        n = top_p(values, masses, keys, places, heap, sums, n, top, numbers[TOP_P])
    if numbers[LOG_MIN_P] >= LEAST:
        n = keep_above(values, places, n, top + numbers[LOG_MIN_P])
    return n


@outlined
def keep_above(values: Ptr, places: Ptr, n: int, border: Scalar) -> int:
    kept = 0
    for i in range(n):
        if values[i] >= border:
            values[kept] = values[i]
            places[kept] = places[i]
            kept += 1
    return kept


@outlined
def keep_first(values: Ptr, places: Ptr, keys: Ptr, n: int, last: Scalar) -> Scalar:
    """Keeps what comes before a place in the descending order of keys, and the place itself."""
    border = keys[last]
    kept = 0
    for i in range(n):
        key = keys[i]
        if key > border or (key == border and i <= last):
            values[kept] = values[i]
            places[kept] = places[i]
            kept += 1
    return kept


def deviation(values: Ptr, n: int) -> Scalar:
    """The standard deviation of the finite values."""
    found = 0.0
    count = 0
    for i in range(n):
        if values[i] >= LEAST:
            found += values[i]
            count += 1
    mean = found / float(count)
    found = 0.0
    for i in range(n):
        if values[i] >= LEAST:
            found += (values[i] - mean) * (values[i] - mean)
    return sqrt(found / float(count))


@outlined
def kth_largest(values: Ptr, keys: Ptr, heap: Ptr, n: int, count: Scalar) -> Scalar:
    """The place of the least of the `count` largest values. A heap holds the largest so far, with the least on top."""
    for i in range(count):
        keys[i] = -values[i]
        heap[i] = i32(i)
    for i in range(count):
        sink(heap, keys, count - 1 - i, count, 1)
    for i in range(count, n):
        if -values[i] < keys[heap[0]]:
            keys[i] = -values[i]
            heap[0] = i32(i)
            sink(heap, keys, 0, count, 1)
    return i64(heap[0])


@outlined
def typical_p(
    values: Ptr, masses: Ptr, keys: Ptr, places: Ptr, heap: Ptr, sums: Ptr, n: int, top: Scalar, share: Scalar
) -> Scalar:
    weigh(values, masses, n, top, 1.0)
    expected = 0.0
    for i in range(n):
        if masses[i] > 0.0:
            expected += masses[i] * (values[i] - top)
    expected = expected / total(masses, n)
    for i in range(n):
        apart = (values[i] - top) - expected
        keys[i] = apart if apart < 0.0 else -apart
    return keep_first(values, places, keys, n, reaching(heap, sums, keys, masses, n, share))


@outlined
def top_p(
    values: Ptr, masses: Ptr, keys: Ptr, places: Ptr, heap: Ptr, sums: Ptr, n: int, top: Scalar, share: Scalar
) -> Scalar:
    weigh(values, masses, n, top, 1.0)
    for i in range(n):
        keys[i] = values[i] - top
    return keep_first(values, places, keys, n, reaching(heap, sums, keys, masses, n, share))


@outlined
def reaching(heap: Ptr, sums: Ptr, keys: Ptr, masses: Ptr, n: int, share: Scalar) -> Scalar:
    """The place in the descending order of keys at which the masses reach a share of all, see `filters._first`."""
    for i in range(INTERVALS):
        sums[i] = 0.0
    for i in range(n):
        sums[interval(keys[i])] += masses[i]
    target = share * total(sums, INTERVALS)
    target = target if target > TINY else TINY
    at = 0
    found = 0.0
    while found + sums[at] < target and at < INTERVALS - 1:
        found += sums[at]
        at += 1
    count = 0
    for i in range(n):
        if interval(keys[i]) == at:
            heap[count] = i32(i)
            count += 1
    for i in range(count >> 1):
        sink(heap, keys, (count >> 1) - 1 - i, count, 0)
    while True:
        place = i64(heap[0])
        found += masses[place]
        count -= 1
        if found >= target or count <= 0:
            return place
        heap[0] = heap[count]
        sink(heap, keys, 0, count, 0)


def interval(key: Scalar) -> Scalar:
    scaled = -key * PER_NAT
    return i64(scaled) if scaled < float(INTERVALS - 1) else INTERVALS - 1


@outlined
def sink(heap: Ptr, keys: Ptr, start: int, count: int, later: int) -> None:
    """Moves a place down a heap whose top has the largest key; of equal ones the first place, or `later` the last."""
    at = start
    place = heap[at]
    key = keys[place]
    child = 2 * at + 1
    while child < count:
        if child + 1 < count:
            child += ahead(keys[heap[child + 1]], heap[child + 1], keys[heap[child]], heap[child], later)
        if ahead(keys[heap[child]], heap[child], key, place, later) == 0:
            break
        heap[at] = heap[child]
        at = child
        child = 2 * at + 1
    heap[at] = place


def ahead(key: Scalar, place: Scalar, other: Scalar, other_place: Scalar, later: int) -> int:
    """1 if a place belongs above another one, else 0."""
    if key == other:
        first = 1 if place < other_place else 0
        return 1 - first if later == 1 else first
    return 1 if key > other else 0


@outlined
def mix(values: Ptr, masses: Ptr, keys: Ptr, numbers: Ptr, n: int, top: Scalar) -> None:
    """XTC: `masses` become those of the mixture of the draws in which it applies and of those in which it does not."""
    weigh(values, keys, n, top, 1.0)
    least = least_above(values, keys, n, numbers[XTC_THRESHOLD] * total(keys, n))
    threshold = numbers[XTC_THRESHOLD] * total(keys, n)
    left_top = LEAST
    for i in range(n):  # what is left out is marked
        keys[i] = -1.0 if least >= 0 and i != least and keys[i] >= threshold and keys[i] > 0.0 else 0.0
        left_top = values[i] if keys[i] == 0.0 and values[i] > left_top else left_top
    without = 0.0
    for i in range(n):
        if keys[i] == 0.0:
            keys[i] = exp((values[i] - left_top) / numbers[TEMPERATURE])
            without += keys[i]
    probability = numbers[XTC_PROBABILITY]
    factor = (1.0 - probability) / total(masses, n)
    factor_without = probability / without
    for i in range(n):
        masses[i] *= factor
        if keys[i] >= 0.0:
            masses[i] += keys[i] * factor_without


def least_above(values: Ptr, masses: Ptr, n: int, threshold: Scalar) -> int:
    """The last of the least likely of the tokens that reach the threshold of XTC; -1 if there are fewer than two."""
    count = 0
    least = -1
    for i in range(n):
        if masses[i] >= threshold and masses[i] > 0.0:
            count += 1
            if least < 0 or values[i] <= values[least]:
                least = i
    return least if count > 1 else -1


@outlined
def mirostat(values: Ptr, masses: Ptr, heap: Ptr, numbers: Ptr, chosen: Ptr, n: int, top: Scalar) -> Scalar:
    """Draws among the tokens that are not too surprising; `chosen` receives the sum of all weights."""
    weigh(values, masses, n, top, numbers[TEMPERATURE])
    everything = total(masses, n)
    chosen[3] = everything
    kept = 0
    best = 0
    best_mass = masses[0]
    for i in range(n):
        mass = masses[i]
        if mass > best_mass:
            best = i
            best_mass = mass
        if mass >= numbers[LEAST_SHARE] * everything:
            masses[kept] = mass
            heap[kept] = i32(i)
            kept += 1
    if kept == 0:
        return best
    return i64(heap[draw(masses, kept, numbers[UNIFORM])])
