"""Value names: what IR text calls values, that names last over passes, and that only text depends on them."""

from __future__ import annotations

import re

import pytest
import toy
from hypothesis import given

from ir.random_graphs import graphs
from rlx import demo
from rlx.engine.opening.options import EngineOptions
from rlx.engine.opening.setup import Plan
from rlx.ir import ops
from rlx.ir.dims import SEQ
from rlx.ir.graph import Graph
from rlx.ir.names import NAME
from rlx.passes import pipeline
from rlx.passes.options import Options
from rlx.passes.program import Program
from rlx.weights import open_weights


@pytest.fixture(scope="module")
def model() -> Graph:
    """The graph of the demo model, a Qwen 3."""
    with open_weights(demo.path()) as loader:
        return Plan.of(loader, EngineOptions()).graph


def named(graph: Graph) -> list[str]:
    return list(graph.names().values())


@given(graphs())
def test_names_are_words_used_once(graph: Graph) -> None:
    names = named(graph)
    assert len(names) == len(set(names)) == len(graph.nodes())
    assert all(re.fullmatch(NAME, name) for name in names)
    assert graph.names().keys() == set(graph.nodes())


@pytest.mark.parametrize("options", [Options(), Options(seq=(2, 16)), Options(seq=(2, 16), precision="exact")])
@pytest.mark.parametrize("family", toy.FAMILIES)
def test_a_value_keeps_its_name_over_all_passes(family: str, options: Options) -> None:
    before: dict[object, str] = {}

    def check(stage: str, result: Graph | Program) -> None:
        graph = result.graph if isinstance(result, Program) else result
        names = graph.names()
        assert {node: before.get(node, name) for node, name in names.items()} == names
        before.clear()
        before.update(names)

    pipeline.lower(toy.build(toy.FAMILIES[family]), options, check)


def test_a_rewrite_gives_the_result_the_name_of_what_it_replaces(model: Graph) -> None:
    stages: dict[str, Graph | Program] = {}
    pipeline.lower(model, Options(), lambda stage, result: stages.update({stage[3:]: result}))
    lines = {stage: re.findall(r"%blk\.3\.attn_output\.add = (\w+)", str(result)) for stage, result in stages.items()}
    assert lines["quantize"] == ["add"]
    assert lines["fuse"] == lines["layout"] == lines["memory"] == ["linear"]


def test_a_given_name_changes_text_and_nothing_else() -> None:
    one, two = Graph("g"), Graph("g")
    for graph in (one, two):
        graph.output("y", ops.silu(ops.neg(graph.input("x", [SEQ, 8]))))
    plain = two.names()
    node = one.outputs["y"].inputs[0]
    assert one.named("minus x", node) is node
    assert one == two and one.outputs["y"] is two.outputs["y"]
    assert one.canonical() == two.canonical()
    assert "%minus_x = neg(%x)" in str(one) and "%x.neg = neg(%x)" in str(two)
    assert plain == two.names()
    assert one.replace(outputs={"z": node}).names()[node] == "minus_x"
