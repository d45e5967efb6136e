"""Gemma 1, 2 and 3, text.

A family file: the equations of one decoder, top to bottom. Embeddings are scaled by sqrt(hidden). Gemma 2 also
normalizes the output of each half of a layer, caps scores and logits, and gives every second layer a window. Gemma 3
replaces the caps by norms on the heads of q and k; five layers of six have a window and a separate rope. Caps, windows
and ropes come from the configuration. Sources: Gemma (arXiv 2403.08295), Gemma 2 (arXiv 2408.00118), Gemma 3 (arXiv
2503.19786).
"""

from __future__ import annotations

from functools import partial

from rlx.ir.dtypes import DType
from rlx.ir.graph import Graph
from rlx.models.blocks import attention, embedding, gated_mlp, head, norm, rope_angles
from rlx.models.builder import Weights, start
from rlx.models.config import ModelConfig


def build(config: ModelConfig, weights: Weights, kv_dtype: DType, *, post_norms: bool, head_norms: bool) -> Graph:
    """The graph of a Gemma model; see `rlx.models.build`.

    Args:
        post_norms: adds norms after attention and MLP.
        head_norms: adds norms on the heads of q and k.
    """
    model = start(config, weights, kv_dtype)
    x = embedding(model)
    angles = rope_angles(model)
    for layer in model.layers():
        y = attention(layer, norm(layer, x, "attn_norm"), angles, head_norms=head_norms)
        x = x + (norm(layer, y, "post_attention_norm") if post_norms else y)
        y = gated_mlp(layer, norm(layer, x, "ffn_norm"))
        x = x + (norm(layer, y, "post_ffw_norm") if post_norms else y)
    return head(model, x)


build_gemma = partial(build, post_norms=False, head_norms=False)
build_gemma2 = partial(build, post_norms=True, head_norms=False)
build_gemma3 = partial(build, post_norms=True, head_norms=True)
