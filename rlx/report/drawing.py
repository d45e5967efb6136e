"""A graph as a drawing: equal layers folded to one, places for boxes and edges, from the top down, with few crossings.

Report stage. A layer is what has its number in the name: `blk.3.attn_q` belongs to layer 3. Layers are equal if they
have the same ops, attributes, shapes and formats, and if what they read lies in the same places. The method is that of
layered drawings: ranks by longest paths, an order within ranks by barycenters, and positions by least squares (K.
Sugiyama, S. Tagawa, M. Toda, 1981, https://doi.org/10.1109/TSMC.1981.4308636; for the positions the
pool-adjacent-violators algorithm).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
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


ACROSS, DOWN = 28.0, 34.0  # between boxes of a rank, and between ranks
BEND = 14.0  # width that an edge takes where it passes a rank
TITLE, FRAME = 30.0, 16.0  # height of a frame's title, and from a frame to its boxes
STRAIGHT = 8.0  # how much more a bend is pulled to the next bend of its edge than to a box
_SWEEPS, _MOVES = 8, 24


@dataclass(frozen=True)
class Drawing:
    """Places, in pixels.

    Attributes:
        at: the centre of each box across, and its top.
        routes: for each edge the points through which it passes, from the lower edge of a box to the upper of another.
        frames: left, top, width and height of the frame around each group.
        width, height: of the whole.
    """

    at: list[tuple[float, float]]
    routes: list[list[tuple[float, float]]]
    frames: list[tuple[float, float, float, float]]
    width: float
    height: float


def draw(
    sizes: Sequence[tuple[float, float]], groups: Sequence[int], edges: Sequence[tuple[int, int]], framed: int
) -> Drawing:
    """Places boxes.

    Args:
        sizes: width and height of each box.
        groups: of each box; boxes of a group lie below those of all groups with lower numbers.
        edges: (from, to), without cycles, from each group to itself or to higher ones.
        framed: number of groups that have a frame, counted from 0.
    """
    if not sizes:
        return Drawing([], [], [], 0.0, 0.0)
    rank = _ranks(len(sizes), groups, edges)
    ranks, chains, widths = _with_bends(sizes, rank, edges)
    neighbours = _neighbours(ranks, chains, edges)
    _order(ranks, neighbours)
    x = _positions(ranks, neighbours, widths, len(sizes))
    top, height = _tops(sizes, groups, rank, len(ranks), framed)
    left = min(x[i] - widths[i] / 2 for i in range(len(widths))) - FRAME
    x = [at - left for at in x]
    frames = [_frame(g, sizes, groups, rank, x, top) for g in range(framed)]
    shift = max(0.0, -min((f[0] for f in frames), default=0.0))
    width = max([x[i] + widths[i] / 2 for i in range(len(widths))] + [f[0] + f[2] for f in frames]) + FRAME
    at = [(x[i] + shift, top[rank[i]]) for i in range(len(sizes))]
    tall = _heights(sizes, rank, len(ranks))
    routes = []
    for (a, b), chain in zip(edges, chains, strict=True):
        route = [(at[a][0], at[a][1] + sizes[a][1])]
        for r, i in enumerate(chain, rank[a] + 1):  # straight down beside the boxes of the rank
            route += [(x[i] + shift, top[r]), (x[i] + shift, top[r] + tall[r])]
        routes.append([*route, at[b]])
    return Drawing(at, routes, [(f[0] + shift, *f[1:]) for f in frames], width + shift, height)


def _ranks(count: int, groups: Sequence[int], edges: Sequence[tuple[int, int]]) -> list[int]:
    """The rank of each box: below what it reads and below all earlier groups; what nothing precedes goes down."""
    before: list[list[int]] = [[] for _ in range(count)]
    after: list[list[int]] = [[] for _ in range(count)]
    for a, b in edges:
        before[b].append(a)
        after[a].append(b)
    rank, base = [0] * count, 0
    for group in sorted(set(groups)):
        members = [i for i in _topological(before, after) if groups[i] == group]
        for i in members:
            rank[i] = max([base, *(rank[p] + 1 for p in before[i])])
        for i in reversed(members):
            below = [rank[s] for s in after[i] if groups[s] == group]
            if below and not any(groups[p] == group for p in before[i]):
                rank[i] = max(rank[i], min(below) - 1)
        base = max(rank[i] for i in members) + 1
    return rank


def _topological(before: Sequence[Sequence[int]], after: Sequence[Sequence[int]]) -> list[int]:
    waiting = [len(set(p)) for p in before]
    ready = [i for i, n in enumerate(waiting) if not n]
    order: list[int] = []
    while ready:
        i = ready.pop(0)
        order.append(i)
        for s in dict.fromkeys(after[i]):
            waiting[s] -= 1
            if not waiting[s]:
                ready.append(s)
    return order


def _with_bends(
    sizes: Sequence[tuple[float, float]], rank: Sequence[int], edges: Sequence[tuple[int, int]]
) -> tuple[list[list[int]], list[list[int]], list[float]]:
    """Ranks of boxes and bends, the bends of each edge, and the widths of both; bends are numbered after the boxes."""
    ranks: list[list[int]] = [[] for _ in range(max(rank) + 1)]
    widths = [w for w, _ in sizes]
    for i, r in enumerate(rank):
        ranks[r].append(i)
    chains = []
    for a, b in edges:
        chain = []
        for r in range(rank[a] + 1, rank[b]):
            chain.append(len(widths))
            ranks[r].append(len(widths))
            widths.append(BEND)
        chains.append(chain)
    return ranks, chains, widths


def _neighbours(
    ranks: Sequence[Sequence[int]], chains: Sequence[Sequence[int]], edges: Sequence[tuple[int, int]]
) -> tuple[list[list[int]], list[list[int]]]:
    """For each box and bend what it is joined to in the rank above, and in the rank below."""
    count = sum(map(len, ranks))
    up: list[list[int]] = [[] for _ in range(count)]
    down: list[list[int]] = [[] for _ in range(count)]
    for (a, b), chain in zip(edges, chains, strict=True):
        path = [a, *chain, b]
        for i, j in pairwise(path):
            down[i].append(j)
            up[j].append(i)
    return up, down


def _order(ranks: list[list[int]], neighbours: tuple[list[list[int]], list[list[int]]]) -> None:
    """Orders each rank by the mean place of what it is joined to, sweeping down and up."""
    place = {i: n for row in ranks for n, i in enumerate(row)}
    for sweep in range(_SWEEPS):
        down = sweep % 2 == 0
        joined = neighbours[0 if down else 1]
        for row in ranks if down else reversed(ranks):
            key = {i: sum(place[j] for j in joined[i]) / len(joined[i]) if joined[i] else place[i] for i in row}
            row.sort(key=key.__getitem__)
            place.update({i: n for n, i in enumerate(row)})


def _positions(
    ranks: Sequence[Sequence[int]],
    neighbours: tuple[list[list[int]], list[list[int]]],
    widths: Sequence[float],
    boxes: int,
) -> list[float]:
    """The centre of each box and bend: as near as possible to the mean of what it is joined to, without overlap.

    Args:
        boxes: number of boxes; what follows them are bends.
    """
    x = [0.0] * len(widths)
    up, down = neighbours
    for row in ranks:
        _apart(row, [0.0] * len(row), widths, x)
    for move in range(_MOVES):
        for row in ranks if move % 2 == 0 else reversed(ranks):
            preferred = []
            for i in row:
                joined = [*up[i], *down[i]] if move > 1 else (up[i] if move == 0 else down[i])
                pulls = [(STRAIGHT if i >= boxes and j >= boxes else 1.0, x[j]) for j in joined]
                preferred.append(sum(w * at for w, at in pulls) / sum(w for w, _ in pulls) if pulls else x[i])
            _apart(row, preferred, widths, x)
    return x


def _apart(row: Sequence[int], preferred: Sequence[float], widths: Sequence[float], x: list[float]) -> None:
    """Sets the places of a rank: least squares from `preferred`, in order and at least `ACROSS` apart."""
    offsets, at = [], 0.0
    for before, i in zip([None, *row], row, strict=False):
        at += 0.0 if before is None else (widths[before] + widths[i]) / 2 + ACROSS
        offsets.append(at)
    blocks: list[list[float]] = []  # sum and number of what moves together
    for want, offset in zip(preferred, offsets, strict=True):
        blocks.append([want - offset, 1.0])
        while len(blocks) > 1 and blocks[-2][0] / blocks[-2][1] > blocks[-1][0] / blocks[-1][1]:
            total, number = blocks.pop()
            blocks[-1][0] += total
            blocks[-1][1] += number
    means = [total / number for total, number in blocks for _ in range(int(number))]
    for i, mean, offset in zip(row, means, offsets, strict=True):
        x[i] = mean + offset


def _heights(sizes: Sequence[tuple[float, float]], rank: Sequence[int], count: int) -> list[float]:
    """The height of the highest box of each rank."""
    heights = [0.0] * count
    for i, r in enumerate(rank):
        heights[r] = max(heights[r], sizes[i][1])
    return heights


def _tops(
    sizes: Sequence[tuple[float, float]], groups: Sequence[int], rank: Sequence[int], count: int, framed: int
) -> tuple[list[float], float]:
    """The top of each rank, with room for the title and the edge of a frame, and the height of the whole."""
    heights, starts, ends = _heights(sizes, rank, count), [False] * count, [False] * count
    for group in range(framed):
        members = [rank[i] for i in range(len(rank)) if groups[i] == group]
        if members:
            starts[min(members)] = ends[max(members)] = True
    tops, at = [], FRAME
    for r in range(count):
        at += (TITLE + FRAME) if starts[r] else 0.0
        tops.append(at)
        at += heights[r] + DOWN + (FRAME if ends[r] else 0.0)
    return tops, at - DOWN + FRAME


def _frame(
    group: int,
    sizes: Sequence[tuple[float, float]],
    groups: Sequence[int],
    rank: Sequence[int],
    x: Sequence[float],
    tops: Sequence[float],
) -> tuple[float, float, float, float]:
    """Left, top, width and height of the frame around a group."""
    members = [i for i in range(len(sizes)) if groups[i] == group]
    left, right = min(x[i] - sizes[i][0] / 2 for i in members), max(x[i] + sizes[i][0] / 2 for i in members)
    top, bottom = min(tops[rank[i]] for i in members), max(tops[rank[i]] + sizes[i][1] for i in members)
    return left - FRAME, top - TITLE - FRAME / 2, right - left + 2 * FRAME, bottom - top + TITLE + 1.5 * FRAME
