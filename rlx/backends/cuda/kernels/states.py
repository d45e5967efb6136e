"""Kernels over recurrent states: short convolutions and the gated delta rule."""

from __future__ import annotations

from dataclasses import dataclass

from rlx.backends.cuda.agreed.steps import RUNS
from rlx.backends.cuda.code import F32, THREADS, Code, Value, set_all
from rlx.backends.cuda.kernels.cache import Segment, numbered_segment
from rlx.backends.cuda.numbers import exp
from rlx.ir.dims import DimLike


@dataclass(frozen=True)
class Rows:
    """The rows of a sequence in a call.

    Attributes:
        first: the first of them.
        count: how many.
        read, written: slots of the states that are read and written.
    """

    first: Value
    count: Value
    read: Value
    written: Value


def rows_of(k: Code, number: Value, table: Value | None, columns: int, rows: DimLike) -> Rows:
    """The rows of a segment; all rows without a table."""
    if table is None:
        return Rows(k.number(0), k.number(k.dim(rows)) * k.dim_named(RUNS), k.number(0), k.number(0))
    segment: Segment = numbered_segment(k, number, table, columns)
    assert segment.slot is not None and segment.written is not None
    return Rows(segment.first, segment.env["SEQ"], segment.slot, segment.written)


def causal_conv(k: Code, channels: int, taps: int, table: Value | None, columns: int, rows: DimLike) -> None:
    """A channel of a segment for each thread: y[r] = sum_i w[i] u[r + i], where u is the state, then the rows."""
    blocks = -(-channels // THREADS)
    own = rows_of(k, k.block // blocks, table, columns, rows)
    channel = (k.block % blocks) * THREADS + k.thread
    with k.when((channel < channels) & (own.count > 0)):
        weights = [k.load(k.pointers["weight"], F32, channel * taps + i, constant=True) for i in range(taps)]
        state = own.read * ((taps - 1) * channels) + channel
        seen = [k.variable(F32, k.load(k.pointers["state"], F32, state + i * channels)) for i in range(taps - 1)]
        with k.loop(own.first, own.first + own.count) as row:
            u = [*(value.get() for value in seen), k.load(k.pointers["x"], F32, row * channels + channel)]
            total = k.f32(0.0)
            for weight, value in zip(weights, u, strict=True):
                total = k.fma(weight, value, total)
            k.store(k.pointers["out"], total, row * channels + channel)
            set_all(seen, u[1:])
        target = own.written * ((taps - 1) * channels) + channel
        for i, variable in enumerate(seen):
            k.store(k.pointers["after"], variable.get(), target + i * channels)


@dataclass(frozen=True)
class Delta:
    """Sizes of a gated delta rule, see `rlx.ir.meaning.gated_delta`.

    Attributes:
        tiled: whether head h uses key head h % key_heads, otherwise h // (heads / key_heads).
        corrects: whether what the state knows of a value is subtracted from it.
    """

    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    scale: float
    tiled: bool
    corrects: bool

    @property
    def lanes(self) -> int:
        """Columns of the state that a block has: threads side by side."""
        return next(count for count in (64, 32, 16, 8, 4, 2, 1) if self.value_dim % count == 0)

    @property
    def sharing(self) -> int:
        """Threads that share a column."""
        most = THREADS // self.lanes
        return next(count for count in range(most, 0, -1) if self.key_dim % count == 0)

    @property
    def blocks(self) -> int:
        """Blocks of a segment."""
        return self.heads * (self.value_dim // self.lanes)


def gated_delta(k: Code, d: Delta, table: Value | None, columns: int, rows: DimLike) -> None:
    """Some columns of the state of a head of a segment for each block, token by token, in registers."""
    own = rows_of(k, k.block // d.blocks, table, columns, rows)
    here = k.block % d.blocks
    head, tile = here // (d.value_dim // d.lanes), here % (d.value_dim // d.lanes)
    column = tile * d.lanes + k.thread % d.lanes
    part, depth = k.thread // d.lanes, d.key_dim // d.sharing
    key_head = head % d.key_heads if d.tiled else head // (d.heads // d.key_heads)
    working = part < d.sharing

    def place(slot: Value, i: int) -> Value:
        return ((slot * d.heads + head) * d.key_dim + part * depth + i) * d.value_dim + column

    state = [k.variable(F32, 0.0) for _ in range(depth)]
    with k.when(working & (own.count > 0)):
        for i, value in enumerate(state):
            value.set(k.load(k.pointers["state"], F32, place(own.read, i)))
    keys, queries = k.share(4 * d.key_dim), k.share(4 * d.key_dim)
    partial = k.share(4 * THREADS)
    with k.loop(own.first, own.first + own.count) as row:
        _bring(k, d, row, key_head, keys, queries)
        at = row * d.heads + head
        decay = exp(k, k.load(k.pointers["g"], F32, at))
        beta = k.load(k.pointers["beta"], F32, at)
        found = k.f32(0.0)
        key = [k.load(keys, F32, k.smaller(part, d.sharing - 1) * depth + i) for i in range(depth)]
        for i, value in enumerate(state):
            value.set(value.get() * decay)
            found = k.fma(value.get(), key[i], found)
        v = k.load(k.pointers["v"], F32, at * d.value_dim + column)
        delta = beta * (v - _summed(k, d, partial, part, found) if d.corrects else v)
        result = k.f32(0.0)
        for i, value in enumerate(state):
            value.set(k.fma(key[i], delta, value.get()))
            query = k.load(queries, F32, k.smaller(part, d.sharing - 1) * depth + i)
            result = k.fma(value.get(), query, result)
        output = _summed(k, d, partial, part, result) * d.scale
        with k.when(part.equals(0)):
            k.store(k.pointers["out"], output, at * d.value_dim + column)
    with k.when(working & (own.count > 0)):
        for i, value in enumerate(state):
            k.store(k.pointers["after"], value.get(), place(own.written, i))


def _bring(k: Code, d: Delta, row: Value, key_head: Value, keys: Value, queries: Value) -> None:
    k.barrier()
    with k.loop(k.thread, d.key_dim, THREADS) as i:
        place = (row * d.key_heads + key_head) * d.key_dim + i
        k.store(keys, k.load(k.pointers["k"], F32, place), i)
        k.store(queries, k.load(k.pointers["q"], F32, place), i)
    k.barrier()


def _summed(k: Code, d: Delta, partial: Value, part: Value, value: Value) -> Value:
    """The sum over the threads that share a column."""
    k.barrier()
    k.store(partial, value, k.thread)
    k.barrier()
    lane, total = k.thread % d.lanes, k.f32(0.0)
    for i in range(d.sharing):
        total = total + k.load(partial, F32, lane + i * d.lanes)
    return total
