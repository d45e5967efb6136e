"""LFM2 with experts in all layers but the first ones, which sigmoids choose.

A family file, over the equations of `lfm2.py`. Source: LFM2 (arXiv 2511.23404).
"""

from __future__ import annotations

from dataclasses import replace

from rlx.models import lfm2
from rlx.models.names import SCALED, WHOLE, Row, Table

_LFM2 = lfm2.ARCHITECTURES["lfm2"]
_EXPERTS = (
    Row("ffn_gate_inp", "feed_forward.gate"),
    Row("exp_probs_b.bias", "feed_forward.expert_bias", WHOLE),
    Row("ffn_gate_exps", "feed_forward.experts.{}.w1", SCALED),
    Row("ffn_up_exps", "feed_forward.experts.{}.w3", SCALED),
    Row("ffn_down_exps", "feed_forward.experts.{}.w2", SCALED),
    Row("ffn_gate_up_exps.weight", "feed_forward.experts.gate_up_proj", WHOLE),
    Row("ffn_down_exps.weight", "feed_forward.experts.down_proj", WHOLE),
)
ARCHITECTURES = {
    "lfm2moe": replace(
        _LFM2,
        names=Table((*_LFM2.names.layer, *_EXPERTS), _LFM2.names.decoder),
        model_types=("lfm2_moe",),
        experts="must",
        router="sigmoid",
        hf_keys={**_LFM2.hf_keys, "dense_layers": "num_dense_layers"},
        hf_defaults={"hidden_act": "silu", "tie_word_embeddings": True, "norm_eps": 1e-5, "conv_L_cache": 3},
    )
}
