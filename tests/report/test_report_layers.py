"""Layers of a report: equal ones are one in the drawing, and one change; boxes do not overlap, and no edge is lost."""

from __future__ import annotations

from itertools import combinations, pairwise

import toy
from hypothesis import given
from hypothesis import strategies as st

from rlx.ir import ops
from rlx.ir.dims import SEQ
from rlx.ir.dtypes import I32
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.passes import pipeline
from rlx.passes.options import Options
from rlx.passes.report import PassReport
from rlx.report.drawing import Drawing, draw, fold
from rlx.report.work import Change, changes


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


# ---------------------------------------------------------------------------------------------- what a pass changed


def by_pass(graph: Graph, options: Options) -> dict[str, list[Change]]:
    reports: list[PassReport] = []
    stages = {name.split("-", 1)[1]: result for name, result in pipeline.stages(graph, options, reports)}
    graphs = {name: result for name, result in stages.items() if isinstance(result, Graph)}
    names = list(graphs)
    done = {report.name: report for report in reports}
    return {b: changes(graphs[a], graphs[b], done[b]) for a, b in pairwise(names)}


def gated(layers: int) -> Graph:
    graph = Graph("gated")
    x = graph.input("x", [SEQ, 32])
    for i in range(layers):
        gate, up = (ops.linear(x, graph.weight(f"blk.{i}.{name}.weight", [32, 32])) for name in ("gate", "up"))
        x = graph.named(f"blk.{i}.act", ops.silu(gate) * up)
    graph.output("y", x)
    return graph


def test_what_became_a_part_of_a_value_is_beside_it() -> None:
    (first, others) = by_pass(gated(3), Options(seq=(4, 4), precision="exact", all_rows=True))["fuse"]
    assert (first.name, first.layers, first.rules) == ("blk.*.act", (0,), ("gated-silu",))
    assert (others.name, others.layers, others.rules) == ("blk.*.act", (1, 2), ("gated-silu",))
    assert [line.split(" = ")[0] for line in others.before] == [
        "%blk.*.gate",
        "%blk.*.gate.silu",
        "%blk.*.up",
        "%blk.*.act",
    ]
    (line,) = others.after
    assert line == (
        '%blk.*.act = linear(%blk.*-1.act, %blk.*.gate.weight, %blk.*.up.weight) {gated="silu"} : f32[4, 32]'
    )


def test_lines_before_and_after_are_those_of_the_graphs() -> None:
    """Each line of a change, with the number of a layer, is one of the graph before or after."""
    graph = toy.build(toy.FAMILIES["qwen3"])
    reports: list[PassReport] = []
    stages = [r for _, r in pipeline.stages(graph, Options(seq=(2, 8)), reports) if isinstance(r, Graph)]
    for before, after, done in zip(stages, stages[1:], reports, strict=False):
        texts = [{line.strip() for line in str(each).splitlines()} for each in (before, after)]
        for change in changes(before, after, done):
            for layer in change.layers or (None,):
                for lines, text in zip((change.before, change.after), texts, strict=True):
                    shown = [line if layer is None else _of(line, layer) for line in lines]
                    assert set(shown) <= text
        assert (before == after) <= (changes(before, after, done) == [])


def _of(line: str, layer: int) -> str:
    return line.replace("*-1", str(layer - 1)).replace("*", str(layer))


# ------------------------------------------------------------------------------------------------------------ boxes


Edges = list[tuple[int, int]]


@st.composite
def layered(pick: st.DrawFn) -> tuple[list[tuple[float, float]], list[int], Edges]:
    """Boxes in groups in ascending order, and edges from earlier to later boxes."""
    count = pick(st.integers(1, 24))
    sizes = [(float(pick(st.integers(40, 260))), float(pick(st.integers(30, 90)))) for _ in range(count)]
    drawn = sorted(pick(st.lists(st.integers(-1, 2), min_size=count, max_size=count)))
    groups = [sorted({*drawn}).index(group) - 1 for group in drawn]  # -1, 0, 1, ... without gaps
    pairs = [(a, b) for a, b in combinations(range(count), 2)]
    edges = pick(st.lists(st.sampled_from(pairs), max_size=40, unique=True)) if pairs else []
    return sizes, groups, edges


def boxes(sizes: list[tuple[float, float]], drawing: Drawing) -> list[tuple[float, float, float, float]]:
    return [(x - w / 2, y, x + w / 2, y + h) for (w, h), (x, y) in zip(sizes, drawing.at, strict=True)]


@given(layered())
def test_boxes_lie_apart_and_edges_lead_down(given: tuple[list[tuple[float, float]], list[int], Edges]) -> None:
    sizes, groups, edges = given
    drawing = draw(sizes, groups, edges, framed=max(0, max(groups)))
    found = boxes(sizes, drawing)
    for a, b in combinations(found, 2):
        assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
    for left, top, right, bottom in found:
        assert left >= 0 and top >= 0 and right <= drawing.width and bottom <= drawing.height
    for (a, b), route in zip(edges, drawing.routes, strict=True):
        assert found[a][3] <= found[b][1]
        assert route[0] == (drawing.at[a][0], found[a][3]) and route[-1] == drawing.at[b]
        heights = [y for _, y in route]
        assert heights == sorted(heights)
    for i, j in combinations(range(len(sizes)), 2):
        assert groups[i] == groups[j] or found[i][3] <= found[j][1]


def test_a_frame_holds_its_boxes_and_no_others() -> None:
    sizes = [(100.0, 40.0)] * 6
    drawing = draw(sizes, [-1, 0, 0, 0, 0, 1], [(0, 1), (1, 2), (1, 3), (2, 4), (3, 4), (4, 5)], framed=1)
    ((left, top, width, height),) = drawing.frames
    inside = [left < a and c < left + width and top < b and d < top + height for a, b, c, d in boxes(sizes, drawing)]
    assert inside == [False, True, True, True, True, False]
