"""The recipes of CONTRIBUTING.md: a toy op and kernel, each added at the places named there.

Nothing else is touched, so a further place that an addition needs fails here, and so does a recipe that forgets one.
`tests/runners/test_options.py` has a toy engine option, and `tests/backends/far.py` is a backend.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlx
from rlx import backends
from rlx.backends import device as devices
from rlx.backends.cpu import select
from rlx.backends.cpu.kernel import Kernel, Units
from rlx.backends.cpu.loops import loop_kernel
from rlx.backends.cpu.target import Target as CpuTarget
from rlx.engine.opening.options import EngineOptions
from rlx.errors import CompileError
from rlx.ir import flops, infer, interp, ops, text
from rlx.ir.dims import SEQ
from rlx.ir.dtypes import F32
from rlx.ir.graph import Graph
from rlx.ir.meaning import Array, Attrs, Env
from rlx.ir.node import Node
from rlx.ir.op_table import OPS, REQUIRED, Op
from rlx.scalars import HOLE, Ptr
from rlx.store.cache import CompileCache

ROOT = Path(__file__).parent.parent
X = np.arange(8, dtype=np.float32).reshape(2, 4) - 3

#: Recipe -> the modules whose tables or classes the toys below are entered in.
PLACES: dict[str, list[Any]] = {
    "Add an op": [OPS, infer, flops],
    "Add a kernel": [select],
    "Add a backend": [backends, devices],
    "Add an engine option": [EngineOptions],
}


@pytest.mark.parametrize("title", PLACES)
def test_a_recipe_names_the_places(title: str) -> None:
    recipe = re.search(rf"^### {title}\n(.*?)^##", (ROOT / "CONTRIBUTING.md").read_text(), re.M | re.S)
    assert recipe, f"no recipe is called {title!r}"
    table = "rlx.ir.op_table"
    for place in PLACES[title]:
        module = table if place is OPS else getattr(place, "__module__", None) or place.__name__
        path = Path(sys.modules[module].__file__ or "").relative_to(ROOT).as_posix()
        assert path in recipe[1], f"{title} does not name {path}"


# -- an op and its kernel ---------------------------------------------------------------------------------------------


def raised(x: list[Array], a: Attrs, env: Env) -> Array:
    """x + by."""
    return x[0] + x[0].dtype.type(a["by"])


@pytest.fixture
def toy_op(monkeypatch: pytest.MonkeyPatch) -> Callable[[Node, float], Node]:
    """The builder of an op that adds a number, entered in the op table."""
    monkeypatch.setitem(OPS, "toy", Op("toy", {"by": REQUIRED}, infer.unary("toy"), raised, flops.each(1)))
    return lambda x, by: ops.make("toy", x, by=by)


def toy_graph(op: Callable[[Node, float], Node]) -> Graph:
    graph = Graph("toy")
    graph.output("y", op(graph.input("x", [SEQ, 4]), 1.5))
    return graph


def test_an_op(toy_op: Any) -> None:
    graph = toy_graph(toy_op)
    assert text.loads(str(graph)) == graph
    assert np.array_equal(interp.run(graph, {"x": X}, {"SEQ": 2})[0]["y"], X + 1.5)
    with rlx.compile(graph, device="reference", cache=CompileCache(policy="off")) as exe:
        assert np.array_equal(exe(x=X)["y"], X + 1.5)
    with pytest.raises(CompileError, match="no kernel serves"):
        rlx.compile(graph, cache=CompileCache(policy="off"))


WIDTH: int = HOLE
BY: float = HOLE


def _toy(x: Ptr, out: Ptr, begin: int, end: int) -> None:
    for i in range(begin * WIDTH, end * WIDTH):
        out[i] = x[i] + BY


def toy_kernel(width: int, by: float) -> Kernel:
    return loop_kernel(_toy, {"WIDTH": width, "BY": np.float32(by)}, [("x", F32), ("out", F32)])


def test_a_kernel(toy_op: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def toy(node: Node, target: CpuTarget) -> Any:
        return select._call(node, toy_kernel(select.width(node), node["by"]), Units(select.rows(node)))

    monkeypatch.setitem(select.KERNELS, "toy", toy)
    monkeypatch.setenv("RLX_VERIFY", "1")
    with rlx.compile(toy_graph(toy_op), cache=CompileCache(policy="off")) as exe:
        assert np.array_equal(exe(x=X)["y"], X + 1.5)
        assert "BY = 1.5" in exe.source("toy")
