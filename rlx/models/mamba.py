"""Mamba-2: a recurrence with one decay a head in place of attention (arXiv 2405.21060).

Part of the models stage, a block of Granite 4 and Nemotron-H. Names of tensors and states are those of `delta_net.py`:
q is C there, k is B, v is x, and the time step is made of alpha.
"""

from __future__ import annotations

from math import inf

from rlx.ir import ops
from rlx.ir.dims import SEQ
from rlx.ir.node import Node
from rlx.models.blocks import linear
from rlx.models.builder import Model
from rlx.models.delta_net import convolved

IN_OUT = ("ssm_alpha", "attn_gate", *(f"ssm_{part}" for part in "qkv"), "ssm_out")  # its linear layers


def mamba(layer: Model, x: Node) -> Node:
    """The recurrent layer, with the states of `delta_net`."""
    net = layer.config.recurrence
    assert net is not None
    q, k = (convolved(layer, x, part, net.key_heads, net.key_dim) for part in "qk")
    v = convolved(layer, x, "v", net.value_heads, net.value_dim)
    step = ops.softplus(linear(layer, x, "ssm_alpha", net.value_heads) + layer.weight("ssm_dt.bias", net.value_heads))
    if net.steps != (0, inf):
        step = ops.clamp(step, net.steps[0], net.steps[1] if net.steps[1] < inf else None)
    state = layer.graph.state(f"s.{layer.layer}", (net.value_heads, net.key_dim, net.value_dim))
    g = step * layer.weight("ssm_a", net.value_heads)
    y = ops.gated_delta(state, q, k, v, g, step, scale=1.0, heads=net.heads, corrects=False)
    y, v = (ops.reshape(each, [SEQ, net.values]) for each in (layer.named("ssm", y), v))
    y = y + v * layer.repeated("ssm_d", net.value_heads, net.value_dim)
    y = _normed(layer, y * ops.silu(linear(layer, x, "attn_gate", net.values)))
    return linear(layer, y, "ssm_out", layer.config.hidden)


def _normed(layer: Model, x: Node) -> Node:
    """RMS norm of each group of channels; x and the weight have the width of all."""
    net = layer.config.recurrence
    assert net is not None
    groups = ops.reshape(x, [SEQ, net.key_heads, net.values // net.key_heads])
    normed = ops.reshape(ops.rms_norm(groups, eps=layer.config.eps), [SEQ, net.values])
    return normed * layer.weight("ssm_norm.weight", net.values)
