"""Batches, compiled: every row a sequence of its own, in slots and lengths of all kinds, against one sequence alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from compiled import levels
from runners import hybrid

from rlx.errors import ArgumentError, GraphError
from rlx.ir import interp, ops
from rlx.ir.dims import CTX, SEQ
from rlx.ir.dtypes import KV_DTYPES, DType
from rlx.ir.graph import Graph
from rlx.passes import pipeline
from rlx.passes.options import Options
from rlx.runtime.cache import CompileCache
from rlx.runtime.executable import Executable, compile

Array = np.ndarray[Any, Any]

LENGTHS = (75, 33, 50, 7, 21)
SLOTS = (3, 0, 5, 1, 2)
CEILING = 2e-5  # of the largest logit: float32 through a few layers
WINDOW_CTX = {"CTX": 80, "WINDOW_CTX": 64}


@pytest.fixture(scope="module")
def cache() -> CompileCache:
    return CompileCache(capacity=64, policy="off")


def orders(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Sequences of each step: some of those that are not through, in any order; alone or together."""
    at, rng = [0] * len(lengths), np.random.default_rng(11)
    while live := [i for i, length in enumerate(lengths) if at[i] < length]:
        chosen = rng.permutation(live)[: rng.integers(1, len(live) + 1)].tolist()
        for i in chosen:
            at[i] += 1
        yield chosen


def in_batches(batch: Executable, texts: Sequence[Array]) -> list[Array]:
    """The logits after every token of each text."""
    found: list[list[Array]] = [[] for _ in texts]
    for chosen in orders(LENGTHS):
        past = [len(found[i]) for i in chosen]
        tokens = [texts[i][at] for i, at in zip(chosen, past, strict=True)]
        logits = batch(tokens=tokens, positions=past, past=past, slots=[SLOTS[i] for i in chosen])["logits"]
        for i, row in zip(chosen, logits, strict=True):
            found[i].append(row)
    return [np.stack(rows) for rows in found]


def alone(single: Executable, ids: Array) -> Array:
    """The same of one text, a step a token."""
    single.reset()
    return np.concatenate([single(tokens=[t], positions=[at], PAST_SEQ=at)["logits"] for at, t in enumerate(ids)])


def texts(vocab: int) -> list[Array]:
    rng = np.random.default_rng(2)
    return [rng.integers(0, vocab, length).astype(np.int32) for length in LENGTHS]


@pytest.mark.parametrize("level", levels())
def test_every_kind_of_state(level: str, cache: CompileCache) -> None:
    """Against float64 over each whole text; and the bits are those of the text alone."""
    graph = hybrid.graph()
    weights = {name: w.astype(np.float32) for name, w in hybrid.weights(graph).items()}
    bind, ids, options = {**WINDOW_CTX, **weights}, texts(hybrid.VOCAB), {"target": level, "threads": 2, "cache": cache}
    with compile(graph, bind, sequences=6, **options) as batch, compile(graph, {**bind, "SEQ": 1}, **options) as single:
        for again in range(2):  # recurrent states begin anew
            batch.reset()
            for one, rows in zip(ids, in_batches(batch, ids), strict=True):
                want = hybrid.reference(graph, one)
                assert np.abs(rows - want).max() <= CEILING * np.abs(want).max()
                assert again or np.array_equal(rows, alone(single, one))


@pytest.mark.parametrize("dtype", KV_DTYPES, ids=str)
def test_caches_of_every_type(dtype: DType, cache: CompileCache) -> None:
    """Long enough that the positions of a row are cut into ranges, whose sums meet in scratch memory of the row."""
    graph = Graph("attention")
    q, k, v = (graph.input(name, [SEQ, heads, 32]) for name, heads in (("q", 2), ("k", 1), ("v", 1)))
    keys = ops.kv_write(graph.state("keys", [1, CTX, 32], dtype), k)
    values = ops.kv_write(graph.state("values", [1, CTX, 32], dtype), v)
    graph.output("y", ops.attention(q, keys, values, scale=0.2))
    rng, lengths = np.random.default_rng(6), (300, 4, 170)
    rows = [[rng.standard_normal((n, heads, 32)).astype(np.float32) for heads in (2, 1, 1)] for n in lengths]
    names = ("q", "k", "v")
    with (
        compile(graph, {"CTX": 304}, sequences=3, threads=2, cache=cache) as batch,
        compile(graph, {"CTX": 304, "SEQ": 1}, threads=2, cache=cache) as single,
    ):
        wants = [
            [
                single(**{n: x[[t]] for n, x in zip(names, row, strict=True)}, PAST_SEQ=t)["y"][0]
                for t in range(len(row[0]))
            ]
            for row in rows
        ]
        for at in range(max(lengths)):
            live = [i for i, n in enumerate(lengths) if at < n][::-1]
            inputs = {name: np.stack([rows[i][part][at] for i in live]) for part, name in enumerate(names)}
            found = batch(**inputs, past=[at] * len(live), slots=live)["y"]
            assert np.array_equal(found, [wants[i][at] for i in live]), at


def test_the_compiled_graph_means_the_same(cache: CompileCache) -> None:
    """The graph after all passes, interpreted over slots, gives the logits of the graph as it was built."""
    graph = hybrid.graph(window=70)
    weights = hybrid.weights(graph)
    final: list[Any] = []
    pipeline.lower(graph, Options("exact", (1, 6), sequences=True), lambda _, stage: final.append(stage))
    batch = next(g for g in reversed(final) if isinstance(g, Graph))
    assert batch.phase == "batch"
    env = {"PAST_SEQ": 0, "SLOTS": 6, **WINDOW_CTX, "WINDOW_CTX": 128}
    leaves = batch.leaves("state").items()
    states = {n: np.zeros([int(env.get(str(d), 0) or str(d)) for d in leaf.shape]) for n, leaf in leaves}
    ids, found = texts(hybrid.VOCAB)[1:], [0] * 4
    wants = [hybrid.reference(graph, one) for one in ids]
    for chosen in orders(LENGTHS[1:]):
        past = np.array([found[i] for i in chosen], np.int32)
        tokens = np.array([ids[i][found[i]] for i in chosen], np.int32)
        feeds = {"tokens": tokens, "positions": past, "past": past, "slots": np.array([SLOTS[i] for i in chosen])}
        outputs, states = interp.run(
            batch, {**weights, **states, **feeds}, {**env, "SEQ": len(chosen)}, dtype=np.float64
        )
        for i, row in zip(chosen, outputs["logits"], strict=True):
            np.testing.assert_allclose(row, wants[i][found[i]], rtol=1e-9, atol=1e-9)
            found[i] += 1


def test_wrong_rows(cache: CompileCache) -> None:
    graph = hybrid.graph(kinds=("full",))
    weights = {name: w.astype(np.float32) for name, w in hybrid.weights(graph).items()}
    with compile(graph, {"CTX": 16, **weights}, sequences=2, threads=1, cache=cache) as exe:
        two = {"tokens": [1, 2], "positions": [0, 0]}
        for slots in ([0, 0], [0, 2], [-1, 0]):
            with pytest.raises(ArgumentError, match="slots"):
                exe(**two, slots=slots, past=[0, 0])
        for past in ([0, 16], [-1, 0]):
            with pytest.raises(ArgumentError, match="do not fit a cache"):
                exe(**two, slots=[0, 1], past=past)
        with pytest.raises(ArgumentError, match="missing: past, slots"):
            exe(**two)
        exe(**two, slots=[1, 0], past=[15, 3])
    for count in (1, 0, "two"):
        with pytest.raises(ArgumentError, match="sequences"):
            compile(graph, weights, sequences=count, cache=cache)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="rows and no other"):
        Options(seq=(4, 4), sequences=True)


def test_rows_that_cannot_be_told_apart(cache: CompileCache) -> None:
    last, read = Graph("last"), Graph("read")
    last.output("y", ops.last_row(last.input("x", [SEQ, 16])))
    read.output("y", ops.scale(read.state("kept", [3, 16]), 2.0))
    for graph in (last, read):
        with pytest.raises(GraphError, match="mixes the rows"):
            compile(graph, sequences=2, cache=cache)
