"""IR text: every graph prints, parses back to the same nodes, and damage is reported with its line; names of values,
and how graphs differ, in words.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import toy
from hypothesis import given
from hypothesis import strategies as st

from ir.random_graphs import STEPS, graphs
from rlx import demo
from rlx.engine.opening.options import EngineOptions
from rlx.engine.opening.setup import Plan
from rlx.errors import IrSyntaxError
from rlx.ir import ops
from rlx.ir.compare import differences
from rlx.ir.dims import SEQ
from rlx.ir.dtypes import F16
from rlx.ir.graph import Graph
from rlx.ir.printer import NAME
from rlx.ir.text import dumps, loads
from rlx.passes import pipeline
from rlx.passes.options import Options
from rlx.passes.program import Program
from rlx.weights import open_weights


def test_the_random_graphs_cover_the_op_table() -> None:
    """An op without a step in random_graphs.py is an op that no property test sees."""
    assert STEPS.keys() == ops.OPS.keys()


BOUNDS = st.dictionaries(st.sampled_from(["SEQ", "CTX", "X_1"]), st.tuples(st.integers(0, 9), st.integers(9, 99)))


@given(graphs(), BOUNDS)
def test_random_graphs_round_trip(g: Graph, bounds: dict[str, tuple[int, int]]) -> None:
    g = g.replace(bounds=bounds)
    text = dumps(g)
    again = loads(text)
    assert dumps(again) == text
    assert again == g
    assert all(again.outputs[name] is node for name, node in g.outputs.items())


@pytest.mark.parametrize("family", toy.FAMILIES)
@pytest.mark.parametrize("options", [Options(), Options(seq=(2, 16)), Options(seq=(2, 16), precision="exact")])
def test_every_stage_of_the_pipeline_round_trips(family: str, options: Options) -> None:
    stages: list[Graph | Program] = []
    pipeline.lower(toy.build(toy.FAMILIES[family]), options, lambda _, result: stages.append(result))
    assert len(stages) >= 8
    for stage in stages[:-2]:
        assert isinstance(stage, Graph)
        assert loads(dumps(stage)) == stage


SAMPLE = """\
graph "sample" prefill {
  bound SEQ 2..16
  %x = input "x" : f32[SEQ, 64]
  %w = weight "w" : q8_0[32, 64]
  %cache = state "cache" : f32[4, CTX, 8]
  %w.linear = linear(%x, %w) : f32[SEQ, 32]
  %3 = elementwise(%w.linear) {expr=("scale", ("neg", 0,), 2.0,)} : f32[SEQ, 32]
  %5 = reshape(%w.linear) {shape=(<SEQ>, 4, 8,)} : f32[SEQ, 4, 8]
  %6 = kv_write(%cache, %5) {at=<2*PAST_SEQ+1>} : f32[4, CTX, 8]
  output "y" %3
  output "cache" %6
}
"""


@pytest.mark.parametrize(
    ("line", "old", "new", "why"),
    [
        (1, 'graph "sample" prefill {', "program {", "expected `graph"),
        (1, '"sample"', '"sam\\xple"', "expected `graph"),
        (12, "}\n", "", "expected `}` at the end"),
        (2, "2..16", "2..", "no node, bound or output"),
        (3, "[SEQ, 64]", "[SEQ, 0]", "dims must be positive"),
        (3, "[SEQ, 64]", "[SEQ,, 64]", "is not a dim"),
        (3, "[SEQ, 64]", "[2SEQ, 64]", "is not a dim"),
        (3, "f32[SEQ", "f33[SEQ", "'f33'"),
        (3, ' "x"', "(%x)", "a leaf has a name"),
        (4, "q8_0[32, 64]", "q8_0[32, 60]", "multiple of the 32-element blocks of q8_0"),
        (6, "linear(", "linaer(", "no op is called 'linaer'"),
        (6, "linear(%x, %w)", 'linear "x"', "a leaf has a name"),
        (6, "(%x, %w)", "(%x, 1)", "no node, bound or output"),
        (6, "(%x, %w)", "(%x, %nope)", "%nope is not defined before this line"),
        (6, "%w.linear = linear", "%w = linear", "%w has two definitions"),
        (6, "(%x, %w)", "(%w, %x)", "linear: found operands"),
        (6, "f32[SEQ, 32]", "f32[SEQ, 33]", "the op gives <linear f32[SEQ, 32]>"),
        (6, "f32[SEQ, 32]", "f16[SEQ, 32]", "the op gives <linear f32[SEQ, 32]>"),
        (6, " : f32[SEQ, 32]", " {bias=} : f32[SEQ, 32]", "is no list of attributes"),
        (6, " : f32[SEQ, 32]", " {bias=1 +} : f32[SEQ, 32]", "is no list of attributes"),
        (6, " : f32[SEQ, 32]", " {True} : f32[SEQ, 32]", "is no list of attributes"),
        (6, " : f32[SEQ, 32]", " {**{}} : f32[SEQ, 32]", "is no list of attributes"),
        (6, " : f32[SEQ, 32]", " {bias=False) + f(bias=False} : f32[SEQ, 32]", "is no list of attributes"),
        (6, " : f32[SEQ, 32]", " {bias=False, bias=False} : f32[SEQ, 32]", "gives an attribute twice"),
        (6, " : f32[SEQ, 32]", " {bias=[]} : f32[SEQ, 32]", "unhashable"),
        (6, " : f32[SEQ, 32]", " {bias=__import__('os')} : f32[SEQ, 32]", "malformed node"),
        (6, " : f32[SEQ, 32]", " {bais=False} : f32[SEQ, 32]", "unknown attribute bais"),
        (7, '("neg", 0,)', '("neg", 1,)', "is no expression over 1 operands"),
        (8, "(<SEQ>, 4, 8,)", "5", "not iterable"),
        (8, "(<SEQ>, 4, 8,)", "(<SEQ>, 4, 9,)", "to have as many elements"),
        (8, " {shape=(<SEQ>, 4, 8,)}", "", "attribute shape is missing"),
        (9, "<2*PAST_SEQ+1>", "<2*>", "is not a dim"),
        (10, "%3", "%66", "%66 is not defined before this line"),
        (11, '"cache"', '"y"', "an output of this name exists"),
        (11, '"cache"', '"ca\\che"', "no node, bound or output"),
    ],
)
def test_a_damaged_line_is_named(line: int, old: str, new: str, why: str) -> None:
    lines = SAMPLE.split("\n")
    if old == "}\n":
        text = SAMPLE[:-2].rstrip()
        line = 11
    else:
        assert old in lines[line - 1]
        lines[line - 1] = lines[line - 1].replace(old, new, 1)
        text = "\n".join(lines)
    with pytest.raises(IrSyntaxError, match=re.escape(why)) as caught:
        loads(text)
    assert caught.value.where == f"line {line}"


@given(st.data())
def test_damage_anywhere_is_a_syntax_error_or_another_graph(data: st.DataObject) -> None:
    """Any one character replaced: either it still says something well formed, or the error names a line."""
    at = data.draw(st.integers(0, len(SAMPLE) - 1))
    text = SAMPLE[:at] + data.draw(st.sampled_from(list('x0%"(){}<>[],=:. \n\\'))) + SAMPLE[at + 1 :]
    try:
        again = loads(text)
    except IrSyntaxError as error:
        assert re.fullmatch(r"line \d+", str(error.where))
    else:
        assert loads(dumps(again)) == again


# -------------------------------------------------------------------------------------------------- names of values


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


# ------------------------------------------------------------------------------------------------------ differences


def graph(width: int = 32, dtype: Any = F16, layers: int = 5, act: Any = ops.silu) -> Graph:
    made = Graph("m")
    x = made.input("x", [SEQ, width])
    for i in range(layers):
        x = act(ops.linear(x, made.weight(f"w.{i}", [width, width], dtype)))
    made.output("y", x)
    return made


def rows(a: Graph, b: Graph) -> list[tuple[str, str, str]]:
    return [(row.what, row.left, row.right) for row in differences(a, b)]


def test_ops_are_counted_and_the_first_places_named() -> None:
    found = rows(graph(), graph(act=ops.sigmoid))
    assert found[:2] == [("op silu", "5 times", ""), ("op sigmoid", "", "5 times")]
    assert [what.startswith("value %") for what, _, _ in found[2:5]] == [True] * 3
    assert found[5][0] == "further values"
    assert len(found) == 6
