"""Tiles of int8 products for registers of 16 bytes: four rows of activations times eight unpacked weight rows.

A register of sums holds four of them. What they are depends on the instruction:

| `Isa.product_rows` | operands | sums |
|---|---|---|
| 1 | 4 weight rows of 4 k; 4 k of one row, a lane of a register | of 4 weight rows |
| 2 | 2 weight rows of 8 k; 2 rows of 8 k | [weight row][row] |

So eight registers hold the sums of a tile. In scratch memory, the codes and scales of the weights have the order of the
registers. Activations are copied for all rows of a macro tile; a record holds four rows of a sub-block:

    128 bytes   codes: [row][32 k], or [pair of rows][8 k][row of the pair][k]
     16 bytes   scales of the four rows, f32; 32 bytes with two rows per operand: each pair of rows twice
     as many    terms of the four rows (see `Multiplier.write_terms`), for each term of a sub-block

The integer sums are exact, and what follows is computed as in `multiply.py`. So a result has the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from rlx.backends.cpu.kernels.linear.multiply import Multiplier, Rows, Sums
from rlx.backends.cpu.kernels.linear.unpack import CHUNK, GROUPS, SUB
from rlx.backends.cpu.layouts import BLOCK_ROWS
from rlx.backends.cpu.tiles import FLOAT, I8, I32, I32X16, I64, Emitter, Index, vector

#: Rows of activations of a tile, and weight rows whose sums the registers hold beside them.
ROWS, WIDTH = 4, 8
#: The sums of a row.
FLOATS = vector(FLOAT, WIDTH)

_REGISTER = 16  # bytes
_CODES = ROWS * SUB  # bytes of the codes of a record
_FOUR, _FLOATS, _BYTES = vector(I32, 4), vector(FLOAT, 4), vector(I8, _REGISTER)


class Narrow:
    """The tiles of one linear kernel.

    Attributes:
        together: rows of activations whose sums are in one register.
        record_bytes: bytes of a record.
        group_bytes: bytes of the records of four rows.
    """

    def __init__(self, e: Emitter, multiply: Multiplier) -> None:
        self.e, self.multiply, self.shape = e, multiply, multiply.shape
        self.together = e.isa.product_rows
        self._number_bytes = _REGISTER * self.together  # of four rows
        self.record_bytes = _CODES + self._number_bytes * (1 + multiply.terms_a_sub)
        self.group_bytes = self.shape.k // SUB * self.record_bytes

    # --- operands -----------------------------------------------------------------------------------------------------

    def weights(self, codes: Sequence[ir.Value], scales: Sequence[ir.Value]) -> list[ir.Value]:
        """The codes of each group of 4 k of a sub-block and its scales -> the same in the order of the registers."""
        if self.together == 1:
            return [*codes, *scales]
        e, ordered = self.e, list[ir.Value]()
        for low, high in zip(codes[::2], codes[1::2], strict=True):
            rows = [e.b.bitcast(x, I32X16) for x in (low, high)]
            for first in (0, WIDTH):
                lanes = [BLOCK_ROWS * j + first + i for i in range(WIDTH) for j in (0, 1)]
                ordered.append(e.b.shuffle_vector(*rows, ir.Constant(I32X16, lanes)))
        twice = [[first + i // 2 for i in range(2 * WIDTH)] for first in (0, WIDTH)]
        return [*ordered, *(e.pick(scale, lanes) for scale in scales for lanes in twice)]

    def write_record(self, rows: Rows, sub: ir.Value, record: ir.Value) -> None:
        """Copies sub-block `sub` of four rows."""
        e, k, terms = self.e, self.shape.k, range(self.multiply.terms_a_sub)
        self._write_codes([e.at(x, (sub, SUB)) for x in rows.x], record)
        self._write_numbers([e.at(x, k, (sub, 4)) for x in rows.x], self._numbers(record, 0))
        for half in terms:
            places = [self.multiply.term(rows, row, sub, half) for row in range(ROWS)]
            self._write_numbers(places, self._numbers(record, 1 + half))

    def _write_codes(self, rows: Sequence[ir.Value], record: ir.Value) -> None:
        e, two = self.e, vector(I64, 2)
        for at in range(0, SUB, _REGISTER):
            found = [e.load(two, e.at(row, at)) for row in rows]
            if self.together == 1:
                for i, value in enumerate(found):
                    e.store(value, e.at(record, SUB * i + at), 16)
                continue
            for pair, both in enumerate(zip(found[::2], found[1::2], strict=True)):
                for half in (0, 1):
                    operand = e.b.shuffle_vector(*both, ir.Constant(vector(I32, 2), [half, 2 + half]))
                    e.store(operand, e.at(record, 2 * SUB * pair + 2 * at + _REGISTER * half), 16)

    def _write_numbers(self, places: Sequence[ir.Value], to: ir.Value) -> None:
        """Copies a number of each of the four rows."""
        e = self.e
        for row, place in enumerate(places):
            number = e.load(I32, place, 4)
            for copy in range(self.together):
                e.store(number, e.at(to, self._lane(row) + 8 * copy), 4)

    def _lane(self, row: int) -> int:
        """Byte offset of a row's number."""
        return 4 * row if self.together == 1 else _REGISTER * (row // 2) + 4 * (row % 2)

    def _numbers(self, record: ir.Value, which: Index) -> ir.Value:
        """Address of the scales (0) of a record, or of its terms (1 and up)."""
        return self.e.at(record, _CODES, (which, self._number_bytes))

    # --- products -----------------------------------------------------------------------------------------------------

    def add_chunk(self, chunk: ir.Value, weights: ir.Value, stride: int, group: ir.Value, first: int) -> Sums:
        """The parts of a chunk (see `Multiplier.integer_step`) for 8 weight rows from `first` on: f32[8] for each row.

        Args:
            chunk: number of the chunk.
            weights: its unpacked weights, `stride` bytes for a sub-block.
            group: the records of four rows.
        """
        e, sets = self.e, self.multiply.part_sets
        zeros = [ir.Constant(_FLOATS, None)] * (ROWS * WIDTH // 4 * sets)
        start = e.at(group, (chunk, CHUNK // SUB * self.record_bytes))
        with e.loop(0, self.multiply.steps(chunk, SUB), 1, zeros) as s:
            place, record = e.near(e.at(weights, (s.i, stride))), e.near(e.at(start, (s.i, self.record_bytes)))
            s.values = self._add_sub(place, record, s.values, first)
        size = len(zeros) // sets
        return [row for i in range(0, len(zeros), size) for row in self._rows(s.results[i : i + size])]

    def _add_sub(self, weights: ir.Value, record: ir.Value, parts: Sums, first: int) -> Sums:
        """Adds a sub-block. Registers of sums are ordered by rows of activations, then by weight rows."""
        e, format_ = self.e, self.multiply.format
        count, size = format_.row.parts, ROWS * WIDTH // 4
        scales = [self._of_weights(weights, v, first) for v in range(format_.vectors)]
        scaled: Sums = []
        for half in range(count):
            factors = scales[half] * (size // len(scales[half]))
            numbers = [e.b.sitofp(s, _FLOATS) for s in self._sums(weights, record, first, half)]
            if scaled:
                scaled = [e.fma(*operands) for operands in zip(numbers, factors, scaled, strict=True)]
            else:
                scaled = [e.b.fmul(*operands) for operands in zip(numbers, factors, strict=True)]
        done = [e.fma(*operands) for operands in zip(scaled, self._of_rows(record, 0, _FLOATS), parts, strict=False)]
        lows = parts[size:] or done  # added up apart, or to the products
        for half, low in enumerate(scales[count:]):
            terms = self._of_rows(record, 1 + half, _FLOATS)
            lows = [e.fma(*operands) for operands in zip(low * (size // len(low)), terms, lows, strict=True)]
        return done + lows if parts[size:] else lows

    def _sums(self, weights: ir.Value, record: ir.Value, first: int, half: int) -> Sums:
        """The integer sums of a sub-block, or of one half of it if each half has its own scale."""
        count = SUB // self.multiply.format.row.parts
        start = self._of_rows(record, 1 + half, _FOUR) if self.multiply.zero else [ir.Constant(_FOUR, None)] * WIDTH
        add = self._add_lanes if self.together == 1 else self._add_pairs
        step, sums = _REGISTER // self.together, start
        for k in range(half * count, (half + 1) * count, step):
            sums = add(weights, record, first, k, sums)
        return sums

    def _add_lanes(self, weights: ir.Value, record: ir.Value, first: int, k: int, sums: Sums) -> Sums:
        """16 k: registers of 4 weight rows times lanes of four rows."""
        e = self.e
        rows = [e.load(_BYTES, e.at(record, SUB * row + k), 16) for row in range(ROWS)]
        for group in range(4):
            place = e.at(weights, 16 * (k + 4 * group) + 4 * first)
            codes = [e.load(_BYTES, e.at(place, _REGISTER * i), 16) for i in range(WIDTH // 4)]
            lanes = [e.pick(row, [4 * group + i % 4 for i in range(_REGISTER)]) for row in rows]
            operands = [(code, lane) for lane in lanes for code in codes]
            sums = [e.isa.dot_step(e, s, *both) for s, both in zip(sums, operands, strict=True)]
        return sums

    def _add_pairs(self, weights: ir.Value, record: ir.Value, first: int, k: int, sums: Sums) -> Sums:
        """8 k: pairs of weight rows times pairs of rows."""
        e = self.e
        place = e.at(weights, 16 * k + 8 * first)
        codes = [e.load(_BYTES, e.at(place, _REGISTER * i), 16) for i in range(WIDTH // 2)]
        rows = [e.load(_BYTES, e.at(record, 2 * SUB * pair + 2 * k), 16) for pair in range(ROWS // 2)]
        operands = [(code, row) for row in rows for code in codes]
        return [e.isa.pair_products(e, s, *both) for s, both in zip(sums, operands, strict=True)]

    def _of_weights(self, weights: ir.Value, vector: int, first: int) -> list[ir.Value]:
        """The registers of one vector of scales of unpacked weights."""
        e = self.e
        place = e.at(weights, 64 * GROUPS + self.together * (64 * vector + 4 * first))
        return [e.load(_FLOATS, e.at(place, _REGISTER * i), 16) for i in range(WIDTH // 4 * self.together)]

    def _of_rows(self, record: ir.Value, which: Index, type_: ir.Type) -> list[ir.Value]:
        """The scales (0) or terms (1 and up) of four rows, for each register of sums."""
        e, place = self.e, self._numbers(record, which)
        registers = [e.load(type_, e.at(place, _REGISTER * i), 16) for i in range(self.together)]
        if self.together == 1:
            registers = [e.pick(registers[0], [row] * 4) for row in range(ROWS)]
        return [register for register in registers for _ in range(ROWS * WIDTH // 4 // len(registers))]

    def _rows(self, parts: Sums) -> Sums:
        """f32[8] of each row."""
        e = self.e
        if self.together == 1:
            return [e.concat(*two) for two in zip(parts[::2], parts[1::2], strict=True)]
        done = []
        for pair in (parts[:4], parts[4:]):
            for row in (0, 1):
                order = ir.Constant(_FOUR, [row, 2 + row, 4 + row, 6 + row])
                both = [e.b.shuffle_vector(*two, order) for two in zip(pair[::2], pair[1::2], strict=True)]
                done.append(e.concat(*both))
        return done
