"""DeepSeek-V2-Lite, V3, Mistral 4 and models of the same architecture: latent attention, and experts.

A family file: the equations of one decoder, top to bottom, and what its files say. The cache holds the latent vector of
each position, and queries are brought into its space. Sources: DeepSeek-V2 (arXiv 2405.04434) for the attention,
DeepSeek-V3 (arXiv 2412.19437) for the router, which chooses from groups of experts by biased sigmoids; in V2 and
Mistral 4, whose queries grow as Ministral 3's, it is a softmax.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from rlx.ir import ops
from rlx.ir.dims import SEQ
from rlx.ir.node import Node
from rlx.models import llama
from rlx.models.architectures import Architecture
from rlx.models.blocks import Angles, cached, linear, linear_of_heads, norm
from rlx.models.builder import Model
from rlx.models.keys import HEADS, Keys
from rlx.models.names import BIASED_MOE, LAYER, LINEAR, PRE_NORMS, PREDICTION, Row, Table
from rlx.models.settings import Key

_EPS = 1e-6  # of the norms of latent vectors, whatever the others have


def _attention(layer: Model, x: Node, angles: Angles) -> Node:
    """q = [rope(q_r) | q_n W_k] of each head over [rope(k_r) | c] for all, whose mixes of c become values by W_v."""
    config, sizes, rotary = layer.config, layer.config.latent, angles[layer.config.rope]
    assert sizes is not None
    rope, heads = sizes.rope, config.heads
    q, name = x, "attn_q"
    if sizes.queries:
        q, name = norm(layer, linear(layer, x, "attn_q_a", sizes.queries), "attn_q_a_norm", _EPS), "attn_q_b"
    q = linear(layer, q, name, heads * (sizes.plain + rope))
    if (query_scale := llama.query_scale(layer)) is not None:
        q = q * query_scale
    q = ops.reshape(q, [SEQ, heads, sizes.plain + rope])
    plain, turning = ops.slice(q, 0, sizes.plain, axis=2), ops.slice(q, sizes.plain, sizes.plain + rope, axis=2)
    q = ops.concat(turning, linear_of_heads(layer, plain, "attn_k_b", sizes.keys), axis=2)
    both = linear(layer, x, "attn_kv_a_mqa", sizes.width)
    latent = norm(layer, ops.slice(both, 0, sizes.keys), "attn_kv_a_norm", _EPS)
    rows = ops.reshape(ops.concat(ops.slice(both, sizes.keys, sizes.width), latent), [SEQ, 1, sizes.width])
    scale = config.rope.yarn.head_scale if config.rope.yarn is not None else 1.0
    y = ops.attention(
        ops.rope(q, rotary, style=config.rope_style),
        cached(layer, "k", ops.rope(rows, rotary, style=config.rope_style)),
        cached(layer, "v", rows),
        scale=config.attention_scale * scale**2,
    )
    mixed = ops.slice(ops.reshape(layer.named("attn", y), [SEQ, heads, sizes.width]), rope, sizes.width, axis=2)
    y = linear_of_heads(layer, mixed, "attn_v_b", sizes.values)
    return linear(layer, ops.reshape(y, [SEQ, heads * sizes.values]), "attn_output", config.hidden)


def _rope_without_part(keys: Keys) -> dict[str, Any]:
    """Mistral 4 says how large a part of a head has rope, which is in the sizes."""
    key, place = "partial_rotary_factor", "rope_parameters"
    rope = keys.nested(place, optional=True)
    sizes = [keys.integer(f"qk_{each}_head_dim", HEADS) for each in ("rope", "nope")]
    for each in (keys, rope):
        each.require(key, sizes[0] / sum(sizes), "it is not that of qk_rope_head_dim")
    named = {name.removeprefix(rope.prefix): value for name, value in rope.mapping.items()}
    return {key: None, **({place: {**named, key: None}} if named else {})}


_NAMES = (
    Row("attn_q_a", "self_attn.q_a_proj", LINEAR),
    Row("attn_q_a_norm", "self_attn.q_a_layernorm"),
    Row("attn_q_b", "self_attn.q_b_proj", LINEAR),
    Row("attn_kv_a_mqa", "self_attn.kv_a_proj_with_mqa", LINEAR),
    Row("attn_kv_a_norm", "self_attn.kv_a_layernorm"),
    Row("attn_kv_b", "self_attn.kv_b_proj", LINEAR),
    Row("attn_k_b", None),
    Row("attn_v_b", None),
)
_DEEPSEEK = Architecture(
    partial(llama.build, attend=_attention),
    Table((*LAYER, *_NAMES, *PRE_NORMS, *BIASED_MOE, *PREDICTION)),
    ("deepseek_v3",),
    hf_variants={
        "kimi_k2": {},
        "glm4_moe_lite": {"hf_defaults": {"first_k_dense_replace": 1}},
        "deepseek_v2": {"hf_defaults": {"scoring_func": "softmax", "norm_topk_prob": False}},
    },
    gguf_rope="interleaved",
    hf_rope="interleaved",
    latent=True,
    experts="must",
    router="either",
    shared_expert="may",
    predicts=True,
    hf_biases={"attention_bias": ("attn_q_a", "attn_kv_a_mqa", "attn_output")},
    gguf_defaults={"rope.scaling.yarn_log_unit": 0.1, "expert_weights_norm": False},
)
_LENGTH = "attention.temperature_length rope.scaling.original_context_length"
ARCHITECTURES = {
    "deepseek2": _DEEPSEEK,
    "mistral4": replace(
        _DEEPSEEK,
        model_types=("mistral4",),
        hf_variants={},
        router="softmax",
        hf_spelling=_rope_without_part,
        keys={**llama.QUERY_SCALE, "original_context": Key(_LENGTH, *llama.QUERY_SCALE["original_context"][1:])},
    ),
}
