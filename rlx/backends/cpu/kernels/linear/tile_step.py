"""A step of a linear on tile registers: 32 k of two tiles of rows times two blocks of weights, 2 x 2 tiles of sums.

It has four loads and four products, fewer if there is one tile of rows or one block. While the other thread of a core
is busy, with whatever program, a tile load waits for the products before it, and what follows waits for the load. So
single loads and products stand between the vectors that are unpacked meanwhile. Where nothing is unpacked, the loads
come first, so that a step waits once, and all are kept apart (docs/batch.md has the times).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial, reduce

from llvmlite import ir

from rlx.backends.cpu.isa.amx import ROW_BYTES, ROWS
from rlx.backends.cpu.isa.portable import Tiles
from rlx.backends.cpu.tiles import Emitter

BLOCKS = 2  # row blocks of a panel: two units, or the two matrices of a gated linear
SUMS, X, W = (0, 1, 2, 3), (4, 5), (6, 7)  # tile registers: sums by row and block, activations, weights


@dataclass(frozen=True)
class Operand:
    """Weights of one row block of a panel.

    Attributes:
        first: address of the tile of the first 32 k.
        stride: bytes to the tile of the next 32 k.
        wrap: all ones, or the number of steps minus 1 after which tiles lie where the first ones lay.
    """

    first: ir.Value
    stride: int
    wrap: ir.Value

    def tile(self, e: Emitter, step: ir.Value) -> ir.Value:
        """Address of the tile of a step."""
        return e.at(self.first, (e.b.and_(step, self.wrap), self.stride))


@dataclass(frozen=True)
class Strides:
    """Strides of activations in bytes: to the tile of the next 32 k, to that of the next 16 rows, and between rows."""

    step: int
    tile: int
    row: int


@dataclass(frozen=True)
class Operation:
    """A load of a tile, or a product.

    Attributes:
        rows: number of the tile of rows, 0 or 1; 0 also for a load of weights.
        block: number of the block, 0 or 1; 0 also for a load of activations.
        emit: emits it.
        multiplies: whether it is a product.
    """

    rows: int
    block: int
    emit: Callable[[], None]
    multiplies: bool = False


@dataclass(frozen=True)
class TileSteps:
    """Emits the steps of some rows and blocks.

    Attributes:
        tiles: the tile registers.
        second_rows: whether there is a second tile of rows; None if there always is.
        second_block: whether there is a second block, likewise.
    """

    e: Emitter
    tiles: Tiles
    second_rows: ir.Value | None
    second_block: ir.Value | None

    def operations(self, x: ir.Value, strides: Strides, weights: Sequence[Operand], step: ir.Value) -> list[Operation]:
        """The operations of 32 k of rows at `x` and a step of the panel, block by block."""
        e, load, dot = self.e, self.tiles.load, self.tiles.dot_bf16
        found = [Operation(i, 0, partial(load, X[i], e.at(x, i * strides.tile), strides.row)) for i in range(len(X))]
        for j, w in enumerate(weights):
            found.append(Operation(0, j, partial(load, W[j], w.tile(e, step), ROW_BYTES)))
            found += [Operation(i, j, partial(dot, SUMS[i * BLOCKS + j], X[i], W[j]), True) for i in range(len(X))]
        return found

    def cases(self) -> Iterator[TileSteps]:
        """These, in a block of code each for where there is a second block and where it is not known."""
        if self.second_block is None:
            yield self
            return
        with self.e.b.if_else(self.second_block) as (two, one):
            with two:
                yield replace(self, second_block=None)
            with one:
                yield self

    def at_once(self, operations: Iterable[Operation]) -> None:
        """Emits a step, all loads first."""
        for each in sorted(operations, key=lambda each: each.multiplies):
            with self._if(each.rows and self.second_rows, each.block and self.second_block):
                each.emit()
                self.tiles.space()

    def by_turns(
        self, operations: Iterable[Operation], condition: ir.Value, unpack: Callable[[int], Iterable[None]]
    ) -> None:
        """Emits a step, if the condition holds, between the vectors of another one that is unpacked.

        Args:
            unpack: unpacks a block, by its number: emits a vector each time before it yields, 16 in all.
        """
        for block in range(BLOCKS):
            own = [each for each in operations if each.block == block]
            with self._if(block and self.second_block):
                for done, _ in enumerate(unpack(block)):
                    for each in own[done * len(own) // ROWS : (done + 1) * len(own) // ROWS]:
                        with self._if(condition, each.rows and self.second_rows):
                            each.emit()

    @contextmanager
    def _if(self, *conditions: ir.Value | int | None) -> Iterator[None]:
        """A block of code that runs if all conditions hold; None and 0 stand for what always does."""
        known = [condition for condition in conditions if condition]
        with self.e.when(reduce(self.e.b.and_, known)) if known else nullcontext():
            yield
