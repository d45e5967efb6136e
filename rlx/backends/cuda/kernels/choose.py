"""The choice of tokens from rows of logits, as `rlx.sampling.choice.choose` means it: three kernels for all rows.

Blocks share a row: each has a part of `PART` tokens. `look` finds the largest value of a row after the mask and the
changes. Without randomness that is all. `weigh` counts and weighs the tokens by intervals of their values, and so finds
the interval in which top-k or top-p end. `draw` lists and sorts the tokens of that interval, and draws. Of each row the
last block to come does what concerns the whole row.

Weights are integers, multiples of 2^-34 of the largest: their sums do not depend on the order. So a row has the same
token alone and beside others, and on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlx.backends.cuda.agreed.choice import (
    AMOUNTS,
    BEFORE,
    BEST,
    BEST_TOKEN,
    BY_BOTH,
    BY_COUNT,
    BY_SHARE,
    CHANGES,
    COUNTERS,
    COUNTS,
    DRAWN,
    DRAWS,
    FIRST,
    FIRST_NUMBER,
    FLAGS,
    GREEDY,
    IDS,
    KIND,
    LAST,
    LISTED,
    LISTED_COUNT,
    LOGITS,
    LOOKED,
    MASK,
    MASKED,
    MASS,
    NO_TOKEN,
    PART,
    PART_WORDS,
    ROW_WORDS,
    TARGET,
    TOO_MANY,
    TOP,
    WEIGHED,
    WORDS,
)
from rlx.backends.cuda.code import F32, F64, I8, I32, I64, THREADS, WARP, WARPS, Code, Value
from rlx.backends.cuda.kernels.rows import Best
from rlx.sampling.choice import LOG_MIN_P, NUMBERS, UNIFORM
from rlx.sampling.filters import EXP_LEAST, EXP_TERMS, GRID, INTERVALS, LN2_HIGH, LN2_LOW, LOG2_E, PER_NAT, ROUND

NOT_FINITE, BROKEN = 1, 2  # flags: a logit is not finite; one is NaN or +inf
_INFINITE, _NONE = 0x7F800000, float("-inf")
_EACH = PART // THREADS
_LOW = 17  # low bits of a weight, which has 35


def kernels() -> dict[str, Callable[[Code], None]]:
    """Name of each kernel, in order -> what emits it. There is a block for each part of each row."""
    return {"look": _look, "weigh": _weigh, "draw": _draw}


def _look(k: Code) -> None:
    at = _Row(k)
    place = k.share(8 * PART)
    best, flags = Best(k, F64), at.stage(place, k.block % at.parts)
    for i in range(_EACH):
        index = k.thread + i * THREADS
        value = k.load(place, F64, index)
        broken = value.is_nan() | value.equals(float("inf"))
        best.note(value, at.first(k.block % at.parts) + index, flags | broken.to(I32) * BROKEN)
    found = best.of_block()
    with k.when(k.thread.equals(0)):
        for which, each in zip((BEST, BEST_TOKEN, FLAGS), found, strict=True):
            at.set_part(which, each)
    with k.when(at.is_last(LOOKED)):
        every = Best(k, F64)
        with k.loop(k.thread, at.parts, THREADS) as part:
            every.note(at.part(BEST, part, F64), at.part(BEST_TOKEN, part, I32), at.part(FLAGS, part, I32))
        top, token, flag = every.of_block()
        with k.when(k.thread.equals(0)):
            fails = (flag & BROKEN).equals(BROKEN) | top.equals(_NONE)
            at.set(TOP, top)
            at.set(DRAWS, k.select(fails, 0, 1 - at.word(GREEDY).to(I32)).to(I64))
            at.set(FIRST, k.as_value(INTERVALS, I64))
            at.set(LAST, k.as_value(-1, I64))
            at.tell(k.select(fails, NO_TOKEN, token))
            k.store(k.pointers["found"], (flag & NOT_FINITE) ^ 1, at.row * 2 + 1)


def _weigh(k: Code) -> None:
    at = _Row(k)
    top_k, top_p = at.number("top_k"), at.number("top_p")
    with k.when(at.state(DRAWS).equals(1) & ((top_k > 0.0) | (top_p < 1.0))):
        place, own = k.share(8 * PART), k.share(3 * 4 * INTERVALS)
        with k.loop(k.thread, 3 * INTERVALS, THREADS) as place_of_sum:
            k.store(own, k.number(0), place_of_sum)
        at.stage(place, k.block % at.parts)
        for i in range(_EACH):
            value = k.load(place, F64, k.thread + i * THREADS)
            with k.when(value > _NONE):
                interval = at.interval(value)
                k.add(k.at(own, I32, interval), k.number(1))
                with k.when(top_p < 1.0):
                    mass = weight(k, value - at.top)
                    k.add(k.at(own, I32, interval + INTERVALS), (mass & ((1 << _LOW) - 1)).to(I32))
                    k.add(k.at(own, I32, interval + 2 * INTERVALS), (mass >> _LOW).to(I32))
        k.barrier()
        sums = k.at(k.pointers["sums"], I64, at.row * (2 * INTERVALS))
        with k.loop(k.thread, INTERVALS, THREADS) as interval:
            count, low, high = (k.load(own, I32, interval + which * INTERVALS) for which in range(3))
            with k.when(count > 0):
                k.add(k.at(sums, I64, interval), count.to(I64))
                k.add(k.at(sums, I64, interval + INTERVALS), low.to(I64) + (high.to(I64) << _LOW))
        with k.when(at.is_last(WEIGHED)):
            _end_in(at, sums, top_k, top_p)


def _end_in(at: _Row, sums: Value, top_k: Value, top_p: Value) -> None:
    """Finds the intervals whose tokens have to be sorted. The sums become 0 again."""
    k, some = at.code, INTERVALS // THREADS
    counts, masses = [], []
    for i in range(some):
        index = k.thread * some + i
        counts.append(k.load(sums, I64, index))
        masses.append(k.load(sums, I64, index + INTERVALS))
        k.store(sums, k.as_value(0, I64), index)
        k.store(sums, k.as_value(0, I64), index + INTERVALS)
    count, every_count = _scanned(k, counts)
    mass, every_mass = _scanned(k, masses)
    counted = (top_k > 0.0) & (every_count.to(F64) >= top_k)
    target = top_p * every_mass.to(F64)
    target = k.select(target < 1.0, 1.0, target)
    both = counted & (top_p < 1.0)
    with k.when(counted | (top_p < 1.0)):
        for i in range(some):
            next_count, next_mass = count + counts[i], mass + masses[i]
            by_count = (next_count.to(F64) >= top_k) & (count.to(F64) < top_k)
            by_share = (next_mass.to(F64) >= target) & (mass.to(F64) < target)
            with k.when(k.select(counted, by_count, by_share)):
                index = (k.thread * some + i).to(I64)
                at.set(FIRST, k.select(both, k.as_value(0, I64), index))
                at.set(LAST, index)
                kind = k.select(both, BY_BOTH, k.select(counted, BY_COUNT, BY_SHARE))
                at.set(KIND, kind.to(I64))
                at.set(BEFORE, k.select(both, k.as_value(0, I64), k.select(counted, count, mass)))
                at.set(TARGET, target)
            count, mass = next_count, next_mass


def _draw(k: Code) -> None:
    at = _Row(k)
    with k.when(at.state(DRAWS).equals(1)):
        place, first, last = k.share(8 * PART), at.state(FIRST).to(I32), at.state(LAST).to(I32)
        part = k.block % at.parts
        at.stage(place, part)
        cut, mass = at.top + at.number("log_min_p"), k.variable(I64, 0)
        listed = k.at(k.pointers["listed"], I64, at.row * (2 * LISTED))
        for i in range(_EACH):
            index = k.thread + i * THREADS
            value = k.load(place, F64, index)
            with k.when(value > _NONE):
                interval = at.interval(value)
                with k.when((interval < first) & (value >= cut)):
                    mass.set(mass.get() + at.share(value))
                with k.when((interval >= first) & (interval <= last)):
                    number = k.added(k.at(k.pointers["counters"], I32, at.row * COUNTERS + LISTED_COUNT))
                    with k.when(number < LISTED):
                        k.store(listed, value, number)
                        k.store(listed, (at.first(part) + index).to(I64), number + LISTED)
        _, everything = _scanned(k, [mass.get()])
        with k.when(k.thread.equals(0)):
            at.set_part(MASS, everything)
        with k.when(at.is_last(DRAWN)):
            counter = k.at(k.pointers["counters"], I32, at.row * COUNTERS + LISTED_COUNT)
            count = k.load(counter, I32)
            k.barrier()
            with k.when(k.thread.equals(0)):
                k.store(counter, k.number(0))
            with k.when((count > LISTED) & k.thread.equals(0)):
                at.tell(k.number(TOO_MANY))
            with k.when(count <= LISTED):
                _finish(at, place, listed, count, cut)


def _finish(at: _Row, place: Value, listed: Value, count: Value, cut: Value) -> None:
    """Draws a token of the row: at first its part.

    Args:
        place: shared memory for the values of a part.
        listed: tokens of which some are kept, with their values.
        count: how many.
        cut: what min-p excludes is smaller.
    """
    k = at.code
    values, ids, sums = k.share(8 * LISTED), k.share(4 * LISTED), k.share(8 * THREADS)
    border, last = k.variable(F64, _NONE), k.variable(I32, 0x7FFFFFFF)
    own = k.variable(I64, 0)
    with k.when(k.thread < at.parts):
        own.set(at.part(MASS, k.thread, I64))
    k.store(sums, own.get(), k.thread)
    with k.when(count > 0):
        _sort(k, listed, values, ids, count)
        kept = _kept(at, values, count)
        border.set(k.load(values, F64, kept - 1))
        last.set(k.load(ids, I32, kept - 1))
        with k.loop(k.thread, kept, THREADS) as number:
            value = k.load(values, F64, number)
            with k.when(value >= cut):
                k.add(k.at(sums, I64, k.load(ids, I32, number) // PART), at.share(value))
    k.barrier()
    own_mass = k.load(sums, I64, k.thread)
    before, everything = _scanned(k, [own_mass])
    target, chosen, start = at.number("uniform") * everything.to(F64), k.share(4), k.share(8)

    def reached(sum_: Value) -> Value:
        return (sum_.to(F64) > target) | sum_.equals(everything)

    with k.when((own_mass > 0) & reached(before + own_mass) & _not(reached(before))):
        k.store(chosen, k.thread)
        k.store(start, before)
    k.barrier()
    part = k.load(chosen, I32)
    at.stage(place, part)
    masses = []
    for i in range(_EACH):
        token = k.thread * _EACH + i
        value = k.load(place, F64, token)
        is_kept = (value > border.get()) | (value.equals(border.get()) & (at.first(part) + token <= last.get()))
        each = k.variable(I64, 0)
        with k.when(is_kept & (value >= cut) & (value > _NONE)):
            each.set(at.share(value))
        masses.append(each.get())
    before, _ = _scanned(k, masses)
    before = before + k.load(start, I64)
    for i, mass in enumerate(masses):
        with k.when((mass > 0) & reached(before + mass) & _not(reached(before))):
            at.tell(at.first(part) + k.thread * _EACH + i)
        before = before + mass


def _sort(k: Code, listed: Value, values: Value, ids: Value, count: Value) -> None:
    """Sorts tokens by their values, the largest first, then by their numbers: a bitonic sort."""
    levels = k.number(0)
    for bit in range(LISTED.bit_length() - 1):
        levels = levels + (count > 1 << bit).to(I32)
    size = k.number(1) << levels
    with k.loop(k.thread, size, THREADS) as i:
        valid = i < count
        k.store(values, k.select(valid, k.load(listed, F64, i), _NONE), i)
        k.store(ids, k.select(valid, k.load(listed, I64, i + LISTED).to(I32), 0x7FFFFFFF), i)
    k.barrier()
    with k.loop(1, levels + 1) as level, k.loop(0, level) as step:
        distance = k.number(1) << (level - 1 - step)
        with k.loop(k.thread, size >> 1, THREADS) as i:
            inner = i & (distance - 1)
            one = ((i - inner) << 1) + inner
            other = one + distance
            a, b = k.load(values, F64, one), k.load(values, F64, other)
            a_id, b_id = k.load(ids, I32, one), k.load(ids, I32, other)
            ordered = (a > b) | (a.equals(b) & (a_id < b_id))
            with k.when(ordered.to(I32).equals((one >> level) & 1)):
                for to, value, token in ((one, b, b_id), (other, a, a_id)):
                    k.store(values, value, to)
                    k.store(ids, token, to)
        k.barrier()


def _kept(at: _Row, values: Value, count: Value) -> Value:
    """How many of the sorted tokens top-k and top-p keep."""
    k, kind, before = at.code, at.state(KIND), at.state(BEFORE)
    most = at.number("top_k") - before.to(F64)
    counted = k.select((most < count.to(F64)) & _not(kind.equals(BY_SHARE)), most, count.to(F64)).to(I32)
    found = k.share(4)
    with k.when(k.thread.equals(0)):
        k.store(found, counted)
    with k.when(_not(kind.equals(BY_COUNT))):
        some, masses = LISTED // THREADS, []
        for i in range(some):
            index, found_mass = k.thread * some + i, k.variable(I64, 0)
            with k.when(index < counted):
                found_mass.set(weight(k, k.load(values, F64, index) - at.top))
            masses.append(found_mass.get())
        rising, everything = _scanned(k, masses)
        target = at.number("top_p") * everything.to(F64)
        target = k.select(kind.equals(BY_SHARE), at.state(TARGET, F64), k.select(target < 1.0, 1.0, target))
        rising = rising + k.select(kind.equals(BY_SHARE), before, k.as_value(0, I64))
        for i, mass in enumerate(masses):
            after = rising + mass
            with k.when((after.to(F64) >= target) & (rising.to(F64) < target)):
                k.store(found, k.thread * some + i + 1)
            rising = after
    k.barrier()
    return k.load(found, I32)


class _Row:
    """The row of a block, and its part.

    Attributes:
        row: its number.
        parts: of each row.
    """

    def __init__(self, k: Code) -> None:
        self.code, self.parts = k, k.dim_named("PARTS")
        self.row = k.block // self.parts
        self.vocab = k.dim_named("VOCAB")

    # -- memory -------------------------------------------------------------------------------------------------------

    def word(self, which: int, type_: str = I64) -> Value:
        """A word of the table."""
        return self.code.load(self.code.pointers["table"], type_, self.row * WORDS + which)

    def number(self, name: str) -> Value:
        """A number of the choice."""
        place = {"log_min_p": LOG_MIN_P, "uniform": UNIFORM}.get(name)
        return self.word(FIRST_NUMBER + (NUMBERS.index(name) if place is None else place), F64)

    def array(self, which: int) -> Value:
        """The array whose address is in the table."""
        return self.code.at(self.code.pointers["memory"], I8, self.word(which))

    def state(self, which: int, type_: str = I64) -> Value:
        """A word of the row."""
        return self.code.load(self.code.pointers["rows"], type_, self.row * ROW_WORDS + which)

    def set(self, which: int, value: Value) -> None:
        """Writes a word of the row."""
        self.code.store(self.code.pointers["rows"], value, self.row * ROW_WORDS + which)

    @property
    def top(self) -> Value:
        """The largest value."""
        return self.state(TOP, F64)

    def _place(self, which: int, part: Value) -> Value:
        return (self.row * PART_WORDS + which) * self.parts + part

    def part(self, which: int, part: Value, type_: str) -> Value:
        """A word of a part; of an i32 its low half."""
        scale = 2 if type_ == I32 else 1
        return self.code.load(self.code.pointers["parts"], type_, self._place(which, part) * scale)

    def set_part(self, which: int, value: Value) -> None:
        """Writes a word of the part of this block."""
        k, scale = self.code, 2 if value.type == I32 else 1
        k.store(k.pointers["parts"], value, self._place(which, k.block % self.parts) * scale)

    def tell(self, token: Value) -> None:
        """The result."""
        self.code.store(self.code.pointers["found"], token, self.row * 2)

    def is_last(self, counter: int) -> Value:
        """Whether this block is the last of the row that comes here."""
        k = self.code
        return k.is_last(k.at(k.pointers["counters"], I32, self.row * COUNTERS + counter), self.parts)

    # -- values -------------------------------------------------------------------------------------------------------

    def first(self, part: Value) -> Value:
        """The first token of a part."""
        return part * PART

    def stage(self, place: Value, part: Value) -> Value:
        """Brings the values of a part, after the mask and the changes, to shared memory, f64[PART]; all threads wait.

        Returns:
            The flags of the thread's logits.
        """
        k, first, masked = self.code, self.first(part), self.word(MASKED).to(I32)
        logits, mask, flags, values = self.array(LOGITS), self.array(MASK), k.number(0), []
        tokens = [first + k.thread + i * THREADS for i in range(_EACH)]
        loaded = [k.load(logits, F32, k.smaller(token, self.vocab - 1)) for token in tokens]
        for token, logit in zip(tokens, loaded, strict=True):
            bits = logit.bits(I32)
            infinite = (bits & 0x7FFFFFFF) >= _INFINITE
            broken = infinite & _not(bits.equals(_INFINITE - (1 << 31)))
            flags = flags | infinite.to(I32) * NOT_FINITE | broken.to(I32) * BROKEN
            values.append(k.variable(F64, k.select(token < self.vocab, logit.to(F64), _NONE)))
        with k.when(masked > 0):
            for token, value in zip(tokens, values, strict=True):
                word = token >> 5
                bits = k.load(mask, I32, k.smaller(word, masked - 1)) >> (token & 31)
                allowed = (bits & 1).equals(1) & (word < masked)
                value.set(k.select(allowed, value.get(), _NONE))
        k.barrier()  # for readers of another part in the same place
        for i, value in enumerate(values):
            k.store(place, value.get(), k.thread + i * THREADS)
        k.barrier()
        self._change(place, first)
        return flags

    def _change(self, place: Value, first: Value) -> None:
        """Applies the changes, in order. Each warp has a part of the values, and looks at all changes."""
        k, changes, mine = self.code, self.word(CHANGES).to(I32), PART // WARPS
        ids, own = self.array(IDS), first + k.warp * mine
        with k.when(changes > 0):
            with k.loop(0, changes, WARP) as start:
                number = start + k.lane
                token = k.load(ids, I32, k.smaller(number, changes - 1))
                inside = (number < changes) & (token >= own) & (token < own + mine) & (token < self.vocab)
                candidates = k.ballot(inside)
                with k.when(_not(candidates.equals(0))), k.loop(0, WARP) as bit:
                    is_candidate = ((candidates >> bit) & 1).equals(1)
                    with k.when(is_candidate & k.lane.equals(0)):
                        self._change_one(place, start + bit, k.load(ids, I32, start + bit) - first)
            k.barrier()

    def _change_one(self, place: Value, number: Value, index: Value) -> None:
        k = self.code
        value = k.load(place, F64, index)
        count, amount = (k.load(self.array(which), F64, number) for which in (COUNTS, AMOUNTS))
        repetition = self.number("repetition_penalty")
        scaled = k.select(value > 0.0, value / repetition, value * repetition)
        penalized = scaled - count * self.number("frequency_penalty") - self.number("presence_penalty")
        k.store(place, k.select(count > 0.0, penalized, value) + amount, index)

    def interval(self, value: Value) -> Value:
        """The interval of a finite value, i32."""
        k, scaled = self.code, (self.top - value) * PER_NAT
        return k.select(scaled < float(INTERVALS - 1), scaled, float(INTERVALS - 1)).to(I32)

    def share(self, value: Value) -> Value:
        """The weight of a token in the draw."""
        return weight(self.code, (value - self.top) / self.number("temperature"))


def weight(k: Code, x: Value) -> Value:
    """`rlx.sampling.filters.exp` in units of 2^-34, i64."""
    y = k.select(x < EXP_LEAST, EXP_LEAST, x)
    shifted = y * LOG2_E + ROUND
    n = shifted - ROUND
    r = (y - n * LN2_HIGH) - n * LN2_LOW
    p: Value = r * EXP_TERMS[0] + EXP_TERMS[1]
    for term in EXP_TERMS[2:]:
        p = p * r + term
    p = (r * r * p + r) + 1.0
    scale = ((shifted.bits(I64) + 1023) << 52).bits(F64)
    grid = k.as_value(GRID, F64)
    return (k.select(x < EXP_LEAST, 0.0, p * scale) + grid).bits(I64) - grid.bits(I64)


def _scanned(k: Code, values: Sequence[Value]) -> tuple[Value, Value]:
    """The sum of the values, i64, of the threads before this one, and of all threads."""
    value, place = values[0], k.share(8 * WARPS)
    for each in values[1:]:
        value = value + each
    own = value
    for distance in (1, 2, 4, 8, 16):
        other = k.shuffled(own, k.larger(k.lane - distance, 0))
        own = own + k.select(k.lane >= distance, other, k.as_value(0, I64))
    k.barrier()
    with k.when(k.lane.equals(WARP - 1)):
        k.store(place, own, k.warp)
    k.barrier()
    before, everything = own - value, k.as_value(0, I64)
    for warp in range(WARPS):
        sum_ = k.load(place, I64, warp)
        before = before + k.select(k.warp > warp, sum_, k.as_value(0, I64))
        everything = everything + sum_
    return before, everything


def _not(condition: Value) -> Value:
    return condition ^ 1
