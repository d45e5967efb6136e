"""Tiles of int8 products for registers of 16 bytes: some rows of activations times eight unpacked weight rows.

A register of sums holds four of them. What they are depends on the instruction:

| `Isa.product_rows` | operands | sums |
|---|---|---|
| 1 | 4 weight rows of 4 k; 4 k of one row, a lane of a register | of 4 weight rows |
| 2 | 2 weight rows of 8 k; 2 rows of 8 k | [weight row][row] |

A tile of six rows takes twelve registers of integer sums and as many of the sums of a chunk. Formats that add up more
than these have tiles of four rows.

In scratch memory, the codes and scales of the weights have the order of the registers, and so have the totals. An
unpacked sub-block of 16 weight rows has these vectors of 64 bytes:

    8           codes
    1 each      scales and lows; with two rows in a register, each number twice
    4 or 6      -origin * scale for each register of sums, if sums start with the origin (see `multiply.py`)
    3 or 4      what each register of sums starts with, if it is no term

The last two repeat few numbers. But one instruction loads two registers, and it takes two to set or copy them.

Activations are copied for all rows of a macro tile. A record holds a tile's rows of a sub-block:

     64 bytes   codes of each pair of rows: [8 k][row of the pair][k]
     16 bytes   scales of each pair of rows, f32, twice; with product_rows = 1, scales of four rows
     as many    terms of the rows (see `Multiplier.write_terms`), for each term of a sub-block

The integer sums are exact, and what follows is computed as in `multiply.py`. So a result has the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from rlx.backends.cpu.kernels.linear.multiply import ORIGIN, ORIGIN_BITS, Multiplier, Rows, Sums
from rlx.backends.cpu.kernels.linear.unpack import CHUNK, GROUPS, SUB
from rlx.backends.cpu.layouts import BLOCK_ROWS
from rlx.backends.cpu.tiles import FLOAT, I8, I32, I32X16, I64, Emitter, Index, vector

#: Weight rows of a tile.
WIDTH = 8

_REGISTER = 16  # bytes
_FOUR, _FLOATS, _BYTES = vector(I32, 4), vector(FLOAT, 4), vector(I8, _REGISTER)


class Narrow:
    """The tiles of one linear kernel.

    Attributes:
        rows: rows of activations of a tile.
        together: rows of activations whose sums are in one register.
        record_bytes: bytes of a record.
        group_bytes: bytes of the records of a tile's rows.
        width_bytes: bytes from what is unpacked for 8 weight rows to that for the next 8.
        sub_bytes: bytes of an unpacked sub-block.
        has_origin: whether integer sums start with the origin, see `multiply.py`.
    """

    def __init__(self, e: Emitter, multiply: Multiplier) -> None:
        self.e, self.multiply, self.shape = e, multiply, multiply.shape
        self.rows, self.together = tile_rows(multiply), e.isa.product_rows
        self._count = self.rows * WIDTH // 4  # registers of sums
        self._codes = self.rows * SUB  # bytes of the codes of a record
        self._number_bytes = _REGISTER * -(-self.rows * self.together // 4)  # of a number of each row
        self.record_bytes = self._codes + self._number_bytes * (1 + multiply.terms_a_sub)
        self.group_bytes = self.shape.k // SUB * self.record_bytes
        self.width_bytes = 32 * self.together
        row = multiply.format.row
        self.has_origin = not multiply.zero and row.parts == 1 and row.scales != "e8m0"
        self._copies = self._count * 4 // WIDTH // self.together if self.has_origin else 0
        self._starts_at = 64 * (GROUPS + self.together * (multiply.format.vectors + self._copies))
        of_starts = 0 if multiply.zero else _REGISTER * self._count + self.width_bytes
        self.sub_bytes = self._starts_at + -(-of_starts // 64) * 64

    # --- operands -----------------------------------------------------------------------------------------------------

    def write_weights(self, codes: Sequence[ir.Value], scales: Sequence[ir.Value], to: ir.Value) -> None:
        """Stores the codes of each group of 4 k of a sub-block, and its scales, in the order of the registers."""
        e, to, numbers = self.e, self.e.near(to), self.numbers(scales)
        backs = [e.b.fmul(number, e.f32(-ORIGIN)) for number in numbers[: self.together]] * self._copies
        for i, value in enumerate([*self._ordered(codes), *numbers, *backs]):
            e.store(value, e.at(to, 64 * i), 16)

    def write_starts(self, sub: ir.Value) -> None:
        """Stores what the sums start with, if they do not start with terms."""
        for at in range(self._starts_at, self.sub_bytes, 64):
            self.e.store(self.e.i32(ORIGIN_BITS if self.has_origin else 0), self.e.at(sub, at), 16)

    def _ordered(self, codes: Sequence[ir.Value]) -> list[ir.Value]:
        if self.together == 1:
            return list(codes)
        e, ordered = self.e, list[ir.Value]()
        for low, high in zip(codes[::2], codes[1::2], strict=True):
            rows = [e.b.bitcast(x, I32X16) for x in (low, high)]
            for first in (0, WIDTH):
                lanes = [BLOCK_ROWS * j + first + i for i in range(WIDTH) for j in (0, 1)]
                ordered.append(e.b.shuffle_vector(*rows, ir.Constant(I32X16, lanes)))
        return ordered

    def numbers(self, vectors: Sequence[ir.Value]) -> list[ir.Value]:
        """Numbers of 16 weight rows -> the same in the order of the registers."""
        if self.together == 1:
            return list(vectors)
        twice = [[first + i // 2 for i in range(2 * WIDTH)] for first in (0, WIDTH)]
        return [self.e.pick(each, lanes) for each in vectors for lanes in twice]

    def write_record(self, rows: Rows, sub: ir.Value, record: ir.Value) -> None:
        """Copies sub-block `sub` of a tile's rows."""
        e, k = self.e, self.shape.k
        self._write_codes([e.at(x, (sub, SUB)) for x in rows.x], record)
        self._write_numbers([e.at(x, k, (sub, 4)) for x in rows.x], self._numbers(record, 0))
        for half in range(self.multiply.terms_a_sub):
            places = [self.multiply.term(rows, row, sub, half) for row in range(self.rows)]
            self._write_numbers(places, self._numbers(record, 1 + half))

    def _write_codes(self, rows: Sequence[ir.Value], record: ir.Value) -> None:
        e, two = self.e, vector(I64, 2)
        for at in range(0, SUB, _REGISTER):
            found = [e.load(two, e.at(row, at)) for row in rows]
            for pair, both in enumerate(zip(found[::2], found[1::2], strict=True)):
                for half in (0, 1):
                    operand = e.b.shuffle_vector(*both, ir.Constant(vector(I32, 2), [half, 2 + half]))
                    e.store(operand, e.at(record, self._codes_of(pair, at // 8 + half)), 16)

    def _codes_of(self, pair: int, step: int) -> int:
        """Byte offset of the codes of a pair of rows for the 8 k of a step.

        Two registers that are read at the same time are side by side: one instruction loads them.
        """
        pairs, last = self.rows // 2, self.rows // 2 - 1
        if pairs % 2 == 0:
            return _REGISTER * (pairs * step + pair)
        start = _REGISTER * pairs * (step - step % 2)  # of two steps
        if pair == last:
            return start + _REGISTER * (last + step % 2)
        return start + _REGISTER * (pair + (pairs + 1) * (step % 2))

    def _write_numbers(self, places: Sequence[ir.Value], to: ir.Value) -> None:
        """Copies a number of each row."""
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
        return self.e.at(record, self._codes, (which, self._number_bytes))

    # --- products -----------------------------------------------------------------------------------------------------

    def add_chunk(
        self, chunk: ir.Value, weights: ir.Value, stride: int, group: ir.Value, totals: Sequence[ir.Value]
    ) -> Sums:
        """The parts of a chunk (see `Multiplier.integer_step`) for 8 weight rows, in registers.

        Args:
            chunk: number of the chunk.
            weights: its unpacked weights from the first of the rows on, `stride` bytes for a sub-block.
            group: the records of the tile's rows.
            totals: addresses of the registers' totals, with which the parts start if these are carried.
        """
        e = self.e
        sums = [ir.Constant(_FLOATS, None)] * (self._count * self.multiply.part_sets)
        if self.multiply.carries:
            sums = [e.load(_FLOATS, place, 16) for place in totals]
        start = e.at(group, (chunk, CHUNK // SUB * self.record_bytes))
        middle = 256  # from where offsets, -256 to 1008, are small enough for loads of pairs
        with e.loop(0, self.multiply.steps(chunk, SUB), 1, sums) as s:
            place = e.at(e.near(e.at(weights, middle, (s.i, stride))), -middle)
            record = e.near(e.at(start, (s.i, self.record_bytes)))
            s.values = self._add_sub(place, record, s.values)
        return s.results

    def _add_sub(self, weights: ir.Value, record: ir.Value, parts: Sums) -> Sums:
        """Adds a sub-block. Registers of sums are ordered by rows of activations, then by weight rows."""
        e, format_, scaled = self.e, self.multiply.format, list[ir.Value]()
        count, size, vectors = format_.row.parts, self._count, e.at(weights, 64 * GROUPS)
        for half in range(count):
            sums, scales = self._sums(weights, record, half), self.of_weights(vectors, half)
            factors = scales * (size // len(scales))
            if self.has_origin:
                copies = range(format_.vectors, format_.vectors + self._copies)
                scaled = [back for copy in copies for back in self.of_weights(vectors, copy)]
            numbers = [e.b.bitcast(s, _FLOATS) if self.has_origin else e.b.sitofp(s, _FLOATS) for s in sums]
            if scaled:
                scaled = [e.fma(*operands) for operands in zip(numbers, factors, scaled, strict=True)]
            else:
                scaled = [e.b.fmul(*operands) for operands in zip(numbers, factors, strict=True)]
        done = [e.fma(*operands) for operands in zip(scaled, self._of_rows(record, 0, _FLOATS), parts, strict=False)]
        lows = parts[size:] or done  # added up apart, or to the products
        for half in range(format_.vectors - count):
            low, terms = self.of_weights(vectors, count + half), self._of_rows(record, 1 + half, _FLOATS)
            lows = [e.fma(*operands) for operands in zip(low * (size // len(low)), terms, lows, strict=True)]
        return done + lows if parts[size:] else lows

    def _sums(self, weights: ir.Value, record: ir.Value, half: int) -> Sums:
        """The integer sums of a sub-block, or of one half of it if each half has its own scale."""
        e = self.e
        count = SUB // self.multiply.format.row.parts
        if self.multiply.zero:
            sums = self._of_rows(record, 1 + half, _FOUR)
        else:
            sums = [e.load(_FOUR, e.at(weights, self._starts_at + _REGISTER * i), 16) for i in range(self._count)]
        add = self._add_lanes if self.together == 1 else self._add_pairs
        for k in range(half * count, (half + 1) * count, 8):
            rows = [e.load(_BYTES, e.at(record, self._codes_of(p, k // 8)), 16) for p in range(self.rows // 2)]
            sums = add(e.at(weights, 16 * k), rows, sums)
        return e.isa.settled(e, sums)  # scales that are loaded earlier would need more registers than there are

    def _add_lanes(self, weights: ir.Value, rows: Sequence[ir.Value], sums: Sums) -> Sums:
        """8 k: registers of 4 weight rows times lanes of pairs of rows."""
        e = self.e
        for group in (0, 1):
            codes = self._codes_at(e.at(weights, 64 * group), WIDTH // 4)
            four = [[8 * row + 4 * group + i % 4 for i in range(_REGISTER)] for row in (0, 1)]
            lanes = [e.pick(pair, lane) for pair in rows for lane in four]
            operands = [(code, lane) for lane in lanes for code in codes]
            sums = [e.isa.dot_step(e, s, *both) for s, both in zip(sums, operands, strict=True)]
        return sums

    def _add_pairs(self, weights: ir.Value, rows: Sequence[ir.Value], sums: Sums) -> Sums:
        """8 k: pairs of weight rows times pairs of rows."""
        e, done = self.e, list(sums)
        codes = self._codes_at(weights, WIDTH // 2)
        for i in (0, 2):
            for j, row in enumerate(rows):
                for c in (i, i + 1):
                    at = j * len(codes) + c
                    done[at] = e.isa.pair_products(e, done[at], codes[c], row)
        return done

    def _codes_at(self, place: ir.Value, count: int) -> list[ir.Value]:
        """Registers of codes."""
        return [self.e.load(_BYTES, self.e.at(place, _REGISTER * i), 16) for i in range(count)]

    def of_weights(self, place: ir.Value, vector: int) -> list[ir.Value]:
        """The registers of one of the vectors of numbers of weight rows at `place`."""
        e, place = self.e, self.e.at(place, 64 * self.together * vector)
        return [e.load(_FLOATS, e.at(place, _REGISTER * i), 16) for i in range(WIDTH // 4 * self.together)]

    def _of_rows(self, record: ir.Value, which: Index, type_: ir.Type) -> list[ir.Value]:
        """The scales (0) or terms (1 and up) of the rows, for each register of sums."""
        e, place = self.e, self._numbers(record, which)
        registers = [e.load(type_, e.at(place, at), 16) for at in range(0, self._number_bytes, _REGISTER)]
        if self.together == 1:
            registers = [e.pick(registers[row // 4], [row % 4] * 4) for row in range(self.rows)]
        return [register for register in registers for _ in range(self._count // len(registers))]

    # --- totals -------------------------------------------------------------------------------------------------------

    def totals(self, first: ir.Value, row_bytes: int) -> list[ir.Value]:
        """Addresses of the totals of registers.

        Args:
            first: address of the first row's total of the first weight row.
            row_bytes: bytes between the totals of rows.
        """
        return [self.e.at(first, i // 2 * row_bytes + i % 2 * _REGISTER) for i in range(self._count)]

    def store_totals(self, parts: Sums, numbers: Sequence[Sequence[ir.Value]], totals: Sequence[ir.Value]) -> None:
        """Adds the parts of a chunk to the totals, in the order of the registers.

        Args:
            numbers: the registers of each number of the superblock, if they are applied now (`Multiplier.late`).
        """
        e = self.e
        for i, place in enumerate(totals):
            own = [registers[i % len(registers)] for registers in numbers]
            e.store(self.multiply.add_part(i, parts, own, e.load(_FLOATS, place, 16)), place, 16)

    def order_totals(self, totals: ir.Value, count: ir.Value, sums: int) -> None:
        """Brings the totals f32[count, sums, 16] into the order of weight rows."""
        if self.together == 1:
            return
        e = self.e
        with e.loop(0, count, self.together) as row:
            for first in range(0, sums * BLOCK_ROWS, WIDTH):
                places = self.totals(e.at(totals, (row.i, 64 * sums), 4 * first), 64 * sums)[:4]
                found = [e.load(_FLOATS, place, 16) for place in places]
                for i, place in enumerate(places):
                    order = [i // 2 + 2 * lane for lane in range(4)]  # of two registers
                    two = found[i % 2 * 2 : i % 2 * 2 + 2]
                    e.store(e.b.shuffle_vector(*two, ir.Constant(_FOUR, order)), place, 16)


def tile_rows(multiply: Multiplier) -> int:
    """Rows of activations of a tile: six if registers hold the sums, which then take 24 of 32."""
    return 6 if multiply.format.row.parts == multiply.part_sets == 1 else 4
