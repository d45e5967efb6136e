"""Costs: operations and bytes of a node, counted by hand."""

from __future__ import annotations

import pytest

from ir.cases import ANGLES, BLOCKS, CACHES, CASES, CHOICE, EXPERTS, HEADS, PAIR, G, U, W, X, Y
from ir.references import ENV
from rlx.ir import costs, ops
from rlx.ir.dtypes import Q8_0
from rlx.ir.node import Node


def cost(node: Node, **env: int) -> tuple[int, int]:
    return costs.cost(node, {**ENV, **env})


def test_the_cost_of_a_linear() -> None:
    weight = G.weight("q", [32, 64], Q8_0)
    assert cost(ops.linear(X, weight)) == (2 * 3 * 32 * 64, 3 * 64 * 4 + 32 * 68 + 3 * 32 * 4)
    square = G.weight("square", [64, 64])
    plain, residual = ops.linear(X, square), ops.make("linear", X, square, Y, residual=True)
    assert cost(plain)[0] == cost(residual)[0]  # a residual is no second weight, of whatever shape
    assert cost(residual)[1] - cost(plain)[1] == 3 * 64 * 4
    gated = ops.make("linear", X, W, U, gated="silu")
    assert cost(gated)[0] == 2 * cost(ops.linear(X, W))[0]
    assert cost(ops.linear(ops.quantize(X), weight))[1] == 3 * 72 + 32 * 68 + 3 * 32 * 4


@pytest.mark.parametrize("window", [None, 1, 2, 4, 100])
@pytest.mark.parametrize("past", [0, 7])
def test_the_cost_of_attention_counts_what_is_visible(window: int | None, past: int) -> None:
    node = ops.attention(HEADS, CACHES["f32"], CACHES["f16"], scale=1, window=window)
    pairs = [(q, t) for q in range(past, past + 3) for t in range(past + 3) if 0 <= q - t < (window or 999)]
    keys = len({t for _, t in pairs})
    flops, moved = cost(node, PAST_SEQ=past)
    assert flops == len(pairs) * 4 * 16 * 4
    assert moved == 2 * 3 * 64 * 4 + 2 * keys * 16 * (4 + 2)


def test_the_cost_of_experts_is_that_of_the_chosen() -> None:
    chosen = 3 * 2  # of 48, were they all different
    flops, moved = cost(ops.expert_linear(X, CHOICE, EXPERTS[0]))
    assert flops == 2 * chosen * 5 * 64
    assert moved == 3 * 64 * 4 + chosen * 4 + chosen * 5 * 68 + chosen * 5 * 4
    gated = cost(ops.expert_linear(BLOCKS, CHOICE, *EXPERTS, gated="silu"))
    assert gated == (2 * flops, moved + chosen * 64 * 4 - 3 * 64 * 4 + chosen * 5 * 68)
    few = G.weight("few", [4, 5, 64], Q8_0)
    assert cost(ops.expert_linear(X, CHOICE, few))[1] == 3 * 64 * 4 + chosen * 4 + 4 * 5 * 68 + chosen * 5 * 4


@pytest.mark.parametrize("node", CASES)
def test_every_op_has_a_cost(node: Node) -> None:
    flops, moved = cost(node)
    assert flops >= 0 and (moved > 0) == (node.op not in ("reshape", "pack"))


def test_what_comes_from_memory_is_weights_and_states() -> None:
    """A linear's weight, not its activations; the written rows of a cache; a state that is read and written."""

    def stored(node: Node) -> int:
        return costs.stored_bytes(node, ENV)

    assert stored(ops.linear(X, G.weight("stored", [32, 64], Q8_0))) == 32 * 68
    assert stored(ops.kv_write(CACHES["f16"], PAIR)) == 3 * 32 * 2
    conv = ops.causal_conv(G.state("stored rows", [3, 8]), ANGLES, G.weight("taps", [8, 4]))
    assert stored(conv) == 4 * (2 * 3 * 8 + 8 * 4)
    attention = ops.attention(HEADS, ops.kv_write(CACHES["f32"], PAIR), CACHES["f16"], scale=1)
    assert stored(attention) == cost(attention)[1] - 2 * 3 * 64 * 4
    assert stored(ops.silu(X)) == 0
