"""Gemma 4: dense, with per-layer embeddings (E2B, E4B), and with experts.

A family file: the equations of one decoder, top to bottom. Source: the published implementation in transformers.
"""

from __future__ import annotations

from rlx.ir import ops
from rlx.ir.dtypes import DType
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.models import blocks
from rlx.models.architectures import Architecture, every_nth_is_full
from rlx.models.blocks import norm
from rlx.models.builder import Model, Weights, start
from rlx.models.config import ModelConfig
from rlx.models.names import SCALED, WHOLE, Row, per_layer


def build(config: ModelConfig, weights: Weights, kv_dtype: DType) -> Graph:
    """The graph of a Gemma 4 model; see `rlx.models.build`."""
    model = start(config, weights, kv_dtype)
    x = blocks.embedding(model)
    angles, inputs = blocks.rope_angles(model), blocks.per_layer_inputs(model, x)
    for layer in model.layers():
        y = blocks.attention(layer, norm(layer, x, "attn_norm"), angles, norms="heads", value_norms=True)
        x = x + norm(layer, y, "post_attention_norm")
        x = x + norm(layer, both(layer, x) if layer.here.sparse else dense(layer, x), "post_ffw_norm")
        if inputs is not None:
            x = x + blocks.per_layer_input(layer, x, inputs)
        x = x * layer.weight("layer_output_scale.weight", 1)
    return blocks.head(model, x)


def dense(layer: Model, x: Node) -> Node:
    """The feed-forward block for every token."""
    return blocks.mlp(layer, norm(layer, x, "ffn_norm"))


def both(layer: Model, x: Node) -> Node:
    """The dense block beside the experts; the router has a separate scale for x."""
    width = layer.config.hidden
    routed = ops.scale(ops.rms_norm(x, eps=layer.config.eps), width**-0.5) * layer.weight("ffn_gate_inp.scale", width)
    experts = blocks.mixture(layer, norm(layer, x, "pre_ffw_norm_2"), routed)
    return norm(layer, dense(layer, x), "post_ffw_norm_1") + norm(layer, experts, "post_ffw_norm_2")


_EXPERTS = (
    Row("ffn_gate_inp", "router.proj"),
    Row("ffn_gate_inp.scale", "router.scale", WHOLE),
    Row("ffn_gate_exps", None, SCALED),
    Row("ffn_up_exps", None, SCALED),
    Row("ffn_gate_up_exps", None, SCALED),
    Row("ffn_gate_up_exps.weight", "experts.gate_up_proj", WHOLE),
    Row("ffn_down_exps.weight", "experts.down_proj", WHOLE),
    Row("ffn_down_exps.scale", "router.per_expert_scale", WHOLE),
    Row("pre_ffw_norm_2", "pre_feedforward_layernorm_2"),
    Row("post_ffw_norm_1", "post_feedforward_layernorm_1"),
    Row("post_ffw_norm_2", "post_feedforward_layernorm_2"),
)
_ROPES = {
    "sliding_attention": {"rope_type": "default"},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25},
}
_DEFAULTS = {
    "head_dim": 256,
    "global_head_dim": 512,
    "rope_parameters": _ROPES,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size_per_layer_input": 0,
    "tie_word_embeddings": True,
}  # fmt: skip
ARCHITECTURES = {
    "gemma4": Architecture(
        build,
        per_layer(*_EXPERTS, Row("layer_output_scale.weight", "layer_scalar", WHOLE)),
        ("gemma4_text", "gemma4", "gemma4_unified_text", "gemma4_unified"),
        runner="gemma",
        two_way="sliding",
        gguf_period=6,
        gguf_caps=(0.0, 30.0),
        gguf_local_heads=True,
        shares_kv=True,
        hf_ends_full=True,
        attention_scale=1.0,
        hf_sliding=every_nth_is_full(6),
        local_base=10_000.0,
        hf_base=1_000_000.0,
        hf_keys={"activation": "hidden_activation", "experts": "num_experts", "experts_used": "top_k_experts"},
        activation="gelu_tanh",
        experts="may",
        scales_embedding=True,
        hf_defaults=_DEFAULTS,
    )
}
