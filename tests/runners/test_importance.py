"""Sums of squares of the inputs of linear layers: against the interpreter, which computes a graph op by op."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from rlx import models
from rlx.engine.engine import Engine
from rlx.engine.importance import PROFILE, importance
from rlx.ir import interp
from rlx.ir.dims import value
from rlx.ir.dtypes import F32
from rlx.ir.stored import dequantize
from rlx.weights import ModelWeights
from rlx.weights.names import file_names

WINDOW = 80  # more than the rows of a step, which is how long programs keep the values of one


def expected(engine: Engine, ids: np.ndarray) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Name in a GGUF file -> (sums of squares, counts) of one window, in float64."""
    config, weights = engine.config, engine.weights
    graph = models.build(config, weights, F32, place=weights.place)
    layers = [node for node in graph.nodes() if node.op in ("linear", "expert_linear")]
    inputs = {f"{i}.{j}": each for i, node in enumerate(layers) for j, each in enumerate(node.inputs[:2])}
    graph = graph.replace(outputs={name: each for name, each in inputs.items() if each.op != "weight"})
    env = {"SEQ": len(ids), "PAST_SEQ": 0, "CTX": 128, "WINDOW_CTX": 128}
    feeds = {
        name: config.value(name, _values(weights, name)) for name in graph.leaves("weight").keys() - graph.constants
    }
    feeds |= {n: np.zeros([value(d, env) for d in s.shape]) for n, s in graph.leaves("state").items()}
    feeds |= {"tokens": ids, "positions": np.arange(len(ids), dtype=np.int32)}
    values, _ = interp.run(graph, feeds, env, dtype=np.float64)
    sources = {view.name: view.source for view in models.views(config, weights.has)}
    found: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for i, node in enumerate(layers):
        x, weight = values[f"{i}.0"], node.inputs[2 if node.op == "expert_linear" else 1]
        chosen = values[f"{i}.1"] if node.op == "expert_linear" else np.zeros((len(x), 1), int)
        count = weight.shape[0] if len(weight.shape) == 3 else 1
        rows = np.broadcast_to(x if x.ndim == 3 else x[:, None], (*chosen.shape, x.shape[-1]))
        sums = np.array([np.square(rows[chosen == e]).sum(0) for e in range(count)])
        name = file_names(sources.get(weight.name, weight.name), weights.family)[0]
        before, counted = found.get(name, (0.0, 0))  # parts of one tensor, and weights that multiply twice
        found[name] = before + sums, counted + np.array([(chosen == e).sum() for e in range(count)])
    return found


def _values(weights: ModelWeights, name: str) -> np.ndarray:
    info = weights.info(name)
    return dequantize(weights.raw(name), info.dtype, info.shape)


@pytest.mark.parametrize("name", ["qwen3moe", "phi3", "gemma3n"])
def test_they_are_those_of_the_interpreter(goldens: Path, name: str) -> None:
    rng = np.random.default_rng(1)
    with closing(Engine.open(goldens / name / "hf", max_seq=WINDOW, profile=PROFILE)) as engine:
        prefix = list(engine.tokenizer.prefix)
        ids = rng.integers(8, engine.config.vocab_size, 2 * WINDOW - 1).astype(np.int32)
        found = importance(engine, ids.tolist(), WINDOW)
        first = np.array([*prefix, *ids[len(prefix) : WINDOW]], np.int32)
        wanted = expected(engine, first)
    assert found.keys() == wanted.keys() and len(found) > 6
    for tensor, (squares, counts) in wanted.items():
        np.testing.assert_array_equal(found[tensor].counts, counts)
        np.testing.assert_allclose(found[tensor].squares, squares, rtol=2e-3, atol=1e-5 * squares.max(), err_msg=tensor)
