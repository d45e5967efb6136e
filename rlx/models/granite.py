"""Granite 3 and 4 without recurrent layers: dense, with experts, and with a shared expert.

A family file: the equations of one decoder, top to bottom, and what its files say. It is llama with factors on the
embeddings, the residual branches, the scores and the logits. Source: the published implementation in transformers.
"""

from __future__ import annotations

from dataclasses import replace

from rlx.ir import ops
from rlx.ir.dtypes import DType
from rlx.ir.graph import Graph
from rlx.models.architectures import Architecture
from rlx.models.blocks import attention, embedding, feed_forward, head, norm, rope_angles, shared_expert
from rlx.models.builder import Weights, start
from rlx.models.config import ModelConfig
from rlx.models.keys import FACTOR
from rlx.models.names import LAYER, MOE, PRE_NORMS, WHOLE, Row, Table, shared_expert_names
from rlx.models.settings import Key


def build(config: ModelConfig, weights: Weights, kv_dtype: DType) -> Graph:
    """The graph of a Granite model; see `rlx.models.build`."""
    model = start(config, weights, kv_dtype)
    x = embedding(model)
    angles, by = rope_angles(model), config.own["residual_scale"]
    for layer in model.layers():
        x = x + ops.scale(attention(layer, norm(layer, x, "attn_norm"), angles), by)
        y = norm(layer, x, "ffn_norm")
        more = config.experts is not None and config.experts.shared
        x = x + ops.scale(feed_forward(layer, y) + shared_expert(layer, y) if more else feed_forward(layer, y), by)
    return head(model, x, scale=1 / config.own["logit_divisor"])


_EXPERTS = (
    Row("ffn_gate_inp", "block_sparse_moe.router.layer"),
    Row("ffn_gate_up_exps.weight", "block_sparse_moe.input_linear.weight", WHOLE),
    Row("ffn_down_exps.weight", "block_sparse_moe.output_linear.weight", WHOLE),
    Row("ffn_gate_up_shexp", "shared_mlp.input_linear"),
    Row("ffn_down_shexp", "shared_mlp.output_linear"),
)
_GRANITE = Architecture(
    build,
    Table((*LAYER, *PRE_NORMS)),
    ("granite",),
    gguf_rope="interleaved",
    keys={
        "residual_scale": Key("residual_scale", "residual_multiplier", FACTOR, 1.0),
        "logit_divisor": Key("logit_scale", "logits_scaling", FACTOR, 1.0),
    },
)
ARCHITECTURES = {
    "granite": _GRANITE,
    "granitemoe": replace(
        _GRANITE,
        names=Table((*LAYER, *PRE_NORMS, *_EXPERTS, *MOE, *shared_expert_names())),
        model_types=("granitemoe", "granitemoeshared"),
        experts="may",
        shared_expert="may",
    ),
}
