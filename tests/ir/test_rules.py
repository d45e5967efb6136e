"""Rewrite rules: THE test of every rule, and how matching and rewriting behave."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given

from ir.random_graphs import ENV, INDICES, feeds, graphs
from rlx.errors import GraphError
from rlx.ir import interp, ops, rules
from rlx.ir.dims import CTX, SEQ, bind
from rlx.ir.dtypes import DTYPES, F16, F32, I32, Q8_0
from rlx.ir.graph import Graph
from rlx.ir.node import LEAVES, Node, topological
from rlx.ir.rules import AttrVar, Match, Rule, rewrite, var
from rlx.passes import fuse, options, simplify

ALL = (*simplify.RULES, *(rule for group in fuse.RULES.values() for rule in group))
# Sizes of the dim variables: different where rules allow it, heads a multiple of kv heads, K whole int8 blocks.
SIZES = {"R": 3, "K": 64, "N": 6, "H": 4, "G": 2, "D": 16, "A": 8, "T": 9, "V": 7, "S": 2, "E": 8}
each_rule = pytest.mark.parametrize("rule", ALL, ids=lambda rule: rule.name)


def instance(rule: Rule, dtypes: dict[str, str] | None = None, **attrs: Any) -> tuple[Node, Node]:
    """Both sides of a rule with every dim variable at its size and every attribute variable at its example."""
    leaves = {n.name: n for n in topological([rule.before, rule.after]) if n.op in LEAVES}
    nodes = {name: _sized(n, DTYPES[(dtypes or {}).get(name, n.dtype.name)]) for name, n in leaves.items()}
    match = Match(nodes=nodes, attrs={**_examples(rule), **attrs})
    return rules.instantiate(rule.before, match), rules.instantiate(rule.after, match)


def _sized(leaf: Node, dtype: Any) -> Node:
    return ops.leaf(leaf.op, leaf.name, tuple(bind(d, SIZES) for d in leaf.shape), dtype)


def _examples(rule: Rule) -> dict[str, Any]:
    values = [v for n in topological([rule.before]) for _, v in n.attrs]
    return {v.name: v.example for v in values if isinstance(v, AttrVar)}


def value_of(node: Node, seed: int = 0) -> np.ndarray:
    graph = Graph(outputs={"y": node})
    rng = np.random.default_rng(seed)
    arrays = {
        n.name: rng.integers(0, SIZES["V"], n.shape) if n.dtype is I32 else rng.standard_normal(n.shape)
        for n in sorted(graph.leaves("input").values(), key=lambda n: n.name)
    }
    arrays |= {n.name: rng.standard_normal(n.shape) for n in graph.leaves("state").values()}
    return interp.run(graph, arrays, dtype=np.float64)[0]["y"]


def names(node: Node) -> list[str]:
    return [n.op for n in topological([node]) if n.op not in LEAVES]


# --- every rule -------------------------------------------------------------------------------------------------------


@each_rule
@pytest.mark.parametrize("seed", range(3))
def test_both_sides_mean_the_same(rule: Rule, seed: int) -> None:
    before, after = instance(rule)
    assert before is not after
    assert (before.shape, before.dtype) == (after.shape, after.dtype)
    np.testing.assert_allclose(value_of(after, seed), value_of(before, seed), rtol=1e-12, atol=1e-13)


@each_rule
def test_a_rule_matches_its_own_before(rule: Rule) -> None:
    before, after = instance(rule)
    assert rewrite(Graph(outputs={"y": before}), [rule]).outputs == {"y": after}


@each_rule
def test_a_rule_matches_inside_a_graph(rule: Rule) -> None:
    """Between other nodes, and at its own place only."""
    before, after = instance(rule)
    wrap = {F32: ops.tanh}.get(before.dtype, lambda n: n)
    graph = Graph(outputs={"y": wrap(before), "z": ops.neg(Graph().input("other", [SEQ, 3]))})
    assert rewrite(graph, [rule]).outputs == {"y": wrap(after), "z": graph.outputs["z"]}


@each_rule
def test_a_rule_does_less_work(rule: Rule) -> None:
    before, after = instance(rule)
    assert len(names(after)) < len(names(before))


@each_rule
def test_an_inner_value_that_is_read_elsewhere_stays(rule: Rule) -> None:
    """Taking it in would compute it twice."""
    before, _ = instance(rule)
    inner = [n for n in topological([before]) if n.op not in LEAVES and n is not before]
    for node in inner:
        named = Graph(outputs={"y": before, "inner": node})
        assert rewrite(named, [rule]).outputs == named.outputs
    assert inner or rule.name == "scale-one"


@each_rule
def test_free_variables_match_every_dtype(rule: Rule) -> None:
    dtypes = {name: "f16" if name in ("cache", "k", "v") else "q8_0" for name in rule.any_dtype - {"x"}}
    dtypes |= {"x": "q8a"} if "x" in rule.any_dtype else {}
    attrs = {"dtype": "f16"} if "cache" in dtypes else {}
    before, after = instance(rule, dtypes, **attrs)
    assert rewrite(Graph(outputs={"y": before}), [rule]).outputs == {"y": after}


def test_rules_have_names_and_groups() -> None:
    assert len({rule.name for rule in ALL}) == len(ALL)
    assert ["custom", *fuse.RULES, "elementwise", "prologue"] == list(options.FUSIONS)


# --- matching ---------------------------------------------------------------------------------------------------------

X = Graph().input("x", [SEQ, 64])
Y = Graph().input("y", [SEQ, 64])
_A = AttrVar("a", 2.0)
_V, _W = var("v", ["R", "K"]), var("w", ["R", "K"])


def apply(node: Node, *some: Rule) -> Node:
    return rewrite(Graph(outputs={"y": node}), some or ALL).outputs["y"]


def test_one_variable_is_one_node() -> None:
    assert apply(ops.mul(X, ops.sigmoid(X))) is ops.silu(X)
    assert apply(ops.mul(X, ops.sigmoid(Y))) is ops.mul(X, ops.sigmoid(Y))


def test_addition_and_product_match_both_ways() -> None:
    assert apply(ops.mul(ops.sigmoid(X), X)) is ops.silu(X)
    w = Graph().weight("w", [64, 64], Q8_0)
    fused = ops.make("linear", X, w, Y, residual=True)
    assert apply(ops.add(Y, ops.linear(X, w))) is apply(ops.add(ops.linear(X, w), Y)) is fused


def test_one_attribute_variable_is_one_value() -> None:
    before = ops.add(ops.make("scale", _V, by=_A), ops.make("scale", _W, by=_A))
    rule = Rule("factor", before, ops.make("scale", ops.add(_V, _W), by=_A))
    assert apply(ops.add(ops.scale(X, 3.0), ops.scale(Y, 3.0)), rule) is ops.scale(ops.add(X, Y), 3.0)
    mixed = ops.add(ops.scale(X, 3.0), ops.scale(Y, 4.0))
    assert apply(mixed, rule) is mixed


def test_one_dim_variable_is_one_dim() -> None:
    square = Rule("square", ops.neg(var("v", ["K", "K"])), var("v", ["K", "K"]))
    assert apply(ops.neg(Graph().input("s", [8, 8])), square).op == "input"
    assert apply(ops.neg(X), square) is ops.neg(X)


def test_rank_and_fixed_sizes_must_fit() -> None:
    rule = Rule("fixed", ops.neg(var("v", ["R", 32])), var("v", ["R", 32]))
    for shape, op in [([SEQ, 32], "input"), ([SEQ, 64], "neg"), ([32], "neg"), ([2, SEQ, 32], "neg")]:
        assert apply(ops.neg(Graph().input("v", shape)), rule).op == op


def test_a_plain_variable_matches_no_state_and_no_other_dtype() -> None:
    state = Graph().state("s", [SEQ, 64])
    assert apply(ops.neg(ops.neg(state))).op == "neg"
    only_f32 = Rule("read", ops.linear(_V, var("m", ["N", "K"])), ops.linear(_V, var("m", ["N", "K"])))
    assert only_f32.match(ops.linear(X, Graph().weight("m", [8, 64]))) is not None
    assert only_f32.match(ops.linear(X, Graph().weight("m", [8, 64], F16))) is None


def test_a_cache_variable_matches_a_state_only() -> None:
    g = Graph()
    cache = g.state("c", [2, CTX, 16], F16)
    heads, angles = g.input("h", [SEQ, 2, 16]), g.input("a", [SEQ, 16])
    written = ops.kv_write(cache, ops.rope(heads, angles, style="neox"))
    assert apply(written).op == "rope_kv_write"
    assert apply(written).inputs == (cache, heads, angles)


def test_a_read_of_a_shared_linear_blocks_gating() -> None:
    w, u = (Graph().weight(n, [64, 64]) for n in "wu")
    gate = ops.linear(X, w)
    y = ops.mul(ops.silu(gate), ops.linear(X, u))
    shared = rewrite(Graph(outputs={"y": ops.add(y, ops.tanh(gate))}), ALL).outputs["y"]
    assert "linear" in names(shared) and not any(n.op == "linear" and n["gated"] for n in topological([shared]))
    assert apply(y) is ops.make("linear", X, w, u, gated="silu")


def test_values_that_become_one_have_the_readers_of_both() -> None:
    w = Graph().weight("w", [64, 64])
    same = ops.linear(ops.neg(ops.neg(X)), w)
    graph = Graph(outputs={"a": ops.tanh(ops.linear(X, w)), "b": ops.add(Y, same)})
    after = rewrite(graph, ALL)
    assert after.outputs == {"a": ops.tanh(ops.linear(X, w)), "b": ops.add(Y, ops.linear(X, w))}


# --- rewriting --------------------------------------------------------------------------------------------------------


def test_a_chain_folds_to_its_end() -> None:
    node = X
    for _ in range(6):
        node = ops.scale(node, 0.5)
    assert apply(node) is ops.scale(X, 0.5**6)
    for _ in range(6):
        node = ops.scale(node, 2.0)
    assert apply(node) is X  # the products end at 1.0, and scaling by that is nothing


def test_what_a_rule_makes_can_match_another_rule() -> None:
    g = Graph()
    rows = ops.embedding(g.weight("t", [8, 64], Q8_0), g.input("ids", [SEQ], I32))
    assert apply(ops.scale(ops.scale(rows, 3.0), 4.0)) is ops.embedding(*rows.inputs, scale=12.0)
    cache, heads = g.state("c", [2, CTX, 16]), g.input("h", [SEQ, 2, 16])
    angles, weight = g.input("a", [SEQ, 8]), g.weight("n", [16])
    turned = ops.rope(ops.rms_norm(heads, weight, eps=1e-5), angles, style="interleaved")
    node = apply(ops.kv_write(cache, turned))
    assert names(node) == ["rope_kv_write"] and node["norm_eps"] == 1e-5 and node["style"] == "interleaved"


def test_nothing_to_do_returns_the_same_nodes() -> None:
    graph = Graph("g", {"y": ops.tanh(X)}, phase="decode", bounds={"SEQ": (1, 1)})
    assert rewrite(graph, ALL) == graph
    assert rewrite(graph, []) == graph


def test_a_rule_that_changes_the_shape_is_an_error() -> None:
    wrong = Rule("wrong", ops.neg(_V), ops.last_row(_V))
    with pytest.raises(GraphError, match=r"wrong: rule changes <neg f32\[SEQ, 64\]> to <last_row f32\[1, 64\]>"):
        apply(ops.neg(X), wrong)


@given(graphs(skip=INDICES))
def test_rewriting_keeps_the_meaning_and_ends(graph: Graph) -> None:
    after = rewrite(graph, ALL)
    assert rewrite(after, ALL) == after
    assert len(after.nodes()) <= len(graph.nodes())
    values = feeds(graph)
    expected, states = interp.run(graph, values, ENV, dtype=np.float64)
    found, new_states = interp.run(after, values, ENV, dtype=np.float64)
    for name, value in [*expected.items(), *states.items()]:
        other = found[name] if name in found else new_states[name]
        np.testing.assert_allclose(other, value, rtol=1e-9, atol=1e-9 * np.abs(value).max())
