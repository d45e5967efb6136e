"""Toy models of every family, compiled, against the interpreter in float64: awkward shapes, chunks, every level."""

from __future__ import annotations

import numpy as np
import pytest
import toy

from rlx.codegen.target import LEVELS, Target
from rlx.ir import interp
from rlx.ir.dtypes import F32
from rlx.runtime.cache import CompileCache
from rlx.runtime.executable import compile

# Largest error of a logit as a share of the largest: float32 through two layers.
CEILING = 1e-5
SHAPES = {
    "one kv head": {"heads": 5, "kv_heads": 1, "head_dim": 16},
    "as many kv heads as heads": {"heads": 3, "kv_heads": 3, "head_dim": 48},
    "head dims of no whole vector": {"heads": 6, "kv_heads": 2, "head_dim": 20, "rotated": 12},
    "narrow and odd": {"width": 40, "hidden": 52, "vocab": 77, "heads": 2, "kv_heads": 1, "head_dim": 24},
    "wide heads": {"heads": 2, "kv_heads": 1, "head_dim": 256},
}


@pytest.fixture(scope="module")
def cache() -> CompileCache:
    return CompileCache(capacity=256, policy="off")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("family", toy.FAMILIES)
def test_awkward_shapes_in_chunks(family: str, shape: str, cache: CompileCache) -> None:
    check(toy.FAMILIES[family].but(dtype=F32, cache=F32, **SHAPES[shape]), "native", cache)


@pytest.mark.parametrize("level", LEVELS[: LEVELS.index(Target.host("native").level) + 1])
@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_every_level(family: str, level: str, cache: CompileCache) -> None:
    check(toy.FAMILIES[family].but(dtype=F32, cache=F32), level, cache)


def check(model: toy.Toy, level: str, cache: CompileCache) -> None:
    """Chunks of 1, 7 and 9 rows against one pass over all of them."""
    graph = toy.build(model)
    arrays, env = toy.feeds(graph, seq=21, ctx=32)
    states = {name: np.zeros_like(arrays[name]) for name in graph.leaves("state")}
    want, _ = interp.run(graph, {**arrays, **states}, env, dtype=np.float64)
    weights = {n: arrays[n].astype(np.float32) for n in graph.leaves("weight") if n not in graph.constants}
    got, at = [], 0
    with compile(graph, {"CTX": 32, **weights}, target=Target.host(level), threads=2, cache=cache) as exe:
        for count in (7, 1, 9, 1, 1, 2):
            part = {n: arrays[n][at : at + count] for n in ("tokens", "positions")}
            got.append(exe(**part, PAST_SEQ=at)["logits"])
            at += count
    error = np.abs(np.concatenate(got) - want["logits"]).max()
    assert error <= CEILING * np.abs(want["logits"]).max()
