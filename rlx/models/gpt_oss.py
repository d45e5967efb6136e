"""gpt-oss: experts in every layer, with biases; every other layer has a window; heads may attend to nothing.

A family file: the equations of one decoder, top to bottom, and what its files say. Sources: the model card (arXiv
2508.10925), attention sinks (arXiv 2309.17453), and the published implementation in transformers.
"""

from __future__ import annotations

from rlx.ir import ops
from rlx.ir.dtypes import DType
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.models.architectures import Architecture, every_nth_is_full
from rlx.models.blocks import attention, embedding, head, mixture, norm, rope_angles
from rlx.models.builder import Model, Weights, start
from rlx.models.config import ModelConfig
from rlx.models.keys import FACTOR
from rlx.models.names import ATTENTION, ATTN_NORM, BIASED, FUSED_QKV, POST_NORM, WHOLE, Row, Table
from rlx.models.settings import Key


def build(config: ModelConfig, weights: Weights, kv_dtype: DType) -> Graph:
    """The graph of a gpt-oss model; see `rlx.models.build`."""
    model = start(config, weights, kv_dtype)
    x = embedding(model)
    angles = rope_angles(model)
    for layer in model.layers():
        x = x + attention(layer, norm(layer, x, "attn_norm"), angles, sinks=True)
        x = x + mixture(layer, norm(layer, x, "post_attention_norm"), gate_by=_bounded_swish)
    return head(model, x)


def _bounded_swish(model: Model, gate: Node, up: Node) -> Node:
    """gate sigmoid(alpha gate) (up + 1), of a gate up to the limit and an up between it and its negative."""
    limit, alpha = (model.config.own[name] for name in ("swiglu_limit", "swiglu_alpha"))
    gate, up = ops.clamp(gate, high=limit), ops.clamp(up, low=-limit, high=limit)
    y = gate * ops.sigmoid(ops.scale(gate, alpha))
    return y * up + y


_YARN = {
    "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096,
    "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
}  # fmt: skip
_EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
_NAMES = (
    Row("attn_sinks.weight", "self_attn.sinks", WHOLE),
    Row("ffn_gate_inp", "mlp.router", BIASED),
    Row("ffn_gate_up_exps.weight", "mlp.experts.gate_up_proj_blocks", WHOLE),
    Row("ffn_gate_up_exps_t.weight", "mlp.experts.gate_up_proj", WHOLE),
    Row("ffn_gate_up_exps.bias", "mlp.experts.gate_up_proj_bias", WHOLE),
    Row("ffn_down_exps.weight", "mlp.experts.down_proj_blocks", WHOLE),
    Row("ffn_down_exps_t.weight", "mlp.experts.down_proj", WHOLE),
    Row("ffn_down_exps.bias", "mlp.experts.down_proj_bias", WHOLE),
    *(Row(name, None, BIASED) for name in _EXPERTS),
)
ARCHITECTURES = {
    "gpt-oss": Architecture(
        build,
        Table((*ATTENTION, *FUSED_QKV, *ATTN_NORM, *POST_NORM, *_NAMES)),
        ("gpt_oss",),
        keys={
            "swiglu_limit": Key("", "swiglu_limit", FACTOR, 7.0),
            "swiglu_alpha": Key("", "swiglu_alpha", FACTOR, 1.702),
        },
        gguf_period=2,
        gguf_defaults={"rope.scaling.yarn_truncate": False},
        hf_sliding=every_nth_is_full(2),
        hf_base=150_000.0,
        hf_defaults={"rope_parameters": _YARN},
        experts="must",
        in_turns=True,
        biases=("ffn_gate_inp", *_EXPERTS),
    )
}
