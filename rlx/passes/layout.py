"""Layout: how weights and caches lie in memory. Packing becomes an explicit node, run once at load.

Matrices that are multiplied are packed as blocks of 16 output rows (`r16k4`, see `rlx.codegen.layouts`), those of
experts one after the other; a table of which only rows are looked up, in this and any other graph of the model, stays
in the file as it is (`file`). Key caches lie in tiles of 16 positions, so that attention scores need no horizontal
sums.
"""

from __future__ import annotations

from rlx.errors import GraphError
from rlx.ir import ops
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.passes.options import Options
from rlx.passes.program import root

MATRIX_LAYOUT = "r16k4"
FILE_LAYOUT = "file"
_MULTIPLY = ("linear", "expert_linear", "linear_pick")


def layout(graph: Graph, options: Options) -> Graph:
    """Puts a pack node between each matrix and its readers, and tiles the key caches."""
    keys, values = ({root(n.inputs[i]) for n in graph.nodes() if n.op == "attention"} for i in (1, 2))
    for shared in keys & values:
        hint = "Write the rows into two states."
        raise GraphError("serves as keys and as values, which lie differently in memory", where=repr(shared), hint=hint)

    multiplied = {i for n in graph.nodes() if n.op in _MULTIPLY for i in n.inputs if _is_matrix(i)}
    multiplied |= {n for n in graph.nodes() if _is_matrix(n) and n.name in options.packed}

    def visit(old: Node, inputs: tuple[Node, ...]) -> Node:
        if old.op == "state" and old in keys:
            return ops.rebuild(old, (), layout="tiles")
        if old.op in (*_MULTIPLY, "embedding"):
            inputs = tuple(_packed(i, i in multiplied) if _is_matrix(i) else i for i in inputs)
        return ops.rebuild(old, inputs)

    return graph.map(visit)


def _is_matrix(node: Node) -> bool:
    return node.op == "weight" and len(node.shape) >= 2


def _packed(node: Node, multiplied: bool) -> Node:
    return ops.make("pack", node, layout=MATRIX_LAYOUT if multiplied else FILE_LAYOUT)
