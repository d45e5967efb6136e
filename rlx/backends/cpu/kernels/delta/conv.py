"""Causal depthwise convolution over rows, the short filter of hybrid models. Its state holds the previous rows.

A unit computes all rows of a block of channels. The newest rows stay in registers: the next row needs them, and after
the last row they are the new state.

    window = state                                      # taps - 1 vectors, oldest first
    for row: out[row] = sum(w[i] * (window + [x[row]])[i]); window = window[1:] + [x[row]]
    state = window
"""

from __future__ import annotations

from llvmlite import ir

from rlx.backends.cpu.kernel import Kernel
from rlx.backends.cpu.target import Target
from rlx.backends.cpu.tiles import F32X16, FLOAT, LANES, Emitter
from rlx.errors import CompileError
from rlx.ir.dtypes import F32

CHANNELS = 64  # channels of a unit: there are ceil(channels / CHANNELS) units
_VECTORS = CHANNELS // LANES


def causal_conv(channels: int, taps: int, target: Target, *, aside: bool = False) -> Kernel:
    """A kernel for y[row, c] = sum_i w[c, i] u[row + i, c], where u is the state followed by x.

    Buffers: `state` f32[taps - 1, channels], updated to the last rows of u; `x` f32[rows, channels]; `w` f32[channels,
    taps]; `out` f32[rows, channels], which may be `x`. Extent: `rows`. Units: blocks of `CHANNELS` channels. Each sum
    runs from the oldest row to the newest, so bits do not depend on how rows are split into calls.

    Args:
        aside: leave `state` unchanged and write the new state to the buffer `after`, which precedes `out`.

    Raises:
        CompileError: `channels` or `taps` is less than 1.
    """
    if channels < 1 or taps < 1:
        raise CompileError(f"{channels} channels and {taps} taps", where="causal_conv")
    e = Emitter(target, ["state", "x", "w", *["after"] * aside, "out"], ["rows"])
    _Conv(e, channels, taps).write()
    return e.finish("causal_conv", _outline(channels, taps, "after" if aside else "state"))


class _Conv:
    """Generates a convolution kernel."""

    def __init__(self, e: Emitter, channels: int, taps: int) -> None:
        self.e, self.channels, self.taps = e, channels, taps
        self.tail = channels % LANES
        self.row_bytes = 4 * channels

    def write(self) -> None:
        e = self.e
        whole = self.channels // LANES
        sizes = (2, 1) if e.target.vectors == "avx512" else (1,)  # the window and the weights of two fit 32 registers
        with e.loop(e.args["begin"], e.args["end"]) as unit:
            first = e.b.mul(unit.i, e.i64(_VECTORS))
            e.tiled(first, e.smin(e.b.add(first, e.i64(_VECTORS)), whole), sizes, self._block)
            if self.tail:
                with e.when(e.b.icmp_signed("==", unit.i, e.i64(whole // _VECTORS))):
                    self._block(1, e.i64(whole), self.tail)

    def _block(self, vectors: int, first: ir.Value, tail: int = 0) -> None:
        """All rows of `vectors` vectors of channels, from vector `first` on.

        `tail` is the number of channels of a partial vector, or 0.
        """
        e, window = self.e, self.taps - 1
        mask = e.tail_mask(e.i64(tail)) if tail else None
        w = e.at(e.args["w"], (first, 64 * self.taps))
        before, after = (
            [e.at(state, (first, 64), self.row_bytes * i + 64 * v) for i in range(window) for v in range(vectors)]
            for state in (e.args["state"], e.args.get("after", e.args["state"]))
        )
        weights = [self._weights(e.at(w, 64 * self.taps * v), tail) for v in range(vectors)]
        x, out = (e.at(e.args[name], (first, 64)) for name in ("x", "out"))
        with e.loop(0, e.args["rows"], 1, [e.load_as_f32(F32, place, mask) for place in before]) as row:
            offset = e.mul_add(row.i, self.row_bytes)
            newest = [e.load_as_f32(F32, e.at(x, offset, 64 * v), mask) for v in range(vectors)]
            rows = [*row.values, *newest]
            for v in range(vectors):
                e.store_from_f32(F32, self._sum(weights[v], rows[v::vectors]), e.at(out, offset, 64 * v), mask)
            row.values = rows[vectors:]
        for value, place in zip(row.results, after, strict=True):
            e.store_from_f32(F32, value, place, mask)

    def _sum(self, weights: list[ir.Value], rows: list[ir.Value]) -> ir.Value:
        total = self.e.b.fmul(weights[0], rows[0])
        for weight, row in zip(weights[1:], rows[1:], strict=True):
            total = self.e.fma(weight, row, total)
        return total

    def _weights(self, place: ir.Value, tail: int) -> list[ir.Value]:
        """The weights of 16 channels as one vector per tap. In memory they are ordered channel by channel."""
        e = self.e
        parts = [self._weight_part(e.at(place, 64 * i), i, tail) for i in range(self.taps)]
        while len(parts) & (len(parts) - 1):
            parts.append(ir.Constant(F32X16, ir.Undefined))
        while len(parts) > 1:
            parts = [e.concat(low, high) for low, high in zip(parts[::2], parts[1::2], strict=True)]
        return [e.pick(parts[0], range(tap, LANES * self.taps, self.taps)) for tap in range(self.taps)]

    def _weight_part(self, place: ir.Value, index: int, tail: int) -> ir.Value:
        e = self.e
        if not tail:
            return e.load(F32X16, place)
        return e.masked_load(FLOAT, place, e.tail_mask(e.i64(tail * self.taps - LANES * index)))


def _outline(channels: int, taps: int, after: str) -> str:
    """The readable outline of the kernel."""
    return (
        f"for block in range(begin, end):  # {CHANNELS} of {channels} channels\n"
        f"    u = concat(state, x)[:, block]\n"
        f"    out[row, block] = sum(w[block, i] * u[row + i] for i in range({taps}))\n"
        f"    {after}[:, block] = u[-{taps - 1}:]\n"
    )
