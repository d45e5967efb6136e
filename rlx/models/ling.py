"""Ling 2.0 and Ring 2.0: the equations of GLM-4.5 with other names.

A family file: what its files say; the equations are those of `llama.py`. Source: Ling 2.0 (arXiv 2510.22115).
"""

from __future__ import annotations

from functools import partial
from typing import Any

from rlx.models import llama
from rlx.models.architectures import QKV, Architecture
from rlx.models.blocks import attention
from rlx.models.keys import Keys
from rlx.models.names import DECODER, LINEAR, MLP, MOE, PRE_NORMS, PREDICTION, WHOLE, Row, Table, shared_expert_names


def _only_ling_2(keys: Keys) -> dict[str, Any]:
    """Files of the first Ling have the same model type; a softmax is its router."""
    if (found := keys.text("score_function", "softmax")) != "sigmoid":
        keys.unsupported("score_function", found, "only Ling 2.0, whose router has sigmoids, is supported")
    return {}


_LAYER = (
    *MLP,
    *MOE,
    *PRE_NORMS,
    *PREDICTION,
    *shared_expert_names("mlp.shared_experts"),
    Row("exp_probs_b.bias", "mlp.gate.expert_bias", WHOLE),
    Row("attn_qkv", "attention.query_key_value", LINEAR),
    Row("attn_output", "attention.dense", LINEAR),
    Row("attn_q_norm", "attention.query_layernorm"),
    Row("attn_k_norm", "attention.key_layernorm"),
    Row("layer_output_norm", "final_layernorm"),  # of the block that predicts
)
ARCHITECTURES = {
    "bailingmoe2": Architecture(
        partial(llama.build, attend=partial(attention, norms="heads")),
        Table(_LAYER, (*DECODER, Row("token_embd", "word_embeddings"))),
        ("bailing_moe", "bailing_moe_v2"),
        partial_rope=0.5,
        experts="must",
        router="sigmoid",
        shared_expert="may",
        predicts=True,
        hf_spelling=_only_ling_2,
        hf_keys={"shared_ffn": "moe_shared_expert_intermediate_size", "shared_experts": "num_shared_experts"},
        hf_biases={
            "moe_router_enable_expert_bias": ("exp_probs_b",),
            "use_qkv_bias": QKV,
            "use_bias": ("attn_output",),
        },
    ),
}
