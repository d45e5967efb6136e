"""The interpreter: values, states, float types, and errors that say what is missing."""

from __future__ import annotations

import numpy as np
import pytest
import toy

from rlx.errors import GraphError
from rlx.ir import interp, ops
from rlx.ir.dims import CTX, SEQ
from rlx.ir.dtypes import BF16, F16, I32
from rlx.ir.graph import Graph
from rlx.ir.node import Node

ENV = {"SEQ": 2, "PAST_SEQ": 1, "CTX": 4}


def run(node: Node, feeds: dict[str, np.ndarray], env: dict[str, int] = ENV, **options: object) -> np.ndarray:
    return interp.run(Graph(outputs={"y": node}), feeds, env, **options)[0]["y"]


G = Graph()
X = G.input("x", [SEQ, 4])
IDS = G.input("ids", [SEQ], I32)
TABLE = G.weight("table", [8, 4], BF16)
CACHE, HEADS = G.state("cache", [1, CTX, 4], F16), G.input("heads", [SEQ, 1, 4])


def test_it_computes_in_the_type_asked_for() -> None:
    for dtype in (np.float32, np.float64):
        assert run(ops.exp(X), {"x": np.ones((2, 4), np.float16)}, dtype=dtype).dtype == dtype
        assert run(ops.embedding(TABLE, IDS), {"table": np.ones((8, 4)), "ids": [0, 7]}, dtype=dtype).dtype == dtype


def test_a_prompt_in_chunks_equals_the_prompt_at_once() -> None:
    """The meaning of PAST_SEQ: states of one call are the next call's input."""
    graph = toy.build(toy.FAMILIES["gemma"].but(cache=BF16))
    feeds, env = toy.feeds(graph, seq=7)
    whole, _ = interp.run(graph, feeds, env, dtype=np.float64)
    states: dict[str, np.ndarray] = {}
    rows = []
    for start, stop in ((0, 3), (3, 4), (4, 7)):
        part = {n: feeds[n][start:stop] for n in ("tokens", "positions")}
        at = {"SEQ": stop - start, "PAST_SEQ": start, "CTX": 16}
        outputs, states = interp.run(graph, {**feeds, **states, **part}, at, dtype=np.float64)
        rows.append(outputs["logits"])
    np.testing.assert_allclose(np.concatenate(rows), whole["logits"], rtol=1e-9, atol=1e-9)


def recurrent() -> Graph:
    """A convolution over rows and a gated delta rule: ops with an effect."""
    g = Graph("recurrent")
    x = g.input("x", [SEQ, 8])
    mixed = ops.causal_conv(g.state("rows", [3, 8]), x, g.weight("taps", [8, 4]))
    heads = ops.reshape(mixed, [SEQ, 2, 4])
    decay, beta = ops.neg(ops.softplus(g.input("decay", [SEQ, 2]))), ops.sigmoid(g.input("beta", [SEQ, 2]))
    state = g.state("delta", [2, 4, 4])
    g.output("y", ops.gated_delta(state, heads, ops.softmax(heads), heads, decay, beta, scale=0.5))
    g.output("mixed", mixed)
    return g


def test_an_effect_gives_a_result_and_a_new_state() -> None:
    graph, rng = recurrent(), np.random.default_rng(0)
    feeds = {n: rng.standard_normal([d if isinstance(d, int) else 7 for d in leaf.shape])
             for kind in ("input", "weight", "state") for n, leaf in graph.leaves(kind).items()}  # fmt: skip
    before = {n: feeds[n].copy() for n in ("rows", "delta")}
    whole, states = interp.run(graph, feeds, {"SEQ": 7}, dtype=np.float64)
    assert states.keys() == before.keys() and all(np.array_equal(feeds[n], a) for n, a in before.items())
    assert np.array_equal(states["rows"], feeds["x"][4:]) and states["delta"].shape == (2, 4, 4)
    parts, now = [], {}
    for start, stop in ((0, 1), (1, 3), (3, 7)):
        part = {n: feeds[n][start:stop] for n in graph.leaves("input")}
        outputs, now = interp.run(graph, {**feeds, **now, **part}, {"SEQ": stop - start}, dtype=np.float64)
        parts.append(outputs)
    for name, value in whole.items():
        np.testing.assert_allclose(np.concatenate([p[name] for p in parts]), value, rtol=1e-12)
    for name, state in states.items():
        np.testing.assert_allclose(now[name], state, rtol=1e-12)


def test_a_cache_that_wraps_keeps_the_newest_positions() -> None:
    written = Graph(outputs={"y": ops.kv_write(CACHE, HEADS, wrap=True)})
    cache = np.zeros((1, 4, 4))
    for past in range(0, 10, 2):
        rows = np.stack([np.full((1, 4), float(past + i)) for i in range(2)])
        cache = interp.run(written, {"cache": cache, "heads": rows}, {**ENV, "PAST_SEQ": past})[1]["cache"]
    assert cache[0, :, 0].tolist() == [8, 9, 6, 7]


def test_what_lies_beyond_the_length_does_not_matter() -> None:
    graph = toy.build(toy.FAMILIES["llama"])
    feeds, env = toy.feeds(graph, seq=3, past=2)
    expected, _ = interp.run(graph, feeds, env, dtype=np.float64)
    for name in graph.leaves("state"):
        feeds[name][:, 5:] = np.nan
    found, _ = interp.run(graph, feeds, env, dtype=np.float64)
    assert np.array_equal(found["logits"], expected["logits"])


@pytest.mark.parametrize(
    ("node", "feeds", "message"),
    [
        (X, {}, "input 'x': no value was given"),
        (TABLE, {}, "weight 'table': no value was given"),
        (CACHE, {}, "state 'cache': no value was given"),
        (X, {"x": np.ones((2, 5))}, r"input 'x': expected shape \[2, 4\], found \[2, 5\]"),
        (X, {"x": np.ones(2)}, r"input 'x': expected shape \[2, 4\], found \[2\]"),
        (X, {"x": np.ones((2, 4), np.int32)}, "input 'x': expected floats .*, found int32"),
        (TABLE, {"table": np.ones((8, 4), np.uint16)}, "weight 'table': expected floats .*dequantized.*, found uint16"),
        (IDS, {"ids": np.ones(2)}, "input 'ids': expected integers, found float64"),
    ],
)
def test_a_bad_feed_is_named(node: Node, feeds: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        run(node, feeds)


@pytest.mark.parametrize("ids", [[0, 8], [-1, 0]])
def test_an_id_outside_the_table_is_an_error(ids: list[int]) -> None:
    with pytest.raises(GraphError, match=r"<embedding.*cannot be computed: ids .* are not all rows of a table of 8"):
        run(ops.embedding(TABLE, IDS), {"table": np.ones((8, 4)), "ids": np.array(ids)})
