"""Kernels: C-ABI functions over raw pointers and extents that compute a range of independent work units.

`void symbol(ptr b0, ..., i64 e0, ..., i64 begin, i64 end)`: buffers, run-time extents, then the units `[begin, end)`.
Workers take ranges of units dynamically (`work_stealing.py`), so every split of the units must give the same bits.

A kernel call: `select.py` builds one for each node, and the linker generates the code that makes it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ParamSpec

from rlx.ir import dims
from rlx.ir.dims import DimLike
from rlx.ir.node import Node

P = ParamSpec("P")

#: Size of the cache of a function marked `once`, in kernels.
KEPT = 64


@dataclass(frozen=True)
class Kernel:
    """One kernel as text, before it is compiled.

    Attributes:
        symbol: the function's name with a digest of its text, so that equal kernels are compiled once.
        buffers: the pointer parameters' names, in order.
        extents: the names of the i64 run-time extents, in order (`seq`, `past`, `ctx`, `rows`, `n`, `k`).
        llvm: LLVM assembly of a module that defines `symbol`.
        source: readable form of the kernel: specialized Python, or the outline of a tile kernel.
        calls: kernels that this one calls; their modules must be linked too.
        python: of a loop kernel the plain Python function that it was lowered from.
        elements: of a loop kernel the element type of each buffer, by its NumPy name.
    """

    symbol: str
    buffers: tuple[str, ...]
    extents: tuple[str, ...]
    llvm: str
    source: str
    calls: tuple[Kernel, ...] = ()
    python: Callable[..., object] | None = field(default=None, compare=False, repr=False)
    elements: tuple[str, ...] = field(default=(), compare=False, repr=False)

    def closure(self) -> Iterator[Kernel]:
        """This kernel and all that it calls."""
        yield self
        for kernel in self.calls:
            yield from kernel.closure()


def symbol(template: str, text: str) -> str:
    """The name of a kernel: its template and a digest of its text."""
    return f"{template}_{hashlib.sha256(text.encode()).hexdigest()[:10]}"


def once(write: Callable[P, Kernel]) -> Callable[P, Kernel]:
    """Caches a function that generates kernels: equal arguments give the kernel of the earlier call.

    The programs of a model share most of their kernels, and a large kernel takes as long to generate as to compile.
    """
    return lru_cache(KEPT, typed=True)(write)  # type: ignore[return-value]  # all arguments are hashable


CHUNKS = 64  # most ranges of a call: ranges are small enough to balance the load, large enough to stream weights
SCRATCH = -1  # instead of an operand's number: the scratch buffer


@dataclass(frozen=True)
class Units:
    """The number of work units of a call: ceil(dim / per) * times.

    Attributes:
        busy: number of units that have work, if fewer than all; they are the first ones.
        together: units that a worker takes at once, because fewer would take as long.
        ranges: most ranges that they are divided into.
        few: up to so many of `dim`, ranges of single units are not taken together. Workers would wait longer for the
            last one than that saves.
    """

    dim: DimLike
    per: int = 1
    times: int = 1
    busy: int | None = None
    together: int = 1
    ranges: int = CHUNKS
    few: int = 0

    def most(self, limits: dims.Bounds) -> int:
        """Upper bound of the number of units that have work."""
        return self.count(dims.bounds(self.dim, limits)[1])

    def at(self, env: Mapping[str, int]) -> int:
        """The number of units that have work for these values of the symbols."""
        return self.count(dims.value(self.dim, env))

    def count(self, size: int) -> int:
        """The number of units that have work where `dim` is `size`."""
        count = -(-size // self.per) * self.times
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
