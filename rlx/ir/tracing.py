"""Tracing: a NumPy formula applied to nodes, which gives the same formula in ops of the compiler.

A custom op without a kernel is compiled this way. Operators, and the functions of NumPy in the tables below, are known;
whatever else a formula does to its operands cannot be traced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from rlx.errors import CustomOpError, ShapeError
from rlx.ir import ops
from rlx.ir.infer import expression_size, renumber
from rlx.ir.node import Node

_MAX_TERMS = 1 << 10  # of an expression


class Untraceable(Exception):
    """A formula uses something that no op computes."""


def trace(meaning: Callable[..., Any], inputs: Sequence[Node], attrs: Mapping[str, Any]) -> Node:
    """The result of a function of arrays, as a node over these operands.

    Raises:
        Untraceable: it uses something that no op computes.
    """
    try:
        found = meaning(*map(Traced, inputs), **attrs)
    except Untraceable:
        raise
    except ShapeError as error:
        raise Untraceable(str(error)) from error
    except Exception as error:  # whatever a user's function does with a value that is no array
        raise Untraceable(f"{type(error).__name__}: {error}") from error
    if not isinstance(found, Traced):
        raise Untraceable(f"it returns a {type(found).__name__} that does not follow from the operands")
    return found.node


def meaning_of(node: Node) -> Node:
    """The node of a custom op as its meaning in other ops.

    Raises:
        Untraceable: as `trace`.
        CustomOpError: the meaning has another shape than the shape rule says.
    """
    custom = ops.OPS[node.op].custom
    assert custom is not None
    found = _joined(trace(custom.meaning, node.inputs, dict(node.attrs)))
    if (found.shape, found.dtype) != (node.shape, node.dtype):
        what = f"its shape rule gives {node!r}, its meaning {found!r}"
        raise CustomOpError(what, where=f"custom op {node.op}", hint="One of them is wrong.")
    return found


def _joined(result: Node) -> Node:
    """A node whose elementwise ops are one, also where it reads a value several times."""
    operands: list[Node] = []

    def expression(node: Node) -> Any:
        if not ops.OPS[node.op].elementwise or node.shape != result.shape:
            if node not in operands:
                operands.append(node)
            return operands.index(node)
        parts = [expression(i) for i in node.inputs]
        return (
            renumber(node["expr"], parts) if node.op == "elementwise" else (node.op, *parts, *dict(node.attrs).values())
        )

    if _terms(result, {}) > _MAX_TERMS or not ops.OPS[result.op].elementwise:
        return result
    expr = expression(result)
    first = next(i for i, node in enumerate(operands) if node.shape == result.shape)
    order = [first, *(i for i in range(len(operands)) if i != first)]  # the first operand has the shape of the result
    return ops.make(
        "elementwise", *(operands[i] for i in order), expr=renumber(expr, [order.index(i) for i in range(len(order))])
    )


def _terms(node: Node, known: dict[Node, int]) -> int:
    """Number of ops of a formula that is written as one expression, in which a value may stand several times."""
    if node not in known:
        times = expression_size(node["expr"]) if node.op == "elementwise" else 1
        known[node] = times + times * sum(_terms(i, known) for i in node.inputs if ops.OPS[node.op].elementwise)
    return known[node]


class Traced(NDArrayOperatorsMixin):
    """A node that looks like an array."""

    def __init__(self, node: Node) -> None:
        self.node = node

    @property
    def shape(self) -> tuple[Any, ...]:
        """Sizes; those that are known at run time only are dims."""
        return self.node.shape

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.node.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """That of arithmetic."""
        return np.dtype(np.float32)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Traced:
        if method != "__call__" or options or ufunc.__name__ not in _UFUNCS:
            raise Untraceable(f"np.{ufunc.__name__} has no op")
        return _UFUNCS[ufunc.__name__](*inputs)

    def __array_function__(self, function: Any, types: Any, args: Any, options: Any) -> Traced:
        name = getattr(function, "__name__", "")
        if name not in _FUNCTIONS:
            raise Untraceable(f"np.{name} has no op")
        return _FUNCTIONS[name](*args, **options)

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise Untraceable("it makes an array of an operand")

    def __bool__(self) -> bool:
        raise Untraceable("it decides by the values of an operand")

    def __getattr__(self, name: str) -> Any:
        raise Untraceable(f"it uses .{name} of an operand")

    def __getitem__(self, key: Any) -> Traced:
        return Traced(ops.index(self.node, key))

    # `y += x` makes another value, as `y + x` does: the mixin would write into y.
    __iadd__, __isub__ = NDArrayOperatorsMixin.__add__, NDArrayOperatorsMixin.__sub__
    __imul__, __itruediv__ = NDArrayOperatorsMixin.__mul__, NDArrayOperatorsMixin.__truediv__

    def mean(self, axis: int | None = None, keepdims: bool = False) -> Traced:
        """As of an array, over the last axis."""
        return _mean(self, axis, keepdims=keepdims)

    def sum(self, axis: int | None = None, keepdims: bool = False) -> Traced:
        """As of an array, over the last axis."""
        return _sum(self, axis, keepdims=keepdims)

    def clip(self, low: float | None = None, high: float | None = None) -> Traced:
        """As of an array."""
        return _clip(self, low, high)

    def astype(self, dtype: Any) -> Traced:
        """The value itself, for types of floats: arithmetic is f32."""
        if np.dtype(dtype).kind != "f":
            raise Untraceable(f"it converts an operand to {np.dtype(dtype)}")
        return self


def _of(value: Any) -> Any:
    """An operand of a builder: a node or a number."""
    if isinstance(value, Traced):
        return value.node
    if isinstance(value, Real):
        return float(value)
    raise Untraceable(f"it uses a {type(value).__name__} beside its operands")


def _builder(build: Callable[..., Node]) -> Callable[..., Traced]:
    return lambda *values: Traced(build(*map(_of, values)))


def _absolute(x: Any) -> Node:
    return ops.maximum(x, ops.neg(x))


def _logaddexp(x: Any, y: Any) -> Node:
    if x != 0 or not isinstance(y, Node):
        raise Untraceable("np.logaddexp has an op for a first operand of 0 only")
    return ops.softplus(y)


_UFUNCS: dict[str, Callable[..., Traced]] = {
    "add": _builder(ops.add),
    "subtract": _builder(ops.sub),
    "multiply": _builder(ops.mul),
    "divide": _builder(ops.div),
    "true_divide": _builder(ops.div),
    "power": _builder(ops.power),
    "maximum": _builder(ops.maximum),
    "minimum": _builder(ops.minimum),
    "negative": _builder(ops.neg),
    "exp": _builder(ops.exp),
    "tanh": _builder(ops.tanh),
    "sqrt": _builder(ops.sqrt),
    "square": _builder(lambda x: ops.mul(x, x)),
    "reciprocal": _builder(lambda x: ops.div(1.0, x)),
    "absolute": _builder(_absolute),
    "fabs": _builder(_absolute),
    "logaddexp": _builder(_logaddexp),
}


def _reduced(build: Callable[..., Node]) -> Callable[..., Traced]:
    def apply(x: Any, axis: int | None = None, keepdims: bool = False) -> Traced:
        if axis is None:
            raise Untraceable("it reduces all axes: give axis=-1")
        return Traced(build(_of(x), axis, keepdims))

    return apply


_mean, _sum = _reduced(ops.mean), _reduced(ops.sum)


def _clip(x: Any, a_min: float | None = None, a_max: float | None = None) -> Traced:
    return Traced(ops.clamp(_of(x), a_min, a_max))


_FUNCTIONS: dict[str, Callable[..., Traced]] = {"mean": _mean, "sum": _sum, "clip": _clip}
