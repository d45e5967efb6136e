"""Gemma 4: dense, with per-layer embeddings (E2B, E4B), and with experts.

A family file: the equations of one decoder, top to bottom. Source: the published implementation in transformers.
"""

from __future__ import annotations

from rlx.ir import ops
from rlx.ir.dtypes import DType
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.models.blocks import (
    attention,
    embedding,
    gated_mlp,
    head,
    mixture,
    norm,
    per_layer_input,
    per_layer_inputs,
    rope_angles,
)
from rlx.models.builder import Model, Weights, start
from rlx.models.config import ModelConfig


def build(config: ModelConfig, weights: Weights, kv_dtype: DType) -> Graph:
    """The graph of a Gemma 4 model; see `rlx.models.build`."""
    model = start(config, weights, kv_dtype)
    x = embedding(model)
    angles, inputs = rope_angles(model), per_layer_inputs(model, x)
    for layer in model.layers():
        y = attention(layer, norm(layer, x, "attn_norm"), angles, head_norms=True, value_norms=True)
        x = x + norm(layer, y, "post_attention_norm")
        x = x + norm(layer, both(layer, x) if layer.here.sparse else dense(layer, x), "post_ffw_norm")
        if inputs is not None:
            x = x + per_layer_input(layer, x, inputs)
        x = x * layer.weight("layer_output_scale.weight", 1)
    return head(model, x)


def dense(layer: Model, x: Node) -> Node:
    """The feed-forward block for every token."""
    return gated_mlp(layer, norm(layer, x, "ffn_norm"))


def both(layer: Model, x: Node) -> Node:
    """The dense block beside the experts; the router has a separate scale for x."""
    width = layer.config.hidden
    routed = ops.scale(ops.rms_norm(x, eps=layer.config.eps), width**-0.5) * layer.weight("ffn_gate_inp.scale", width)
    experts = mixture(layer, norm(layer, x, "pre_ffw_norm_2"), routed)
    return norm(layer, dense(layer, x), "post_ffw_norm_1") + norm(layer, experts, "post_ffw_norm_2")
