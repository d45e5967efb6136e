"""AMX tile registers for the emitter of `tiles.py`: eight tiles of 16 rows of 64 bytes, and their matrix products.

A bf16 product computes C f32[rows, 16] += A bf16[rows, 32] times B. A row of B holds two consecutive k: one pair of
bf16 for each of 16 columns, the form that `dots.bf16_pairs` makes of packed weights. The order of each sum does not
depend on the number of rows. Rounding is to nearest even and subnormals count as zero, as in `dots.dot_bf16`.

The tile configuration holds the number of rows of each tile. It is a structure in memory that a kernel loads at run
time (80 ns). Loading it clears the tile registers of the running thread, and `release` frees them. A kernel that uses
tiles begins with `configure` and ends with `release`.
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from rlx.backends.cpu.tiles import I8, I16, VOID, Emitter, Index

#: Number of tile registers, rows of a tile, bytes of a row, and the k of a bf16 product.
COUNT, ROWS, ROW_BYTES, DEPTH = 8, 16, 64, 32
#: Bytes of a full tile.
BYTES = ROWS * ROW_BYTES

_NOPS = "; ".join(["nop"] * 8)
_PALETTE, _WIDTHS_AT, _HEIGHTS_AT, _CONFIG_BYTES = 1, 16, 48, 64


class AmxTiles:
    """The tile registers of a kernel, addressed by number."""

    def __init__(self, e: Emitter) -> None:
        self.e = e
        self._config = e.stack(_CONFIG_BYTES)
        for at in range(0, _CONFIG_BYTES, 8):
            e.store(e.i64(0), e.at(self._config, at), 8)
        e.store(ir.Constant(I8, _PALETTE), self._config)
        for tile in range(COUNT):
            e.store(ir.Constant(I16, ROW_BYTES), e.at(self._config, _WIDTHS_AT + 2 * tile))

    def configure(self, rows: Sequence[Index]) -> None:
        """Sets the number of rows (1 to 16) of tiles 0 and up, and clears all tiles."""
        e = self.e
        for tile, count in enumerate(rows):
            e.store(e.b.trunc(e.i64(count), I8), e.at(self._config, _HEIGHTS_AT + tile))
        self._call("llvm.x86.ldtilecfg", self._config)

    def release(self) -> None:
        self._call("llvm.x86.tilerelease")

    def zero(self, tile: int) -> None:
        self._call("llvm.x86.tilezero", _number(tile))

    def load(self, tile: int, pointer: ir.Value, stride: Index) -> None:
        """Loads the rows of a tile, `stride` bytes apart in memory."""
        self._call("llvm.x86.tileloadd64", _number(tile), pointer, self.e.i64(stride))

    def store(self, tile: int, pointer: ir.Value, stride: Index) -> None:
        self._call("llvm.x86.tilestored64", _number(tile), pointer, self.e.i64(stride))

    def dot_bf16(self, c: int, a: int, b: int) -> None:
        """c f32[rows, 16] += a bf16[rows, 32] times b."""
        self._call("llvm.x86.tdpbf16ps", *map(_number, (c, a, b)))

    def dot_int8(self, c: int, a: int, b: int) -> None:
        """c i32[rows, 16] += a i8[rows, 64] times b, where a row of b holds four consecutive k of 16 columns."""
        self._call("llvm.x86.tdpbssd", *map(_number, (c, a, b)))

    def space(self) -> None:
        """Keeps the instructions before and after it apart: a CPU whose core has another busy thread is up to 1.5 times
        as fast with eight instructions between two on tiles (docs/batch.md).
        """
        self.e.b.call(ir.InlineAsm(ir.FunctionType(VOID, []), _NOPS, "", side_effect=True), [])

    def _call(self, name: str, *operands: ir.Value) -> None:
        self.e.call(name, VOID, operands)


def _number(tile: int) -> ir.Value:
    """The tile's number as a constant: it is an immediate operand of the instruction."""
    return ir.Constant(I8, tile)
