"""Weights of a product of one row on their way to tensor cores: a ring of pieces in shared memory for each warp.

A piece is some units of a tile, with what their scales and lows are made of. Weights never change, so a warp begins to
copy its first pieces before the kernel before this one ends; and a piece takes no registers until it is multiplied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlx.backends.cuda.code import F32, I8, I16, I32, WARPS, Code, Operand, Value
from rlx.backends.cuda.kernels.matrix import Group, Matrix, lane_words
from rlx.backends.cuda.kernels.scales import Numbers, numbers_of
from rlx.backends.cuda.kernels.tensor_cores import commit_copies, copy_async, wait_copies
from rlx.backends.cuda.layouts import DEPTH, LANES, LOAD, Form

_V4 = "<4 x i32>"


@dataclass(frozen=True)
class Piece:
    """What is copied at a time of a matrix: codes, or other numbers, then fields, then numbers of superblocks.

    Attributes:
        form: of the weights.
        units: of a tile.
        even: whether all pieces are whole, and whole superblocks or equal parts of one.
    """

    form: Form
    units: int
    even: bool

    @property
    def groups(self) -> int:
        """Times 32 k."""
        return self.units * (self.form.unit // DEPTH)

    @property
    def fields_at(self) -> int:
        """Where the fields begin."""
        return self.units * self.form.code_bytes

    @property
    def heads_at(self) -> int:
        """Where the numbers of superblocks begin."""
        return self.fields_at + self.units * self.form.field_bytes

    @property
    def nbytes(self) -> int:
        """Of all; of superblocks as many as it touches at most."""
        size, block = self.groups * DEPTH, self.form.block
        touched = -(-size // block) if self.even else (size - DEPTH + block - DEPTH) // block + 1
        return self.heads_at + touched * self.form.head_bytes

    @property
    def numbers(self) -> int:
        """Scales and lows of 32 k of two rows."""
        return 2 * self.form.scales * (1 + self.form.lows)

    @property
    def numbers_bytes(self) -> int:
        """Of all scales and lows as f32: [32 k, g, scale or low, row g or g + 8]."""
        return self.groups * 8 * self.numbers * 4


class Ring:
    """The pieces of a warp.

    Args:
        matrices: one, or two if the layer is gated.
        piece: of each of them.
        stages: pieces that are in shared memory at a time.

    Attributes:
        nbytes: what all warps copy at a time.
    """

    def __init__(self, code: Code, matrices: Sequence[Matrix], piece: Piece, stages: int) -> None:
        self.code, self.matrices, self.piece, self.stages = code, matrices, piece, stages
        self._stage = len(matrices) * piece.nbytes
        self.nbytes = WARPS * self._stage
        own, numbers = stages * self._stage, len(matrices) * piece.numbers_bytes
        self._place = code.at(code.share(WARPS * own), I8, code.warp * own)
        self._numbers = code.at(code.share(WARPS * numbers), I8, code.warp * numbers)

    @staticmethod
    def stages_in(nbytes: int, piece: Piece, matrices: int) -> int:
        """How many pieces of so many matrices there is room for in each warp."""
        return (nbytes // (WARPS * matrices) - piece.numbers_bytes) // piece.nbytes

    def _at(self, slot: Operand, part: int, offset: int = 0) -> Value:
        place = self.code.number(slot) * self._stage + (part * self.piece.nbytes + offset)
        return self.code.at(self._place, I8, place)

    # -- copies -------------------------------------------------------------------------------------------------------

    def begin(self, slot: Operand, tile: Value, unit: Value) -> None:
        """Begins to copy the pieces of a tile from a unit on; `end` must follow."""
        piece, form = self.piece, self.piece.form
        for part, matrix in enumerate(self.matrices):
            codes, fields, heads = (self._at(slot, part, at) for at in (0, piece.fields_at, piece.heads_at))
            self._copy(codes, matrix.codes_at(tile), piece.fields_at, unit, matrix.units, form.code_bytes)
            size = piece.heads_at - piece.fields_at
            self._copy(fields, matrix.fields_at(tile), size, unit, matrix.units, form.field_bytes)
            if form.head_bytes:
                superblock, size = unit * form.unit // form.block, piece.nbytes - piece.heads_at
                self._copy(heads, matrix.heads_at(tile), size, superblock, matrix.superblocks, form.head_bytes)

    def _copy(self, to: Value, source: Value, nbytes: int, first: Value, count: int, each: int) -> None:
        """Copies bytes of a tile, which has `count` times `each` of them, from number `first` on; not those after."""
        k, total, own = self.code, nbytes // LOAD, first * (each // LOAD) + self.code.lane
        to, start_of = k.at(to, _V4, k.lane), k.at(source, _V4, own)
        for start in range(0, total, LANES):
            with k.guarded(None if start + LANES <= total else k.lane < total - start):
                place = k.at(start_of, _V4, start)
                if not self.piece.even:
                    place = k.at(source, _V4, k.smaller(own + start, count * (each // LOAD) - 1))
                copy_async(k, k.at(to, _V4, start), place)

    def end(self) -> None:
        """Ends what is copied at a time, also if that is nothing."""
        commit_copies(self.code)

    # -- what was copied ----------------------------------------------------------------------------------------------

    def take(self, slot: Value, unit: Value) -> list[tuple[Value, Value]]:
        """Waits for the oldest pieces, which begin with a unit: their scales and lows, which `keep` must get."""
        wait_copies(self.code, self.stages - 1)
        self.code.sync_warp()
        k, piece, form, found = self.code, self.piece, self.piece.form, list[tuple[Value, Value]]()
        if form.row is None:
            return found
        g, t, subs = k.lane >> 2, k.lane & 3, form.block // DEPTH
        group = unit * (form.unit // DEPTH)
        for part in range(len(self.matrices)):
            fields, heads = self._at(slot, part, piece.fields_at), self._at(slot, part, piece.heads_at)
            for start in range(0, piece.groups, 4):
                own = t + start if start + 4 <= piece.groups else k.smaller(t + start, piece.groups - 1)
                superblock = own // subs if piece.even else (group + own) // subs - group // subs
                words = self._words(fields, 2 * form.row.field_bytes, own * 8 + g)
                words += self._words(heads, 4 * form.row.head, superblock * 8 + g)
                numbers = numbers_of(k, form.row, words)
                flat = [each for pair in (*numbers.scales, *numbers.lows) for each in pair]
                place = ((own + part * piece.groups) * 8 + g) * (4 * piece.numbers)
                to = k.at(self._numbers, I8, place)
                found += [(k.at(to, I8, 4 * i), k.vector(flat[i : i + 4])) for i in range(0, len(flat), 4)]
        return found

    def keep(self, found: Sequence[tuple[Value, Value]]) -> None:
        """Puts scales and lows where `numbers` finds them."""
        k = self.code
        for place, values in found:
            k.store(place, values, align=4 * int(values.type[1:].split()[0]))
        if found:
            k.sync_warp()

    def _words(self, base: Value, nbytes: int, index: Value) -> list[Value]:
        """The bytes with a number as i32."""
        k = self.code
        if not nbytes:
            return []
        if nbytes == 2:
            return [k.load(base, I16, index).to(I32)]
        return k.lanes(k.load(base, f"<{nbytes // 4} x i32>", index))

    def unit(self, slot: Value, part: int, i: int) -> list[Value]:
        """What a lane has of unit `i` of a piece, as it is stored: registers."""
        form = self.piece.form
        return lane_words(self.code, form, self._at(slot, part, i * form.code_bytes), self.code.lane)

    def operands(self, part: int, words: Sequence[Value], q: int) -> Group:
        """32 k of a unit without scales; see `Matrix.raw`."""
        return self.matrices[part].raw(words, q, Numbers([], []))

    def numbers(self, part: int, number: int) -> Numbers:
        """The scales and lows of 32 k of a piece, for the two rows of the lane."""
        k, piece, scales = self.code, self.piece, self.piece.form.scales
        place = k.at(self._numbers, I8, (k.lane >> 2) * (4 * piece.numbers))
        place = k.at(place, I8, (number + part * piece.groups) * (8 * 4 * piece.numbers))
        flat = list[Value]()
        for start in range(0, piece.numbers, 4):
            size = min(4, piece.numbers - start)
            flat += k.lanes(k.load(k.at(place, I8, 4 * start), f"<{size} x {F32}>", align=4 * size))
        pairs = [(flat[n], flat[n + 1]) for n in range(0, len(flat), 2)]
        return Numbers(pairs[:scales], pairs[scales:])
