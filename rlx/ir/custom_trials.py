"""Trials of custom ops: their meanings on random data, before a program that uses them is compiled.

A trial shows what a user's function does: it must return what the shape rule says, the same for equal operands, and
compute each row for itself. Kernels have a trial of their own in their backend.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from rlx.errors import CustomOpError
from rlx.ir import interp, ops
from rlx.ir.custom import CustomOp
from rlx.ir.dims import Bounds, symbols, value
from rlx.ir.dtypes import I32
from rlx.ir.graph import Graph
from rlx.ir.meaning import Array
from rlx.ir.node import Node
from rlx.ir.tracing import Untraceable, meaning_of

ROWS = 3  # the smallest size of a symbol, where its bounds allow that
#: Largest difference of a meaning and its trace, in float64, as a share of the largest magnitude.
_CEILING = 1e-6
_done: set[Any] = set()  # trials that were passed: digest, attributes and types of the operands


def check_meanings(nodes: Iterable[Node], limits: Bounds) -> None:
    """Tries the meanings of all custom ops among some nodes. What was tried before is not tried again.

    Raises:
        CustomOpError: a meaning disagrees with its shape rule, has side effects, or mixes rows.
    """
    for node in nodes:
        op = ops.OPS[node.op].custom
        if op is not None:
            key = op.digest, node.attrs, tuple((i.shape, i.dtype) for i in (*node.inputs, node))
            if key not in _done:
                _try(node, op, sample_sizes(node, limits))
                _done.add(key)


def sample_sizes(node: Node, limits: Bounds) -> dict[str, int]:
    """Small values for the symbols of a node and its operands: different ones, within their bounds."""
    names = sorted({name for n in (*node.inputs, node) for dim in n.shape for name in symbols(dim)})
    bounds = [limits.get(name, (1, 1 << 20)) for name in names]
    return {
        name: min(high, max(low, ROWS + i)) for i, (name, (low, high)) in enumerate(zip(names, bounds, strict=True))
    }


def operands_of(node: Node, sizes: Mapping[str, int], *, positive: bool) -> list[Array]:
    """Random operands: float64, or int32 numbers that are valid indices of every axis."""
    rng = np.random.default_rng(7)
    shapes = [tuple(value(d, sizes) for d in i.shape) for i in node.inputs]
    least = min((d for shape in shapes for d in shape if d > 0), default=1)
    found: list[Array] = []
    for operand, shape in zip(node.inputs, shapes, strict=True):
        if operand.dtype is I32:
            found.append(rng.integers(0, least, shape).astype(np.int32))
        else:
            values = rng.standard_normal(shape).astype(np.float32).astype(np.float64)
            found.append(np.abs(values) + 0.125 if positive else values)
    return found


def _try(node: Node, op: CustomOp, sizes: Mapping[str, int]) -> None:
    where, attrs = f"custom op {op.name}", dict(node.attrs)
    shape = tuple(value(d, sizes) for d in node.shape)
    for positive in (False, True):
        operands = operands_of(node, sizes, positive=positive)
        found = op.evaluate(operands, attrs, sizes)
        if found.shape != shape or (node.dtype is I32) != (found.dtype.kind in "iub"):
            rule = op.rule.text if op.rule else "that of the first operand, element by element"
            what = f"its shape rule gives {node.dtype}{list(shape)}, its meaning {found.dtype}{list(found.shape)}"
            raise CustomOpError(what, where=where, hint=f"One of them is wrong. The rule is {rule!r}.")
        again = op.evaluate(operands, attrs, sizes)
        if not np.array_equal(found, again, equal_nan=True):
            hint = "A meaning may depend on its operands and attributes only: no random numbers, no memory of calls."
            raise CustomOpError(
                "a side effect: its meaning gives two results for equal operands", where=where, hint=hint
            )
        _check_rows(node, op, operands, sizes, found)
    if op.kernel is None:
        _check_trace(node, op, operands, sizes, found)


def _check_rows(node: Node, op: CustomOp, operands: list[Array], sizes: Mapping[str, int], found: Array) -> None:
    """Evaluates the last row alone: rows of a call may belong to different sequences."""
    if not node.shape or not symbols(node.shape[0]) or len(found) < 2:
        return
    of_rows = [i.shape[:1] == node.shape[:1] for i in node.inputs]
    last = [x[-1:] if has else x for x, has in zip(operands, of_rows, strict=True)]
    alone = op.evaluate(last, dict(node.attrs), sizes)
    if alone.shape != (1, *found.shape[1:]) or not _close(alone, found[-1:]):
        hint = "Rows of a call may belong to different sequences. Put what is mixed into an axis behind the first one."
        raise CustomOpError(
            "its meaning mixes rows: the last row alone is another one", where=f"custom op {op.name}", hint=hint
        )


def _check_trace(node: Node, op: CustomOp, operands: list[Array], sizes: Mapping[str, int], found: Array) -> None:
    """Compares the meaning with the ops that it becomes where it has no kernel."""
    names = [f"x{i}" for i in range(len(operands))]
    leaves = [ops.leaf("input", n, x.shape, i.dtype) for n, x, i in zip(names, operands, node.inputs, strict=True)]
    try:
        traced = meaning_of(ops.make(op.name, *leaves, **dict(node.attrs)))
    except Untraceable:
        return  # the backend says that there is no kernel
    feeds = dict(zip(names, operands, strict=True))
    other = interp.run(Graph(outputs={"y": traced}), feeds, dict(sizes), dtype=np.float64)[0]["y"]
    if not _close(other, found):
        what = "its meaning in NumPy and in ops differ"
        hint = "Write it with operators and functions of NumPy on the operands, or give it a kernel."
        raise CustomOpError(what, where=f"custom op {op.name}", hint=hint)


def _close(a: Array, b: Array) -> bool:
    finite = np.abs(b[np.isfinite(b)]) if b.size else b
    return bool(np.allclose(a, b, rtol=_CEILING, atol=_CEILING * finite.max(initial=0.0), equal_nan=True))
