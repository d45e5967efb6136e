"""How graphs differ, in words."""

from __future__ import annotations

from typing import Any

from rlx.ir import ops
from rlx.ir.compare import differences
from rlx.ir.dims import SEQ
from rlx.ir.dtypes import F16
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


def test_ops_are_counted_and_the_first_places_named() -> None:
    found = rows(graph(), graph(act=ops.sigmoid))
    assert found[:2] == [("op silu", "5 times", ""), ("op sigmoid", "", "5 times")]
    assert [what.startswith("value %") for what, _, _ in found[2:5]] == [True] * 3
    assert found[5][0] == "further values"
    assert len(found) == 6
