"""Ministral 3 and Mistral 3: llama whose queries grow with their position.

A family file: the equations of one decoder, top to bottom, and what its files say. The scale of a query far behind the
original context is that of Llama 4. Source: the published implementation in transformers.
"""

from __future__ import annotations

import numpy as np

from rlx.ir import ops
from rlx.ir.dims import SEQ
from rlx.ir.dtypes import I32, DType
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.models.architectures import Architecture, all_slide
from rlx.models.blocks import attention, embedding, feed_forward, head, norm, rope_angles
from rlx.models.builder import Model, Weights, start
from rlx.models.config import ModelConfig
from rlx.models.keys import CAP
from rlx.models.names import LAYER, MOE, PRE_NORMS, Table
from rlx.models.settings import Key


def build(config: ModelConfig, weights: Weights, kv_dtype: DType) -> Graph:
    """The graph of a Ministral 3 model; see `rlx.models.build`."""
    model = start(config, weights, kv_dtype)
    x = embedding(model)
    angles, scale = rope_angles(model), _query_scale(model)
    for layer in model.layers():
        x = x + attention(layer, norm(layer, x, "attn_norm"), angles, query_scale=scale)
        x = x + feed_forward(layer, norm(layer, x, "ffn_norm"))
    return head(model, x)


def _query_scale(model: Model) -> Node | None:
    """1 + beta ln(1 + floor(position / original context)) of each token, f32 [SEQ, 1]; None if it is always 1."""
    beta, original = (model.config.own[name] for name in ("query_growth", "original_context"))
    if not beta or original >= model.config.context:
        return None
    steps = np.arange(model.config.context) // original
    table = model.graph.constant("query_scale", (1 + beta * np.log1p(steps)).astype(np.float32)[:, None])
    return ops.take_rows(table, model.graph.input("positions", [SEQ], I32))


_ROPE = ("rope_parameters", "rope_scaling")
ARCHITECTURES = {
    "mistral3": Architecture(
        build,
        Table((*LAYER, *PRE_NORMS, *MOE)),
        ("ministral3", "mistral3"),
        wrappers=("mistral3",),
        gguf_rope="interleaved",
        hf_base=1_000_000.0,
        hf_sliding=all_slide,
        experts="may",
        keys={
            "query_growth": Key(
                "attention.temperature_scale", " ".join(f"{each}.llama_4_scaling_beta" for each in _ROPE), CAP, 0.0
            ),
            "original_context": Key(
                "rope.scaling.original_context_length",
                " ".join(f"{each}.original_max_position_embeddings" for each in _ROPE),
                (1, 1 << 31),
                1 << 31,
            ),
        },
    )
}
