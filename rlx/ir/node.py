"""Nodes: the values of a graph, immutable and interned.

Two nodes with the same op, inputs and attributes are the same object. Common subexpressions are therefore shared,
equality is `is`, and unreachable code does not exist.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Any

from rlx.ir.dims import Shape
from rlx.ir.dtypes import DType

Attrs = tuple[tuple[str, Any], ...]

_interned: weakref.WeakValueDictionary[tuple[Any, ...], Node] = weakref.WeakValueDictionary()
_lock = threading.Lock()


class Node:
    """One value of a graph. Make nodes with the functions of `rlx.ir.ops`, never directly.

    Attributes:
        op: name of the op, a row of `rlx.ir.ops.OPS`.
        inputs: the operands.
        attrs: (name, value) pairs in the op table's order.
        shape, dtype: of the value, derived by the op's shape rule.
    """

    __slots__ = ("__weakref__", "attrs", "dtype", "inputs", "op", "shape")

    op: str
    inputs: tuple[Node, ...]
    attrs: Attrs
    shape: Shape
    dtype: DType

    #: NumPy's operators return NotImplemented for a node, so that the node's own operators are used.
    __array_ufunc__ = None

    def __getitem__(self, key: Any) -> Any:
        """An attribute by its name; with another key part of the value, see `rlx.ops.index`."""
        if not isinstance(key, str):
            return _build("index", self, key)
        for name, value in self.attrs:
            if name == key:
                return value
        raise KeyError(f"{self.op} has no attribute {key}")

    @property
    def name(self) -> str:
        """Name of a leaf (input, weight or state)."""
        return str(self["name"])

    def __repr__(self) -> str:
        shape = ", ".join(map(str, self.shape))
        label = f' "{self.name}"' if self.op in LEAVES else ""
        return f"<{self.op}{label} {self.dtype}[{shape}]>"

    def __add__(self, other: Node | float) -> Node:
        return _build("add", self, other)

    def __radd__(self, other: float) -> Node:
        return _build("add", self, other)

    def __mul__(self, other: Node | float) -> Node:
        return _build("mul", self, other)

    def __rmul__(self, other: float) -> Node:
        return _build("mul", self, other)

    def __sub__(self, other: Node | float) -> Node:
        return _build("sub", self, other)

    def __rsub__(self, other: float) -> Node:
        return _build("sub", other, self)

    def __truediv__(self, other: Node | float) -> Node:
        return _build("div", self, other)

    def __rtruediv__(self, other: float) -> Node:
        return _build("div", other, self)

    def __matmul__(self, other: Node) -> Node:
        return _build("matmul", self, other)

    def __rmatmul__(self, other: Any) -> Node:
        return _build("matmul", other, self)

    def __pow__(self, exponent: float) -> Node:
        return _build("power", self, exponent)

    def __neg__(self) -> Node:
        return _build("neg", self)

    @property
    def T(self) -> Node:
        """The transpose of a weight [n, k]."""
        return _build("transpose", self)

    def reshape(self, *shape: Any) -> Node:
        """The same elements in another shape, given as numbers or as one sequence."""
        return _build("reshape", self, shape[0] if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape)

    def sum(self, axis: int = -1, keepdims: bool = False) -> Node:
        """The sum over the last axis, or over axis 1 of three."""
        return _build("sum", self, axis, keepdims)

    def mean(self, axis: int = -1, keepdims: bool = False) -> Node:
        """The mean over the last axis, or over axis 1 of three."""
        return _build("mean", self, axis, keepdims)

    def clamp(self, low: float | None = None, high: float | None = None) -> Node:
        """The value within bounds, of which one may be left out."""
        return _build("clamp", self, low, high)


LEAVES = ("input", "weight", "state")


def _build(name: str, *operands: Any) -> Node:
    """What a function of `rlx.ir.ops` returns; imported at the first use because it imports this module."""
    from rlx.ir import ops

    node: Node = getattr(ops, name)(*operands)
    return node


def intern(op: str, inputs: tuple[Node, ...], attrs: Attrs, shape: Shape, dtype: DType) -> Node:
    """The unique node with these contents."""
    key = (op, inputs, attrs, shape, dtype)
    with _lock:
        node = _interned.get(key)
        if node is None:
            node = object.__new__(Node)
            node.op, node.inputs, node.attrs, node.shape, node.dtype = op, inputs, attrs, shape, dtype
            _interned[key] = node
        return node


def topological(roots: Iterable[Node]) -> list[Node]:
    """The nodes under `roots`, operands first, without recursion (graphs are thousands of nodes deep)."""
    order: dict[Node, None] = {}
    stack = list(roots)[::-1]
    while stack:
        node = stack[-1]
        waiting = [i for i in node.inputs if i not in order]
        if waiting:
            stack.extend(waiting[::-1])
        else:
            order.setdefault(stack.pop())
    return list(order)
