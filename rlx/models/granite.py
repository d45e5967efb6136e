"""Granite 3 and 4: dense, with experts, and with a shared expert. `granite_hybrid.py` has the row for Mamba-2.

A family file: the equations of one decoder, top to bottom, and what its files say. It is llama with factors on the
embeddings, the residual branches, the scores and the logits. Source: the published implementation in transformers.
"""

from __future__ import annotations

from dataclasses import replace

from rlx.ir import ops
from rlx.ir.dtypes import DType
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.models.architectures import Architecture
from rlx.models.blocks import attention, embedding, feed_forward, head, mlp, norm, rope_angles, shared_expert
from rlx.models.builder import Model, Weights, start
from rlx.models.config import ModelConfig
from rlx.models.keys import FACTOR
from rlx.models.mamba import mamba
from rlx.models.names import LAYER, MOE, PRE_NORMS, WHOLE, Row, Table, shared_expert_names
from rlx.models.settings import Key


def build(config: ModelConfig, weights: Weights, kv_dtype: DType) -> Graph:
    """The graph of a Granite model; see `rlx.models.build`."""
    model = start(config, weights, kv_dtype)
    x = embedding(model)
    angles, by = rope_angles(model), config.own["residual_scale"]
    for layer in model.layers():
        y = norm(layer, x, "attn_norm")
        x = x + ops.scale(mamba(layer, y) if layer.here.recurrent else attention(layer, y, angles), by)
        x = x + ops.scale(_forward(layer, norm(layer, x, "ffn_norm")), by)
    return head(model, x, scale=1 / config.own["logit_divisor"])


def _forward(layer: Model, x: Node) -> Node:
    """The experts with the shared one; checkpoints without experts may call their dense block the shared expert."""
    experts = layer.config.experts
    if experts is None:
        return mlp(layer, x, suffix="_shexp" if layer.has("ffn_down_shexp.weight") else "")
    return feed_forward(layer, x) + shared_expert(layer, x) if experts.shared else feed_forward(layer, x)


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
