"""Granite 4 with Mamba-2 in place of attention in most layers, which then have no rope.

A family file, over the equations of `granite.py`. Source: the published implementation in transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rlx.models import granite
from rlx.models.architectures import QKVO
from rlx.models.keys import Keys
from rlx.models.mamba import IN_OUT
from rlx.models.names import Table, mamba_names

_MOE = granite.ARCHITECTURES["granitemoe"]


def _rope_layers(keys: Keys, windows: Sequence[int | None]) -> list[bool]:
    has = keys.text("position_embedding_type", "rope") == "rope" and keys.flag("rope.scaling.finetuned", True)
    return [has] * len(windows)


def _spelled(keys: Keys) -> dict[str, Any]:
    """Without experts the width of the shared one is that of the dense block."""
    return {"intermediate_size": keys.get("shared_intermediate_size")} if not keys.get("num_local_experts", 0) else {}


ARCHITECTURES = {
    "granitehybrid": replace(
        _MOE,
        names=Table((*_MOE.names.layer, *mamba_names("mamba"))),
        model_types=("granitemoehybrid",),
        hybrid="mamba",
        rope_layers=_rope_layers,
        hf_spelling=_spelled,
        hf_biases={"attention_bias": QKVO, "mamba_conv_bias": ("ssm_conv1d",), "mamba_proj_bias": IN_OUT},
        hf_keys={
            "value_heads": "mamba_n_heads",
            "key_heads": "mamba_n_groups",
            "key_dim": "mamba_d_state",
            "value_dim": "mamba_d_head",
        },
        hf_defaults={
            "position_embedding_type": "nope",
            "mamba_n_groups": 1,
            "mamba_d_conv": 4,
            "mamba_conv_bias": True,
        },
    ),
}
