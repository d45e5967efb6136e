"""Sizes that kernel selection asks for: literals, and products of sizes of which one may be symbolic."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.errors import CompileError
from rlx.ir.dims import DimLike
from rlx.ir.node import Node
from rlx.ir.shape_rules import product


def static(node: Node, axis: int) -> int:
    """The size of an axis that must be static, because kernels have it as a literal.

    Raises:
        CompileError: the size is symbolic.
    """
    size = node.shape[axis]
    if not isinstance(size, int):
        raise CompileError(f"axis {axis} must be static, found {size}", where=repr(node), hint="Bind its symbol.")
    return size


def extent(sizes: Sequence[DimLike], node: Node) -> DimLike:
    """The product of some sizes of a node.

    Raises:
        CompileError: two of them are symbolic.
    """
    found = product(sizes)
    if found is None:
        what = f"the product of {[size for size in sizes if not isinstance(size, int)]} is no affine extent"
        raise CompileError(what, where=repr(node), hint="Bind one of their symbols.")
    return found


def rows(node: Node) -> DimLike:
    """Number of rows of a value: the product of all axes but the last; `CompileError` as `extent`."""
    return extent(node.shape[:-1], node)
