"""Phi-3, 3.5 and 4: llama with q, k and v in one matrix, and gate and up in another.

A family file: the equations are those of llama. Long texts have other frequencies than short ones (LongRoPE, arXiv
2402.13753). Source: Phi-3 (arXiv 2404.14219).
"""

from __future__ import annotations

from rlx.models import llama
from rlx.models.architectures import Architecture, all_slide
from rlx.models.names import LAYER, LINEAR, PRE_NORMS, Row, Table

_FUSED = (Row("attn_qkv", "self_attn.qkv_proj", LINEAR), Row("ffn_up", "mlp.gate_up_proj", LINEAR))
ARCHITECTURES = {
    "phi3": Architecture(
        llama.build,
        Table((*LAYER, *_FUSED, *PRE_NORMS)),
        ("phi3",),
        gguf_period=1 << 30,
        hf_sliding=all_slide,
        partial_rope=1.0,
        fused_ffn=True,
    )
}
