"""The results of attention of few rows: sums over positions, which blocks leave for each other, and what is written.

What is subtracted from scores before the exponential function is a whole power of two. So the results of positions are
brought to the same one without rounding, and have the same bits whatever block adds them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rlx.backends.cuda.code import F32, I1, I16, I32, THREADS, WARPS, Code, Value
from rlx.backends.cuda.kernels.row_chunks import Work
from rlx.backends.cuda.numbers import LOG2_E, exp2, rounded

_LOWEST = float("-inf")
_TWO = "<2 x float>"
_ADDED = 16  # ranges that a thread loads and adds together


class Sums:
    """The largest score of a query, the sum of its weights, and the weighted values of a thread, of some positions."""

    def __init__(self, k: Code, count: int) -> None:
        self.k = k
        self.top, self.total = k.variable(F32, _LOWEST), k.variable(F32, 0.0)
        self.values = [k.variable(F32, 0.0) for _ in range(count)]

    def clear(self) -> None:
        """Forgets all positions."""
        self.top.set(_LOWEST)
        for each in (self.total, *self.values):
            each.set(0.0)

    def add(self, top: Value, total: Value, values: Sequence[Value]) -> None:
        """Adds those of other positions. The factors are powers of two."""
        k, before = self.k, self.top.get()
        after = k.fmax(before, top)
        base = finite(k, after)
        first, second = exp2(k, before - base), exp2(k, top - base)
        self.top.set(after)
        for own, other in zip((self.total, *self.values), (total, *values), strict=True):
            own.set(own.get() * first + other * second)

    def add_all(
        self, inside: Sequence[Value], heads: Sequence[Sequence[Value]], values: Sequence[Sequence[Value]]
    ) -> None:
        """Adds those of several positions, one after the other, with the bits of `add`.

        Args:
            inside: which of them count.
            heads: the largest score of each, and the sum of its weights.
        """
        k, before = self.k, self.top.get()
        tops = [k.select(own, head[0], k.f32(_LOWEST)) for own, head in zip(inside, heads, strict=True)]
        after = before
        for top in tops:
            after = k.fmax(after, top)
        base = finite(k, after)
        first, factors = exp2(k, before - base), [exp2(k, top - base) for top in tops]
        self.top.set(after)
        for i, own in enumerate((self.total, *self.values)):
            found = own.get() * first
            for counts, head, some, factor in zip(inside, heads, values, factors, strict=True):
                found = k.select(counts, found + (head[1], *some)[i] * factor, found)
            own.set(found)


def finite(k: Code, top: Value) -> Value:
    """What is subtracted from scores: the largest, or 0 if there is none."""
    return k.select(top.equals(_LOWEST), k.f32(0.0), top)


class Results:
    """The results of a block.

    Args:
        memory: shared memory for a range of each query, which is free at the end.
    """

    def __init__(self, w: Work, memory: Value) -> None:
        self.w, self.k, self.a, self.t, self.memory = w, w.k, w.a, w.t, memory
        self.columns = -(-(w.t.width // 16) // WARPS)  # sixteens of elements of values that a warp has
        self.g, self.t4 = self.k.lane >> 2, self.k.lane & 3
        self.range, self.whole = Sums(self.k, 4 * self.columns), Sums(self.k, 4 * self.columns)

    def add(self, following: Value, top: Value, total: Value, values: Sequence[Value]) -> None:
        """Adds a chunk to its range, and the range to the whole after its last chunk.

        Args:
            following: the position after the chunk.
        """
        k, w = self.k, self.w
        self.range.add(top, total, values)
        with k.when((following >= w.limit) | (following & (w.size - 1)).equals(0)):
            own = self.range
            found = own.top.get(), own.total.get(), [each.get() for each in own.values]
            if w.share is None:
                self.whole.add(*found)
            else:
                with k.when(w.is_alone):
                    self.whole.add(*found)
                with k.when(w.is_shared & (following <= w.last)):
                    self._leave((following - 1) >> w.shift)
            with k.when(following <= w.last):
                own.clear()  # the last range of the row stays for `_merge`

    def finish(self) -> None:
        """Writes the results of the row, if the block has all of it, or the last range."""
        k, w = self.k, self.w
        if w.share is None:
            self._write_whole()
            return
        with k.when(w.is_alone):
            self._write_whole()
        with k.when(w.is_shared & w.stop.equals(w.ranges)):
            self._merge()

    def _elements(self) -> Iterator[tuple[int, Value]]:
        """The elements of the values of a thread, two side by side: number of the first among its own, and which."""
        k, t = self.k, self.t
        for n in range(self.columns):
            group = k.warp + n * WARPS
            inside = (self.g < self.a.together) & (self.w.head + self.g < self.w.end)
            if (n + 1) * WARPS > t.width // 16:
                inside = inside & (group < t.width // 16)
            for half in range(2):
                element = group * 16 + self.t4 * 2 + 8 * half
                own = inside if t.width == self.a.width else inside & (element < self.a.width)
                with k.when(own):
                    yield 4 * n + 2 * half, element

    def _write_whole(self) -> None:
        k, own = self.k, self.whole
        head = k.smaller(self.w.head + self.g, self.w.end - 1)
        total, factor = self._with_sink(head, own.top.get(), own.total.get())
        for i, element in self._elements():
            self._store(head, element, [own.values[i + at].get() * factor / total for at in range(2)])

    def _with_sink(self, head: Value, top: Value, total: Value) -> tuple[Value, Value]:
        """The sum of weights with that of the sink of a head, and the factor of the values."""
        k = self.k
        if not self.a.sinks:
            return total, k.f32(1.0)
        sink = k.load(k.pointers["sinks"], F32, head, constant=True) * LOG2_E
        base = finite(k, k.fmax(top, sink))
        factor = exp2(k, top - base)
        return total * factor + exp2(k, sink - base), factor

    def _store(self, head: Value, element: Value, values: Sequence[Value]) -> None:
        """Stores two results side by side."""
        k, a = self.k, self.a
        place = (self.w.row * a.heads + head) * a.width + element
        given = [rounded(each, a.out) for each in values]
        if a.width % 2 == 0:
            k.store(k.at(k.pointers["out"], F32 if a.out == "f32" else I16, place), k.vector(given))
            return
        for at, each in enumerate(given):
            with k.when(element + at < a.width):
                k.store(k.pointers["out"], each, place + at)

    def _place(self, head: Value) -> Value:
        """Where the ranges of a head lie, 0 between kernels: of each the weighted values, largest score, and sum."""
        assert self.w.share is not None
        at = (self.w.share.place * self.a.heads + head) * self.w.share.room * self.a.partial
        return self.k.at(self.k.pointers["scratch"], F32, at)

    def _leave(self, number: Value) -> None:
        """Leaves a range to the block that merges them."""
        k, a = self.k, self.a
        place = k.at(self._place(self.w.head + self.g), F32, (number - self.w.first) * a.partial)
        for at, pair in self._numbers():
            leave(k, k.at(place, F32, at), *pair)

    def _numbers(self) -> Iterator[tuple[Value, list[Value]]]:
        """What a thread has of a range: pairs of its numbers, and where among them they are."""
        k, own = self.k, self.range
        for i, element in self._elements():
            yield element, [own.values[i].get(), own.values[i + 1].get()]
        writes = k.warp.equals(0) & self.t4.equals(0)
        with k.when(writes & (self.g < self.a.together) & (self.w.head + self.g < self.w.end)):
            yield k.number(self.a.partial - 2), [own.top.get(), own.total.get()]

    def _merge(self) -> None:
        """Adds the ranges of the row in order: its own last one, and those that others leave.

        Blocks begin in the order of their numbers: so those with the other ranges run, or have ended.
        """
        k, a, w = self.k, self.a, self.w
        count, pairs = w.ranges - 1 - w.first, (a.width + 1) // 2
        k.barrier()
        for at, pair in self._numbers():
            k.store(k.at(self.memory, F32, self.g * a.partial + at), k.vector(pair))
        k.barrier()
        with k.loop(k.thread, a.together * pairs, THREADS) as item:
            query, element = item // pairs, item % pairs * 2
            head = w.head + query
            with k.when(head < w.end):
                sums = self._taken(self._place(head), count, element)
                place = k.at(self.memory, F32, query * a.partial)
                top, total = k.lanes(k.load(k.at(place, F32, a.partial - 2), _TWO))
                sums.add(top, total, k.lanes(k.load(k.at(place, F32, element), _TWO)))
                total, factor = self._with_sink(head, sums.top.get(), sums.total.get())
                self._store(head, element, [value.get() * factor / total for value in sums.values])
        k.barrier()
        with k.loop(k.thread, a.together * count, THREADS) as item:
            query, number = item % a.together, item // a.together
            with k.when(w.head + query < w.end):
                place = k.at(self._place(w.head + query), F32, number * a.partial + (a.partial - 2))
                k.store(place, k.vector([k.f32(0.0)] * 2))

    def _taken(self, place: Value, count: Value, element: Value) -> Sums:
        """The sum of ranges that others leave, for two elements, which become 0."""
        k, a, sums = self.k, self.a, Sums(self.k, 2)
        with k.loop(0, count, _ADDED) as start:
            valid = [start + i < count for i in range(_ADDED)]
            rows = k.at(place, F32, start * a.partial)
            own = k.at(rows, F32, element)
            heads, values = taken(k, [k.at(rows, F32, a.partial - 2), own], 4 * a.partial, valid)
            sums.add_all(valid, heads, values)
            for i, inside in enumerate(valid):
                with k.when(inside):
                    k.store(k.at(own, F32, i * a.partial), k.vector([k.f32(0.0)] * 2))
        return sums


def leave(k: Code, place: Value, first: Value, second: Value) -> None:
    """Writes two f32 for another block, which gets them by `taken`: to memory that is 0."""
    given = [k.select(each.bits(I32).equals(0), k.f32(-0.0), each) for each in (first, second)]
    k.assembly("void", "st.relaxed.gpu.global.v2.f32 [$0], {$1, $2};", "l,f,f", place, *given)


def taken(k: Code, places: Sequence[Value], step: int, valid: Sequence[Value]) -> list[list[list[Value]]]:
    """What other blocks leave: for each place, two f32 there and at some others after it; waits until all are there.

    Args:
        step: bytes from one to the next.
        valid: of each number of such steps, whether they are read.
    """
    found = [[[k.variable(F32, 1.0) for _ in range(2)] for _ in valid] for _ in places]
    with k.repeat() as again:
        lacks = k.as_value(0, I1)
        for place, own in zip(places, found, strict=True):
            for i, (inside, variables) in enumerate(zip(valid, own, strict=True)):
                text = f"@$3 ld.relaxed.gpu.global.v2.f32 {{$0, $1}}, [$2+{i * step}];"
                pair = k.assembly("{float, float}", text, "=f,=f,l,b,0,1", place, inside, k.f32(1.0), k.f32(1.0))
                for j, variable in enumerate(variables):
                    value = k.op(f"extractvalue {pair.type} {pair.text}, {j}", F32)
                    variable.set(value)
                    lacks = lacks | value.bits(I32).equals(0)
        again(lacks)
    return [[[variable.get() for variable in variables] for variables in own] for own in found]
