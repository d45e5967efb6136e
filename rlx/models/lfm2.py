"""LFM2: short gated convolutions in place of attention in most layers; also with experts, which sigmoids choose.

A family file: the equations of one decoder, top to bottom, and what its files say. Source: LFM2 (arXiv 2511.23404).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rlx.ir import ops
from rlx.ir.dtypes import DType
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.models.architectures import Architecture
from rlx.models.blocks import attention, embedding, feed_forward, head, linear, norm, rope_angles
from rlx.models.builder import Model, Weights, start
from rlx.models.config import ModelConfig
from rlx.models.keys import POSITIVE, WIDTH, Keys
from rlx.models.names import FUSED_QKV, LINEAR, SCALED, WHOLE, Row, Table
from rlx.models.settings import Key


def build(config: ModelConfig, weights: Weights, kv_dtype: DType) -> Graph:
    """The graph of an LFM2 model; see `rlx.models.build`."""
    model = start(config, weights, kv_dtype)
    x = embedding(model)
    angles = rope_angles(model)
    for layer in model.layers():
        y = norm(layer, x, "attn_norm")
        x = x + (convolution(layer, y) if layer.here.recurrent else attention(layer, y, angles, norms="heads"))
        x = x + feed_forward(layer, norm(layer, x, "ffn_norm"))
    return head(model, x, last_norm="token_embd_norm")


def convolution(layer: Model, x: Node) -> Node:
    """c * conv(b * v) of three projections of x; state "conv.{layer}" f32 [taps - 1, hidden], the last inputs."""
    width, taps = layer.config.hidden, int(layer.config.own["taps"])
    b, c, v = (linear(layer, x, f"shortconv.{part}", width) for part in "bcv")
    state = layer.graph.state(f"conv.{layer.layer}", (taps - 1, width))
    y = ops.causal_conv(state, b * v, layer.numbers("shortconv.conv.weight", width, taps))
    if layer.has("shortconv.conv.bias"):
        y = y + layer.weight("shortconv.conv.bias", width)
    return linear(layer, c * y, "shortconv.out_proj", width)


def _spelled(keys: Keys) -> dict[str, Any]:
    """The width of the dense blocks is what the file says, or two thirds of it, rounded up; layers may be numbered.

    Published files have a key of their own for tied embeddings.
    """
    tied = keys.flag("tie_embedding", keys.flag("tie_word_embeddings", True))
    width = keys.integer("block_ff_dim" if "block_ff_dim" in keys else "intermediate_size", WIDTH)
    if keys.flag("block_auto_adjust_ff_dim", False):
        multiple = keys.integer("block_multiple_of", (1, 1 << 16))
        width = int(keys.number("block_ffn_dim_multiplier", POSITIVE, 1.0) * int(2 * width / 3))
        width = -(-width // multiple) * multiple
    found: dict[str, Any] = {"intermediate_size": width, "tie_word_embeddings": tied}
    key, layers = "full_attn_idxs", keys.integer("num_hidden_layers", (1, 1024))
    if "layer_types" in keys:
        return found
    full = keys.elements(key, lambda each: each.integer(key, (0, layers - 1))) if key in keys else range(layers)
    return {**found, "layer_types": ["full_attention" if layer in full else "conv" for layer in range(layers)]}


_DECODER = (Row("token_embd", "embed_tokens"), Row("token_embd_norm", "embedding_norm"), Row("rope_freqs", None))
_LAYER = (
    *FUSED_QKV,
    Row("attn_norm", "operator_norm"),
    Row("attn_q", "self_attn.q_proj", LINEAR),
    Row("attn_k", "self_attn.k_proj", LINEAR),
    Row("attn_v", "self_attn.v_proj", LINEAR),
    Row("attn_output", "self_attn.out_proj", LINEAR),
    Row("attn_q_norm", "self_attn.q_layernorm"),
    Row("attn_k_norm", "self_attn.k_layernorm"),
    Row("shortconv.in_proj", "conv.in_proj", LINEAR),
    Row("shortconv.conv", "conv.conv", LINEAR),
    Row("shortconv.out_proj", "conv.out_proj", LINEAR),
    Row("ffn_norm", "ffn_norm"),
    Row("ffn_gate", "feed_forward.w1", LINEAR),
    Row("ffn_up", "feed_forward.w3", LINEAR),
    Row("ffn_down", "feed_forward.w2", LINEAR),
)
_EXPERTS = (
    Row("ffn_gate_inp", "feed_forward.gate"),
    Row("exp_probs_b.bias", "feed_forward.expert_bias", WHOLE),
    Row("ffn_gate_exps", "feed_forward.experts.{}.w1", SCALED),
    Row("ffn_up_exps", "feed_forward.experts.{}.w3", SCALED),
    Row("ffn_down_exps", "feed_forward.experts.{}.w2", SCALED),
    Row("ffn_gate_up_exps.weight", "feed_forward.experts.gate_up_proj", WHOLE),
    Row("ffn_down_exps.weight", "feed_forward.experts.down_proj", WHOLE),
)
_LFM2 = Architecture(
    build,
    Table(_LAYER, _DECODER),
    ("lfm2",),
    hybrid="convolution",
    hf_base=1_000_000.0,
    hf_spelling=_spelled,
    hf_keys={"eps": "norm_eps"},
    keys={"taps": Key("shortconv.l_cache", "conv_L_cache", (2, 64))},
    hf_defaults={
        "hidden_act": "silu",
        "block_auto_adjust_ff_dim": True,
        "block_multiple_of": 256,
        "norm_eps": 1e-5,
        "conv_L_cache": 3,
    },
)
ARCHITECTURES = {
    "lfm2": _LFM2,
    "lfm2moe": replace(
        _LFM2,
        names=Table((*_LAYER, *_EXPERTS), _DECODER),
        model_types=("lfm2_moe",),
        experts="must",
        router="sigmoid",
        hf_keys={**_LFM2.hf_keys, "dense_layers": "num_dense_layers"},
        hf_biases={"use_expert_bias": ("exp_probs_b",)},
        hf_defaults={"hidden_act": "silu", "use_expert_bias": True, "norm_eps": 1e-5, "conv_L_cache": 3},
    ),
}
