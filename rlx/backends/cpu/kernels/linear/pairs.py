"""Matrix products of int8: tiles of four rows of activations over unpacked weights, for targets that multiply two rows
of weights by two rows of activations, 8 k at a time, in one instruction.

Both operands are put into the order of that instruction once. In scratch memory, the codes of a sub-block of 32 k are
ordered [8 k][pair of weight rows][row of the pair][k]. Activations are copied for all rows of a macro tile; a record
holds four rows of a sub-block:

    128 bytes   codes: [pair of rows][8 k][row of the pair][k]
     16 bytes   scales of the four rows, f32
     16 bytes   terms of the four rows (see `Multiplier.write_terms`), for each term of a sub-block

The integer sums are exact, and what follows is computed as in `multiply.py`. So a result has the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from rlx.backends.cpu.kernels.linear.multiply import Multiplier, Rows, Sums
from rlx.backends.cpu.kernels.linear.unpack import CHUNK, SUB
from rlx.backends.cpu.layouts import BLOCK_ROWS
from rlx.backends.cpu.tiles import FLOAT, I8, I32, I32X16, I64, Emitter, Index, vector

#: Rows of activations of a tile, and weight rows whose sums the registers hold beside them.
ROWS, WIDTH = 4, 8

_OPERAND = 16  # bytes of an operand: two rows of 8 k
_STEPS = SUB // 8  # products for the sums of a sub-block
_CODES = ROWS * SUB  # bytes of the codes of a record
_FOUR = vector(I32, 4)
#: The sums of a row.
FLOATS = vector(FLOAT, WIDTH)


class Pairs:
    """The matrix products of one linear kernel."""

    def __init__(self, e: Emitter, multiply: Multiplier) -> None:
        self.e, self.multiply, self.shape = e, multiply, multiply.shape
        self.record_bytes = _CODES + 16 + 16 * multiply.terms_a_sub
        self.group_bytes = self.shape.k // SUB * self.record_bytes

    # --- operands -----------------------------------------------------------------------------------------------------

    def codes(self, groups: Sequence[ir.Value]) -> list[ir.Value]:
        """The 64 codes of each group of 4 k of a sub-block -> the same codes in the order of the products."""
        e, ordered = self.e, []
        for low, high in zip(groups[::2], groups[1::2], strict=True):
            rows = [e.b.bitcast(x, I32X16) for x in (low, high)]
            for first in (0, WIDTH):
                lanes = [BLOCK_ROWS * j + first + i for i in range(WIDTH) for j in (0, 1)]
                ordered.append(e.b.shuffle_vector(*rows, ir.Constant(I32X16, lanes)))
        return ordered

    def write_record(self, rows: Rows, sub: ir.Value, record: ir.Value) -> None:
        """Copies sub-block `sub` of four rows."""
        e, k = self.e, self.shape.k
        two, found = vector(I64, 2), [e.at(x, (sub, SUB)) for x in rows.x]
        for pair in range(ROWS // 2):
            for at in range(0, SUB, 16):
                both = [e.load(two, e.at(place, at)) for place in found[2 * pair : 2 * pair + 2]]
                for half in (0, 1):
                    operand = e.b.shuffle_vector(*both, ir.Constant(vector(I32, 2), [half, 2 + half]))
                    e.store(operand, e.at(record, pair * _CODES // 2 + 2 * at + _OPERAND * half), 16)
        for row, x in enumerate(rows.x):
            e.store(e.load(I32, e.at(x, k, (sub, 4)), 4), e.at(record, _CODES + 4 * row), 4)
            for half in range(self.multiply.terms_a_sub):
                term = e.load(I32, self.multiply.term(rows, row, sub, half), 4)
                e.store(term, e.at(record, _CODES + 16 * (half + 1) + 4 * row), 4)

    # --- products -----------------------------------------------------------------------------------------------------

    def add_chunk(
        self, chunk: ir.Value, weights: ir.Value, stride: int, group: ir.Value, sums: Sums, first: int
    ) -> Sums:
        """The sums of a chunk, f32[4 rows][8], for 8 weight rows from `first` on.

        Args:
            chunk: number of the chunk.
            weights: its unpacked weights, `stride` bytes for a sub-block.
            group: the records of four rows.
        """
        e = self.e
        steps = self.multiply.steps(chunk, SUB)
        start = e.at(group, (chunk, CHUNK // SUB * self.record_bytes))
        with e.loop(0, steps, 1, sums) as s:
            place, record = e.at(weights, (s.i, stride)), e.at(start, (s.i, self.record_bytes))
            s.values = self._add_sub(place, record, s.values, first)
        return s.results

    def _add_sub(self, weights: ir.Value, record: ir.Value, parts: Sums, first: int) -> Sums:
        e, format_ = self.e, self.shape.format
        assert format_ is not None
        count = format_.row.parts
        scales = [e.load(FLOATS, e.at(weights, 64 * v + 4 * first), 16) for v in range(8, 8 + format_.vectors)]
        scaled = [e.b.fmul(e.b.sitofp(s, FLOATS), scales[0]) for s in self._sums(weights, record, first, 0)]
        if count == 2:
            second = [e.b.sitofp(s, FLOATS) for s in self._sums(weights, record, first, 1)]
            scaled = [e.fma(s, scales[1], before) for s, before in zip(second, scaled, strict=True)]
        activation_scales = e.load(vector(FLOAT, ROWS), e.at(record, _CODES), 16)
        parts = [e.fma(s, self._lane(activation_scales, i), parts[i]) for i, s in enumerate(scaled)]
        for half, low in enumerate(scales[count:]):
            terms = e.load(vector(FLOAT, ROWS), self._terms(record, half), 16)
            parts = [e.fma(low, self._lane(terms, i), part) for i, part in enumerate(parts)]
        return parts

    def _sums(self, weights: ir.Value, record: ir.Value, first: int, half: int) -> list[ir.Value]:
        """The integer sums of a sub-block, or of one half of it if each half has its own scale: i32[8] for each row."""
        e, format_ = self.e, self.shape.format
        assert format_ is not None
        count = _STEPS // format_.row.parts
        pairs, operand = range(ROWS // 2), vector(I8, _OPERAND)
        start = [ir.Constant(_FOUR, None) for _ in pairs]
        if self.multiply.zero:
            terms = e.load(_FOUR, self._terms(record, half), 16)
            start = [e.pick(terms, [2 * pair, 2 * pair + 1] * 2) for pair in pairs]
        sums = [[start[pair]] * (WIDTH // 2) for pair in pairs]
        for step in range(half * count, (half + 1) * count):
            place = e.at(weights, 128 * step + 8 * first)
            codes = [e.load(operand, e.at(place, _OPERAND * i), 16) for i in range(WIDTH // 2)]
            for pair in pairs:
                x = e.load(operand, e.at(record, pair * _CODES // 2 + _OPERAND * step), 16)
                sums[pair] = [e.isa.pair_products(e, s, code, x) for s, code in zip(sums[pair], codes, strict=True)]
        return [self._row(sums[pair], row) for pair in pairs for row in (0, 1)]

    def _row(self, sums: Sums, row: int) -> ir.Value:
        """The sums of one of two rows: each operand holds [weight row][row]."""
        e = self.e
        order = ir.Constant(_FOUR, [row, 2 + row, 4 + row, 6 + row])
        return e.concat(*(e.b.shuffle_vector(*two, order) for two in zip(sums[::2], sums[1::2], strict=True)))

    def _terms(self, record: ir.Value, half: Index) -> ir.Value:
        return self.e.at(record, _CODES + 16, (half, 16))

    def _lane(self, values: ir.Value, lane: int) -> ir.Value:
        return self.e.pick(values, [lane] * WIDTH)
