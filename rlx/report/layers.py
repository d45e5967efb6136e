"""Equal layers of a graph folded to one: the boxes and edges of the drawing.

Report stage. A layer is what has its number in the name: `blk.3.attn_q` belongs to layer 3. Layers are equal if they
have the same ops, attributes, shapes and formats, and if what they read lies in the same places.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlx.ir.dtypes import I32
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.passes.report import without_layer

_INSIDE = re.compile(r"(?:(?<=\.)|^)\d{1,9}(?=\.)")  # a whole part of a name that is not its last: "x.2" is no layer
_LEAVES = ("weight", "state")
_FEW = 2  # readers of an input that are shown as edges


@dataclass
class Box:
    """A value in the drawing, or the equal values of several layers.

    Attributes:
        name: of the value; `*` stands for the number of the layer.
        node: the value, of the first of the layers.
        group: index of the group of equal layers; -1 before all layers, the number of groups after them.
        layers: numbers of the layers, in ascending order; empty outside of layers.
        leaves: the weights and states that it reads, by name.
    """

    name: str
    node: Node
    group: int
    layers: tuple[int, ...] = ()
    leaves: dict[str, Node] = field(default_factory=dict)


@dataclass(frozen=True)
class Folded:
    """A graph with equal layers folded.

    Attributes:
        boxes: in the order of computation.
        edges: (index of the box that is read, index of the reader), each once, without those from a layer to a later
            one of an earlier group; so they have no cycle.
        groups: the layers of each group, the first layer first.
        outputs: name -> index of its box.
    """

    boxes: list[Box]
    edges: list[tuple[int, int]]
    groups: list[tuple[int, ...]]
    outputs: dict[str, int]


def layer_number(name: str) -> int | None:
    """The number of the layer that a value belongs to, by its name."""
    found = _INSIDE.search(name)
    return int(found[0]) if found else None


def origin(node: Node) -> Node:
    """The node whose value it is: a view and a packed weight are other forms of their operand."""
    while node.op in ("reshape", "pack"):
        node = node.inputs[0]
    return node


def fold(graph: Graph) -> Folded:
    """Folds the equal layers of a graph."""
    names = graph.names()
    tables = _tables(graph)
    nodes = [n for n in graph.nodes() if n.op not in (*_LEAVES, "reshape", "pack") and n not in tables]
    layer = {n: layer_number(names[n]) for n in nodes}
    members: dict[int, list[Node]] = {}
    for node in nodes:
        if (number := layer[node]) is not None:
            members.setdefault(number, []).append(node)
    alike: dict[Any, list[int]] = {}
    for number in sorted(members):
        alike.setdefault(_signature(number, members[number], names, layer), []).append(number)
    groups = [tuple(numbers) for numbers in alike.values()]
    group = {number: i for i, numbers in enumerate(groups) for number in numbers}

    boxes: list[Box] = []
    index: dict[Node, int] = {}
    later: set[Node] = set()  # values outside of layers that need a layer
    for node in nodes:
        number = layer[node]
        if number is None:
            reads = [origin(i) for i in node.inputs]
            after = any(i in later or layer.get(i) is not None for i in reads)
            later |= {node} if after else set()
            index[node] = len(boxes)
            boxes.append(Box(names[node], node, len(groups) if after else -1))
        else:
            first = groups[group[number]][0]
            place = members[number].index(node)
            if number == first:
                index[node] = len(boxes)
                boxes.append(Box(without_layer(names[node]), node, group[number], groups[group[number]]))
            else:
                index[node] = index[members[first][place]]
    for node in nodes:
        box = boxes[index[node]]
        if box.node is node:
            box.leaves = _leaves(node, names, bool(box.layers), tables)
    outputs = {name: index[origin(n)] for name, n in graph.outputs.items() if origin(n) in index}
    return Folded(boxes, _edges(nodes, layer, index, boxes), groups, outputs)


def _tables(graph: Graph) -> set[Node]:
    """Inputs of whole numbers that many ops read, such as page tables. Their edges would hide the others."""
    readers = graph.readers()
    return {n for n in graph.leaves("input").values() if n.dtype is I32 and readers[n] > _FEW}


def _signature(number: int, nodes: Sequence[Node], names: dict[Node, str], layer: dict[Node, int | None]) -> Any:
    """Equal for equal layers. What a layer reads of others is numbered in the order in which it is first read."""
    others: dict[Node, int] = {}

    def operand(node: Node) -> Any:
        found = origin(node)
        if found.op in _LEAVES:
            return _own(names[found], number), found.dtype, found.shape
        if layer.get(found) == number:
            return _own(names[found], number)
        return others.setdefault(found, len(others))

    return tuple(
        (_own(names[n], number), n.op, n.attrs, n.shape, n.dtype, tuple(operand(i) for i in n.inputs)) for n in nodes
    )


def _own(name: str, number: int) -> str:
    """The name with `*` for the number of this layer, also at its end: "k.3" of layer 3."""
    return re.sub(rf"(?:(?<=\.)|^){number}(?=\.|$)", "*", name, count=1)


def _leaves(node: Node, names: dict[Node, str], folded: bool, tables: set[Node]) -> dict[str, Node]:
    found = [origin(i) for i in node.inputs]
    return {without_layer(names[i]) if folded else names[i]: i for i in found if i.op in _LEAVES or i in tables}


def _edges(
    nodes: Iterable[Node], layer: dict[Node, int | None], index: dict[Node, int], boxes: Sequence[Box]
) -> list[tuple[int, int]]:
    edges: dict[tuple[int, int], None] = {}
    for node in nodes:
        for read in map(origin, node.inputs):
            if read not in index:
                continue  # a leaf
            a, b = index[read], index[node]
            other = layer[read] != layer[node] and layer[read] is not None and layer[node] is not None
            if boxes[a].group > boxes[b].group or (other and boxes[a].group == boxes[b].group):
                continue  # from a layer to a later one, which is folded into the same box or into one above
            edges[a, b] = None
    return list(edges)
