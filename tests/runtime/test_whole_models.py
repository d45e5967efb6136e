"""Toy models of every family, compiled, against the interpreter in float64: awkward shapes, chunks, every level. The
newer ones are in `tests/models/test_shapes.py`.
"""

from __future__ import annotations

import numpy as np
import pytest
import toy

from rlx.backends.cpu.target import Target, supported_levels
from rlx.compiler.executable import compile
from rlx.ir import interp
from rlx.ir.dims import value
from rlx.ir.dtypes import F32
from rlx.ir.graph import Graph
from rlx.store.cache import CompileCache

LEVELS = supported_levels()
# Largest error of a logit as a share of the largest: float32 through two layers.
CEILING = 1e-5
SHAPES = {
    "one kv head": {"heads": 5, "kv_heads": 1, "head_dim": 16},
    "as many kv heads as heads": {"heads": 3, "kv_heads": 3, "head_dim": 48},
    "head dims of no whole vector": {"heads": 6, "kv_heads": 2, "head_dim": 20, "rotated": 12},
    "narrow and odd": {"width": 40, "hidden": 52, "vocab": 77, "heads": 2, "kv_heads": 1, "head_dim": 24},
    "wide heads": {"heads": 2, "kv_heads": 1, "head_dim": 256},
}


#: Gemma has head norms, windows and caps, Llama the other rope; what is left of the others are biases.
AWKWARD = [(("llama", "gemma")[i % 2], shape) for i, shape in enumerate(SHAPES)]
AWKWARD += [("gemma", "head dims of no whole vector"), ("qwen2", "narrow and odd"), ("qwen3", "one kv head")]


@pytest.mark.parametrize(("family", "shape"), AWKWARD)
def test_awkward_shapes_in_chunks(family: str, shape: str, cache: CompileCache) -> None:
    check(toy.FAMILIES[family].but(dtype=F32, cache=F32, **SHAPES[shape]), "native", cache)


@pytest.mark.parametrize("level", LEVELS[:-1])
def test_every_level(level: str, cache: CompileCache) -> None:
    """The families take turns; the tests above are on the widest level."""
    family = ("llama", "gemma")[LEVELS.index(level) % 2]
    check(toy.FAMILIES[family].but(dtype=F32, cache=F32), level, cache)


def check(model: toy.Toy, level: str, cache: CompileCache) -> None:
    graph = toy.build(model)
    arrays, _ = toy.feeds(graph, seq=21, ctx=32)
    compare(graph, {name: arrays[name] for name in graph.leaves("weight") if name in arrays}, level, cache)


def compare(graph: Graph, weights: dict[str, np.ndarray], level: str, cache: CompileCache) -> None:
    """Chunks of 1, 7 and 9 rows against one pass over all of them."""
    env = {"SEQ": 21, "PAST_SEQ": 0, "CTX": 32, "WINDOW_CTX": 64}
    vocab = graph.outputs["logits"].shape[1]
    tokens = np.random.default_rng(3).integers(0, int(str(vocab)), 21).astype(np.int32)
    rows = {"tokens": tokens, "positions": np.arange(21, dtype=np.int32)}
    weights = {name: values.astype(np.float32) for name, values in weights.items()}
    states = {n: np.zeros([value(d, env) for d in s.shape]) for n, s in graph.leaves("state").items()}
    want, _ = interp.run(graph, {**rows, **weights, **states}, env, dtype=np.float64)
    sizes = {name: env[name] for name in ("CTX", "WINDOW_CTX") if name in graph.symbols}
    got, at = [], 0
    with compile(graph, {**sizes, **weights}, target=Target.host(level), threads=2, cache=cache) as exe:
        for count in (7, 1, 9, 1, 1, 2):
            part = {n: each[at : at + count] for n, each in rows.items()}
            got.append(exe(**part, PAST_SEQ=at)["logits"])
            at += count
    error = np.abs(np.concatenate(got) - want["logits"]).max()
    assert error <= CEILING * np.abs(want["logits"]).max()
