"""Attention kernels on caches of random numbers, and softmax in float64: what the tests of attention share."""

from __future__ import annotations

from copy import copy
from typing import Any, NamedTuple

import emulated
import numpy as np
import pytest
from levels import BF16_TARGETS, LEVELS, TILE_TARGETS, name
from native import aligned, run
from numpy.typing import NDArray

from rlx.backends.cpu.kernel import Kernel
from rlx.backends.cpu.kernels.attention.attention import attention
from rlx.backends.cpu.kernels.attention.bf16 import DottedAttention, RoundedAttention, TiledAttention
from rlx.backends.cpu.kernels.attention.shape import row_tile
from rlx.backends.cpu.kernels.attention.split import scratch_bytes
from rlx.backends.cpu.target import Target
from rlx.ir.dtypes import BF16, F16, F32, DType

Array = NDArray[Any]

#: Ceiling of |out - float64| / (largest |v| * (1 + largest |score|)): an error of a score is one of its weight. Where
#: products are of bf16 all factors have eight bits.
ATTENTION_ERROR, ROUNDED_ERROR = 5e-7, 2.0**-8


def units(seq: int, heads: int, kv_heads: int, rows: int | None = None, *, bf16: bool = False) -> int:
    """Number of work units of a call of `seq` rows."""
    return -(-seq // row_tile(heads, kv_heads, rows, bf16=bf16)) * kv_heads


class Way(NamedTuple):
    """For which machine a kernel is written, and what writes products of bf16."""

    target: Target
    writer: type[RoundedAttention] | None = None

    def case(self, *shape: Any, **options: Any) -> Case:
        made = Case(*shape, **options)
        made.writer, made.error = self.writer, ROUNDED_ERROR if self.writer else ATTENTION_ERROR
        return made


PLAIN = [Way(target) for target in LEVELS]
TILES = [Way(target, TiledAttention) for target in (*emulated.TARGETS, *TILE_TARGETS)]
ROUNDED = [*TILES, *(Way(target, DottedAttention) for target in (*BF16_TARGETS, *TILE_TARGETS))]


def label(value: Any) -> str:
    """Part of a test's id."""
    if isinstance(value, Way):
        return f"{value.writer.__name__ if value.writer else 'plain'}-{name(value.target)}"
    return name(value) if isinstance(value, Target) else str(value)


def ready(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles are emulated where the target has none."""
    if way in TILES and way.target not in TILE_TARGETS:
        emulated.use(monkeypatch)


def stored(values: Array, dtype: DType) -> tuple[Array, Array]:
    """(the cache's numbers, their values in float64)."""
    if dtype is F32:
        return values.astype(np.float32), values.astype(np.float32).astype(np.float64)
    if dtype is F16:
        return values.astype(np.float16), values.astype(np.float16).astype(np.float64)
    bits = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return bits, (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


class Case:
    """A cache of random keys and values that holds NaN where no position has been written."""

    error = ATTENTION_ERROR
    writer: type[RoundedAttention] | None = None
    pages: Array | None = None  # the page table, if the cache is a pool
    sinks: Array | None = None  # a further score of each head

    def __init__(
        self, heads: int, kv_heads: int, head_dim: int, dtype: DType, ctx: int, filled: int, seed: int = 0
    ) -> None:
        rng = np.random.default_rng([seed, heads, head_dim])
        self.shape, self.dtype, self.ctx, self.filled = (heads, kv_heads, head_dim), dtype, ctx, filled
        cache = rng.standard_normal((2, kv_heads, ctx, head_dim)).astype(np.float32)
        (keys, self.k), (values, self.v) = (stored(c, dtype) for c in cache)
        for numbers in (keys, values):
            numbers[:, filled:] = 0x7FC0 if dtype is BF16 else np.nan
        tiles = keys.reshape(kv_heads, ctx // 16, 16, head_dim).transpose(0, 1, 3, 2)
        self.keys, self.values = aligned(tiles), aligned(values)
        self.q = aligned(rng.standard_normal((filled, heads, head_dim)).astype(np.float32))

    def kernel(self, target: Target, **options: Any) -> Kernel:
        return attention(*self.shape, target, **{"writer": self.writer, **options})

    def native(
        self, target: Target, past: int, seq: int, scale: float, *, ranges: list[tuple[int, int]] | None = None,
        bf16: bool = False, marks: Array | None = None, **options: Any,
    ) -> Array:  # fmt: skip
        """The rows; `ranges` are the units of each call, `marks` the operand of the mask."""
        how, rows, group = options.get("split"), options.get("rows_static"), self.shape[0] // self.shape[1]
        options |= {"paged": self.pages is not None, "sinks": self.sinks is not None}
        kernel = self.kernel(target, kv_dtype=self.dtype, scale=scale, **options)
        count = units(seq, *self.shape[:2], rows, bf16=bf16 or self.writer is not None)
        scratch = None
        if how and rows:
            count = self.shape[1] * how.parts
            scratch = aligned(np.zeros(count * scratch_bytes(group, self.shape[2], how), np.uint8))
        out = np.full((seq + 1, *self.q.shape[1:]), 7, np.uint16 if options.get("out") == "bf16" else np.float32)
        given = (self.sinks, marks, self.pages, scratch)
        arrays = [aligned(self.q[past : past + seq]), self.keys, self.values, *(x for x in given if x is not None), out]
        for begin, end in ranges or [(0, count)]:
            run(kernel, target, *arrays, begin=begin, end=end, seq=seq, past=past, ctx=self.ctx)
        assert (out[seq] == 7).all(), "wrote past its rows"
        return out[:seq]

    def paged(self, table: list[int], pages: int) -> Case:
        """The case in the pages `table` of a pool of `pages`; NaN in all others."""
        other = copy(self)
        # A call reads nothing behind its last page.
        other.ctx, other.pages = 64 * pages, np.array([*table, -1], np.int32)
        keys, values = (np.full((c.shape[0], n, *c.shape[2:]), np.nan, c.dtype) for c, n in self._sizes(64 * pages))
        for position in range(self.filled):
            place = 64 * table[position // 64] + position % 64
            keys[:, place // 16, :, place % 16] = self.keys[:, position // 16, :, position % 16]
            values[:, place] = self.values[:, position]
        other.keys, other.values = aligned(keys), aligned(values)
        return other

    def with_sinks(self) -> Case:
        """The case with a sink for each head, of which some are above all scores and some below."""
        other = copy(self)
        other.sinks = aligned(np.resize(np.float32([3, 0, -2, 12]), self.shape[0]))
        return other

    def ring(self, length: int, ctx: int) -> Case:
        """The case as a ring of `ctx` places holds it once `length` positions were written; NaN where none was."""
        other = copy(self)
        other.ctx = ctx
        keys, values = (np.full((c.shape[0], n, *c.shape[2:]), np.nan, c.dtype) for c, n in self._sizes(ctx))
        for position in range(length):
            place = position % ctx
            keys[:, place // 16, :, place % 16] = self.keys[:, position // 16, :, position % 16]
            values[:, place] = self.values[:, position]
        other.keys, other.values = aligned(keys), aligned(values)
        return other

    def _sizes(self, ctx: int) -> list[tuple[Array, int]]:
        return [(self.keys, ctx // 16), (self.values, ctx)]

    def reference(
        self, past: int, seq: int, scale: float, *, window: int | None = None, softcap: float | None = None,
        last: Array | None = None, bias: Array | None = None,
    ) -> tuple[Array, float]:  # fmt: skip
        """(result, the ceiling of its error); `last` is the last key that each row sees, as a rule its own."""
        group, length, own = self.shape[0] // self.shape[1], past + seq, past + np.arange(seq)
        k, v = (np.repeat(c[:, :length], group, axis=0) for c in (self.k, self.v))
        scores = np.einsum("rhd,htd->hrt", self.q[past:length].astype(np.float64), k) * float(np.float32(scale))
        scores = softcap * np.tanh(scores / softcap) if softcap else scores
        scores = scores if bias is None else scores + bias.swapaxes(0, 1)
        keys, last = np.arange(length), own if last is None else last
        last = last if bias is None else np.full(seq, length)
        seen = (keys <= last[:, None]) & (own[:, None] - keys < (window or length + 1))
        scores = np.where(seen, scores, -np.inf)
        weights, total = np.exp(scores), np.exp(scores).sum(axis=-1, keepdims=True)
        total = total if self.sinks is None else total + np.exp(self.sinks.astype(np.float64))[:, None, None]
        out = np.einsum("hrt,htd->rhd", weights / total, v)
        return out, self.error * np.abs(v).max() * (1 + np.abs(scores[np.isfinite(scores)]).max())

    def check(
        self, target: Target, past: int, seq: int, *, mask: str = "causal", bias: Array | None = None, **options: Any
    ) -> None:
        window, last, marks, scale = options.get("window"), None, None, self.shape[2] ** -0.5
        if mask != "causal":
            last = self.seen(mask, past, seq, window)
            marks = aligned(np.where(last == past + seq - 1, last + 6, last).astype(np.int32))  # as far as keys go
            options |= {"mask": mask}
        marks = marks if mask == "visible" else bias
        given = options if bias is None else {**options, "mask": "bias", "bias": bias.shape[1]}
        got = self.native(target, past, seq, scale, marks=marks, **given)
        shown = {name: options.get(name) for name in ("window", "softcap")}
        want, ceiling = self.reference(past, seq, scale, last=last, bias=bias, **shown)  # type: ignore[arg-type]
        assert np.abs(got - want).max() < ceiling, (past, seq, np.abs(got - want).max(), ceiling)

    def seen(self, mask: str, past: int, seq: int, window: int | None) -> Array:
        """The last key that each row sees. "visible": a picture in the middle, whose rows see it to its end, and a row
        that looks back.
        """
        last = np.full(seq, past + seq - 1)
        if mask == "around":
            return np.minimum(last, past + np.arange(seq) + (window or 0) - 1)
        if mask == "visible":
            last = past + np.arange(seq)
            last[seq // 4 : seq // 2] = past + max(seq // 2 - 1, 0)
            last[-1] -= np.random.default_rng([past, seq]).integers(0, 3) if last[-1] >= 3 else 0
        return last

    def bias(self, past: int, seq: int, heads: int, future: bool) -> Array:
        """A bias [seq, heads, past + seq] that closes about a third of the keys, later ones too unless `future`."""
        rng, own = np.random.default_rng([7, past, seq, heads]), past + np.arange(seq)
        bias = (rng.standard_normal((seq, heads, past + seq)) * 2).astype(np.float32)
        bias[rng.random(bias.shape) < 0.3] = -np.inf
        if not future:
            bias = np.where(np.arange(past + seq) > own[:, None, None], np.float32(-np.inf), bias)
        bias[np.arange(seq), :, own] = 0.5  # something is open
        return np.ascontiguousarray(bias, np.float32)
