"""Llama 1 to 3.2 and models of the same architecture: Mistral, Mixtral, TinyLlama, SmolLM, Vicuna.

A family file: the equations of one decoder, top to bottom. Sources: Llama (arXiv 2302.13971), Llama 3 (arXiv
2407.21783) for its rope scaling, which is part of the frequencies, Mixtral (arXiv 2401.04088) for the experts.
"""

from __future__ import annotations

from rlx.ir.dtypes import DType
from rlx.ir.graph import Graph
from rlx.models.blocks import attention, embedding, feed_forward, head, norm, rope_angles
from rlx.models.builder import Weights, start
from rlx.models.config import ModelConfig


def build(config: ModelConfig, weights: Weights, kv_dtype: DType) -> Graph:
    """The graph of a llama model; see `rlx.models.build`."""
    model = start(config, weights, kv_dtype)
    x = embedding(model)
    angles = rope_angles(model)
    for layer in model.layers():
        x = x + attention(layer, norm(layer, x, "attn_norm"), angles)
        x = x + feed_forward(layer, norm(layer, x, "ffn_norm"))
    return head(model, x)
