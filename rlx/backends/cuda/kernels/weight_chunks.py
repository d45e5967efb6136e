"""Weights on their way to products of many rows: in chunks in shared memory, then scaled, as operands of bf16.

In calls of few rows codes are multiplied, and scales with the sums. With many rows there are more sums than weights: so
the weights are scaled, and rounded to bf16, or where x has several parts they are the sum of as many.

Lane 4 g + t of a tile has of each 16 k the four at 4 t. In the order of the instruction, which rows of x have where
they lie, it has 2 t, 2 t + 1, 2 t + 8 and 2 t + 9: two of the lane 4 g + t / 2, and two of the second one after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlx.backends.cuda.code import F32, I8, I32, WARP, WARPS, Code, Value
from rlx.backends.cuda.kernels.large_shape import code_bytes
from rlx.backends.cuda.kernels.matrix import Group, Halves, Matrix, lane_words
from rlx.backends.cuda.kernels.row_parts import CHUNK
from rlx.backends.cuda.kernels.scales import Numbers, numbers_of
from rlx.backends.cuda.kernels.tensor_cores import copy_async
from rlx.backends.cuda.layouts import DEPTH, LOAD, Form
from rlx.backends.cuda.numbers import pair_parts

_FOUR = "<4 x i32>"


class Weights:
    """The tiles of a warp, whose codes come to shared memory in chunks.

    Args:
        matrix: theirs.
        tiles: their numbers.
        stages: chunks in shared memory.
    """

    def __init__(self, code: Code, matrix: Matrix, tiles: Sequence[Value], stages: int) -> None:
        self.code, self.matrix, self.form, self.tiles = code, matrix, matrix.form, tiles
        self.memory = code.share(stages * WARPS * len(tiles) * code_bytes(matrix.form))
        self._lanes = _lanes_of(code)

    def _units(self, number: Value) -> list[Value]:
        """The units of a chunk; those after the last are the last, which zeros of x are multiplied with."""
        per_chunk = CHUNK // self.form.unit
        return [self.code.smaller(number * per_chunk + i, self.matrix.units - 1) for i in range(per_chunk)]

    def numbers(self, number: Value) -> list[list[Any]]:
        """Begins to load the scales of a chunk: for each unit, for each tile."""
        return [[self.matrix.numbers(tile, unit) for tile in self.tiles] for unit in self._units(number)]

    def _unit(self, stage: Value, tile: int, unit: int) -> Value:
        """Where a unit of a chunk lies."""
        place = (stage * WARPS + self.code.warp) * len(self.tiles) + tile
        return self.code.at(self.memory, I8, place * code_bytes(self.form) + unit * self.form.code_bytes)

    def bring(self, number: Value, stage: Value) -> None:
        """Begins to copy the codes of a chunk to shared memory."""
        k, count = self.code, self.form.code_bytes // LOAD
        for tile, place in enumerate(self.tiles):
            codes = self.matrix.codes_at(place)
            for i, unit in enumerate(self._units(number)):
                source, to = k.at(codes, _FOUR, unit * count + k.lane), k.at(self._unit(stage, tile, i), _FOUR, k.lane)
                for start in range(0, count, WARP):
                    with k.guarded(None if start + WARP <= count else k.lane < count - start):
                        copy_async(k, k.at(to, _FOUR, start), k.at(source, _FOUR, start))

    def group(self, tile: int, unit: int, q: int, stage: Value, numbers: list[list[Any]]) -> Group:
        """32 k of a tile in a unit of a chunk, with the k in the order of the instruction."""
        k, form = self.code, self.form
        words = _ordered(k, form, *(self._loaded(tile, unit, q, stage, lane) for lane in self._lanes))
        found = numbers_of(k, form.row, numbers[unit][tile][q]) if form.row else Numbers([], [])
        return self.matrix.group(words * (form.unit // DEPTH), q, found)

    def _loaded(self, tile: int, unit: int, q: int, stage: Value, lane: Value) -> list[Value]:
        """What a lane has of 32 k."""
        k, place = self.code, self._unit(stage, tile, unit)
        if self.form.unit > DEPTH:  # two words of the four
            return k.lanes(k.load(k.at(place, I32, 2 * q), "<2 x i32>", lane * 2))
        return lane_words(k, self.form, place, lane)


def _lanes_of(k: Code) -> tuple[Value, Value]:
    """The lanes that have the k of this lane in the order of the instruction."""
    first = (k.lane & -4) | (k.lane >> 1 & 1)
    return first, first | 2


def _ordered(k: Code, form: Form, first: Sequence[Value], second: Sequence[Value]) -> list[Value]:
    """What a lane has of a unit in the order of the instruction, from the words of the lanes of `_lanes_of`."""
    if form.raw:  # bytes 0 and 2 are the first two k, 1 and 3 the others
        selector = (k.lane & 1) * 0x1111 + 0x6240
        return [k.bytes_of(a, b, selector) for a, b in zip(first, second, strict=True)]
    found, size, odd = list[Value](), 2 if form.kind == "f32" else 1, (k.lane & 1).equals(1)
    for i in range(0, len(first), 2 * size):
        for some in (first, second):
            found += [k.select(odd, some[j + size], some[j]) for j in range(i, i + size)]
    return found


def operands(k: Code, group: Group, count: int) -> Halves:
    """For each half of 32 k the parts of the weights.

    Args:
        count: of parts of scaled weights; others have those that their type takes.
    """
    if not group.scales:
        return group.parts
    found: Halves = []
    for half, parts in enumerate(group.parts):
        (codes,) = parts  # they are exact in bf16
        which = half if len(group.scales) > 1 else 0
        pairs = [pair_parts(k, *_scaled(k, word, group, which, i % 2), "bf16", count) for i, word in enumerate(codes)]
        found.append([[pair[part] for pair in pairs] for part in range(count)])
    return found


def _scaled(k: Code, word: Value, group: Group, which: int, row: int) -> tuple[Value, Value]:
    """Two weights of one of the two rows of the lane."""
    scale = group.scales[which][row]
    codes = (word << 16).bits(F32), (word & -0x10000).bits(F32)
    if not group.lows:
        return codes[0] * scale, codes[1] * scale
    low = -group.lows[which][row]
    return k.fma(codes[0], scale, low), k.fma(codes[1], scale, low)
