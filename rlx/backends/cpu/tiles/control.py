"""The control flow of tile kernels: counted loops, tiles of a range, conditions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from llvmlite import ir

from rlx.backends.cpu.tiles.builder import Builder
from rlx.backends.cpu.tiles.types import I32, I64, Index


@dataclass
class Loop:
    """A counted loop under construction.

    Attributes:
        i: the counter.
        values: the loop-carried values. Assign the values of the next iteration before the loop ends.
        results: the carried values after the last iteration.
    """

    i: ir.Value
    values: list[ir.Value]
    results: list[ir.Value] = field(default_factory=list)


class Control(Builder):
    """Loops and conditions."""

    @contextmanager
    def loop(self, start: Index, stop: Index, step: int = 1, carry: Sequence[ir.Value] = ()) -> Iterator[Loop]:
        """`for i in range(start, stop, step)`, with the carried values `carry`.

        After the loop, `results` holds the carried values and `i` the first value that was not run.
        """
        before = self.b.block
        head, body, done = (self.function.append_basic_block(name) for name in ("head", "loop", "done"))
        self.b.branch(head)
        self.b.position_at_end(head)
        i = self.b.phi(I64)
        phis = [self.b.phi(value.type) for value in carry]
        self.b.cbranch(self.b.icmp_signed("<", i, self.i64(stop)), body, done)
        self.b.position_at_end(body)
        loop = Loop(i, list(phis), list(phis))
        yield loop
        following = self.b.add(i, self.i64(step), flags=["nsw"])
        for phi, first, later in zip([i, *phis], [self.i64(start), *carry], [following, *loop.values], strict=True):
            phi.add_incoming(first, before)
            phi.add_incoming(later, self.b.block)
        self._loops.append(self.module.add_metadata([ir.Constant(I32, len(self._loops))]))
        self.b.branch(head).set_metadata("llvm.loop", self._loops[-1])
        self.b.position_at_end(done)

    def tiled(self, start: Index, stop: Index, sizes: Sequence[int], body: Callable[[int, ir.Value], None]) -> None:
        """Covers range(start, stop) with tiles of the given sizes, largest first. `body(size, first)` emits a tile.

        A remainder smaller than the last size is not covered.
        """
        for size in sizes:
            with self.loop(start, self.b.sub(self.i64(stop), self.i64(size - 1)), size) as loop:
                body(size, loop.i)
            start = loop.i

    @contextmanager
    def cut(self, length: Index) -> Iterator[tuple[ir.Value, ir.Value, ir.Value]]:
        """A loop over the units [begin, end), split at multiples of `length`.

        Yields (number of the piece, its first unit, its end), where units are counted from the start of the piece.
        """
        size, begin, end = self.i64(length), self.args["begin"], self.args["end"]
        less = self.i64(length - 1) if isinstance(length, int) else self.b.sub(length, self.i64(1))
        with self.loop(self.b.udiv(begin, size), self.b.udiv(self.b.add(end, less), size)) as piece:
            start = self.b.mul(piece.i, size)
            yield piece.i, self.b.sub(self.smax(begin, start), start), self.smin(self.b.sub(end, start), length)

    @contextmanager
    def when(self, condition: ir.Value) -> Iterator[None]:
        """`if condition:`"""
        with self.b.if_then(condition):
            yield
