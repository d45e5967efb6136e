"""The interpreter: runs a graph with the NumPy meanings. Slow, simple, and the reference for everything compiled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rlx.errors import GraphError
from rlx.ir.dims import value
from rlx.ir.graph import LEAVES, Graph, Node
from rlx.ir.ops import OPS
from rlx.ir.verify import WRITES

Arrays = Mapping[str, np.ndarray]


def run(
    graph: Graph,
    feeds: Arrays,
    env: Mapping[str, int] | None = None,
    *,
    dtype: Any = np.float32,
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Evaluates a graph.

    Args:
        feeds: name -> array for every input, weight (dequantized values) and state; constants are the graph's own.
        env: symbol -> value.
        dtype: the float type to compute in; float64 gives a reference for float32 kernels.

    Returns:
        (outputs by name, new states by name).
    """
    env = env or {}
    values: dict[Node, np.ndarray] = {}
    states: dict[str, np.ndarray] = {}
    for node in graph.nodes():
        if node.op in LEAVES:
            values[node] = _feed(graph, node, feeds, env, dtype)
        else:
            values[node] = OPS[node.op].meaning([values[i] for i in node.inputs], dict(node.attrs), env)
        if node.op in WRITES:
            states[node.inputs[0].name] = values[node]
    return {name: values[n] for name, n in graph.outputs.items()}, states


def _feed(graph: Graph, node: Node, feeds: Arrays, env: Mapping[str, int], dtype: Any) -> np.ndarray:
    found = feeds.get(node.name, graph.constants.get(node.name))
    if found is None:
        raise GraphError("no value was given", where=f"{node.op} {node.name!r}")
    array = np.asarray(found)
    shape = tuple(value(d, env) for d in node.shape)
    if array.shape != shape:
        raise GraphError(f"expected shape {list(shape)}, found {list(array.shape)}", where=f"{node.op} {node.name!r}")
    return array.astype(dtype) if array.dtype.kind == "f" else array
