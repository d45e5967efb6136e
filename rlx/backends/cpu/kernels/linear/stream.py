"""The streaming half of linear kernels: weights are read once and unpacked in registers, for few rows as in decode.

    for i in range of a part's units:                   # parts: contiguous, one per stream
        for chunk of 256 k:
            for part: total[part] += part of the chunk, W unpacked in registers; prefetch the next weights
        out = gate(total + bias) ... + residual

In a part, the next weights follow the unit in memory. After the last unit of a part, a worker skips the other parts and
continues with the same part of its next range. Prefetches take that into account.

A tile of several rows takes one part. It reads memory in ascending order, because the hardware's prefetchers do better
then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from math import gcd

from llvmlite import ir

from rlx.backends.cpu import dots
from rlx.backends.cpu.kernels.linear import unpack
from rlx.backends.cpu.kernels.linear.multiply import Multiplier, ResultWriter, Rows, Shape, Sub, Sums
from rlx.backends.cpu.kernels.linear.unpack import CHUNK, SUB, Format
from rlx.backends.cpu.layouts import PACKINGS
from rlx.backends.cpu.target import Target
from rlx.backends.cpu.tiles import I64, Emitter, Index
from rlx.ir.dtypes import BF16

# A tile that computes long on a sub-block, which has at most so many bytes per row, also prefetches into the
# second-level cache, at a multiple of the distance. The first-level cache waits for too few lines at a time.
_FAR_BYTES, _FAR = 128, 4


def parts(target: Target, matrices: int) -> int:
    """Number of parts of a range that a linear with 1 or 2 matrices reads in parallel, for one row."""
    return max(1, target.tuning.streams // matrices)


def most_integers(target: Target) -> int:
    """Number of integer sums of 16 lanes in registers at the same time, beside the codes and products of a step."""
    return {"generic": 2, "avx2": 4, "neon": 4, "avx512": 8}[target.vectors]


@dataclass(frozen=True)
class _Stream:
    """A chunk of a row block.

    Attributes:
        start: its address.
        header: the f16 numbers of its superblock, as f32.
        ahead: prefetch distance in bytes.
    """

    start: ir.Value
    header: list[ir.Value]
    ahead: ir.Value


class StreamWriter(ResultWriter):
    """Generates the streaming half of a linear kernel: products of rows with packed weights."""

    def __init__(self, e: Emitter, shape: Shape) -> None:
        super().__init__(e, shape)
        self.multiply = Multiplier(e, e.target, shape)
        packing = PACKINGS[shape.dtype]
        self.read_steps = max(shape.pair, packing.superblock) // shape.pair  # of plain weights, which are read together
        self.read_bytes = self.read_steps * shape.pair // packing.superblock * packing.nbytes
        self.distance = e.target.tuning.prefetch * (1 if shape.format else 2)  # prefetch distance in bytes

    def chunk(self, block: ir.Value, chunk: ir.Value) -> ir.Value:
        """Address of a chunk of a row block."""
        return self.e.at(block, (chunk, unpack.chunk_bytes(self.shape.dtype)))

    def stream_units(self, rows: Rows, begin: ir.Value, end: ir.Value) -> None:
        """Multiplies one row by the units [begin, end), one unit of each part at a time."""
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
        """Multiplies some rows, from `row` on, by some units. The next read is `skip` bytes after the end of a unit."""
        e, names = self.e, self.shape.weights
        blocks = [self._block(name, unit) for unit in units for name in names]
        together, skips = len(blocks), [skip] * len(blocks)
        if self.shape.integer and rows.count > 1 and rows.count * together > most_integers(e.target):
            together = 1  # one block after the other: the sums of all would not stay in registers
        elif rows.count == 1 and e.target.tuning.streams < together:
            together, skips = 1, self._skips(blocks)  # one stream
        parts = range(0, len(blocks), together)
        totals = [self._totals(blocks[i : i + together], rows, skips[i]) for i in parts]
        of_blocks = [part[i::together] for part in totals for i in range(together)]
        for i in range(rows.count):
            for j, unit in enumerate(units):
                products = of_blocks[j * len(names) : (j + 1) * len(names)]
                self.finish(e.b.add(row, e.i64(i)), unit, [product[i] for product in products])

    def _skips(self, blocks: Sequence[ir.Value]) -> list[ir.Value]:
        """Bytes from the end of each block to the block that is read next, if they are read one after the other.

        After the last one comes the one that follows the first in memory.
        """
        e, size = self.e, self.e.i64(self.shape.block_bytes)
        starts = [e.b.ptrtoint(block, I64) for block in blocks]
        ends = [e.b.add(start, size) for start in starts]
        return [e.b.sub(following, end) for following, end in zip([*starts[1:], ends[0]], ends, strict=True)]

    def _totals(self, blocks: Sequence[ir.Value], rows: Rows, skip: Index) -> Sums:
        """The products of some rows with some blocks."""
        with self.e.loop(0, self.shape.chunks, 1, self.multiply.zeros(rows, len(blocks))) as c:
            c.values = self._stream(blocks, rows, c.i, self._ahead(c.i, skip), c.values)
        return c.results

    def _ahead(self, chunk: ir.Value, skip: Index) -> ir.Value:
        """Prefetch distance of a chunk, in bytes. For the last chunks of a unit it includes `skip`."""
        e = self.e
        last = self.shape.chunks - -(-self.distance // unpack.chunk_bytes(self.shape.dtype))
        leaves = e.b.icmp_signed(">=", chunk, e.i64(last))
        return e.b.add(e.i64(self.distance), e.b.select(leaves, e.i64(skip), e.i64(0)))

    def _stream(self, blocks: Sequence[ir.Value], rows: Rows, chunk: ir.Value, ahead: ir.Value, totals: Sums) -> Sums:
        """Adds the products of the rows with a chunk of each block."""
        e, multiply = self.e, self.multiply
        starts, format_ = [self.chunk(block, chunk) for block in blocks], self.shape.format
        early = format_ is not None and not multiply.late
        streams = [_Stream(start, format_.chunk(e, start) if format_ and early else [], ahead) for start in starts]
        zeros = multiply.zeros(rows, len(blocks))
        if not self.shape.integer:
            return multiply.add(totals, multiply.add(*halves(self._stream_floats(streams, rows, chunk, zeros + zeros))))
        sums = totals if multiply.carries else zeros * multiply.part_sets
        parts = self._stream_integers(streams, rows, chunk, sums)
        numbers = [multiply.format.chunk(e, start) if multiply.late else [] for start in starts]
        return [multiply.add_part(i, parts, numbers[i % len(starts)], total) for i, total in enumerate(totals)]

    def _stream_integers(self, streams: Sequence[_Stream], rows: Rows, chunk: ir.Value, zeros: Sums) -> Sums:
        e = self.e
        with e.loop(0, self.multiply.steps(chunk, SUB), 1, zeros) as s:
            subs = [self._packed_sub(stream, s.i, rows.count) for stream in streams]
            s.values = self.multiply.integer_step(subs, rows, e.mul_add(chunk, CHUNK // SUB, s.i), s.values)
        return s.results

    def _stream_floats(self, streams: Sequence[_Stream], rows: Rows, chunk: ir.Value, zeros: Sums) -> Sums:
        e, pair = self.e, self.shape.pair
        step = SUB if self.shape.format else gcd(self.shape.k // pair, 8)
        with e.loop(0, self.multiply.steps(chunk, step * pair), 1, zeros) as s:
            weights = [self._packed_floats(stream, s.i, step) for stream in streams]
            first = e.mul_add(e.mul_add(chunk, CHUNK // (step * pair), s.i), step)
            sums = halves(s.values)
            for i in range(step):
                sums[i % 2] = self.multiply.float_step(i, [w(i) for w in weights], rows, first, sums[i % 2])
            s.values = sums[0] + sums[1]
        return s.results

    def _packed_sub(self, stream: _Stream, s: ir.Value, rows: int) -> Sub:
        e, format_ = self.e, self.multiply.format
        place = e.near(unpack.sub_block(e, format_, stream.start, s))
        self._prefetch(e.at(place, stream.ahead), format_.row.stride)
        if format_.row.stride <= _FAR_BYTES * rows:
            e.prefetch(e.at(place, stream.ahead, (_FAR - 1) * self.distance), format_.row.stride, level=2)
        scales = partial(format_.scales, e, stream.header, place)
        if self._loops(format_):
            early = scales()
            return Sub(partial(format_.plain_code, e, place), lambda: early, in_memory=True)
        known = None
        if self.multiply.holds_codes or (rows == 1 and e.target.vectors != "neon"):
            known = format_.codes(e, place)  # read early, which waits less for memory

        def code(group: Index) -> ir.Value:
            assert isinstance(group, int)
            return known[group] if known else format_.codes(e, place, [group])[0]

        if e.target.vectors == "neon":  # whose registers do not hold them beside the codes
            return Sub(code, scales, in_memory=False)
        early = scales()
        return Sub(code, lambda: early, in_memory=False)

    def _loops(self, format_: Format) -> bool:
        """Whether the codes of a sub-block are read in a loop: unrolled they would be most of the kernel's code."""
        return format_.plain and not self.shape.single and self.e.target.vectors in ("generic", "avx2")

    def _packed_floats(self, stream: _Stream, s: ir.Value, step: int) -> Callable[[int], ir.Value]:
        """The weights of each step. They are read early where registers hold them, which waits less for memory."""
        e, format_ = self.e, self.shape.format
        if format_ is None:
            nbytes = step // self.read_steps * self.read_bytes
            place = e.at(stream.start, (s, nbytes))
            self._prefetch(e.at(place, stream.ahead), nbytes)

            read = cache(lambda i: self.load_steps(e.at(place, i * self.read_bytes)))

            def weights(i: int) -> ir.Value:
                return read(i // self.read_steps)[i % self.read_steps]

            return weights if e.target.vectors == "neon" else [weights(i) for i in range(step)].__getitem__
        place = unpack.sub_block(e, format_, stream.start, s)
        self._prefetch(e.at(place, stream.ahead), format_.row.stride)
        codes, scales = format_.codes(e, place), format_.scales(e, stream.header, place)
        return unpack.weights_f32(e, format_, codes, scales).__getitem__

    def _prefetch(self, place: ir.Value, nbytes: int) -> None:
        if level := self.e.target.tuning.prefetch_level:
            self.e.prefetch(place, nbytes, level)

    def load_steps(self, place: ir.Value) -> list[ir.Value]:
        """Loads the plain weights of one read: for each step 16 rows as f32, or 16 pairs of bf16."""
        e, dtype = self.e, self.shape.dtype
        if self.shape.pair == 2:
            return [dots.bf16_pairs(e, dtype, place)]
        if dtype is BF16:
            return list(e.bf16_pairs_to_f32(dots.bf16_pairs(e, dtype, place)))
        return [e.load_as_f32(dtype, place)]


def halves(values: Sums) -> list[Sums]:
    """Splits sums into the first half and the second."""
    return [values[: len(values) // 2], values[len(values) // 2 :]]
