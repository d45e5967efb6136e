"""Granite 3 and 4: dense, with experts, with a shared expert, and with Mamba-2 in place of attention in most layers.

A family file: the equations of one decoder, top to bottom, and what its files say. It is llama with factors on the
embeddings, the residual branches, the scores and the logits; so is MiniCPM (arXiv 2404.06395), in other words. Source:
the published implementation in transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import sqrt
from typing import Any

from rlx.ir import ops
from rlx.ir.dtypes import DType
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.models.architectures import QKVO, Architecture
from rlx.models.blocks import attention, embedding, feed_forward, head, mlp, norm, rope_angles
from rlx.models.builder import Model, Weights, start
from rlx.models.config import ModelConfig
from rlx.models.keys import FACTOR, HEADS, WIDTH, Keys
from rlx.models.names import LAYER, MOE, PRE_NORMS, WHOLE, Row, Table, mamba_names, shared_expert_names
from rlx.models.recurrent import IN_OUT, mamba
from rlx.models.settings import Key


def build(config: ModelConfig, weights: Weights, kv_dtype: DType) -> Graph:
    """The graph of a Granite model; see `rlx.models.build`."""
    model = start(config, weights, kv_dtype)
    x = embedding(model)
    angles, by = rope_angles(model), config.own["residual_scale"]
    for layer in model.layers():
        y = norm(layer, x, "attn_norm")
        x = x + ops.scale(mamba(layer, y) if layer.here.recurrent else attention(layer, y, angles), by)
        x = x + ops.scale(_forward(layer, norm(layer, x, "ffn_norm")), by)
    return head(model, x, scale=1 / config.own["logit_divisor"])


def _forward(layer: Model, x: Node) -> Node:
    """The feed-forward block; checkpoints without experts may call it the shared expert."""
    if layer.config.experts is None and layer.has("ffn_down_shexp.weight"):
        return mlp(layer, x, suffix="_shexp")
    return feed_forward(layer, x)


def _rope_layers(keys: Keys, windows: Sequence[int | None]) -> list[bool]:
    """Layers with Mamba-2 around them usually have no rope; null in `config.json` says so, too."""
    has = keys.flag("rope.scaling.finetuned", True) if keys.prefix else keys.get(_POSITIONS, None) == "rope"
    return [has] * len(windows)


def _spelled(keys: Keys) -> dict[str, Any]:
    """Without experts the width of the shared one is that of the dense block. The size of a head may be "auto"."""
    found = {} if keys.get("num_local_experts", 0) else {"intermediate_size": keys.get("shared_intermediate_size")}
    if keys.get("mamba_d_head", "auto") == "auto":
        width = keys.integer("mamba_expand", WIDTH, 2) * keys.integer("hidden_size", WIDTH)
        found["mamba_d_head"] = width // keys.integer("mamba_n_heads", HEADS)
    return found


def _of_minicpm(keys: Keys) -> dict[str, float]:
    """The factors by the names of Granite: the depth and the width of the model are in two of them."""
    layers, hidden = keys.integer("num_hidden_layers", (1, 1024)), keys.integer("hidden_size", WIDTH)
    return {
        "embedding_multiplier": keys.number("scale_emb", FACTOR, 1.0),
        "residual_multiplier": keys.number("scale_depth", FACTOR, 1.0) / sqrt(layers),
        "logits_scaling": hidden / keys.integer("dim_model_base", WIDTH, 1),
    }


_POSITIONS = "position_embedding_type"
_EXPERTS = (
    Row("ffn_gate_inp", "block_sparse_moe.router.layer"),
    Row("ffn_gate_up_exps.weight", "block_sparse_moe.input_linear.weight", WHOLE),
    Row("ffn_down_exps.weight", "block_sparse_moe.output_linear.weight", WHOLE),
    Row("ffn_gate_up_shexp", "shared_mlp.input_linear"),
    Row("ffn_down_shexp", "shared_mlp.output_linear"),
)
_GRANITE = Architecture(
    build,
    Table((*LAYER, *PRE_NORMS)),
    ("granite",),
    gguf_rope="interleaved",
    keys={
        "residual_scale": Key("residual_scale", "residual_multiplier", FACTOR, 1.0),
        "logit_divisor": Key("logit_scale", "logits_scaling", FACTOR, 1.0),
    },
)
_MOE = replace(
    _GRANITE,
    names=Table((*LAYER, *PRE_NORMS, *_EXPERTS, *MOE, *shared_expert_names())),
    model_types=("granitemoe", "granitemoeshared"),
    experts="may",
    shared_expert="may",
)
ARCHITECTURES = {
    "granite": _GRANITE,
    "minicpm": replace(
        _GRANITE,
        names=Table((*LAYER, *PRE_NORMS, *MOE)),
        model_types=("minicpm",),
        experts="may",
        hf_spelling=_of_minicpm,
    ),
    "granitemoe": _MOE,
    "granitehybrid": replace(
        _MOE,
        names=Table((*_MOE.names.layer, *mamba_names("mamba"))),
        model_types=("granitemoehybrid",),
        hybrid="mamba",
        rope_layers=_rope_layers,
        hf_spelling=_spelled,
        hf_biases={"attention_bias": QKVO, "mamba_conv_bias": ("ssm_conv1d",), "mamba_proj_bias": IN_OUT},
        hf_keys={
            "value_heads": "mamba_n_heads",
            "key_heads": "mamba_n_groups",
            "key_dim": "mamba_d_state",
            "value_dim": "mamba_d_head",
        },
        hf_defaults={
            "mamba_n_groups": 1,
            "mamba_d_conv": 4,
            "mamba_conv_bias": True,
        },
    ),
}
