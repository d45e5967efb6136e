"""What tells models apart: equations, constants, the types of the states, and the weights."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx.engine.opening.setup import SAMPLES, identity
from rlx.ir import ops
from rlx.ir.dims import SEQ
from rlx.ir.graph import Graph


class Loader:
    """As much of an open file as is looked at."""

    def __init__(self, tensors: int = 600, **changes: np.ndarray[Any, Any]) -> None:
        self.tensors = {f"blk.{i}.weight": None for i in range(tensors)} | dict.fromkeys(changes)
        self._changes, self.read = changes, 0

    def raw(self, name: str) -> np.ndarray[Any, Any]:
        self.read += 1
        return self._changes.get(name, np.arange(1000, dtype=np.uint8))


def model(eps: float = 1e-6, constant: float = 1.0) -> Graph:
    graph = Graph("model")
    x = graph.input("x", [SEQ, 4])
    graph.output("y", ops.rms_norm(x, graph.constant("scale", np.full(4, constant)), eps=eps))
    return graph


def of(graph: Graph, loader: Any) -> str:
    return identity(graph, loader)


def test_one_model_has_one_identity() -> None:
    assert of(model(), Loader()) == of(model(), Loader())
    assert len(of(model(), Loader())) == 64


def test_other_models_have_others() -> None:
    other = np.full(1000, 7, np.uint8)
    found = {
        of(model(), Loader()),
        of(model(eps=1e-5), Loader()),
        of(model(constant=2.0), Loader()),
        of(model(), Loader(599)),
        of(model(), Loader(1, **{"blk.0.weight": other})),
        of(model(), Loader(1)),
        of(model(), Loader(0)),
    }
    assert len(found) == 7


def test_files_of_many_tensors_are_sampled() -> None:
    loader = Loader(5000)
    of(model(), loader)
    assert 200 < loader.read <= SAMPLES
