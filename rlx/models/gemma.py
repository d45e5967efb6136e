"""Gemma 3, text.

A family file: the equations of one decoder, top to bottom. Embeddings are scaled by sqrt(hidden); each half of a layer
is normalized before and after; five layers of six see a window only, and turn by a rope of their own. Source: Gemma 3
(arXiv 2503.19786).
"""

from __future__ import annotations

from rlx.ir.dtypes import DType
from rlx.ir.graph import Graph
from rlx.models.blocks import attention, embedding, gated_mlp, head, norm, rope_angles
from rlx.models.builder import Weights, start
from rlx.models.config import ModelConfig


def build(config: ModelConfig, weights: Weights, kv_dtype: DType) -> Graph:
    """The graph of a Gemma 3 model; see `rlx.models.build`."""
    model = start(config, weights, kv_dtype)
    x = embedding(model)
    angles = rope_angles(model)
    for layer in model.layers():
        y = attention(layer, norm(layer, x, "attn_norm"), angles, head_norms=True)
        x = x + norm(layer, y, "post_attention_norm")
        y = gated_mlp(layer, norm(layer, x, "ffn_norm"))
        x = x + norm(layer, y, "post_ffw_norm")
    return head(model, x)
