"""Gemma 1, 2 and the text models of Gemma 3.

A family file: the equations of one decoder, top to bottom, and what its files say. Embeddings are scaled by
sqrt(hidden). Gemma 2 also normalizes the output of each half of a layer, caps scores and logits, and gives every second
layer a window. Gemma 3 has norms on the heads of q and k in place of the caps; five layers of six have a window and a
rope of their own. Caps and windows come from the configuration. Sources: Gemma (arXiv 2403.08295), Gemma 2 (arXiv
2408.00118), Gemma 3 (arXiv 2503.19786).
"""

from __future__ import annotations

from functools import partial

from rlx.ir.dtypes import DType
from rlx.ir.graph import Graph
from rlx.models.architectures import Architecture, every_nth_is_full
from rlx.models.blocks import attention, embedding, head, mlp, norm, rope_angles
from rlx.models.builder import Weights, start
from rlx.models.config import ModelConfig
from rlx.models.names import HEAD_NORMS, LAYER, PRE_NORMS, SANDWICH_NORMS, Table


def build(config: ModelConfig, weights: Weights, kv_dtype: DType, *, post_norms: bool, norms: str = "") -> Graph:
    """The graph of a Gemma model; see `rlx.models.build`.

    Args:
        post_norms: adds norms after attention and MLP.
        norms: of q and k, as for `attention`.
    """
    model = start(config, weights, kv_dtype)
    x = embedding(model)
    angles = rope_angles(model)
    for layer in model.layers():
        y = attention(layer, norm(layer, x, "attn_norm"), angles, norms=norms)
        x = x + (norm(layer, y, "post_attention_norm") if post_norms else y)
        y = mlp(layer, norm(layer, x, "ffn_norm"))
        x = x + (norm(layer, y, "post_ffw_norm") if post_norms else y)
    return head(model, x)


_GEMMA1 = {
    "vocab_size": 256_000, "hidden_size": 3072, "intermediate_size": 24_576, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 256, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True,
}  # fmt: skip
_GEMMA2 = {
    "vocab_size": 256_000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6, "query_pre_attn_scalar": 256, "sliding_window": 4096, "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
}  # fmt: skip
ARCHITECTURES = {
    "gemma": Architecture(
        partial(build, post_norms=False),
        Table((*LAYER, *PRE_NORMS)),
        ("gemma",),
        runner="gemma",
        # The first files say "gelu" in the older key; the model was trained with the tanh approximation.
        hf_keys={"activation": "hidden_activation hidden_act"},
        hf_activation_names={"gelu": "gelu_tanh"},
        activation="gelu_tanh",
        norm_offset=1.0,
        scales_embedding=True,
        hf_defaults=_GEMMA1,
    ),
    "gemma2": Architecture(
        partial(build, post_norms=True),
        Table((*LAYER, *SANDWICH_NORMS)),
        ("gemma2",),
        runner="gemma",
        bf16=True,
        gguf_period=2,
        gguf_window=4096,
        gguf_caps=(50.0, 30.0),
        hf_sliding=every_nth_is_full(2),
        hf_keys={"activation": "hidden_activation"},
        activation="gelu_tanh",
        norm_offset=1.0,
        scales_embedding=True,
        wide_scale_layers=46,
        hf_defaults=_GEMMA2,
    ),
    "gemma3": Architecture(
        partial(build, post_norms=True, norms="heads"),
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
            **_GEMMA2,
            "vocab_size": 262_208,
            "max_position_embeddings": 131_072,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
        },
    ),
}
