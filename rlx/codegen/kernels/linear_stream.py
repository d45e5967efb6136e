"""Weights streamed past a few rows of activations: the half of a linear that decoding uses.

    for i in range of a part's units:                   # parts: as many as there are streams, in one piece each
        for chunk of 256 k:
            for part: total[part] += part of the chunk, W unpacked in registers; what comes next is fetched
        out = gate(total + bias) ... + residual

What a worker reads next in a part lies behind the unit, and after a part's last unit behind the other parts: there the
same part of the next range begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

from llvmlite import ir

from rlx.codegen import dots
from rlx.codegen.kernels import unpack
from rlx.codegen.kernels.multiply import Multiplier, Rows, Shape, Sub, Sums
from rlx.codegen.kernels.results import ResultWriter
from rlx.codegen.kernels.unpack import CHUNK, SUB
from rlx.codegen.layouts import PACKINGS
from rlx.codegen.target import Target
from rlx.codegen.tiles import Emitter, Index


def parts(target: Target, matrices: int) -> int:
    """Parts of a range that one row is multiplied with side by side, by a linear with 1 matrix or 2."""
    return max(1, target.tuning.streams // matrices)


@dataclass(frozen=True)
class _Stream:
    """A chunk of a row block.

    Attributes:
        start: where it lies.
        header: the values of its header.
        ahead: bytes from what is read to what is fetched.
    """

    start: ir.Value
    header: list[ir.Value]
    ahead: ir.Value


class StreamWriter(ResultWriter):
    """A linear kernel while it is written: how rows meet weights that are read where they lie."""

    def __init__(self, e: Emitter, shape: Shape) -> None:
        super().__init__(e, shape)
        self.multiply = Multiplier(e, e.target, shape)
        self.step_bytes = shape.pair * PACKINGS[shape.dtype].nbytes  # of plain weights as they are packed
        self.distance = e.target.tuning.prefetch * (1 if shape.format else 2)  # bytes that are fetched ahead

    def chunk(self, block: ir.Value, chunk: ir.Value) -> ir.Value:
        """Where a chunk of a row block lies."""
        return self.e.at(block, (chunk, unpack.chunk_bytes(self.shape.dtype)))

    def stream_units(self, rows: Rows, begin: ir.Value, end: ir.Value) -> None:
        """One row times the units [begin, end), a unit of each part at a time."""
        e, first = self.e, self.e.i64(0)
        sides = parts(e.target, len(self.shape.weights))
        count = e.b.sub(end, begin)
        size = e.b.udiv(count, e.i64(sides))
        others = e.b.mul(e.b.sub(count, size), e.i64(self.shape.block_bytes))
        with e.loop(0, size) as u:
            is_last = e.b.icmp_signed("==", u.i, e.b.sub(size, e.i64(1)))
            units = [e.b.add(begin, e.mul_add(size, part, u.i)) for part in range(sides)]
            self.streamed_tile(rows, first, units, e.b.select(is_last, others, e.i64(0)))
        if sides > 1:
            with e.loop(e.b.add(begin, e.b.mul(size, e.i64(sides))), end) as u:
                self.streamed_tile(rows, first, [u.i])

    def streamed_tile(self, rows: Rows, row: ir.Value, units: Sequence[ir.Value], skip: Index = 0) -> None:
        """Some rows, from `row` on, times some units; `skip` bytes lie between each and what is read after it."""
        e = self.e
        blocks = [self._block(name, unit) for unit in units for name in self.shape.weights]
        with e.loop(0, self.shape.chunks, 1, self.multiply.zeros(rows, len(blocks))) as c:
            c.values = self.multiply.add(c.values, self._stream(blocks, rows, c.i, self._ahead(c.i, skip)))
        totals = iter(c.results)
        for i in range(rows.count):
            for unit in units:
                self._finish(e.b.add(row, e.i64(i)), unit, [next(totals) for _ in self.shape.weights])

    def _ahead(self, chunk: ir.Value, skip: Index) -> ir.Value:
        """Bytes from a chunk to what is fetched meanwhile, which for the last chunks of a unit lies behind `skip`."""
        e = self.e
        last = self.shape.chunks - -(-self.distance // unpack.chunk_bytes(self.shape.dtype))
        leaves = e.b.icmp_signed(">=", chunk, e.i64(last))
        return e.b.add(e.i64(self.distance), e.b.select(leaves, e.i64(skip), e.i64(0)))

    def _stream(self, blocks: Sequence[ir.Value], rows: Rows, chunk: ir.Value, ahead: ir.Value) -> Sums:
        """The part of a chunk."""
        starts, format_ = [self.chunk(block, chunk) for block in blocks], self.shape.format
        streams = [_Stream(start, format_.chunk(self.e, start) if format_ else [], ahead) for start in starts]
        zeros = self.multiply.zeros(rows, len(blocks))
        if self.shape.integer:
            return self._stream_integers(streams, rows, chunk, zeros)
        return self.multiply.add(*halves(self._stream_floats(streams, rows, chunk, zeros + zeros)))

    def _stream_integers(self, streams: Sequence[_Stream], rows: Rows, chunk: ir.Value, zeros: Sums) -> Sums:
        e = self.e
        with e.loop(0, self.multiply.steps(chunk, SUB), 1, zeros) as s:
            subs = [self._packed_sub(stream, s.i) for stream in streams]
            s.values = self.multiply.integer_step(subs, rows, e.mul_add(chunk, CHUNK // SUB, s.i), s.values)
        return s.results

    def _stream_floats(self, streams: Sequence[_Stream], rows: Rows, chunk: ir.Value, zeros: Sums) -> Sums:
        e, pair = self.e, self.shape.pair
        step = SUB if self.shape.format else gcd(self.shape.k // pair, 8)
        with e.loop(0, self.multiply.steps(chunk, step * pair), 1, zeros) as s:
            weights = [self._packed_floats(stream, s.i, step) for stream in streams]
            first = e.mul_add(e.mul_add(chunk, CHUNK // (step * pair), s.i), step)
            sums = halves(s.values)
            for i, blocks in enumerate(zip(*weights, strict=True)):
                sums[i % 2] = self.multiply.float_step(i, blocks, rows, first, sums[i % 2])
            s.values = sums[0] + sums[1]
        return s.results

    def _packed_sub(self, stream: _Stream, s: ir.Value) -> Sub:
        e, format_ = self.e, self.shape.format
        assert format_ is not None
        place = unpack.sub_block(e, format_, stream.start, s)
        e.prefetch(e.at(place, stream.ahead), format_.row.stride)
        codes, bits = format_.codes(e, place), format_.row.bits
        return Sub(lambda g: dots.ready(e, codes[g], bits), format_.scales(e, stream.header, place), in_memory=False)

    def _packed_floats(self, stream: _Stream, s: ir.Value, step: int) -> list[ir.Value]:
        e, format_ = self.e, self.shape.format
        if format_ is None:
            place = e.at(stream.start, (s, step * self.step_bytes))
            e.prefetch(e.at(place, stream.ahead), step * self.step_bytes)
            return [self.load_step(e.at(place, i * self.step_bytes)) for i in range(step)]
        place = unpack.sub_block(e, format_, stream.start, s)
        e.prefetch(e.at(place, stream.ahead), format_.row.stride)
        return unpack.weights_f32(e, format_, format_.codes(e, place), format_.scales(e, stream.header, place))

    def load_step(self, place: ir.Value) -> ir.Value:
        """Plain weights of one step: 16 rows in f32, or 16 pairs of bf16."""
        if self.shape.pair == 1:
            return self.e.load_as_f32(self.shape.dtype, place)
        return dots.bf16_pairs(self.e, place)


def halves(values: Sums) -> list[Sums]:
    """The first half of some sums and the second."""
    return [values[: len(values) // 2], values[len(values) // 2 :]]
