"""GLM-4.5 to 4.7: experts chosen by biased sigmoids, beside one that every token uses, behind some dense layers.

A family file: the equations of one decoder, top to bottom, and what its files say. The router is that of DeepSeek-V3
(arXiv 2412.19437). Source: GLM-4.5 (arXiv 2508.06471).
"""

from __future__ import annotations

from rlx.ir.dtypes import DType
from rlx.ir.graph import Graph
from rlx.models.architectures import QKV, Architecture
from rlx.models.blocks import attention, embedding, feed_forward, head, norm, rope_angles, shared_expert
from rlx.models.builder import Weights, start
from rlx.models.config import ModelConfig
from rlx.models.names import (
    ATTN_NORM,
    HEAD_NORMS,
    LAYER,
    MOE,
    POST_NORM,
    PREDICTION,
    WHOLE,
    Row,
    Table,
    shared_expert_names,
)


def build(config: ModelConfig, weights: Weights, kv_dtype: DType) -> Graph:
    """The graph of a GLM-4.5 model; see `rlx.models.build`."""
    model = start(config, weights, kv_dtype)
    x = embedding(model)
    angles = rope_angles(model)
    for layer in model.layers():
        y = norm(layer, x, "attn_norm")
        x = x + attention(layer, y, angles, head_norms=layer.has("attn_q_norm.weight"))
        y = norm(layer, x, "post_attention_norm")
        x = x + feed_forward(layer, y)
        if layer.here.sparse and config.experts is not None and config.experts.shared:
            x = x + shared_expert(layer, y)
    return head(model, x)


_EXPERTS = (*MOE, Row("exp_probs_b.bias", "mlp.gate.e_score_correction_bias", WHOLE))
_SHARED = shared_expert_names("mlp.shared_experts")
ARCHITECTURES = {
    "glm4moe": Architecture(
        build,
        Table((*LAYER, *ATTN_NORM, *HEAD_NORMS, *POST_NORM, *_EXPERTS, *_SHARED, *PREDICTION)),
        ("glm4_moe",),
        partial_rope=0.5,
        experts="must",
        router="sigmoid",
        shared_expert="may",
        predicts=True,
        hf_biases={"attention_bias": QKV},
    )
}
