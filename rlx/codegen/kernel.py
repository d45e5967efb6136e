"""What a kernel is: a C-ABI function over raw pointers and extents that does a range of independent work units.

`void symbol(ptr b0, ..., i64 e0, ..., i64 begin, i64 end)`: buffers, run-time extents, then the units `[begin, end)`.
Workers take ranges of units as they come (`handout.py`), so every split of the units must give the same bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import ParamSpec

P = ParamSpec("P")

#: Kernels that a function marked `once` keeps.
KEPT = 64


@dataclass(frozen=True)
class Kernel:
    """One compiled-from text kernel.

    Attributes:
        symbol: the function's name, unique by its text, so equal kernels are compiled once.
        buffers: the pointer parameters' names, in order.
        extents: the names of the i64 run-time extents, in order (`seq`, `past`, `ctx`, `rows`, `n`, `k`).
        llvm: LLVM assembly of a module that defines `symbol`.
        source: the text a person reads: specialized Python, or the outline of a tile kernel.
        calls: kernels that this one calls, whose modules must be linked, too.
    """

    symbol: str
    buffers: tuple[str, ...]
    extents: tuple[str, ...]
    llvm: str
    source: str
    calls: tuple[Kernel, ...] = ()


def symbol(template: str, text: str) -> str:
    """The name of a kernel: its template and a digest of the text that makes it what it is."""
    return f"{template}_{hashlib.sha256(text.encode()).hexdigest()[:10]}"


def once(write: Callable[P, Kernel]) -> Callable[P, Kernel]:
    """Marks a function that writes kernels: for equal arguments it gives the kernel that it wrote before.

    Programs of one model have most of their kernels in common, and a large one takes as long to write as to compile.
    """
    return lru_cache(KEPT, typed=True)(write)  # type: ignore[return-value]  # all arguments are hashable
