"""Last row: only the rows that are needed reach the head.

The logits of a prefill are wanted for its last row. The selection is put on the output and moved towards the inputs
through every row-wise op whose value nothing else reads: past the head, the final norm, the last layer's feed-forward
block and attention, down to the residual stream.
"""

from __future__ import annotations

from rlx.ir import ops
from rlx.ir.graph import LEAVES, Graph, Node
from rlx.passes.options import Options


def last_row(graph: Graph, options: Options) -> Graph:
    """Selects the last row of every output that has SEQ rows, unless all rows are wanted."""
    if options.all_rows or options.seq[1] == 1:
        return graph
    outputs = {name: ops.last_row(n) if n.shape[0] == ops.SEQ else n for name, n in graph.outputs.items()}
    return _sink(graph.replace(outputs=outputs))


def _sink(graph: Graph) -> Graph:
    while True:
        readers = {n: len(users) for n, users in graph.users().items()}

        def visit(old: Node, inputs: tuple[Node, ...], readers: dict[Node, int] = readers) -> Node:
            if old.op == "last_row" and inputs == old.inputs and readers[old.inputs[0]] == 1:
                return _through(old.inputs[0]) or old
            return ops.rebuild(old, inputs)

        after = graph.map(visit)
        if after.outputs == graph.outputs:
            return after
        graph = after


def _through(node: Node) -> Node | None:
    """last_row(node) with the selection moved to node's operands, or None where it cannot move."""
    rows = node.shape[0]
    if node.op == "reshape" and node.inputs[0].shape[0] == rows:
        return ops.reshape(ops.last_row(node.inputs[0]), (1, *node.shape[1:]))
    if node.op in LEAVES or not ops.OPS[node.op].rowwise:
        return None
    return ops.rebuild(node, [ops.last_row(i) if i.shape and i.shape[0] == rows else i for i in node.inputs])
