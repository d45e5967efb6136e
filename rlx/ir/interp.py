"""The interpreter: runs a graph with the NumPy meanings. Slow and simple; the reference for compiled code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rlx.errors import CustomOpError, GraphError, RlxError
from rlx.ir.dims import value
from rlx.ir.graph import Graph
from rlx.ir.meaning import Array
from rlx.ir.node import LEAVES, Node
from rlx.ir.op_table import OPS, updated

Arrays = Mapping[str, Array]


def run(
    graph: Graph,
    feeds: Arrays,
    env: Mapping[str, int] | None = None,
    *,
    dtype: Any = np.float32,
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Evaluates a graph.

    Args:
        feeds: name -> array for every input, weight (dequantized values) and state; constants come from the graph.
        env: symbol -> value.
        dtype: the float type to compute in; float64 gives a reference for float32 kernels.

    Returns:
        (outputs by name, new states by name).

    Raises:
        GraphError: a feed is missing or of the wrong shape or kind, a symbol has no value, or a value does not exist
            (an id outside its table, a row beyond the cache).
    """
    env = env or {}
    values: dict[Node, Array] = {}
    states: dict[str, Array] = {}
    for node in graph.nodes():
        if node.op in LEAVES:
            values[node] = _feed(graph, node, feeds, env, dtype)
        elif OPS[node.op].effect:
            values[node], states[updated(node).name] = _compute(node, [values[i] for i in node.inputs], env)
        else:
            values[node] = _compute(node, [values[i] for i in node.inputs], env)
        if OPS[node.op].writes:
            states[node.inputs[0].name] = values[node]
    return {name: values[n] for name, n in graph.outputs.items()}, states


def _compute(node: Node, operands: list[Array], env: Mapping[str, int]) -> Any:
    try:
        return OPS[node.op].meaning(operands, dict(node.attrs), env)
    except CustomOpError:
        raise
    except (ValueError, IndexError, RlxError) as error:
        raise GraphError(f"cannot be computed: {error}", where=repr(node)) from error


def _feed(graph: Graph, node: Node, feeds: Arrays, env: Mapping[str, int], dtype: Any) -> Array:
    found = feeds.get(node.name, graph.constants.get(node.name))
    if found is None:
        raise GraphError("no value was given", where=f"{node.op} {node.name!r}")
    array = np.asarray(found)
    shape = tuple(value(d, env) for d in node.shape)
    if array.shape != shape:
        raise GraphError(f"expected shape {list(shape)}, found {list(array.shape)}", where=f"{node.op} {node.name!r}")
    integral = (node.dtype.numpy or "").startswith(("int", "uint")) and not node.dtype.is_float
    if array.dtype.kind not in ("iu" if integral else "f"):
        expected = "integers" if integral else "floats (of weights the dequantized values)"
        raise GraphError(f"expected {expected}, found {array.dtype}", where=f"{node.op} {node.name!r}")
    return array if integral else array.astype(dtype)
