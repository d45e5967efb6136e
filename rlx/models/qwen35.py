"""Qwen 3 Next and 3.5, dense and with experts: three of four layers use a gated delta rule instead of attention.

A family file: the equations of one decoder, top to bottom. Sources: gated delta networks (arXiv 2412.06464), the
technical report of Qwen 3 (arXiv 2505.09388) for the rest; the shared expert, which every token uses, is that of
DeepSeekMoE (arXiv 2401.06066). The MTP head, which predicts the token after the next, is one more layer with the
model's embedding and head (DeepSeek-V3, arXiv 2412.19437, section 2.2).
"""

from __future__ import annotations

from dataclasses import replace

from rlx.ir import ops
from rlx.ir.dims import SEQ
from rlx.ir.dtypes import DType
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.models.architectures import Architecture
from rlx.models.blocks import Angles, attention, embedding, feed_forward, head, linear, norm, rope_angles
from rlx.models.builder import DRAFT_HEAD, Model, Weights, start
from rlx.models.config import ModelConfig
from rlx.models.names import (
    ATTENTION,
    ATTN_NORM,
    FUSED_QKV,
    GATED_SHARED,
    HEAD_NORMS,
    LINEAR,
    MLP,
    MOE,
    POST_NORM,
    SCALED,
    WHOLE,
    Row,
    Table,
)
from rlx.models.recurrent import delta_net


def build(config: ModelConfig, weights: Weights, kv_dtype: DType) -> Graph:
    """The graph of a Qwen 3.5 model; see `rlx.models.build`."""
    model = start(config, weights, kv_dtype)
    x = embedding(model)
    angles = rope_angles(model)
    for layer in model.layers():
        x = block(layer, x, angles)
    return head(model, x)


def block(layer: Model, x: Node, angles: Angles) -> Node:
    """One layer: x f32 [SEQ, hidden] -> f32 [SEQ, hidden]."""
    y = norm(layer, x, "attn_norm")
    recurrent = layer.here.recurrent
    x = x + (delta_net(layer, y) if recurrent else attention(layer, y, angles, norms="heads", gated=True))
    return x + feed_forward(layer, norm(layer, x, "post_attention_norm"))


_PROJECTIONS = (
    Row("attn_qkv", "linear_attn.in_proj_qkv", LINEAR),
    Row("attn_gate", "linear_attn.in_proj_z", LINEAR),
    Row("ssm_alpha", "linear_attn.in_proj_a", SCALED),
    Row("ssm_beta", "linear_attn.in_proj_b", SCALED),
)
_GROUPED = (
    *FUSED_QKV,
    Row("attn_gate", None, LINEAR),
    Row("ssm_in", "linear_attn.in_proj_qkvz", LINEAR),
    Row("ssm_ba", "linear_attn.in_proj_ba", SCALED),
)
_RECURRENT = (
    Row("ssm_conv1d", "linear_attn.conv1d"),
    Row("ssm_a", "linear_attn.A_log", WHOLE),
    Row("ssm_dt.bias", "linear_attn.dt_bias", WHOLE),
    Row("ssm_norm", "linear_attn.norm"),
    Row("ssm_out", "linear_attn.out_proj", SCALED),
)
_PREDICTION = tuple(Row(f"nextn.{name}", None) for name in ("enorm", "hnorm", "shared_head_norm"))
_NEXT = (Row("nextn.eh_proj", None, SCALED), *_PREDICTION)  # of the block behind the last layer
_LAYER = (*ATTN_NORM, *ATTENTION, *HEAD_NORMS, *POST_NORM, *_RECURRENT, *_NEXT)
_QWEN35 = Architecture(
    build,
    Table((*_LAYER, *_PROJECTIONS, *MLP)),
    ("qwen3_5_text", "qwen3_5"),
    runner="qwen35",
    partial_rope=0.25,
    rope_sections=(11, 11, 10),
    norm_offset=1.0,
    plain_norms=("ssm_norm",),
    hybrid="delta rule",
    gguf_heads="tiled",
    predicts=True,
    hf_defaults={
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
)
ARCHITECTURES = {
    "qwen35": _QWEN35,
    "qwen35moe": replace(
        _QWEN35,
        names=Table((*_LAYER, *_PROJECTIONS, *MOE, *GATED_SHARED)),
        model_types=("qwen3_5_moe_text", "qwen3_5_moe"),
        experts="must",
        shared_expert="gated",
    ),
    "qwen3next": replace(
        _QWEN35,
        names=Table((*_LAYER, *_GROUPED, *MLP, *MOE, *GATED_SHARED)),
        model_types=("qwen3_next",),
        rope_sections=(),
        gguf_heads="grouped",
        experts="must",
        shared_expert="gated",
    ),
}


def build_predictor(config: ModelConfig, weights: Weights, kv_dtype: DType, rows: int) -> Graph:
    """The graph of the head; see `rlx.models.build_predictor`."""
    model = start(config.predictor, weights, kv_dtype)
    here = replace(model, layer=config.layers)
    hidden = model.graph.input("hidden", [SEQ, config.hidden])
    joined = ops.concat(norm(here, embedding(model), "nextn.enorm"), norm(here, hidden, "nextn.hnorm"))
    x = block(here, linear(here, joined, "nextn.eh_proj", config.hidden), rope_angles(model))
    own_norm = here.has("nextn.shared_head_norm.weight")
    x = norm(here, x, "nextn.shared_head_norm") if own_norm else norm(model, x, "output_norm")
    model.graph.output("next_hidden", x)
    table = model.weight(f"{'token_embd' if config.tied else 'output'}.weight", config.vocab_size, config.hidden)
    first = model.graph.weight(DRAFT_HEAD, (rows, config.hidden), table.dtype)
    model.graph.output("token", ops.pick(ops.linear(x, first, bf16=config.bf16)))
    return model.graph
