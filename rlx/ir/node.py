"""Nodes: the values of a graph, immutable and interned.

Two nodes with the same op, inputs and attributes are the same object. Common subexpressions are therefore shared,
equality is `is`, and unreachable code does not exist.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Any

from rlx import ir
from rlx.errors import GraphError
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
        name: of a leaf (input, weight or state); "" for other nodes.
        text: the part of its line in IR text behind the operands; "" until `rlx.ir.printer` makes it.
    """

    __slots__ = ("__weakref__", "attrs", "dtype", "inputs", "name", "op", "shape", "text")

    op: str
    inputs: tuple[Node, ...]
    attrs: Attrs
    shape: Shape
    dtype: DType
    name: str
    text: str

    def __getitem__(self, key: Any) -> Any:
        """An attribute by its name; with another key part of the value, see `rlx.ops.index`."""
        if not isinstance(key, str):
            return _build("index", self, key)
        for name, value in self.attrs:
            if name == key:
                return value
        raise KeyError(f"{self.op} has no attribute {key}")

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

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Node:
        """NumPy's operators with a number or an array on the left are the node's own; its functions are refused."""
        operator = _OPERATORS.get(ufunc.__name__)
        if operator is None or method != "__call__" or options or len(inputs) != 2:
            raise not_computed(f"np.{ufunc.__name__}", ufunc.__name__)
        left, right = inputs
        found: Node = (
            getattr(left, f"__{operator}__")(right) if left is self else getattr(right, f"__r{operator}__")(left)
        )
        return found

    def __lt__(self, other: object) -> bool:
        raise not_computed("a comparison", "maximum")

    __le__ = __gt__ = __ge__ = __lt__

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
# Functions of NumPy -> the operator of a node.
_OPERATORS = {"add": "add", "subtract": "sub", "multiply": "mul", "divide": "truediv", "matmul": "matmul"}


def not_computed(what: str, op: str) -> GraphError:
    """The error of something that needs the values of a node, which has none before its program runs.

    Args:
        what: what was tried.
        op: the op that may be meant.
    """
    ops = ir.ops
    choice = f"rlx.ops.{op}" if callable(getattr(ops, op, None)) and not op.startswith("_") else "a function of rlx.ops"
    hint = f"use {choice}, or define a custom op (rlx.custom_op): its meaning is a formula of NumPy"
    return GraphError(f"{what} needs numbers, and a node is a symbol that has none yet", where="node", hint=hint)


def _build(name: str, *operands: Any) -> Node:
    """The result of a function of `rlx.ir.ops`; imported at the first use because it imports this module."""
    node: Node = getattr(ir.ops, name)(*operands)
    return node


def intern(op: str, inputs: tuple[Node, ...], attrs: Attrs, shape: Shape, dtype: DType) -> Node:
    """The unique node with these contents."""
    key = (op, inputs, attrs, shape, dtype)
    with _lock:
        node = _interned.get(key)
        if node is None:
            node = object.__new__(Node)
            node.op, node.inputs, node.attrs, node.shape, node.dtype = op, inputs, attrs, shape, dtype
            node.name, node.text = dict(attrs)["name"] if op in LEAVES else "", ""
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
