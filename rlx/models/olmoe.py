"""OLMoE and MiniMax-M2: Llama with experts in every layer, and norms over all heads of q and of k together.

A family file: what its files say; the equations are those of `llama.py`. In OLMoE a softmax chooses the experts, in
MiniMax-M2 biased sigmoids. Sources: OLMoE (arXiv 2409.02060), MiniMax-M2 in transformers.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from rlx.models import llama
from rlx.models.architectures import Architecture
from rlx.models.blocks import attention
from rlx.models.keys import HEADS, Keys
from rlx.models.names import HEAD_NORMS, LAYER, MOE, PRE_NORMS, WHOLE, Row, Table


def _partial_rope(keys: Keys) -> dict[str, Any]:
    """How many elements of a head have rope, as the part of it."""
    if "rotary_dim" not in keys:
        return {}
    return {"partial_rotary_factor": keys.integer("rotary_dim", HEADS) / keys.integer("head_dim", HEADS)}


_BUILD = partial(llama.build, attend=partial(attention, norms="whole"))
_M2 = (*llama.MIXTRAL, Row("exp_probs_b.bias", "block_sparse_moe.e_score_correction_bias", WHOLE))
ARCHITECTURES = {
    "olmoe": Architecture(
        _BUILD,
        Table((*LAYER, *HEAD_NORMS, *PRE_NORMS, *MOE)),
        ("olmoe",),
        bf16=True,
        experts="may",
        hf_only={"clip_qkv": (None, "bounds of q, k and v are not supported")},
        hf_defaults={"norm_topk_prob": False},
        gguf_defaults={"expert_weights_norm": False},
    ),
    "minimax-m2": Architecture(
        _BUILD,
        Table((*LAYER, *HEAD_NORMS, *PRE_NORMS, *MOE, *_M2)),
        ("minimax_m2",),
        bf16=True,
        partial_rope=1.0,
        experts="must",
        router="sigmoid",
        biases=("exp_probs_b",),
        hf_base=5_000_000.0,
        hf_spelling=_partial_rope,
        hf_defaults={"head_dim": 128},
    ),
}
