"""Equal layers are one in the drawing, layers that differ are not, and no edge is lost."""

from __future__ import annotations

import toy

from rlx.ir import ops
from rlx.ir.dims import SEQ
from rlx.ir.dtypes import I32
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.passes import pipeline
from rlx.passes.options import Options
from rlx.report.drawing import fold


def chain(widths: list[int], *, acts: dict[int, str] | None = None) -> Graph:
    """Layers x + act(x w), with weights [width, width]."""
    graph = Graph("chain")
    x: Node = graph.input("x", [SEQ, widths[0]])
    for i, width in enumerate(widths):
        up = ops.linear(x, graph.weight(f"blk.{i}.up.weight", [width, width]))
        act = (acts or {}).get(i, "silu")
        x = graph.named(f"blk.{i}.out", x + graph.named(f"blk.{i}.act", ops.make(act, up)))
    graph.output("y", ops.sigmoid(x))
    return graph


def test_equal_layers_are_one() -> None:
    folded = fold(chain([32] * 5))
    assert folded.groups == [(0, 1, 2, 3, 4)]
    assert [box.name for box in folded.boxes] == ["x", "blk.*.up", "blk.*.act", "blk.*.out", "y"]
    assert [box.group for box in folded.boxes] == [-1, 0, 0, 0, 1]
    assert list(folded.boxes[1].leaves) == ["blk.*.up.weight"]
    assert folded.outputs == {"y": 4}


def test_edges_are_those_of_the_graph_without_repeats() -> None:
    """The first layer reads the input; that each layer reads the one before is what the frame says."""
    assert sorted(fold(chain([32] * 5)).edges) == [(0, 1), (0, 3), (1, 2), (2, 3), (3, 4)]


def test_a_layer_with_another_op_stands_alone() -> None:
    folded = fold(chain([32] * 5, acts={2: "gelu_tanh"}))
    assert folded.groups == [(0, 1, 3, 4), (2,)]
    names = [box.name for box in folded.boxes]
    assert len(names) == 8 and names.count("blk.*.up") == 2
    first, second = (i for i, name in enumerate(names) if name == "blk.*.up")
    out = names.index("blk.*.out")
    assert (out, second) in folded.edges and first < second
    assert not [edge for edge in folded.edges if folded.boxes[edge[0]].group > folded.boxes[edge[1]].group]


def is_table(node: Node, graph: Graph) -> bool:
    """Whether it is an input of numbers that three ops or more read."""
    return node.op == "input" and node.dtype is I32 and len(graph.users()[node]) > 2


def test_every_family_folds_to_few_boxes_at_every_stage() -> None:
    """A box stands for as many values as it has layers, so their numbers add up to the nodes of the graph."""
    for family, knobs in toy.FAMILIES.items():
        graph = toy.build(knobs)
        for stage, result in pipeline.stages(graph, Options(seq=(2, 16))):
            if not isinstance(result, Graph):
                continue
            hidden = {"weight", "state", "reshape", "pack"}
            shown = [n for n in result.nodes() if n.op not in hidden and not is_table(n, result)]
            folded = fold(result)
            assert sum(max(1, len(box.layers)) for box in folded.boxes) == len(shown), (family, stage)
