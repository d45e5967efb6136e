"""StarCoder2, StableLM 2 and Nemotron (Minitron): Llama with layer norms, which have biases.

A family file: what its files say; the equations are those of `llama.py`. StarCoder2 and Nemotron have an MLP without a
gate, StableLM 2 and Nemotron rope in a part of each head. Sources: StarCoder2 (arXiv 2402.19173), StableLM 2 (arXiv
2402.17834), Nemotron-4 (arXiv 2402.16819).
"""

from __future__ import annotations

from dataclasses import replace

from rlx.models import llama
from rlx.models.architectures import QKV, QKVO, Architecture, all_slide
from rlx.models.names import ATTENTION, BIASED, DECODER, FUSED_QKV, LAYER, LINEAR, Row, Table

_NORMS = (Row("attn_norm", "input_layernorm", BIASED), Row("ffn_norm", "post_attention_layernorm", BIASED))
_HEAD_NORMS = (Row("attn_q_norm", None), Row("attn_k_norm", None))
_DECODER = (*DECODER, Row("output_norm", "norm", ("bias",)))
_MLP = (Row("ffn_up", "mlp.c_fc", LINEAR), Row("ffn_down", "mlp.c_proj", LINEAR))
_LAYER_NORMS = Architecture(
    llama.build,
    Table((*LAYER, *_NORMS), _DECODER),
    (),
    norm="layer",
    bf16=True,
    biases=("attn_norm", "ffn_norm", "output_norm"),
)
ARCHITECTURES = {
    "starcoder2": replace(
        _LAYER_NORMS,
        names=Table((*ATTENTION, *FUSED_QKV, *_MLP, *_NORMS), _DECODER),
        model_types=("starcoder2",),
        gated_ffn=False,
        activation="gelu_tanh",
        gguf_period=1 << 30,
        hf_sliding=all_slide,
        hf_layer_types=False,
        hf_keys={"eps": "norm_epsilon"},
        hf_biases={"use_bias": (*QKVO, "ffn_up", "ffn_down")},
        hf_defaults={
            "hidden_act": "gelu_pytorch_tanh",
            "norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
            "use_bias": True,
        },
    ),
    "stablelm": replace(
        _LAYER_NORMS,
        names=Table((*LAYER, *_NORMS, *_HEAD_NORMS), _DECODER),
        model_types=("stablelm",),
        partial_rope=0.25,
        hf_only={  # StableLM 2 12B has both
            "use_parallel_residual": (False, "parallel blocks are not supported for this architecture"),
            "qk_layernorm": (False, "norms on the heads of q and k are not supported for this architecture"),
        },
        hf_keys={"eps": "layer_norm_eps"},
        hf_biases={"use_qkv_bias": QKV},
        hf_defaults={"layer_norm_eps": 1e-5},
    ),
    "nemotron": replace(
        _LAYER_NORMS,
        model_types=("nemotron",),
        norm_offset=1.0,
        gated_ffn=False,
        activation="relu2",
        partial_rope=0.5,
        hf_keys={"eps": "norm_eps"},
        hf_defaults={"hidden_act": "relu2", "norm_eps": 1e-5},
    ),
}
