"""Calls of kernels: what `select.py` finds for a node, and what the linker makes code of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rlx.codegen.kernel import Kernel
from rlx.ir import dims
from rlx.ir.dims import DimLike
from rlx.ir.node import Node

SCRATCH = -1  # in the place of an operand's number: the private buffer of a work unit


@dataclass(frozen=True)
class Units:
    """ceil(dim / per) * times work units.

    Attributes:
        busy: how many of them have something to do, if that is less: the first ones.
        together: how many a worker best takes at once.
    """

    dim: DimLike
    per: int = 1
    times: int = 1
    busy: int | None = None
    together: int = 1

    def most(self, limits: dims.Bounds) -> int:
        """Units that have something to do, at most."""
        count = -(-dims.bounds(self.dim, limits)[1] // self.per) * self.times
        return count if self.busy is None else min(count, self.busy)


@dataclass(frozen=True)
class Call:
    """One kernel call of a region.

    Attributes:
        args: what is passed for each of `kernel.buffers`: the number of an operand, the number of operands for the
            result, or `SCRATCH`. Numbers, not nodes, so that the call serves the same node of another layer.
        extents: one dim for each of `kernel.extents`.
        scratch: bytes of the private buffer a work unit needs. It holds zeros at first, then what the last step left.
    """

    node: Node
    kernel: Kernel
    args: tuple[int, ...]
    extents: tuple[DimLike, ...]
    units: Units
    scratch: int = 0

    def buffers(self) -> Iterator[Node | None]:
        """The node behind each buffer, None for the scratch buffer."""
        values = (*self.node.inputs, self.node)
        return (None if a == SCRATCH else values[a] for a in self.args)
