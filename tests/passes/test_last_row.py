"""Last row: rows that nothing wants are not computed, and those that something wants are."""

from __future__ import annotations

import numpy as np
import pytest
import toy

from rlx.ir import interp, ops
from rlx.ir.dims import CTX, OUTS, PAST_SEQ, SEQ
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.ir.verify import verify
from rlx.passes.options import Options
from rlx.passes.specialize import last_row

PREFILL = Options(seq=(2, 16))


def rows(graph: Graph, op: str) -> list[object]:
    """The row count of every node of an op, in order."""
    return [n.shape[0] for n in graph.nodes() if n.op == op]


def weighted(graph: Graph) -> dict[str, object]:
    """Weight name -> rows of the value that it multiplies into."""
    return {i.name: n.shape[0] for n in graph.nodes() for i in n.inputs if i.op == "weight" and n.op == "linear"}


@pytest.mark.parametrize("family", toy.FAMILIES)
def test_the_last_layer_computes_one_row_of_what_the_cache_does_not_need(family: str) -> None:
    model = toy.FAMILIES[family]
    after = last_row(toy.build(model), PREFILL)
    verify(after)
    found, last = weighted(after), model.layers - 1
    head = "embedding" if model.tied else "head"
    one = {head, *(f"{last}.{name}" for name in ("q", "o", "gate", "up", "down"))}
    assert {name for name, count in found.items() if count == 1} == one
    assert all(found[f"{last}.{name}"] == SEQ for name in "kv")
    assert rows(after, "attention") == [SEQ] * last + [1]
    assert rows(after, "kv_write") == [model.kv_heads] * 2 * model.layers
    assert after.outputs["logits"].shape == (1, model.vocab)


def test_a_batch_computes_the_rows_that_are_chosen() -> None:
    """Past the head and the feed-forward block of the last layer, up to its attention, whose rows are of segments."""
    model = toy.FAMILIES["qwen3"]
    after = last_row(toy.build(model), Options(seq=(2, 16), segments=True))
    verify(after)
    found, last = weighted(after), model.layers - 1
    some = {"embedding" if model.tied else "head", *(f"{last}.{name}" for name in ("o", "gate", "up", "down"))}
    assert {name for name, count in found.items() if count == OUTS} == some
    assert rows(after, "attention") == [SEQ] * model.layers
    assert after.outputs["logits"].shape == (OUTS, model.vocab)
    assert sorted(n.inputs[0].op for n in after.nodes() if n.op == "take_rows") == ["add", "attention"]


def test_a_bias_of_unknown_width_keeps_its_rows() -> None:
    graph = Graph()
    q, k = graph.input("q", [SEQ, 2, 8]), graph.input("k", [SEQ, 1, 8])
    keys, values = (ops.kv_write(graph.state(name, [1, CTX, 8]), k) for name in ("keys", "values"))
    bias = graph.input("bias", [SEQ, 1, PAST_SEQ + SEQ])
    graph.output("y", ops.silu(ops.attention(q, keys, values, bias, scale=1.0)))
    after = last_row(graph, PREFILL)
    verify(after)
    assert (rows(after, "attention"), rows(after, "silu")) == ([SEQ], [1])


@pytest.mark.parametrize("options", [Options(seq=(2, 16), all_rows=True), Options(seq=(1, 1))])
def test_nothing_changes_where_every_row_is_wanted(options: Options) -> None:
    graph = toy.build(toy.FAMILIES["llama"])
    assert last_row(graph, options) is graph


G = Graph()
X, Y, W = G.input("x", [SEQ, 8]), G.input("y", [SEQ, 8]), G.weight("w", [8, 8])


def narrowed(**outputs: Node) -> Graph:
    graph = last_row(Graph(outputs=outputs), PREFILL)
    verify(graph)
    return graph


def check(before: Graph, after: Graph) -> None:
    """The last rows of the outputs are what they were."""
    rng = np.random.default_rng(0)
    env = {"SEQ": 4, "PAST_SEQ": 0, "CTX": 16}
    shapes = {
        n.name: [env.get(str(d), d) for d in n.shape] for n in before.nodes() if n.op in ("input", "weight", "state")
    }
    feeds = {n: rng.integers(0, 8, s) if n == "ids" else rng.standard_normal(s) for n, s in shapes.items()}
    want, have = (interp.run(g, feeds, env, dtype=np.float64)[0] for g in (before, after))
    for name, node in before.outputs.items():
        np.testing.assert_allclose(have[name], want[name][-1:] if node.shape[:1] == (SEQ,) else want[name], atol=1e-12)


def test_a_value_with_another_reader_keeps_its_rows() -> None:
    shared = ops.tanh(X)
    whole = ops.kv_write(G.state("s", [1, CTX, 8]), ops.reshape(shared, [SEQ, 1, 8]))
    graph = Graph(outputs={"y": ops.exp(shared), "cache": whole})
    after = narrowed(**graph.outputs)
    assert after.outputs["y"] is ops.exp(ops.last_row(shared))
    assert after.outputs["cache"] is whole
    check(graph, after)


def test_every_output_with_rows_is_reduced() -> None:
    hidden = ops.tanh(X)
    after = narrowed(y=ops.linear(hidden, W), hidden=hidden, scores=ops.argmax(hidden))
    one = ops.tanh(ops.last_row(X))
    assert after.outputs == {"y": ops.linear(one, W), "hidden": one, "scores": ops.argmax(one)}


def test_a_size_that_equals_the_rows_is_not_mistaken_for_them() -> None:
    """A bucket of exactly 8 rows and a bias of 8 elements: the bias keeps its elements."""
    g = Graph()
    g.output("y", ops.add(ops.linear(X, W), g.weight("b", [8])))
    after = last_row(g, Options(seq=(8, 8)))
    assert after.outputs["y"] is ops.add(ops.linear(ops.last_row(X), W), g.weight("b", [8]))
