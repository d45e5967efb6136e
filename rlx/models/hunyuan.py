"""Hunyuan, dense and with experts: Llama whose heads of q and k are normalized behind the rotation.

A family file: what its files say; the equations are those of `llama.py`. Source: the published implementation in
transformers.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from rlx.models import llama
from rlx.models.architectures import Architecture
from rlx.models.blocks import attention
from rlx.models.keys import HEADS, POSITIVE, WIDTH, Keys
from rlx.models.names import LAYER, MOE, PRE_NORMS, Row, Table, shared_expert_names


def _scaled_base(keys: Keys) -> dict[str, Any]:
    """A fixed alpha only makes the base larger. One expert is none."""
    found, whole = dict[str, Any](), keys.integer("hidden_size", WIDTH)
    for place in ("rope_parameters", "rope_scaling"):
        rope = keys.nested(place, optional=True)
        if "alpha" in rope and rope.get("rope_type", rope.get("type", "")) == "dynamic":
            size = keys.integer("head_dim", HEADS, whole // keys.integer("num_attention_heads", HEADS))
            base = rope.number("rope_theta", POSITIVE, keys.number("rope_theta", POSITIVE, 10_000.0))
            found[place] = {"rope_type": "default"}
            found["rope_theta"] = base * rope.number("alpha", POSITIVE) ** (size / max(size - 2, 1))
    return found if keys.get("num_experts", 1) != 1 else {**found, "num_experts": 0}


_NORMS = (Row("attn_q_norm", "self_attn.query_layernorm"), Row("attn_k_norm", "self_attn.key_layernorm"))
_EXPERTS = (Row("ffn_gate_inp", "mlp.gate.wg"), *MOE[1:], *shared_expert_names("mlp.shared_mlp"))
_DENSE = Architecture(
    partial(llama.build, attend=partial(attention, norms="after_rope")),
    Table((*LAYER, *_NORMS, *PRE_NORMS)),
    ("hunyuan_v1_dense",),
    bf16=True,
    hf_spelling=_scaled_base,
)
ARCHITECTURES = {
    "hunyuan-dense": _DENSE,
    "hunyuan-moe": replace(
        _DENSE,
        names=Table((*LAYER, *_NORMS, *PRE_NORMS, *_EXPERTS)),
        model_types=("hunyuan_v1_moe",),
        experts="must",
        shared_expert="may",
        hf_keys={"experts_used": "moe_topk", "shared_ffn": "intermediate_size"},
    ),
}
