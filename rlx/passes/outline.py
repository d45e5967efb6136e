"""Outline: takes the experts of some layers out of a model's graph, for a device beside the one that runs the model.

The experts of a layer are all nodes from its first `expert_linear` to the `mix` that adds up their results, with the
tables of their biases and scales. They become one node, a `call` of a graph of its own. Norms, the router and shared
experts stay. Equal layers have equal bodies, so that one program serves them, with the weights of each in turn.

This is no pass of the pipeline: it changes which weights a device has, so it comes before memory is planned.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from rlx.errors import GraphError
from rlx.ir import ops
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.passes.program import maker

_TABLES = ("embedding", "take")  # that look up biases and scales of experts


@dataclass(frozen=True)
class Experts:
    """The experts of a layer.

    Attributes:
        nodes: that compute them, in order; the last one is the `mix`.
        operands: values with as many rows, then weights.
    """

    nodes: tuple[Node, ...]
    operands: tuple[Node, ...]

    @property
    def weights(self) -> list[str]:
        """Names of their weights."""
        return [node.name for node in self.operands if node.op == "weight"]

    def body(self, name: str) -> Graph:
        """The graph of a `call`, whose leaf "in{i}" is operand i."""
        graph, new = Graph(name), dict[Node, Node]()
        for i, node in enumerate(self.operands):
            leaf = graph.weight if node.op == "weight" else graph.input
            new[node] = leaf(f"in{i}", node.shape, node.dtype)
        for node in self.nodes:
            new[node] = ops.rebuild(node, [new[i] for i in node.inputs])
        graph.output("out", new[self.nodes[-1]])
        return graph


def experts_of(graph: Graph) -> list[Experts]:
    """The experts of each layer that has some, in order, as far as nothing else needs their values or weights."""
    return [*_experts(graph)]


def _experts(graph: Graph) -> Iterator[Experts]:
    users, needs, results = graph.users(), dict[Node, bool](), {*graph.outputs.values()}
    for node in graph.nodes():
        needs[node] = _is_routed(node) or any(needs[i] and i.op != "mix" for i in node.inputs)
        if node.op != "mix" or not needs[node]:
            continue
        found, waiting = {node}, [node]
        while waiting:
            for operand in waiting.pop().inputs:
                own = (needs[operand] and operand.op != "mix") or _looks_up(operand)
                if own and operand not in found | results and found.issuperset(users[operand]):
                    found.add(operand)
                    waiting.append(operand)
        inside = [each for each in needs if each in found]
        around = dict.fromkeys(i for each in inside for i in each.inputs if i not in found)
        values = [i for i in around if i.op != "weight"]
        weights = [i for i in around if i.op == "weight"]
        shared = any(needs[i] and i.op != "mix" for i in values) or not all(found.issuperset(users[i]) for i in weights)
        if not shared and not graph.constants.keys() & {i.name for i in weights}:
            yield Experts(tuple(inside), (*values, *weights))


def _is_routed(node: Node) -> bool:
    """Whether a node computes experts that were chosen: those of adapters are an input."""
    return node.op == "expert_linear" and maker(node.inputs[1]).op != "input"


def _looks_up(node: Node) -> bool:
    """Whether a value is, or is a view of, rows of a table of weights."""
    made = maker(node)
    return made.op in _TABLES and made.inputs[0].op == "weight"


def outline(graph: Graph, weights: Collection[str]) -> Graph:
    """The graph in which layers whose experts have these weights call them.

    Raises:
        GraphError: something else needs them.
    """
    if not weights:
        return graph
    calls = {each.nodes[-1]: each for each in experts_of(graph) if {*each.weights} <= {*weights}}
    if others := ({*weights} & graph.leaves("weight").keys()).difference(*(each.weights for each in calls.values())):
        raise GraphError(f"experts cannot be taken out: {', '.join(sorted(others))}", where=f"graph {graph.name!r}")
    new = dict[Node, Node]()

    def visit(old: Node, inputs: tuple[Node, ...]) -> Node:
        if (each := calls.get(old)) is None:
            new[old] = ops.rebuild(old, inputs)
        else:
            body, operands = each.body(f"{graph.name} experts"), [new[i] for i in each.operands]
            new[old] = ops.make("call", *operands, body=body.canonical(), width=old.shape[1:])
        return new[old]

    return graph.map(visit)
