"""The inner steps of a linear: some k of some rows times some row blocks of weights, summed in registers.

This module has the arithmetic, and so defines the order of every sum. `linear.py` chooses the rows and blocks of a
tile, and loads the weights. Sums are a list ordered by row, then by block.

All linear kernels share the addresses of weights and results, and the epilogue of a finished sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from llvmlite import ir

from rlx.backends import blocks
from rlx.backends.blocks import BLOCKS
from rlx.backends.cpu import dots, vmath
from rlx.backends.cpu.kernels.linear.unpack import CHUNK, GROUPS, SUB, Format
from rlx.backends.cpu.layouts import BLOCK_ROWS, LAYOUTS, PACKINGS
from rlx.backends.cpu.target import Target
from rlx.backends.cpu.tiles import BF16X32, F32X16, FLOAT, I8X64, I32, Emitter, Index, vector
from rlx.ir.dtypes import ACTIVATIONS, BF16, F32, DType

Sums = list[ir.Value]

ORIGIN, ORIGIN_BITS = 1.5 * 2.0**23, 0x4B400000  # the middle of the range where the spacing of f32 numbers is 1


@dataclass(frozen=True)
class Shape:
    """The compile-time parameters of a linear kernel, see `linear.linear`.

    Attributes:
        ragged: the last row block may hold fewer than 16 rows.
        single: there is exactly one row of activations.
        out: type of the results, f32 or bf16.
        signed: codes of 8 bits are signed bytes (`Isa.signed_codes`).
    """

    dtype: DType
    k: int
    act: str
    residual: bool
    bias: bool
    gated: str | None
    ragged: bool
    single: bool
    out: str = "f32"
    signed: bool = False

    @property
    def extents(self) -> list[str]:
        return ["n"] if self.single else ["rows", "n"]

    @property
    def weights(self) -> list[str]:
        return ["w", "w_up"] if self.gated else ["w"]

    @property
    def biases(self) -> list[str]:
        return [name for name in ("bias", "bias_up") if self.bias][: len(self.weights)]

    @property
    def buffers(self) -> list[str]:
        return ["x", *self.weights, *self.biases, *["residual"] * self.residual, "out"]

    @property
    def integer(self) -> bool:
        """Whether activations are int8."""
        return self.act == "q8a"

    @property
    def pair(self) -> int:
        """k of one step on float activations: one f32, or two bf16."""
        return 2 if self.act == "bf16" else 1

    @property
    def format(self) -> Format | None:
        """The format of quantized weights; None for plain numbers (f32, f16, bf16)."""
        return Format(blocks.of(self.dtype, signed=self.signed)) if self.dtype in BLOCKS else None

    @property
    def as_packed(self) -> bool:
        """Whether weights are multiplied as they are packed: f32, and pairs of bf16."""
        return self.dtype is (BF16 if self.pair == 2 else F32)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of activations."""
        return LAYOUTS.size(ACTIVATIONS[self.act], (self.k,))

    @property
    def block_bytes(self) -> int:
        """Bytes of a row block of weights."""
        return self.k // PACKINGS[self.dtype].superblock * PACKINGS[self.dtype].nbytes

    @property
    def chunks(self) -> int:
        return -(-self.k // CHUNK)


@dataclass
class Sub:
    """A sub-block of 32 k of one row block, ready for dot products.

    Attributes:
        code: returns the code vector of a group. The group may be a run-time value if the codes are in memory.
        read_scales: reads the scale vectors, then the vectors of the lows.
        in_memory: whether the codes are in memory, not in registers.
        sign: if codes are magnitudes (see `dots.magnitudes`), returns the vector of signs of a group.
        starts: what their sums start with, plus the origin: a vector, or one for each half of the sub-block.
    """

    code: Callable[[Index], ir.Value]
    read_scales: Callable[[], Sequence[ir.Value]]
    in_memory: bool
    sign: Callable[[Index], ir.Value] | None = None
    starts: Sequence[ir.Value] = ()

    @cached_property
    def scales(self) -> Sequence[ir.Value]:
        """The scale vectors, then the vectors of the lows. They are read where this is used first."""
        return self.read_scales()


@dataclass(frozen=True)
class Rows:
    """Some rows of activations.

    Attributes:
        x: the address of each row.
        terms: the address of the terms of all rows (see `Multiplier.write_terms`); None if there are none.
    """

    x: Sequence[ir.Value]
    terms: ir.Value | None

    @property
    def count(self) -> int:
        return len(self.x)


class Multiplier:
    """The arithmetic of one linear kernel.

    Attributes:
        part_sets: number of sums of a result in a chunk, see `integer_step`.
        carries: whether the sums of a chunk start with the totals, see "integer activations".
    """

    def __init__(self, e: Emitter, target: Target, shape: Shape) -> None:
        self.e, self.target, self.shape = e, target, shape
        self.part_sets = 2 if self.late and self.format.row.lows else 1
        self.carries = shape.integer and e.isa.scales_late and not self.late

    @property
    def holds_codes(self) -> bool:
        """Whether registers hold all codes of a sub-block, beside the sums of a tile."""
        return self.target.vectors == "avx512"

    @property
    def format(self) -> Format:
        """The format of quantized weights."""
        assert self.shape.format is not None
        return self.shape.format

    @cached_property
    def late(self) -> bool:
        """Whether the f16 numbers of a superblock are applied to the sums of a chunk. See "integer activations"."""
        format_ = self.shape.format
        return format_ is not None and self.shape.integer and format_.row.head > 0 and self.e.isa.scales_late

    def steps(self, chunk: ir.Value, step: int) -> Index:
        """Number of steps of `step` k in a chunk; the last chunk may have fewer."""
        if self.shape.k % CHUNK == 0:
            return CHUNK // step
        done = self.e.b.mul(chunk, self.e.i64(CHUNK // step))
        return self.e.smin(CHUNK // step, self.e.b.sub(self.e.i64(self.shape.k // step), done))

    # --- integer activations ------------------------------------------------------------------------------------------
    #
    # Dot products of unsigned codes must be corrected by the zero point (or the minimum) times the sum of the
    # activations. Apart from the scale, that product is the same for all weights. So it is computed once per row; these
    # products are the row's terms.
    #
    # An integer sum is below 2^22. If it starts at the bits of the origin instead of 0, the result is the bits of the
    # f32 number origin + sum, and needs no conversion. One multiply-add scales it and subtracts origin times scale. It
    # rounds once, like the product of sum and scale: scales have at most 19 bits, so origin times scale is exact.
    #
    # A scale of many types is an integer of the sub-block times an f16 number of the superblock, which is a chunk. Some
    # instruction sets (`Isa.scales_late`) multiply an integer sum by the integer scale, and the sum of the chunk by the
    # f16 number: that saves a product for each sub-block. Sum times integer scale is below 2^24, so f32 is exact. There
    # the sums of other types continue from chunk to chunk, which saves an addition, a load and a store for each chunk.

    @cached_property
    def origin(self) -> int:
        """The start value of integer sums: the bits of the origin, or 0.

        It is 0 where the origin saves nothing (single rows), and for e8m0 scales, because their product with the origin
        may overflow.
        """
        format_ = self.shape.format
        fits = format_ is not None and format_.row.scales != "e8m0" and not self.shape.single
        return ORIGIN_BITS if fits and self.target.vectors in ("avx2", "avx512") else 0

    @cached_property
    def zero(self) -> int:
        """The zero point of the codes, which must be corrected in dot products."""
        format_ = self.shape.format
        return format_.row.zero if format_ and self.shape.integer else 0

    @cached_property
    def terms_a_sub(self) -> int:
        """Terms per sub-block: one, or two if each half has its own scale, or 0 if nothing must be corrected."""
        format_ = self.shape.format
        if not format_ or not self.shape.integer or not (self.zero or format_.row.lows):
            return 0
        return format_.row.parts

    @property
    def term_bytes(self) -> int:
        """Bytes of a row's terms."""
        return 4 * self.terms_a_sub * (self.shape.k // SUB)

    def write_terms(self, x: ir.Value, terms: ir.Value) -> None:
        """Stores a row's terms: origin - zero * sums of its codes (i32); for types with lows, -scale * sums (f32)."""
        e, k = self.e, self.shape.k
        scales, sums = e.at(x, k), e.at(x, k + k // 8)
        first = 0
        for width in (16, 8, 1):  # sub-blocks at once
            last = k // SUB // width * width
            if first < last:
                with e.loop(first, last, width) as s:
                    both = e.load(vector(I32, 2 * width), e.at(sums, (s.i, 8)))
                    value = self._terms(both, e.at(scales, (s.i, 4)), width)
                    e.store(value, e.at(terms, (s.i, 4 * self.terms_a_sub)))
            first = last

    def _terms(self, sums: ir.Value, scales: ir.Value, width: int) -> ir.Value:
        e = self.e
        if self.terms_a_sub == 1:
            sums = e.b.add(e.pick(sums, range(0, 2 * width, 2)), e.pick(sums, range(1, 2 * width, 2)))
        if self.zero:
            zero, origin = (ir.Constant(sums.type, [x] * sums.type.count) for x in (-self.zero, self.origin))
            return e.b.add(e.b.mul(sums, zero), origin)
        factors = e.load(vector(FLOAT, width), scales)
        if self.terms_a_sub == 2:
            factors = e.pick(factors, [i // 2 for i in range(2 * width)])
        return e.b.fneg(e.b.fmul(e.b.sitofp(sums, factors.type), factors))

    def integer_step(self, subs: Sequence[Sub], rows: Rows, sub: Index, parts: Sums) -> Sums:
        """Adds sub-block `sub` to `parts`: exact integer sums times weight scale times activation scale.

        `parts` are sums, followed by as many sums of lows where these are added up apart (`part_sets`).
        """
        e, format_ = self.e, self.format
        halves = self._sums_of_halves(subs, rows, sub) if format_.row.halves else [self._sums(subs, rows, sub, 0)]
        scaled = self._scaled(subs, halves[0], 0)
        if format_.row.halves:
            second = [self._number(s) for s in halves[1]]
            scales = [s.scales[1] for s in subs] * rows.count
            scaled = [e.fma(s, d, first) for s, d, first in zip(second, scales, scaled, strict=True)]
        done, apart = [], parts[len(scaled) :]
        for row in range(rows.count):
            activation_scale = e.splat_f32(e.at(rows.x[row], self.shape.k, (sub, 4)))
            for block, weights in enumerate(subs):
                i = row * len(subs) + block
                part = e.fma(scaled[i], activation_scale, parts[i])
                total = apart[i] if apart else part
                for half, low in enumerate(weights.scales[format_.row.parts :]):
                    total = e.fma(low, e.splat_f32(self.term(rows, row, sub, half)), total)
                if apart:
                    apart[i] = total
                done.append(part if apart else total)
        return done + apart

    def add_part(self, i: int, parts: Sums, numbers: Sequence[ir.Value], total: ir.Value) -> ir.Value:
        """Adds sum `i` of a chunk to its total.

        Args:
            parts: the sums of the chunk, see `integer_step`.
            numbers: the f16 numbers of the superblock as f32, if they are applied now (`late`).
        """
        if self.carries:
            return parts[i]
        if not self.late:
            return self.e.b.fadd(total, parts[i])
        for part, number in zip(parts[i :: len(parts) // self.part_sets], numbers, strict=False):
            total = self.e.fma(part, number, total)
        return total

    def _scaled(self, subs: Sequence[Sub], sums: Sums, half: int) -> Sums:
        """Integer sums times their scales."""
        e, count, scales = self.e, len(subs), [s.scales[half] for s in subs]
        if not self.origin:
            return [e.b.fmul(e.to_f32(s), scales[i % count]) for i, s in enumerate(sums)]
        back = [e.b.fmul(d, e.f32(-ORIGIN)) for d in scales]
        return [e.fma(e.b.bitcast(s, F32X16), scales[i % count], back[i % count]) for i, s in enumerate(sums)]

    def _number(self, total: ir.Value) -> ir.Value:
        """An integer sum as f32."""
        e = self.e
        return e.b.fsub(e.b.bitcast(total, F32X16), e.f32(ORIGIN)) if self.origin else e.to_f32(total)

    def term(self, rows: Rows, row: int, sub: Index, half: int = 0) -> ir.Value:
        """Address of a row's term for a sub-block, or for one half of it."""
        assert rows.terms is not None
        return self.e.at(rows.terms, row * self.term_bytes + 4 * half, (sub, 4 * self.terms_a_sub))

    def _sums_of_halves(self, subs: Sequence[Sub], rows: Rows, sub: Index) -> list[Sums]:
        """The integer sums of both halves of a sub-block.

        A word of a plane may hold groups of both. Where registers hold few words, all groups of a word are taken
        together.
        """
        format_ = self.format
        if self.target.vectors != "neon" or subs[0].in_memory:
            return [self._sums(subs, rows, sub, half) for half in (0, 1)]
        sums = [self._start(subs, rows, sub, half) for half in (0, 1)]
        order, span = format_.order(range(GROUPS)), min(dots.span(self.target, format_.row.bits), GROUPS // 2)
        for first in range(0, GROUPS, 2 * span):
            for half in (0, 1):
                groups = [g for g in order[first : first + 2 * span] if g // (GROUPS // 2) == half]
                sums[half] = self._dots(subs, rows, sub, groups, sums[half])
        return sums

    def _start(self, subs: Sequence[Sub], rows: Rows, sub: Index, half: int) -> Sums:
        """What the integer sums of a sub-block or of one half of it start from."""
        e, of_subs = self.e, [part.starts[half] for part in subs if part.starts]
        if not self.zero:
            return (of_subs or [e.i32(self.origin)] * len(subs)) * rows.count
        of_rows = [e.splat_i32(self.term(rows, row, sub, half)) for row in range(rows.count)]
        return [e.b.add(row, more) if more else row for row in of_rows for more in of_subs or [None] * len(subs)]

    def _sums(self, subs: Sequence[Sub], rows: Rows, sub: Index, half: int) -> Sums:
        """The integer sums of a sub-block, or of one half of it if each half has its own scale."""
        e, format_ = self.e, self.format
        count = GROUPS // 2 if format_.row.halves else GROUPS
        groups = range(half * count, (half + 1) * count)
        sums = self._start(subs, rows, sub, half)
        span = min(dots.span(self.target, format_.row.bits), count)
        in_loop = self.target.vectors not in ("avx2", "neon") or format_.row.signed
        if not (in_loop and all(s.in_memory for s in subs)):
            order = groups if self.holds_codes else format_.order(groups)
            for first in range(0, count, span):
                sums = self._dots(subs, rows, sub, order[first : first + span], sums)
            return sums
        # With wide registers, a loop is as fast as an unrolled one, and much faster to compile. With few registers and
        # a sum for every step, LLVM keeps the order of additions in a loop only; another order takes more registers.
        step = max(span, 2)
        with e.loop(groups.start, groups.stop, step, sums) as loop:
            for first in range(0, step, span):
                chosen = [e.mul_add(1, first + i, loop.i) for i in range(span)]
                loop.values = self._dots(subs, rows, sub, chosen, loop.values)
        return loop.results

    def _dots(self, subs: Sequence[Sub], rows: Rows, sub: Index, groups: Sequence[Index], sums: Sums) -> Sums:
        """Adds some groups of a sub-block to integer sums."""
        e, format_ = self.e, self.format

        def activation(group: Index, row: int) -> ir.Value:
            return e.b.bitcast(e.splat_of_four(I32, e.at(rows.x[row], (sub, SUB)), group), I8X64)

        def code(group: Index, block: int) -> ir.Value:
            return subs[block].code(group)

        def sign(group: Index, block: int) -> ir.Value:
            chosen = subs[block].sign
            assert chosen is not None
            return chosen(group)

        if subs[0].sign:
            return dots.dot_tile(e, sums, groups, len(subs), code, activation, sign=sign)
        signed = format_.row.signed
        return dots.dot_tile(e, sums, groups, len(subs), code, activation, signed=signed)

    # --- float activations --------------------------------------------------------------------------------------------
    #
    # A step is one k of f32 or two of bf16, in both cases four bytes of a row. Even and odd steps have separate sums,
    # because two chains of additions hide more latency than one.

    def float_step(self, i: int, blocks: Sequence[ir.Value], rows: Rows, first: Index, sums: Sums) -> Sums:
        """Adds step `first + i` to the sums of its parity. `blocks` are its weights, one vector per block."""
        places = [self.e.at(x, (first, 4)) for x in rows.x]
        activations = [self._float(p, i) for p in places for _ in blocks]
        return [self._add_step(w, x, s) for w, x, s in zip(list(blocks) * rows.count, activations, sums, strict=True)]

    def _float(self, place: ir.Value, i: int) -> ir.Value:
        """A row's activations of step `i` from `place` on, in all lanes."""
        e, floats = self.e, self.shape.pair == 1
        if self.shape.k // self.shape.pair % 4 == 0:
            value = e.splat_of_four(FLOAT, place, i)
        else:
            value = e.splat_f32(e.at(place, 4 * i)) if floats else e.splat_i32(e.at(place, 4 * i))
        return value if floats else e.b.bitcast(value, BF16X32)

    def _add_step(self, weights: ir.Value, activations: ir.Value, sums: ir.Value) -> ir.Value:
        if self.shape.pair == 1:
            return self.e.fma(weights, activations, sums)
        return dots.dot_bf16(self.e, sums, weights, activations)

    def zeros(self, rows: Rows, blocks: int) -> Sums:
        """Sums of zero."""
        return [self.e.f32(0.0)] * (rows.count * blocks)

    def add(self, sums: Sums, more: Sums) -> Sums:
        """Elementwise addition of two lists of sums."""
        return [self.e.b.fadd(a, b) for a, b in zip(sums, more, strict=True)]


class ResultWriter:
    """Base class of the generators of linear kernels. Subclasses emit the sums."""

    def __init__(self, e: Emitter, shape: Shape) -> None:
        self.e, self.shape = e, shape

    def _block(self, name: str, unit: ir.Value) -> ir.Value:
        """Address of the packed weights of a unit."""
        return self.e.at(self.e.args[name], (unit, self.shape.block_bytes))

    def _result_row(self, row: ir.Value) -> ir.Value:
        """The row of the result that belongs to a row of activations."""
        return row

    def _place(self, row: ir.Value, column: ir.Value) -> ir.Value:
        """The flat index of a result."""
        return self.e.b.add(self.e.b.mul(self._result_row(row), self.e.args["n"]), column)

    def _fetch_results(self, row: ir.Value, unit: ir.Value, units: int) -> None:
        """Prefetches the memory of some units' results of a row, so that the stores do not wait for it."""
        e, dtype = self.e, ACTIVATIONS[self.shape.out]
        place = self._place(row, e.b.mul(unit, e.i64(BLOCK_ROWS)))
        e.prefetch(e.at(e.args["out"], (place, dtype.nbytes)), units * dtype.row_bytes(BLOCK_ROWS))

    def _finish_rows(self, totals: ir.Value, blocks: int, count: ir.Value, macro: ir.Value, unit: ir.Value) -> None:
        """Writes a unit's results of `count` rows, from `macro` on. The sums of rows are 64 * `blocks` bytes apart."""
        e, products = self.e, len(self.shape.weights)
        with e.loop(0, count) as r:
            self.finish(e.b.add(macro, r.i), unit, e.load_row(e.at(totals, (r.i, 64 * blocks)), products))

    def finish(self, row: ir.Value, unit: ir.Value, totals: Sums) -> None:
        """Applies bias, gate and residual to 16 results and stores them. The last unit may hold fewer results."""
        e, shape = self.e, self.shape
        column = e.b.mul(unit, e.i64(BLOCK_ROWS))
        place = self._place(row, column)
        mask = e.tail_mask(e.b.sub(e.args["n"], column)) if shape.ragged else None
        biases = [e.load_as_f32(F32, e.at(e.args[name], (column, 4)), mask) for name in shape.biases]
        totals = [e.b.fadd(t, b) for t, b in zip(totals, biases, strict=True)] if biases else totals
        value = totals[0]
        if shape.gated:
            value = e.b.fmul(vmath.UNARY[shape.gated](e, value), totals[1])
        if shape.residual:
            value = e.b.fadd(value, e.load_as_f32(F32, e.at(e.args["residual"], (place, 4)), mask))
        dtype = ACTIVATIONS[shape.out]
        e.store_from_f32(dtype, value, e.at(e.args["out"], (place, dtype.nbytes)), mask)
