"""Llama 1 to 3.2 and the models whose equations are Llama's: Mistral, Mixtral, Ministral 3, Phi-3 to 4, ERNIE 4.5,
EXAONE 3, SmolLM3, TinyLlama, SmolLM, Vicuna.

A family file: the equations of one decoder, top to bottom, and what its files say. Ministral 3 also scales the queries
of tokens far behind the original context, as Llama 4 does. Phi-3 has q, k and v in one matrix, gate and up in another,
and other frequencies for long texts (LongRoPE, arXiv 2402.13753). SmolLM3 has no rope in every fourth layer (arXiv
2501.18795). Sources: Llama (arXiv 2302.13971), Llama 3 (arXiv 2407.21783) for its rope scaling, which is part of the
frequencies, Mixtral (arXiv 2401.04088) for the experts, Phi-3 (arXiv 2404.14219), and transformers for Ministral 3,
ERNIE 4.5 and SmolLM3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from rlx.ir import ops
from rlx.ir.dims import SEQ
from rlx.ir.dtypes import I32, DType
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.models.architectures import FFN, QKV, QKVO, Architecture, all_slide, by_period
from rlx.models.blocks import Angles, attention, embedding, feed_forward, head, norm, rope_angles
from rlx.models.builder import Model, Weights, start
from rlx.models.config import ModelConfig
from rlx.models.keys import CAP, Keys
from rlx.models.names import (
    ATTN_NORM,
    FUSED_QKV,
    LAYER,
    LINEAR,
    MOE,
    POST_NORM,
    PRE_NORMS,
    SCALED,
    WHOLE,
    Row,
    Table,
    shared_expert_names,
)
from rlx.models.settings import Key

Attend = Callable[[Model, Node, Angles], Node]


def build(
    config: ModelConfig, weights: Weights, kv_dtype: DType, *, attend: Attend = attention, second: str = "ffn_norm"
) -> Graph:
    """The graph of a llama model; see `rlx.models.build`.

    Args:
        attend: attention of a layer.
        second: name of the norm before the feed-forward block.
    """
    model = start(config, weights, kv_dtype)
    x = embedding(model)
    angles = rope_angles(model)
    for layer in model.layers():
        x = x + attend(layer, norm(layer, x, "attn_norm"), angles)
        x = x + feed_forward(layer, norm(layer, x, second))
    return head(model, x)


def _scaled_attention(layer: Model, x: Node, angles: Angles) -> Node:
    """Attention whose queries grow with their positions."""
    return attention(layer, x, angles, query_scale=query_scale(layer))


def query_scale(model: Model) -> Node | None:
    """1 + beta ln(1 + floor(position / original context)) of each token, f32 [SEQ, 1]; None if it is always 1."""
    beta, original = (model.config.own.get(name, 0) for name in ("query_growth", "original_context"))
    if not beta or original >= model.config.context:
        return None
    scales = model.graph.constants.get("query_scale")  # all layers have the same
    if scales is None:
        steps = np.arange(model.config.context) // original
        scales = (1 + beta * np.log1p(steps)).astype(np.float32)[:, None]
    table = model.graph.constant("query_scale", scales)
    return ops.take_rows(table, model.graph.input("positions", [SEQ], I32))


def _ernie_layers(keys: Keys) -> dict[str, Any]:
    """Experts are in every n-th layer from a first one to a last one."""
    layers = keys.integer("num_hidden_layers", (1, 1024))
    step, first = keys.integer("moe_layer_interval", (1, 1024)), keys.integer("moe_layer_start_index", (0, 1024), 1)
    last = keys.integer("moe_layer_end_index", (-1, 1024), -1) % layers
    sparse = (first <= layer <= last and (layer + 1) % step == 0 for layer in range(layers))
    return {"mlp_layer_types": ["sparse" if each else "dense" for each in sparse]}


def _exaone_keys(keys: Keys) -> dict[str, Any]:
    """The usual keys for those of published EXAONE 3 and 3.5."""
    usual = {
        "num_layers": "num_hidden_layers",
        "layer_norm_epsilon": "rms_norm_eps",
        "activation_function": "hidden_act",
    }
    return {name: keys.get(key) for key, name in usual.items() if key in keys}


def _rope_layers(keys: Keys, windows: Sequence[int | None]) -> list[bool]:
    """`no_rope_layers` has a 1 for each layer with rope. Files without it have none in every fourth."""
    return _have_rope(keys, len(windows))


def _sliding(keys: Keys, layers: int) -> list[bool]:
    """If `use_sliding_window` is true, the layers without rope have a window."""
    slides = keys.flag("use_sliding_window", False) and "sliding_window" in keys
    return [slides and not has_rope for has_rope in _have_rope(keys, layers)]


def _have_rope(keys: Keys, layers: int) -> list[bool]:
    key = "no_rope_layers"
    if key in keys:
        return [bool(has) for has in keys.integers(key, (0, 1), layers)]
    return by_period(keys.integer("no_rope_layer_interval", (1, 1024), 4), layers)


MIXTRAL = (
    Row("ffn_gate_inp", "block_sparse_moe.gate"),
    Row("ffn_gate_exps", "block_sparse_moe.experts.{}.w1", SCALED),
    Row("ffn_up_exps", "block_sparse_moe.experts.{}.w3", SCALED),
    Row("ffn_down_exps", "block_sparse_moe.experts.{}.w2", SCALED),
)
_ERNIE_MOE = (
    *MOE,
    Row("exp_probs_b.bias", "mlp.moe_statics.e_score_correction_bias", WHOLE),
    *shared_expert_names("mlp.shared_experts"),
)
_EXAONE = (
    Row("attn_norm", "ln_1"),
    *(Row(f"attn_{part}", f"attn.attention.{part}_proj", LINEAR) for part in "qkv"),
    Row("attn_output", "attn.attention.out_proj", LINEAR),
    Row("ffn_norm", "ln_2"),
    Row("ffn_gate", "mlp.c_fc_0", LINEAR),
    Row("ffn_up", "mlp.c_fc_1", LINEAR),
    Row("ffn_down", "mlp.c_proj", LINEAR),
    *FUSED_QKV,
)
_EXAONE_DECODER = (Row("token_embd", "wte"), Row("output_norm", "ln_f"), Row("rope_freqs", None))
_PHI3 = (Row("attn_qkv", "self_attn.qkv_proj", LINEAR), Row("ffn_up", "mlp.gate_up_proj", LINEAR))
_MINISTRAL_ROPE = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16_384,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
_ROPE = ("rope_parameters", "rope_scaling")
#: The settings that `query_scale` reads.
QUERY_SCALE = {
    "query_growth": Key(
        "attention.temperature_scale", " ".join(f"{each}.llama_4_scaling_beta" for each in _ROPE), CAP, 0.0
    ),
    "original_context": Key(
        "rope.scaling.original_context_length",
        " ".join(f"{each}.original_max_position_embeddings" for each in _ROPE),
        (1, 1 << 31),
        1 << 31,
    ),
}
ARCHITECTURES = {
    "llama": Architecture(
        build,
        Table((*LAYER, *PRE_NORMS, *MIXTRAL, *MOE)),
        ("llama",),
        hf_variants={
            "mistral": {"hf_sliding": all_slide, "hf_defaults": {"sliding_window": 4096}},
            "mixtral": {
                "hf_sliding": all_slide,
                "hf_layer_types": False,
                "experts": "must",
                "hf_base": 1_000_000.0,
            },
        },
        bf16=True,
        gguf_rope="interleaved",
        experts="may",
    ),
    "mistral3": Architecture(
        partial(build, attend=_scaled_attention),
        Table((*LAYER, *PRE_NORMS, *MOE)),
        ("ministral3", "mistral3"),
        wrappers={"mistral3": "mistral"},
        gguf_rope="interleaved",
        hf_base=1_000_000.0,
        hf_sliding=all_slide,
        hf_layer_types=False,
        hf_defaults={"rope_parameters": _MINISTRAL_ROPE, "tie_word_embeddings": True},
        experts="may",
        keys=QUERY_SCALE,
    ),
    "phi3": Architecture(
        build,
        Table((*LAYER, *_PHI3, *PRE_NORMS)),
        ("phi3",),
        gguf_period=1 << 30,
        hf_sliding=all_slide,
        hf_layer_types=False,
        partial_rope=1.0,
        fused_ffn=True,
    ),
    "ernie4_5": Architecture(
        build,
        Table((*LAYER, *PRE_NORMS)),
        ("ernie4_5",),
        gguf_rope="interleaved",
        hf_rope="interleaved",
        hf_base=500_000.0,
        hf_biases={"use_bias": (*QKVO, *FFN)},
        hf_defaults={"tie_word_embeddings": True},
    ),
    "ernie4_5-moe": Architecture(
        build,
        Table((*LAYER, *PRE_NORMS, *_ERNIE_MOE)),
        ("ernie4_5_moe",),
        bf16=True,
        gguf_rope="interleaved",
        hf_rope="interleaved",
        hf_base=500_000.0,
        experts="must",
        biases=("exp_probs_b",),
        shared_expert="may",
        hf_spelling=_ernie_layers,
        hf_keys={
            "experts": "moe_num_experts",
            "experts_used": "moe_k",
            "shared_experts": "moe_num_shared_experts",
        },
        hf_biases={"use_bias": (*QKVO, *FFN, *(f"{name}_shexp" for name in FFN))},
        hf_defaults={"tie_word_embeddings": True, "moe_layer_interval": 1},
    ),
    "seed_oss": Architecture(
        partial(build, second="post_attention_norm"),
        Table((*LAYER, *ATTN_NORM, *POST_NORM)),
        ("seed_oss",),
        bf16=True,
        hf_biases={"attention_bias": QKV, "attention_out_bias": ("attn_output",), "mlp_bias": FFN},
        hf_defaults={"attention_bias": True, "head_dim": 128},
    ),
    "arcee": Architecture(
        build,
        Table((*LAYER, *PRE_NORMS)),
        ("arcee",),
        bf16=True,
        gguf_rope="interleaved",
        gated_ffn=False,
        activation="relu2",
        hf_defaults={"hidden_act": "relu2"},
    ),
    "exaone": Architecture(
        build,
        Table(_EXAONE, _EXAONE_DECODER, prefixes=("transformer.",), path="h"),
        ("exaone",),
        bf16=True,
        hf_spelling=_exaone_keys,
    ),
    "smollm3": Architecture(
        build,
        Table((*LAYER, *PRE_NORMS)),
        ("smollm3",),
        gguf_rope="interleaved",
        rope_layers=_rope_layers,
        hf_sliding=_sliding,
        hf_base=2_000_000.0,
        hf_defaults={"tie_word_embeddings": True},
    ),
}
