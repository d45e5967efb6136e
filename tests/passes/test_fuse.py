"""Fuse: which nodes a layer is made of, and elementwise regions."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import toy
from hypothesis import given
from ir.random_graphs import ENV, INDICES, feeds, graphs

from rlx.ir import interp, ops
from rlx.ir.dims import SEQ
from rlx.ir.dtypes import BF16
from rlx.ir.graph import Graph
from rlx.ir.node import LEAVES, Node
from rlx.passes import pipeline
from rlx.passes.fuse import fuse, regions
from rlx.passes.options import FUSIONS, Options
from rlx.passes.program import is_work

G = Graph()
X, Y, ROW = G.input("x", [SEQ, 64]), G.input("y", [SEQ, 64]), G.weight("row", [64])
ONLY = {f: Options(fusions=(f,)) for f in FUSIONS}


def work(family: str, options: Options, layers: int) -> Counter[str]:
    """Steps of a program, by op; those with options that matter by their description."""
    graph = pipeline.lower(toy.build(toy.FAMILIES[family].but(layers=layers)), options).graph
    return Counter(describe(n) for n in graph.nodes() if is_work(n))


def describe(node: Node) -> str:
    attrs = dict(node.attrs)
    shown = [str(attrs[k]) for k in ("gated", "out") if attrs.get(k) not in (None, "f32")]
    shown += [k for k in ("bias", "residual") if attrs.get(k)] + ["normed"] * (attrs.get("norm_eps") is not None)
    return " ".join([node.op, *shown])


def a_layer(family: str, options: Options) -> dict[str, int]:
    """What one more layer adds to a program."""
    return dict(work(family, options, 4) - work(family, options, 3))


LLAMA = {
    "rms_norm q8a": 2,
    "linear": 3,
    "rope": 1,
    "rope_kv_write": 1,
    "kv_write": 1,
    "attention": 1,
    "quantize q8a": 2,
    "linear residual": 2,
    "linear silu": 1,
}


def test_a_llama_layer() -> None:
    assert a_layer("llama", Options()) == LLAMA


def test_a_gemma_layer_has_norms_between_linear_and_residual() -> None:
    assert a_layer("gemma", Options()) == {
        "rms_norm q8a": 2,
        "linear": 5,
        "rope normed": 1,
        "rope_kv_write normed": 1,
        "kv_write": 1,
        "attention": 1,
        "quantize q8a": 2,
        "linear gelu_tanh": 1,
        "rms_norm": 2,
        "elementwise": 2,
    }


def test_without_fusions_a_layer_is_what_the_model_wrote() -> None:
    assert a_layer("llama", Options(fusions=())) == {
        "rms_norm": 2,
        "quantize q8a": 4,
        "linear": 7,
        "rope": 2,
        "kv_write": 2,
        "attention": 1,
        "elementwise": 4,  # two residuals, the activation and the product
    }


@pytest.mark.parametrize("family", toy.FAMILIES)
def test_prefill_and_decode_fuse_alike(family: str) -> None:
    assert a_layer(family, Options()) == a_layer(family, Options(seq=(2, 16)))


def test_a_bias_and_a_residual_join_one_linear() -> None:
    w, b = G.weight("w", [64, 64]), G.weight("b", [64])
    graph = Graph(outputs={"y": ops.add(Y, ops.linear(X, w, b))})
    assert fuse(graph, Options()).outputs["y"] is ops.make("linear", X, w, b, Y, bias=True, residual=True)
    assert fuse(graph, ONLY["bias"]).outputs["y"].inputs[1] is ops.make("linear", X, w, b, bias=True)


@pytest.mark.parametrize("out", ["q8a", "bf16"])
def test_a_norm_prepares_its_only_consumers_activations(out: str) -> None:
    w = G.weight("w", [8, 64], BF16)
    for norm in (ops.rms_norm(X, eps=1e-6), ops.rms_norm(X, ROW, eps=1e-6)):
        prepared = ops.quantize(norm, out)
        both = {"y": ops.linear(prepared, w), "z": ops.linear(prepared, G.weight("u", [8, 64], BF16))}
        fused = fuse(Graph(outputs=both), Options())
        want = ops.make("rms_norm", *norm.inputs, eps=1e-6, out=out)
        assert {n.inputs[0] for n in fused.outputs.values()} == {want}
        read_twice = Graph(outputs={**both, "norm": norm})
        assert fuse(read_twice, Options()).outputs["y"].inputs[0] is prepared


def test_an_activation_rounds_its_own_result() -> None:
    """It is all that the next linear reads of it; otherwise the unrounded values are needed, too."""
    hidden = ops.make("gelu_tanh", ops.scale(X, 2.0))
    for outputs, kinds in (({}, ["bf16"]), ({"hidden": hidden}, ["f32"])):
        graph = Graph(outputs={"y": ops.quantize(hidden, "bf16"), **outputs})
        after = fuse(graph, Options())
        assert [n["out"] for n in after.nodes() if n.op == "elementwise"] == kinds
        assert any(n.op == "quantize" for n in after.nodes()) == bool(outputs)
    off = fuse(Graph(outputs={"y": ops.quantize(hidden, "bf16")}), Options(fusions=("elementwise",)))
    assert [n.op for n in off.nodes()][-1] == "quantize"


# --- elementwise regions ----------------------------------------------------------------------------------------------


def region(node: Node, **others: Node) -> Node:
    return regions(Graph(outputs={"y": node, **others})).outputs["y"]


def test_a_chain_becomes_one_region() -> None:
    y = ops.softcap(ops.add(ops.scale(ops.silu(X), 2.0), ops.mul(Y, ROW)), 5.0)
    found = region(y)
    assert found.inputs == (X, Y, ROW)
    assert found["expr"] == ("softcap", ("add", ("scale", ("silu", 0), 2.0), ("mul", 1, 2)), 5.0)


def test_operands_keep_their_places_when_regions_join() -> None:
    found = region(ops.sub(ops.mul(Y, X), ops.mul(X, ROW)))
    assert found.inputs == (Y, X, ROW)
    assert found["expr"] == ("sub", ("mul", 0, 1), ("mul", 1, 2))


def test_a_value_with_two_readers_is_computed_once() -> None:
    shared = ops.exp(X)
    found = region(ops.add(ops.neg(shared), ops.tanh(shared)))
    (operand,) = found.inputs
    assert operand is ops.make("elementwise", X, expr=("exp", 0))
    assert found["expr"] == ("add", ("neg", 0), ("tanh", 0))


@given(graphs(skip=INDICES))
def test_regions_keep_the_meaning(graph: Graph) -> None:
    after = regions(graph)
    assert not any(ops.OPS[n.op].elementwise for n in after.nodes() if n.op not in (*LEAVES, "elementwise"))
    values = feeds(graph)
    want, have = (interp.run(g, values, ENV, dtype=np.float64)[0] for g in (graph, after))
    for name in want:
        np.testing.assert_allclose(have[name], want[name], rtol=1e-12, atol=1e-12 * np.abs(want[name]).max())
