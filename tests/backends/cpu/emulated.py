"""Tile registers in memory: what `rlx.backends.cpu.isa.amx` does, as loops that any machine runs, so that kernels on
tiles are tested everywhere. `TARGETS` say that they have tiles; `use` makes kernels take these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from levels import LEVELS, TILE_TARGETS

from rlx.backends.cpu.isa import amx
from rlx.backends.cpu.isa.portable import Isa
from rlx.backends.cpu.isa.x86 import X86
from rlx.backends.cpu.target import Target
from rlx.backends.cpu.tiles import F32X16, I16, I32X16, I64, Emitter, vector


def _with_tiles(level: Target, *more: str) -> Target:
    return replace(level, features=",".join(filter(None, (level.features, "+amx-bf16", *more))))


#: The plainest level of this machine and the widest, which machines with tiles have, both with emulated tiles. Beside
#: tiles stand dots of bf16, which level avx512 leaves out where there are real ones.
TARGETS = [_with_tiles(LEVELS[0]), _with_tiles(LEVELS[-1], *["+avx512bf16"] * bool(TILE_TARGETS))]


def use(monkeypatch: pytest.MonkeyPatch) -> None:
    for isa in (Isa, X86):
        monkeypatch.setattr(isa, "tiles", lambda isa, e: EmulatedTiles(e))


class EmulatedTiles:
    """Each tile is 1 KiB of stack; a tile that is not configured has no rows. What is not loaded is NaN."""

    def __init__(self, e: Emitter) -> None:
        self.e = e
        self.memory, self.heights = e.stack(amx.COUNT * amx.BYTES), e.stack(8 * amx.COUNT)

    def configure(self, rows: Sequence[Any]) -> None:
        e = self.e
        for tile, count in enumerate(rows):
            e.store(e.i64(count), e.at(self.heights, 8 * tile), 8)
        with e.loop(0, amx.COUNT * amx.ROWS) as row:
            e.store(e.f32(float("nan")), e.at(self.memory, (row.i, amx.ROW_BYTES)), 64)

    def release(self) -> None:
        pass

    def space(self) -> None:
        pass

    def zero(self, tile: int) -> None:
        with self._rows(tile) as row:
            self.e.store(self.e.f32(0.0), self._row(tile, row.i), 64)

    def load(self, tile: int, pointer: Any, stride: Any) -> None:
        with self._rows(tile) as row:
            self.e.store(self.e.load(F32X16, self.e.at(pointer, (row.i, stride))), self._row(tile, row.i), 64)

    def store(self, tile: int, pointer: Any, stride: Any) -> None:
        with self._rows(tile) as row:
            self.e.store(self.e.load(F32X16, self._row(tile, row.i), 64), self.e.at(pointer, (row.i, stride)))

    def dot_bf16(self, c: int, a: int, b: int) -> None:
        """Rounds after every product instead of after two, which is as close to the sum."""
        e = self.e
        with self._rows(c) as row:
            with e.loop(0, amx.DEPTH // 2, 1, [e.load(F32X16, self._row(c, row.i), 64)]) as pair:
                both = e.load(I32X16, self._row(b, pair.i), 64)
                for half in (0, 1):
                    x = e.splat(e.load(I16, e.at(self._row(a, row.i), (pair.i, 4), 2 * half), 2))
                    w = e.b.trunc(e.b.lshr(both, e.i32(16 * half)), vector(I16))
                    pair.values = [e.fma(e.bf16_to_f32(x), e.bf16_to_f32(w), pair.values[0])]
            e.store(pair.results[0], self._row(c, row.i), 64)

    def _rows(self, tile: int) -> Any:
        return self.e.loop(0, self.e.load(I64, self.e.at(self.heights, 8 * tile), 8))

    def _row(self, tile: int, row: Any) -> Any:
        return self.e.at(self.memory, tile * amx.BYTES, (row, amx.ROW_BYTES))
