"""GLM-4 to 4.7.

A family file: the equations of one decoder, top to bottom, and what its files say. GLM-4 is dense, with Gemma 2's
equations: norms before and behind attention and MLP; half of each head turns. From GLM-4.5 on experts, chosen by biased
sigmoids as in DeepSeek-V3 (arXiv 2412.19437), stand beside one that every token uses, behind some dense layers.
Sources: GLM-4 as transformers implements it, GLM-4.5 (arXiv 2508.06471).
"""

from __future__ import annotations

from functools import partial

from rlx.models import gemma, llama
from rlx.models.architectures import QKV, Architecture
from rlx.models.blocks import attention
from rlx.models.names import (
    ATTENTION,
    ATTN_NORM,
    BIASED_MOE,
    FUSED_QKV,
    HEAD_NORMS,
    LAYER,
    LINEAR,
    POST_NORM,
    PRE_NORMS,
    PREDICTION,
    Row,
    Table,
)

_GLM4 = (
    *ATTENTION,
    *FUSED_QKV,
    *PRE_NORMS,
    Row("post_attention_norm", "post_self_attn_layernorm"),
    Row("post_ffw_norm", "post_mlp_layernorm"),
    Row("ffn_up", "mlp.gate_up_proj", LINEAR),
    Row("ffn_down", "mlp.down_proj", LINEAR),
)
ARCHITECTURES = {
    "glm4": Architecture(
        partial(gemma.build, post_norms=True),
        Table((*_GLM4, *PREDICTION)),
        ("glm4",),
        gguf_rope="interleaved",
        hf_rope="interleaved",
        partial_rope=0.5,
        fused_ffn=True,
        predicts=True,
        hf_biases={"attention_bias": QKV},
    ),
    "glm4moe": Architecture(
        partial(llama.build, attend=partial(attention, norms="optional"), second="post_attention_norm"),
        Table((*LAYER, *ATTN_NORM, *HEAD_NORMS, *POST_NORM, *BIASED_MOE, *PREDICTION)),
        ("glm4_moe",),
        partial_rope=0.5,
        experts="must",
        router="sigmoid",
        biases=("exp_probs_b",),
        shared_expert="may",
        predicts=True,
        hf_biases={"attention_bias": QKV},
    ),
}
