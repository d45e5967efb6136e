"""Qwen 3.5, dense and with experts: three of four layers use a gated delta rule instead of attention.

A family file: the equations of one decoder, top to bottom. Sources: gated delta networks (arXiv 2412.06464), the
technical report of Qwen 3 (arXiv 2505.09388) for the rest; the shared expert, which every token uses, is that of
DeepSeekMoE (arXiv 2401.06066).
"""

from __future__ import annotations

from rlx.ir import ops
from rlx.ir.dims import SEQ
from rlx.ir.dtypes import DType
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.models.blocks import Angles, attention, embedding, feed_forward, gated_mlp, head, linear, norm, rope_angles
from rlx.models.builder import Model, Weights, start
from rlx.models.config import ModelConfig

_UNIT_EPS = 1e-6  # not the eps of the norms


def build(config: ModelConfig, weights: Weights, kv_dtype: DType) -> Graph:
    """The graph of a Qwen 3.5 model; see `rlx.models.build`."""
    model = start(config, weights, kv_dtype)
    x = embedding(model)
    angles = rope_angles(model)
    for layer in model.layers():
        x = block(layer, x, angles)
    return head(model, x)


def block(layer: Model, x: Node, angles: Angles) -> Node:
    """One layer: x f32 [SEQ, hidden] -> f32 [SEQ, hidden]."""
    y = norm(layer, x, "attn_norm")
    recurrent = layer.here.recurrent
    x = x + (delta_net(layer, y) if recurrent else attention(layer, y, angles, head_norms=True, gated=True))
    y = norm(layer, x, "post_attention_norm")
    x = x + feed_forward(layer, y)
    return x + shared_expert(layer, y) if layer.here.sparse else x


def delta_net(layer: Model, x: Node) -> Node:
    """The recurrent layer: states "s.{layer}" f32 [value_heads, key_dim, value_dim], and the last inputs of the
    convolutions, "conv_q.{layer}", "conv_k.{layer}" and "conv_v.{layer}" f32 [taps - 1, channels].
    """
    net = layer.config.delta
    assert net is not None
    q, k = (_unit(layer, _convolved(layer, x, part, net.key_heads, net.key_dim)) for part in "qk")
    v = _convolved(layer, x, "v", net.value_heads, net.value_dim)
    beta = ops.sigmoid(linear(layer, x, "ssm_beta", net.value_heads))
    step = ops.softplus(linear(layer, x, "ssm_alpha", net.value_heads) + layer.weight("ssm_dt.bias", net.value_heads))
    state = layer.graph.state(f"s.{layer.layer}", (net.value_heads, net.key_dim, net.value_dim))
    g = step * layer.weight("ssm_a", net.value_heads)
    y = ops.gated_delta(state, q, k, v, g, beta, scale=net.key_dim**-0.5, heads=net.heads)
    y = layer.named("ssm_delta", y)
    z = ops.reshape(linear(layer, x, "attn_gate", net.values), y.shape)
    y = ops.reshape(norm(layer, y, "ssm_norm") * ops.silu(z), [SEQ, net.values])
    return linear(layer, y, "ssm_out", layer.config.hidden)


def _convolved(layer: Model, x: Node, part: str, heads: int, size: int) -> Node:
    """A projection of x after a short causal convolution, in heads [SEQ, heads, size]."""
    net, channels = layer.config.delta, heads * size
    assert net is not None
    state = layer.graph.state(f"conv_{part}.{layer.layer}", (net.taps - 1, channels))
    taps = layer.numbers(f"ssm_conv_{part}.weight", channels, net.taps)
    y = ops.causal_conv(state, linear(layer, x, f"ssm_{part}", channels), taps)
    return ops.reshape(ops.silu(y), [SEQ, heads, size])


def _unit(layer: Model, x: Node) -> Node:
    """x / sqrt(sum(x^2) + eps) over the last axis: an RMS norm with a sum instead of a mean."""
    size = layer.config.delta.key_dim if layer.config.delta else 1
    return ops.scale(ops.rms_norm(x, eps=_UNIT_EPS / size), size**-0.5)


def shared_expert(layer: Model, x: Node) -> Node:
    """The shared expert, which every token uses, weighted by its own gate."""
    experts = layer.config.experts
    assert experts is not None
    gate = ops.sigmoid(linear(layer, x, "ffn_gate_inp_shexp", 1))
    return gated_mlp(layer, x, suffix="_shexp", ffn=experts.shared) * gate
