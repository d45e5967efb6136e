"""GLM-4: norms before and behind attention and MLP; half of each head turns.

A family file: the equations are those of Gemma 2. Source: the published implementation in transformers.
"""

from __future__ import annotations

from functools import partial

from rlx.models import gemma
from rlx.models.architectures import QKV, Architecture
from rlx.models.names import ATTENTION, FUSED_QKV, LINEAR, PRE_NORMS, PREDICTION, Row, Table

_LAYER = (
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
        Table((*_LAYER, *PREDICTION)),
        ("glm4",),
        gguf_rope="interleaved",
        hf_rope="interleaved",
        partial_rope=0.5,
        fused_ffn=True,
        predicts=True,
        hf_biases={"attention_bias": QKV},
    )
}
