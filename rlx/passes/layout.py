"""Layout: decides how weights and caches lie in memory, and makes packing a node that runs once at load.

- Matrices of linears are packed in the layout of the device (`Layouts.matrices`). A stack of experts is packed expert
  by expert.
- A table that is only looked up, in this graph and in all others of the model, lies as the device looks rows up
  (`Layouts.tables`): by default as it is in the file (`file`).
- Weights of a `call` stay in the memory of the host, in the layouts of the device that computes it (`host`).
- Key caches, and plain keys in the form of one, lie as the device reads keys (`Layouts.keys`). A state whose layout is
  "keys" is a key cache that another graph reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

from rlx.errors import GraphError, ShapeError, UnsupportedModelError
from rlx.ir import ops
from rlx.ir.dtypes import DTYPES
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.ir.op_table import OPS
from rlx.passes.capabilities import Layouts
from rlx.passes.options import Options
from rlx.passes.program import root
from rlx.passes.report import SILENT, Log

FILE_LAYOUT = "file"
ROWS_LAYOUT = "rows"  # float32, as it is
HOST_LAYOUT = "host"
_MEANINGS = {
    FILE_LAYOUT: "only looked up: stays in the file",
    HOST_LAYOUT: "in the memory of the host, as the device cpu has it",
}


def layout(graph: Graph, options: Options, log: Log = SILENT) -> Graph:
    """Puts a pack node between each matrix and its readers, and tiles the key caches.

    Raises:
        GraphError: one state holds both keys and values.
    """
    read = [[root(n.inputs[i]) for n in graph.nodes() if n.op == "attention"] for i in (1, 2)]
    keys, values = ({cache for cache in caches if cache.op == "state"} for caches in read)
    for shared in keys & values:
        hint = "Write the rows into two states."
        raise GraphError("serves as keys and as values, which lie differently in memory", where=repr(shared), hint=hint)

    layouts = options.capabilities.layouts
    lies, names = _matrix_layouts(graph, layouts, options.packed), graph.names()
    for node in graph.leaves("weight").values():
        if node.name in lies:
            log.done(lies[node.name], names[node], _MEANINGS.get(lies[node.name], layouts.matrices_meaning))
    keys |= {node for node in graph.leaves("state").values() if node["layout"] == "keys"}
    for node in graph.leaves("state").values():
        if node in keys:
            log.done(layouts.keys, names[node], layouts.keys_meaning)

    def visit(old: Node, inputs: tuple[Node, ...]) -> Node:
        if old.op == "state" and old in keys:
            return ops.rebuild(old, (), layout=layouts.keys)
        if old.op == "attention":
            lies_as = ((inputs[1], layouts.keys), (inputs[2], "rows"))
            inputs = (inputs[0], *(_placed(node, layout, layouts) for node, layout in lies_as), *inputs[3:])
        if OPS[old.op].multiplies or old.op == "embedding":
            inputs = tuple(ops.make("pack", i, layout=lies[i.name]) if _is_matrix(i) else i for i in inputs)
        if old.op == "call":
            inputs = tuple(ops.make("pack", i, layout=HOST_LAYOUT) if i.op == "weight" else i for i in inputs)
        return ops.rebuild(old, inputs)

    return graph.map(visit)


def _placed(node: Node, layout: str, layouts: Layouts) -> Node:
    """Plain keys or values with their layout; caches are left as they are."""
    return ops.rebuild(node, node.inputs, layout=layout, room=layouts.room) if node.op == "as_cache" else node


def weight_table(graph: Graph, layouts: Layouts, packed: Iterable[str] = ()) -> dict[str, dict[str, Any]]:
    """The rows that the manifest of each program of a model has for its weights, before any program is made.

    The symbolic graph is enough for that, because no other pass changes which ops read a weight.

    Args:
        layouts: those of the device.
        packed: as in `Options`.
    """
    lies = _matrix_layouts(graph, layouts, packed)
    return {n.name: weight_row(n, lies.get(n.name, ROWS_LAYOUT)) for n in graph.leaves("weight").values()}


def weight_bytes(table: Mapping[str, Mapping[str, Any]], layouts: Layouts) -> int:
    """Memory of weights in bytes; those in the file or in the memory of the host need none.

    Args:
        table: of `weight_table`.
        layouts: those of the device.

    Raises:
        UnsupportedModelError: no kernel reads a matrix.
    """
    total = 0
    for name, row in table.items():
        dtype, (*stack, n, k) = DTYPES[row["dtype"]], (1, 1, *map(int, row["shape"]))
        try:
            if row["layout"] == ROWS_LAYOUT:
                total += dtype.size([*stack, n, k])
            elif row["layout"] not in (FILE_LAYOUT, HOST_LAYOUT):
                total += prod(stack) * layouts.matrix_bytes(dtype, n, k)
        except ShapeError as error:
            raise UnsupportedModelError(f"no kernel reads it: {error}", where=name) from error
    return total


def packed_rows(weights: Mapping[str, Any]) -> dict[str, Any]:
    """The rows of such a table whose weights are packed."""
    plain = ROWS_LAYOUT, FILE_LAYOUT, HOST_LAYOUT
    return {name: row for name, row in weights.items() if row["layout"] not in plain}


def weight_row(node: Node, layout: str) -> dict[str, Any]:
    """A row of that table: plain JSON data."""
    return {"dtype": node.dtype.name, "shape": [str(d) for d in node.shape], "layout": layout}


def _matrix_layouts(graph: Graph, layouts: Layouts, packed: Iterable[str]) -> dict[str, str]:
    """Name -> layout of every matrix that is multiplied or looked up, and of every weight of a `call`."""
    read = dict.fromkeys(lookup_tables(graph), layouts.tables)
    multiplied = {i.name for n in graph.nodes() if OPS[n.op].multiplies for i in n.inputs if _is_matrix(i)}
    found = read | dict.fromkeys([*multiplied, *(read.keys() & set(packed))], layouts.matrices)
    return found | {i.name: HOST_LAYOUT for n in graph.nodes() if n.op == "call" for i in n.inputs if i.op == "weight"}


def lookup_tables(graph: Graph) -> set[str]:
    """Names of the weights of which rows are looked up."""
    return {i.name for n in graph.nodes() if n.op == "embedding" for i in n.inputs if _is_matrix(i)}


def _is_matrix(node: Node) -> bool:
    return node.op == "weight" and len(node.shape) >= 2
