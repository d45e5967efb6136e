"""Qwen 2, Qwen 2.5 and Qwen 3, dense and with experts.

A family file: the equations of one decoder, top to bottom. Qwen 2 adds biases to q, k and v; Qwen 3 has none and
normalizes each head of q and k instead. Sources: Qwen 2 (arXiv 2407.10671), Qwen 3 (arXiv 2505.09388).
"""

from __future__ import annotations

from functools import partial

from rlx.ir.dtypes import DType
from rlx.ir.graph import Graph
from rlx.models.blocks import attention, embedding, feed_forward, head, norm, rope_angles
from rlx.models.builder import Weights, start
from rlx.models.config import ModelConfig


def build(config: ModelConfig, weights: Weights, kv_dtype: DType, *, head_norms: bool) -> Graph:
    """The graph of a Qwen model; `head_norms` adds norms on the heads of q and k; see `rlx.models.build`."""
    model = start(config, weights, kv_dtype)
    x = embedding(model)
    angles = rope_angles(model)
    for layer in model.layers():
        x = x + attention(layer, norm(layer, x, "attn_norm"), angles, head_norms=head_norms)
        x = x + feed_forward(layer, norm(layer, x, "ffn_norm"))
    return head(model, x)


build_qwen2 = partial(build, head_norms=False)
build_qwen3 = partial(build, head_norms=True)
