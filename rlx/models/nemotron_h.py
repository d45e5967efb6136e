"""Nemotron-H: a layer is Mamba-2, attention without rope, or a feed-forward block with squared ReLU, of experts or not.

A family file: the equations of one decoder, top to bottom, and what its files say. Source: Nemotron-H (arXiv
2504.03624).
"""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

from rlx.ir.dtypes import DType
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.models.architectures import FFN, Architecture, none_has_rope
from rlx.models.blocks import Angles, attention, embedding, feed_forward, head, norm, rope_angles
from rlx.models.builder import Model, Weights, start
from rlx.models.config import ModelConfig
from rlx.models.keys import Keys
from rlx.models.names import LINEAR, SCALED, WHOLE, Row, Table, mamba_names, shared_expert_names
from rlx.models.recurrent import IN_OUT, mamba


def build(config: ModelConfig, weights: Weights, kv_dtype: DType) -> Graph:
    """The graph of a Nemotron-H model; see `rlx.models.build`."""
    model = start(config, weights, kv_dtype)
    x, angles = embedding(model), rope_angles(model)
    for layer in model.layers():
        x = x + _block(layer, norm(layer, x, "attn_norm"), angles)
    return head(model, x)


def _block(layer: Model, x: Node, angles: Angles) -> Node:
    if layer.here.recurrent:
        return mamba(layer, x)
    return attention(layer, x, angles) if layer.here.kv_heads else feed_forward(layer, x)


_STEPS = [0.001, inf]  # the usual limits
_KINDS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_KINDS |= {kind: kind for kind in (*_KINDS.values(), "linear_attention", "full_attention")}


def _spelled(keys: Keys) -> dict[str, Any]:
    """The kinds of the layers are a list, or a string with a letter for each. Time steps have a lower bound.

    The head is a matrix of its own, whatever `tie_word_embeddings` says.
    """
    key = "layers_block_type" if "layers_block_type" in keys else "hybrid_override_pattern"
    found = keys.get(key, expected="the kinds of the layers")
    kinds = Keys({key: list(found) if isinstance(found, str) else found}, keys.where).elements(
        key, lambda each: each.choice(key, _KINDS)
    )
    keys.require("mamba_hidden_act", "silu", "only SiLU is supported there")
    keys.require("moe_latent_size", None, "experts in a latent space are not supported")
    experts = {} if "moe" in kinds else {"n_routed_experts": 0}
    steps = [keys.number("time_step_min", (0.0, inf), _STEPS[0]), inf]
    own = {"time_step_limit": steps, "tie_word_embeddings": False}
    return {"layer_types": kinds, "num_hidden_layers": len(kinds), **own, **experts}


_DECODER = (Row("token_embd", "embeddings"), Row("output_norm", "norm_f"), Row("rope_freqs", None))
_LAYER = (
    *mamba_names("mixer"),
    Row("attn_norm", "norm"),
    *(Row(f"attn_{part}", f"mixer.{part}_proj", LINEAR) for part in "qkv"),
    Row("attn_output", "mixer.o_proj", LINEAR),
    Row("ffn_up", "mixer.up_proj", LINEAR),
    Row("ffn_down", "mixer.down_proj", LINEAR),
    Row("ffn_gate_inp", "mixer.gate"),
    Row("exp_probs_b.bias", "mixer.gate.e_score_correction_bias", WHOLE),
    Row("ffn_up_exps", "mixer.experts.{}.up_proj", SCALED),
    Row("ffn_down_exps", "mixer.experts.{}.down_proj", SCALED),
    Row("ffn_up_exps.weight", "mixer.experts.up_proj", WHOLE),
    Row("ffn_down_exps.weight", "mixer.experts.down_proj", WHOLE),
    *shared_expert_names("mixer.shared_experts"),
)
_NEMOTRON_H = Architecture(
    build,
    Table(_LAYER, _DECODER, prefixes=("backbone.",)),
    ("nemotron_h",),
    hybrid="mamba",
    single_blocks=True,
    gated_ffn=False,
    activation="relu2",
    experts="may",
    router="sigmoid",
    biases=("exp_probs_b",),
    shared_expert="may",
    rope_layers=none_has_rope,
    hf_spelling=_spelled,
    hf_biases={
        "mlp_bias": (*FFN, "ffn_up_shexp", "ffn_down_shexp"),
        "use_conv_bias": ("ssm_conv1d",),
        "use_bias": IN_OUT,
    },
    hf_keys={
        "activation": "mlp_hidden_act",
        "eps": "layer_norm_epsilon rms_norm_eps",
        "head_dim": "head_dim attention_head_dim",
        "value_heads": "mamba_num_heads",
        "key_heads": "n_groups",
        "key_dim": "ssm_state_size",
        "value_dim": "mamba_head_dim",
        "shared_ffn": "moe_shared_expert_intermediate_size",
    },
    hf_defaults={"mlp_hidden_act": "relu2", "use_conv_bias": True},
    gguf_defaults={"time_step_limit": _STEPS},
)
ARCHITECTURES = {"nemotron_h": _NEMOTRON_H, "nemotron_h_moe": replace(_NEMOTRON_H, model_types=())}
