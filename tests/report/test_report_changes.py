"""What a pass changed: lines and rules, with equal layers as one change."""

from __future__ import annotations

from itertools import pairwise

import toy

from rlx.ir import ops
from rlx.ir.dims import SEQ
from rlx.ir.graph import Graph
from rlx.passes import pipeline
from rlx.passes.options import Options
from rlx.passes.report import PassReport
from rlx.report.work import Change, changes


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
