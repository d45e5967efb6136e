"""StarCoder2: Llama with layer norms, biases everywhere, and an MLP without a gate.

A family file: what its files say; the equations are those of `llama.py`. Source: StarCoder2 (arXiv 2402.19173).
"""

from __future__ import annotations

from rlx.models import llama
from rlx.models.architectures import QKVO, Architecture, all_slide
from rlx.models.names import ATTENTION, BIASED, DECODER, FUSED_QKV, LINEAR, Row, Table

_LAYER = (
    *ATTENTION,
    *FUSED_QKV,
    Row("ffn_up", "mlp.c_fc", LINEAR),
    Row("ffn_down", "mlp.c_proj", LINEAR),
    Row("attn_norm", "input_layernorm", BIASED),
    Row("ffn_norm", "post_attention_layernorm", BIASED),
)
ARCHITECTURES = {
    "starcoder2": Architecture(
        llama.build,
        Table(_LAYER, (*DECODER, Row("output_norm", "norm", ("bias",)))),
        ("starcoder2",),
        norm="layer",
        bf16=True,
        gated_ffn=False,
        activation="gelu_tanh",
        biases=("attn_norm", "ffn_norm", "output_norm"),
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
}
