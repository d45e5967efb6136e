"""Gemma 3, text.

A family file: the equations are those of Gemma 2 with norms on the heads of q and k in place of the caps. Five layers
of six have a window and a separate rope. Source: Gemma 3 (arXiv 2503.19786).
"""

from __future__ import annotations

from functools import partial

from rlx.models import gemma
from rlx.models.architectures import Architecture, every_nth_is_full
from rlx.models.names import HEAD_NORMS, LAYER, SANDWICH_NORMS, Table

ARCHITECTURES = {
    "gemma3": Architecture(
        partial(gemma.build, post_norms=True, head_norms=True),
        Table((*LAYER, *HEAD_NORMS, *SANDWICH_NORMS)),
        ("gemma3_text", "gemma3"),
        runner="gemma",
        two_way="all",
        bf16=True,
        gguf_period=6,
        hf_sliding=every_nth_is_full(6),
        local_base=10_000.0,
        hf_base=1_000_000.0,
        hf_keys={"activation": "hidden_activation"},
        activation="gelu_tanh",
        norm_offset=1.0,
        scales_embedding=True,
        wide_scale_layers=62,
        hf_defaults={
            **gemma.GEMMA2,
            "vocab_size": 262_208,
            "max_position_embeddings": 131_072,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
        },
    )
}
