"""How graphs differ, in words."""

from __future__ import annotations

import doctest
from typing import Any

from rlx.ir import compare, ops, text
from rlx.ir.compare import differences
from rlx.ir.dims import SEQ
from rlx.ir.dtypes import F16, F32
from rlx.ir.graph import Graph


def graph(width: int = 32, dtype: Any = F16, layers: int = 5, act: Any = ops.silu) -> Graph:
    made = Graph("m")
    x = made.input("x", [SEQ, width])
    for i in range(layers):
        x = act(ops.linear(x, made.weight(f"w.{i}", [width, width], dtype)))
    made.output("y", x)
    return made


def rows(a: Graph, b: Graph) -> list[tuple[str, str, str]]:
    return [(row.what, row.left, row.right) for row in differences(a, b)]


def test_the_example_holds() -> None:
    assert doctest.testmod(compare).failed == 0


def test_equal_graphs_do_not_differ() -> None:
    assert rows(graph(), Graph("another name", graph().outputs)) == []
    assert rows(graph(), text.loads(str(graph()))) == []


def test_equal_changes_are_one_row() -> None:
    assert rows(graph(), graph(dtype=F32)) == [("weight dtype of w.0 and 4 more", "f16", "f32")]


def test_shapes() -> None:
    assert rows(graph(layers=1), graph(layers=1, width=64))[:3] == [
        ("output shape of y", "[SEQ, 32]", "[SEQ, 64]"),
        ("input shape of x", "[SEQ, 32]", "[SEQ, 64]"),
        ("weight shape of w.0", "[32, 32]", "[64, 64]"),
    ]


def test_ops_are_counted_and_the_first_places_named() -> None:
    found = rows(graph(), graph(act=ops.sigmoid))
    assert found[:2] == [("op silu", "5 times", ""), ("op sigmoid", "", "5 times")]
    assert [what.startswith("value %") for what, _, _ in found[2:5]] == [True] * 3
    assert found[5][0] == "further values"
    assert len(found) == 6


def test_what_one_graph_has_alone() -> None:
    found = rows(graph(layers=6), graph(layers=1))
    assert [row for row in found if "weight" in row[0]] == [
        ("weight w.1", "f16[32, 32]", ""),
        ("weight w.2", "f16[32, 32]", ""),
        ("weight w.3", "f16[32, 32]", ""),
        ("further weights", "2 weights", ""),
    ]
    assert ("op linear", "6 times", "1 time") in found
