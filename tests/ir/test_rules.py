"""Rewrite rules: THE test of every rule, and how matching and rewriting behave."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given

from ir.random_graphs import ENV, INDICES, feeds, graphs
from rlx.ir import interp, ops, rules
from rlx.ir.dims import CTX, SEQ, bind
from rlx.ir.dtypes import DTYPES, F16, F32, I32
from rlx.ir.graph import Graph
from rlx.ir.node import LEAVES, Node, topological
from rlx.ir.rules import AttrVar, Match, Rule, rewrite, var
from rlx.passes import fuse, simplify

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


# --- matching ---------------------------------------------------------------------------------------------------------

X = Graph().input("x", [SEQ, 64])
_V, _W = var("v", ["R", "K"]), var("w", ["R", "K"])


def apply(node: Node, *some: Rule) -> Node:
    return rewrite(Graph(outputs={"y": node}), some or ALL).outputs["y"]


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


# --- rewriting --------------------------------------------------------------------------------------------------------


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
