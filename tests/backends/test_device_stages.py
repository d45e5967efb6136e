"""What a device decides about compilation: its passes, and what the keys of its programs depend on."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import rlx
from rlx import SEQ, backends, ops
from rlx.backends.cpu.backend import Cpu
from rlx.backends.reference.backend import Reference, Target
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.passes.options import Options
from rlx.passes.pipeline import Pass, usual_passes
from rlx.passes.report import SILENT, Log
from rlx.store.cache import CompileCache
from rlx.store.key import source_digest, versions


def negated(graph: Graph, options: Options, log: Log = SILENT) -> Graph:
    """A pass that nobody else has: every output changes its sign."""
    return graph.replace(outputs={name: -1.0 * y for name, y in graph.outputs.items()})


class Negating(Reference):
    """The reference with one more pass, and without another."""

    name = "negating"

    def target(self, level: str | None = None) -> Any:
        return SimpleNamespace(**{n: getattr(Target(), n) for n in ("capabilities", "tuning", "describe")},
                               level="negating", backend=self)  # fmt: skip

    def passes(self, phase: str) -> tuple[Pass, ...]:
        first, *rest = usual_passes(phase)
        assert first.__name__ == "simplify"
        return (negated, *rest)


@pytest.fixture
def graph() -> Graph:
    g = Graph("layer")
    y: Node = ops.linear(g.input("x", [SEQ, 64]), g.weight("w", [32, 64]))
    g.output("y", y)
    return g


def test_a_device_adds_and_leaves_out_passes(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "negating_backend", SimpleNamespace(BACKEND=Negating()))
    monkeypatch.setitem(backends.MODULES, "negating", "negating_backend")
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((3, 64)).astype(np.float32), rng.standard_normal((32, 64)).astype(np.float32)
    with rlx.compile(graph, {"w": w}, device="negating", cache=CompileCache(policy="off")) as exe:
        np.testing.assert_allclose(exe(x=x)["y"], -x @ w.T, rtol=1e-4, atol=1e-4)
        assert exe.stages[:2] == ["graph", "negated"] and "simplify" not in exe.stages


def test_a_key_depends_on_the_sources_of_its_device_only() -> None:
    cpu, reference = versions(Cpu()), versions(Reference())
    assert {"numba", "llvmlite", "llvm"} <= cpu.keys() and not {"numba", "llvmlite"} & reference.keys()
    assert cpu["generator"] != reference["generator"]
    own, other = "backends/reference/**/*.py", "backends/cpu/**/*.py"
    assert own in Reference().sources and other not in Reference().sources
    assert other in Cpu().sources and own not in Cpu().sources
    for pattern in ("ir/**/*.py", "passes/**/*.py", "backends/*.py", own):
        changed = tuple(p for p in Reference().sources if p != pattern)
        assert len(changed) < len(Reference().sources)
        assert source_digest(None, changed) != reference["generator"], f"{pattern} is not part of the key"
