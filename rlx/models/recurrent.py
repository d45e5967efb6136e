"""Recurrences in place of attention: the gated delta rule, and Mamba-2 with one decay a head.

Part of the models stage, a block of several families: the delta rule (arXiv 2412.06464) of Qwen 3.5, Mamba-2 (arXiv
2405.21060) of Granite 4 and Nemotron-H. Names of tensors and states are the same: in Mamba-2 q is C, k is B, v is x,
and the time step is made of alpha.
"""

from __future__ import annotations

from math import inf

from rlx.ir import ops
from rlx.ir.dims import SEQ
from rlx.ir.node import Node
from rlx.models.blocks import linear, norm
from rlx.models.builder import Model

_UNIT_EPS = 1e-6  # not the eps of the norms


def delta_net(layer: Model, x: Node) -> Node:
    """The recurrent layer: states "s.{layer}" f32 [value_heads, key_dim, value_dim], and the last inputs of the
    convolutions, "conv_q.{layer}", "conv_k.{layer}" and "conv_v.{layer}" f32 [taps - 1, channels].
    """
    net = layer.config.recurrence
    assert net is not None
    q, k = (_unit(layer, convolved(layer, x, part, net.key_heads, net.key_dim)) for part in "qk")
    v = convolved(layer, x, "v", net.value_heads, net.value_dim)
    beta = ops.sigmoid(linear(layer, x, "ssm_beta", net.value_heads))
    step = ops.softplus(linear(layer, x, "ssm_alpha", net.value_heads) + layer.weight("ssm_dt.bias", net.value_heads))
    state = layer.graph.state(f"s.{layer.layer}", (net.value_heads, net.key_dim, net.value_dim))
    g = step * layer.weight("ssm_a", net.value_heads)
    y = ops.gated_delta(state, q, k, v, g, beta, scale=net.key_dim**-0.5, heads=net.heads)
    y = layer.named("ssm_delta", y)
    z = ops.reshape(linear(layer, x, "attn_gate", net.values), y.shape)
    y = ops.reshape(norm(layer, y, "ssm_norm") * ops.silu(z), [SEQ, net.values])
    return linear(layer, y, "ssm_out", layer.config.hidden)


def convolved(layer: Model, x: Node, part: str, heads: int, size: int) -> Node:
    """A projection of x after a short causal convolution, in heads [SEQ, heads, size]; the convolution adds its bias if
    it has one or must have one.
    """
    net, channels = layer.config.recurrence, heads * size
    assert net is not None
    state = layer.graph.state(f"conv_{part}.{layer.layer}", (net.taps - 1, channels))
    taps = layer.numbers(f"ssm_conv_{part}.weight", channels, net.taps)
    y = ops.causal_conv(state, linear(layer, x, f"ssm_{part}", channels), taps)
    bias = f"ssm_conv_{part}.bias"
    if layer.has(bias) or "ssm_conv1d" in layer.config.biases:
        y = y + layer.weight(bias, channels)
    return ops.reshape(ops.silu(y), [SEQ, heads, size])


def _unit(layer: Model, x: Node) -> Node:
    """x / sqrt(sum(x^2) + eps) over the last axis: an RMS norm with a sum instead of a mean."""
    size = layer.config.recurrence.key_dim if layer.config.recurrence else 1
    return ops.scale(ops.rms_norm(x, eps=_UNIT_EPS / size), size**-0.5)


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
