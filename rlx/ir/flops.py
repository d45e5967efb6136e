"""Floating-point operation counts: (operand sizes, result size, attributes) -> a count.

The cost column of the op table in `rlx.ir.ops`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

Sizes = Sequence[tuple[int, ...]]
Flops = Callable[[Sizes, tuple[int, ...], Mapping[str, Any]], int]


def each(count: int) -> Flops:
    return lambda ins, out, attrs: count * prod(out)


def scan(ins: Sizes, out: tuple[int, ...], attrs: Mapping[str, Any]) -> int:
    return prod(ins[0])


def linear(ins: Sizes, out: tuple[int, ...], attrs: Mapping[str, Any]) -> int:
    return (2 if attrs["gated"] else 1) * 2 * ins[0][0] * prod(ins[1])


def linear_pick(ins: Sizes, out: tuple[int, ...], attrs: Mapping[str, Any]) -> int:
    return 2 * ins[0][0] * prod(ins[1])


def expert_linear(ins: Sizes, out: tuple[int, ...], attrs: Mapping[str, Any]) -> int:
    return (2 if attrs["gated"] else 1) * 2 * prod(out) * ins[0][-1]


def mix(ins: Sizes, out: tuple[int, ...], attrs: Mapping[str, Any]) -> int:
    return 2 * prod(out) * ins[0][1]


def causal_conv(ins: Sizes, out: tuple[int, ...], attrs: Mapping[str, Any]) -> int:
    return 2 * prod(out) * ins[2][1]


def gated_delta(ins: Sizes, out: tuple[int, ...], attrs: Mapping[str, Any]) -> int:
    """Per token: decay, one product with k if it corrects, one rank-one update, one product with q, over the state."""
    return (7 if attrs["corrects"] else 5) * out[0] * prod(ins[0])


def attention(ins: Sizes, out: tuple[int, ...], attrs: Mapping[str, Any]) -> int:
    """Two dot products of head_dim per query head and visible key; at most, unless the mask is causal."""
    rows, heads, head_dim = ins[0]
    if attrs["mask"] == "around":
        return 4 * heads * head_dim * rows * min(int(attrs["length"]), 2 * int(attrs["window"]) - 1)
    if attrs["mask"] != "causal":
        return 4 * heads * head_dim * rows * int(attrs["length"])
    ends = range(attrs["length"] - rows + 1, attrs["length"] + 1)
    visible = sum(min(end, attrs["window"] or end) for end in ends)
    return 4 * heads * head_dim * visible
