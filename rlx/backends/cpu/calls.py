"""Kernel calls: `select.py` builds one for each node, and the linker generates the code that makes it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rlx.backends.cpu.kernel import Kernel
from rlx.ir import dims
from rlx.ir.dims import DimLike
from rlx.ir.node import Node

CHUNKS = 64  # most ranges of a call: ranges are small enough to balance the load, large enough to stream weights
SCRATCH = -1  # instead of an operand's number: the scratch buffer


@dataclass(frozen=True)
class Units:
    """The number of work units of a call: ceil(dim / per) * times.

    Attributes:
        busy: number of units that have work, if fewer than all; they are the first ones.
        together: units that a worker takes at once, because fewer would take as long.
        ranges: most ranges that they are divided into.
    """

    dim: DimLike
    per: int = 1
    times: int = 1
    busy: int | None = None
    together: int = 1
    ranges: int = CHUNKS

    def most(self, limits: dims.Bounds) -> int:
        """Upper bound of the number of units that have work."""
        count = -(-dims.bounds(self.dim, limits)[1] // self.per) * self.times
        return count if self.busy is None else min(count, self.busy)


@dataclass(frozen=True)
class Call:
    """One kernel call of a region.

    Attributes:
        args: the argument for each of `kernel.buffers`: the index of an operand, the number of operands for the result,
            or `SCRATCH`. Indices, not nodes, so that equal nodes of other layers can share the call.
        extents: one dim for each of `kernel.extents`.
        scratch: bytes of scratch memory of the call, at most. It is zero before the first call of the kernel; after
            that it keeps what the previous one wrote, of this or of an earlier region.
        reads_past: whether its work grows with the positions before its rows.
        joins: most segments of one row that it takes at once, because they share the first pages (`segments.py`).
    """

    node: Node
    kernel: Kernel
    args: tuple[int, ...]
    extents: tuple[DimLike, ...]
    units: Units
    scratch: DimLike = 0
    reads_past: bool = False
    joins: int = 1

    def buffers(self) -> Iterator[Node | None]:
        """The node that each buffer belongs to, None for the scratch buffer."""
        values = (*self.node.inputs, self.node)
        return (None if a == SCRATCH else values[a] for a in self.args)
