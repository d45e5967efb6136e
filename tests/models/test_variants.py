"""Variants of a model's graph against the graph itself, by the interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from golden_files import FILES, read
from golden_folder import goldens

from rlx.ir import interp, ops
from rlx.ir.dims import value
from rlx.ir.dtypes import F32
from rlx.ir.graph import Graph
from rlx.models import build, variants

IDS = np.random.default_rng(0).integers(3, 500, 40).astype(np.int32)


@pytest.fixture(scope="module")
def model() -> tuple[Graph, dict[str, np.ndarray]]:
    """Gemma 3, with layers with and without a window; its graph and its weights."""
    config, tensors = read(goldens() / "gemma3" / "model-f16.gguf")
    graph = build(config, tensors, F32)
    names = [name for name in graph.leaves("weight") if name not in graph.constants]
    return graph, {name: config.value(name, tensors.array(name)) for name in names}


def logits(graph: Graph, weights: dict[str, np.ndarray], **inputs: Any) -> np.ndarray:
    env = {"SEQ": len(IDS), "PAST_SEQ": 0, "CTX": 48, "WINDOW_CTX": 64}
    feeds = {"tokens": IDS, "positions": np.arange(len(IDS)), **weights, **inputs}
    feeds |= {n: np.zeros([value(d, env) for d in s.shape]) for n, s in graph.leaves("state").items()}
    found: np.ndarray = interp.run(graph, feeds, env)[0]["logits"]
    return found


@pytest.mark.parametrize("family", FILES)
def test_what_enters_a_layer_is_what_the_model_with_fewer_layers_returns(family: str) -> None:
    """Equal nodes are one object."""
    config, tensors = read(goldens() / family / FILES[family][0])
    graph = build(config, tensors, F32, hidden=True)
    found = variants.inputs_of_layers(graph)
    assert [*found] == [*range(config.layers + 1)]
    assert all(node.shape == graph.outputs["hidden"].shape for node in found.values())
    if config.streams > 1 or config.per_layer:  # joined after the last layer, or in a table of all layers
        return
    for layers in range(1, config.layers + 1):
        fewer = build(replace(config, each=config.each[:layers]), tensors, F32, hidden=True)
        assert found[layers] is fewer.outputs["hidden"].inputs[0]


def test_rows_take_the_place_of_tokens_anywhere(model: tuple[Graph, dict[str, np.ndarray]]) -> None:
    """Rows that are the embeddings of tokens, at two places of the prompt, one of them twice."""
    graph, weights = model
    ids = IDS.copy()
    ids[21] = ids[20]
    want = logits(graph, weights, tokens=ids)
    table = weights["token_embd.weight"] * np.float32(weights["token_embd.weight"].shape[1] ** 0.5)
    index, rows, tokens = np.full(len(IDS), -1), np.zeros((len(IDS), table.shape[1]), np.float32), ids.copy()
    rows[:4], index[[5, 6, 20, 21]], rows[4:] = table[ids[[5, 6, 20, 3]]], [0, 1, 2, 2], np.nan
    tokens[[5, 6, 20, 21]] = 0  # looked up, but not used
    found = logits(variants.with_rows(graph), weights, tokens=tokens, rows=rows, row_index=index)
    np.testing.assert_allclose(found, want, atol=1e-5 * np.abs(want).max())


def test_parts_of_rows_enter_further_layers(model: tuple[Graph, dict[str, np.ndarray]]) -> None:
    """A second part that is added after layer 0 is what a bias of its output would add to these rows."""
    graph, weights = model
    width = weights["token_embd.weight"].shape[1]
    rows = np.random.default_rng(1).standard_normal((len(IDS), 2, width)).astype(np.float32)
    index = np.where((np.arange(len(IDS)) >= 4) & (np.arange(len(IDS)) < 9), np.arange(len(IDS)), -1)
    plain = variants.with_rows(graph)
    (first,) = (
        node for node in plain.nodes() if node.op == "rms_norm" and node.inputs[1].name == "blk.1.attn_norm.weight"
    )
    more = plain.input("more", first.inputs[0].shape)
    want = plain.map(lambda old, new: ops.rebuild(old, new) + more if old is first.inputs[0] else ops.rebuild(old, new))
    added = np.where(index[:, None] < 0, 0, rows[:, 1])
    expected = logits(want, weights, rows=rows[:, 0], row_index=index, more=added)
    both = np.where(index[:, None, None] < 0, np.nan, rows).reshape(len(IDS), -1)
    found = logits(variants.with_rows(graph, 1), weights, rows=both, row_index=index)
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())


def test_the_last_visible_position_of_each_row(model: tuple[Graph, dict[str, np.ndarray]]) -> None:
    """As a bias that opens the same keys; with windowed layers only, other layers stay causal."""
    graph, weights = model
    last, n = np.arange(len(IDS)), len(IDS)
    last[10:20], last[25:30] = 19, 29
    bias = np.where(np.arange(n) <= last[:, None], 0, -np.inf).astype(np.float32)[:, None]
    want = logits(variants.with_bias(graph, 1), weights, bias=bias)
    found = logits(variants.with_visible(graph), weights, visible=last)
    np.testing.assert_allclose(found, want, atol=1e-5 * np.abs(want).max())
    plain = logits(graph, weights)
    assert np.abs(want - plain).max() > 0.01 * np.abs(want).max()
    windowed = variants.with_visible(graph, windowed_only=True)
    masks = {(node["window"] is None, node["mask"]) for node in windowed.nodes() if node.op == "attention"}
    assert masks == {(True, "causal"), (False, "visible")}
    np.testing.assert_array_equal(logits(windowed, weights, visible=np.arange(n)), plain)
