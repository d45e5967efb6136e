"""Experts, recurrent layers and caches that wrap, compiled, against their NumPy meaning in float64."""

from __future__ import annotations

import numpy as np
import pytest
from compiled import EXACT_CEILING, INT8_CEILING, check, levels, quantized

from rlx.compiler.executable import compile
from rlx.ir import interp, ops
from rlx.ir.dims import CTX, SEQ
from rlx.ir.dtypes import DTYPES, F32
from rlx.ir.graph import Graph
from rlx.store.cache import CompileCache

LENGTH, CHUNKS = 37, (7, 1, 20, 1, 8)
FOUND = levels()
# Each type on one level and in one precision: tests/backends/cpu has every pair.
PRECISE = (("f32", "exact"), ("q8_0", "auto"), ("q4_k", "exact"), ("mxfp4", "auto"))
EXPERTS = [(FOUND[i % len(FOUND)], *each) for i, each in enumerate(PRECISE)]


def experts_graph(dtype: str, act: str) -> Graph:
    """A gated layer whose slots share a row, a plain one with a row a slot, and the slots' weighted sum."""
    graph, kind = Graph("experts"), DTYPES[dtype]
    x, slots = graph.input("x", [SEQ, 256]), graph.input("slots", [SEQ, 2, 256])
    scores = ops.softmax(graph.input("scores", [SEQ, 6]))
    ids = ops.top_k(scores, 2)
    gate, up, down = (graph.weight(n, (6, 50, 256), kind) for n in ("gate", "up", "down"))
    gated = ops.mul(ops.make(act, ops.expert_linear(x, ids, gate)), ops.expert_linear(x, ids, up))
    shares = ops.reshape(ops.take(scores, ids), [SEQ, 1, 2])
    graph.output("gated", gated)
    graph.output("sum", ops.mix(ops.expert_linear(slots, ids, down), shares))
    return graph


@pytest.mark.parametrize(("level", "dtype", "precision"), EXPERTS)
def test_experts(level: str, dtype: str, precision: str, cache: CompileCache) -> None:
    rng = np.random.default_rng(21)
    pairs = {n: quantized(rng, (6, 50, 256), DTYPES[dtype]) for n in ("gate", "up", "down")}
    raw, values = ({n: pair[i] for n, pair in pairs.items()} for i in range(2))
    graph = experts_graph(dtype, "gelu_tanh" if dtype == "q8_0" else "silu")
    sizes = {"x": (256,), "slots": (2, 256), "scores": (6,)}
    for rows in (1, 19):
        arrays = {n: rng.standard_normal((rows, *size)).astype(np.float32) for n, size in sizes.items()}
        check(graph, arrays, level, cache, exact=values, precision=precision, ceiling=INT8_CEILING, **raw)


def in_chunks(graph: Graph, arrays: dict[str, np.ndarray], level: str, cache: CompileCache, **bind: object) -> None:
    """A prompt in chunks and single steps, whose states the executable keeps, against the whole at once."""
    sizes = {"SEQ": LENGTH, "PAST_SEQ": 0, "CTX": 64}
    weights = {n: a for n, a in bind.items() if isinstance(a, np.ndarray)}
    states = {n: np.zeros([sizes.get(str(d), d) for d in leaf.shape]) for n, leaf in graph.leaves("state").items()}
    want, _ = interp.run(graph, {**arrays, **weights, **states}, sizes, dtype=np.float64)
    parts, at = [], 0
    with compile(graph, bind, target=level, threads=2, cache=cache) as exe:
        for count in CHUNKS:
            part = {n: a[at : at + count] for n, a in arrays.items()}
            parts.append(exe(**part, **({"PAST_SEQ": at} if "CTX" in bind else {})))
            at += count
    for name, value in want.items():
        got = np.concatenate([p[name] for p in parts])
        assert np.abs(got - value).max() <= EXACT_CEILING * np.abs(value).max(), name


@pytest.mark.parametrize("level", FOUND)
@pytest.mark.parametrize("taps", [2, 4])
def test_causal_conv_over_chunks(level: str, taps: int, cache: CompileCache) -> None:
    rng = np.random.default_rng(22)
    graph = Graph("conv")
    x = graph.input("x", [SEQ, 83])
    weight = rng.standard_normal((83, taps)).astype(np.float32)
    y = ops.causal_conv(graph.state("rows", (taps - 1, 83)), x, graph.weight("taps", (83, taps)))
    graph.output("y", ops.silu(y))
    in_chunks(graph, {"x": rng.standard_normal((LENGTH, 83)).astype(np.float32)}, level, cache, taps=weight)


@pytest.mark.parametrize("level", FOUND)
@pytest.mark.parametrize(("heads", "corrects"), [("tiled", True), ("grouped", True), ("grouped", False)])
def test_gated_delta_over_chunks(level: str, heads: str, corrects: bool, cache: CompileCache) -> None:
    rng = np.random.default_rng(23)
    graph = Graph("delta")
    q, k = (ops.rms_norm(graph.input(n, [SEQ, 2, 32]), eps=1e-6) for n in "qk")
    v, decay, beta = graph.input("v", [SEQ, 4, 48]), graph.input("decay", [SEQ, 4]), graph.input("beta", [SEQ, 4])
    state = graph.state("delta", (4, 32, 48))
    gates = ops.neg(ops.softplus(decay)), ops.sigmoid(beta)
    short = ops.scale(k, 32**-0.5)  # keys of length 1
    how = {"scale": 32**-0.5, "heads": heads, "corrects": corrects}
    graph.output("y", ops.gated_delta(state, q, short, v, *gates, **how))
    sizes = {"q": (2, 32), "k": (2, 32), "v": (4, 48), "decay": (4,), "beta": (4,)}
    in_chunks(graph, {n: rng.standard_normal((LENGTH, *s)).astype(np.float32) for n, s in sizes.items()}, level, cache)


SIDES = {"rows": (3, 83), "delta": (2, 24, 40)}


@pytest.mark.parametrize("level", FOUND)
def test_states_that_are_written_aside(level: str, cache: CompileCache) -> None:
    """Every call begins with the states of the start, whose sides are odd here."""
    rng = np.random.default_rng(26)
    graph = Graph("aside")
    x, q = graph.input("x", [SEQ, 83]), graph.input("q", [SEQ, 2, 24])
    rows, delta = ((graph.state(n, shape), graph.state(f"{n}'", shape)) for n, shape in SIDES.items())
    y = ops.make("causal_conv", rows[0], x, graph.weight("taps", (83, 4)), rows[1], aside=True)
    v, gate = ops.reshape(ops.slice(y, 0, 80), [SEQ, 2, 40]), graph.input("gate", [SEQ, 2])
    operands = delta[0], q, q, v, ops.neg(ops.softplus(gate)), gate, delta[1]
    graph.output("y", y)
    graph.output("z", ops.make("gated_delta", *operands, scale=0.2, aside=True))
    arrays = {n: rng.standard_normal((9, *s)).astype(np.float32) for n, s in (("x", (83,)), ("q", (2, 24)))}
    arrays["gate"] = rng.random((9, 2)).astype(np.float32)
    taps = rng.standard_normal((83, 4)).astype(np.float32)
    zeros = {name: np.zeros(SIDES[name.removesuffix("'")]) for name in graph.leaves("state")}
    with compile(graph, {"taps": taps}, target=level, threads=2, cache=cache) as exe:
        for count in (5, 1, 9):
            part = {n: a[:count] for n, a in arrays.items()}
            want, after = interp.run(graph, {**part, "taps": taps, **zeros}, {"SEQ": count}, dtype=np.float64)
            assert after.keys() == {"rows'", "delta'"}
            found = {**exe(**part), **{n: exe._states.copy_state(n, 0) for n in after}}
            for name, value in {**want, **after}.items():
                assert np.abs(found[name] - value).max() <= EXACT_CEILING * np.abs(value).max(), name


def windowed(wrap: bool) -> Graph:
    graph = Graph("ring")
    q, k, v = (graph.input(n, [SEQ, heads, 32]) for n, heads in (("q", 4), ("k", 2), ("v", 2)))
    caches = [ops.kv_write(graph.state(n, (2, CTX, 32), F32), x, wrap=wrap) for n, x in (("keys", k), ("values", v))]
    graph.output("y", ops.attention(q, *caches, scale=32**-0.5, window=9))
    return graph


@pytest.mark.parametrize("level", FOUND)
def test_a_ring_holds_what_a_window_needs(level: str, cache: CompileCache) -> None:
    """A cache of 64 positions that wraps three times, against one of all positions."""
    rng, counts = np.random.default_rng(24), (50, 1, 7, 56, 1, 1, 40, 56)
    length = sum(counts)
    arrays = {n: rng.standard_normal((length, h, 32)).astype(np.float32) for n, h in (("q", 4), ("k", 2), ("v", 2))}
    empty = {n: np.zeros((2, 256, 32)) for n in ("keys", "values")}
    sizes = {"SEQ": length, "PAST_SEQ": 0, "CTX": 256}
    want = interp.run(windowed(wrap=False), {**arrays, **empty}, sizes, dtype=np.float64)[0]["y"]
    with compile(windowed(wrap=True), {"CTX": 64, "SEQ": (1, 56)}, target=level, threads=2, cache=cache) as exe:
        at, got = 0, []
        for count in counts:
            got.append(exe(**{n: a[at : at + count] for n, a in arrays.items()}, PAST_SEQ=at)["y"])
            at += count
    assert np.abs(np.concatenate(got) - want).max() <= EXACT_CEILING * np.abs(want).max()
