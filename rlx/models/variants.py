"""Variants of a model's graph: embeddings in place of tokens, a bias on attention, tokens that may turn out wrong.

Part of the models stage, from one finished graph to another, so that they serve every family alike.
"""

from __future__ import annotations

from rlx.ir import ops
from rlx.ir.dims import PAST_SEQ, SEQ
from rlx.ir.graph import Graph
from rlx.ir.node import Node

# What lies between two updates of recurrent states and costs so little that it is computed twice.
_CHEAP = frozenset(["rms_norm", "reshape", *(name for name, row in ops.OPS.items() if row.elementwise)])


def from_embeds(graph: Graph) -> Graph:
    """The model over the input "embeds" f32 [SEQ, hidden]: what the first layer sees, the scale applied.

    The input "tokens" stays where layers have embeddings of their own.
    """

    def visit(old: Node, inputs: tuple[Node, ...]) -> Node:
        if old.op == "embedding" and old.inputs[0].name == "token_embd.weight":
            return graph.input("embeds", old.shape)
        return ops.rebuild(old, inputs)

    return graph.map(visit)


def with_bias(graph: Graph, heads: int) -> Graph:
    """The model with the input "bias" f32 [SEQ, heads, PAST_SEQ + SEQ] on the attention of every layer.

    Args:
        heads: 1, for all query heads, or as many as there are.
    """
    bias = graph.input("bias", [SEQ, heads, PAST_SEQ + SEQ])

    def visit(old: Node, inputs: tuple[Node, ...]) -> Node:
        return ops.rebuild(old, (*inputs, bias) if old.op == "attention" else inputs)

    return graph.map(visit)


def verifying(graph: Graph) -> Graph:
    """The model for tokens of which some may turn out wrong: recurrent states stay as they are.

    What they become with all the tokens goes to states beside them, whose names end in "'". There are outputs more,
    "kept.0" and so on: what `advancing` needs to take in the first of the tokens only.
    """
    kept = {name: node for node, name in _kept(graph).items()}
    return graph.replace(outputs={**graph.outputs, **kept}).map(_aside)


def advancing(graph: Graph) -> Graph:
    """What updates the recurrent states of a model, and nothing else, for the first SEQ of the rows of `verifying`.

    It writes to the same states beside them. The outputs "kept.0" and so on are states here: they live between calls.
    """
    kept = _kept(graph)

    def visit(old: Node, inputs: tuple[Node, ...]) -> Node:
        return graph.state(kept[old], old.shape) if old in kept else _aside(old, inputs)

    effects = {node.inputs[0].name: node for node in graph.nodes() if node.op in ops.EFFECTS}
    return graph.replace(outputs=effects).map(visit)


def _aside(node: Node, inputs: tuple[Node, ...]) -> Node:
    """A node over other operands; what it would update in place goes to the state beside that."""
    if node.op not in ops.EFFECTS:
        return ops.rebuild(node, inputs)
    state = inputs[0]
    return ops.rebuild(node, (*inputs, ops.leaf("state", f"{state.name}'", state.shape, state.dtype)), aside=True)


def _kept(graph: Graph) -> dict[Node, str]:
    """What recurrent states are updated from, but for weights and what other such updates give: value -> name."""
    nodes = graph.nodes()
    again: set[Node] = set()  # computed from what an update gives
    for node in nodes:
        if node.op in ops.EFFECTS or (node.op in _CHEAP and not again.isdisjoint(node.inputs)):
            again.add(node)
    needed = {node for node in nodes if node.op in ops.EFFECTS}
    for node in reversed(nodes):
        if node in needed:
            needed.update(again.intersection(node.inputs))
    read = [i for node in nodes if node in needed for i in node.inputs]
    values = dict.fromkeys(i for i in read if i not in again and i.op not in ("weight", "state"))
    return {node: f"kept.{i}" for i, node in enumerate(values)}
