"""Kernels: C-ABI functions over raw pointers and extents that compute a range of independent work units.

`void symbol(ptr b0, ..., i64 e0, ..., i64 begin, i64 end)`: buffers, run-time extents, then the units `[begin, end)`.
Workers take ranges of units dynamically (`handout.py`), so every split of the units must give the same bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ParamSpec

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
