"""Variants of a model's graph that take more from the caller: embeddings in place of tokens, a bias on attention.

Part of the models stage, from one finished graph to another, so that they serve every family alike. The weights, the
states and the outputs stay what they are.
"""

from __future__ import annotations

from rlx.ir import ops
from rlx.ir.dims import PAST_SEQ, SEQ
from rlx.ir.graph import Graph
from rlx.ir.node import Node


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
