"""Llama 1 to 3.2 and models of the same architecture: Mistral, Mixtral, TinyLlama, SmolLM, Vicuna.

A family file: the equations of one decoder, top to bottom. Sources: Llama (arXiv 2302.13971), Llama 3 (arXiv
2407.21783) for its rope scaling, which is part of the frequencies, Mixtral (arXiv 2401.04088) for the experts.
"""

from __future__ import annotations

from rlx.ir.dtypes import DType
from rlx.ir.graph import Graph
from rlx.models.architectures import Architecture, all_slide
from rlx.models.blocks import attention, embedding, feed_forward, head, norm, rope_angles
from rlx.models.builder import Weights, start
from rlx.models.config import ModelConfig
from rlx.models.names import LAYER, MOE, PRE_NORMS, SCALED, Row, Table


def build(config: ModelConfig, weights: Weights, kv_dtype: DType) -> Graph:
    """The graph of a llama model; see `rlx.models.build`."""
    model = start(config, weights, kv_dtype)
    x = embedding(model)
    angles = rope_angles(model)
    for layer in model.layers():
        x = x + attention(layer, norm(layer, x, "attn_norm"), angles)
        x = x + feed_forward(layer, norm(layer, x, "ffn_norm"))
    return head(model, x)


_MIXTRAL = (
    Row("ffn_gate_inp", "block_sparse_moe.gate"),
    Row("ffn_gate_exps", "block_sparse_moe.experts.{}.w1", SCALED),
    Row("ffn_up_exps", "block_sparse_moe.experts.{}.w3", SCALED),
    Row("ffn_down_exps", "block_sparse_moe.experts.{}.w2", SCALED),
)
ARCHITECTURES = {
    "llama": Architecture(
        build,
        Table((*LAYER, *PRE_NORMS, *_MIXTRAL, *MOE)),
        ("llama",),
        hf_variants={
            "mistral": {"hf_sliding": all_slide, "hf_defaults": {"sliding_window": 4096}},
            "mixtral": {"hf_sliding": all_slide, "experts": "must", "hf_base": 1_000_000.0},
        },
        bf16=True,
        gguf_rope="interleaved",
        experts="may",
    )
}
