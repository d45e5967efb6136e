"""Nomic BERT.

A family file: what differs from BERT, whose equations it shares. There is rope in place of a table of positions, a
gated feed-forward block, and no biases. Source: Nomic Embed (arXiv 2402.01613).
"""

from __future__ import annotations

from rlx.models.bert import build, config_from_gguf
from rlx.models.encoder import NORM_EPS, EncoderConfig, EncoderFamily
from rlx.models.keys import WIDTH, Keys
from rlx.models.names import BIASED, CLASSIFIER, DENSE, Row, Table

_GATED = {"silu": "silu", "swiglu": "silu", "geglu": "gelu_erf"}

NAMES = Table(
    (
        Row("attn_qkv", "attn.Wqkv", BIASED),
        Row("attn_output", "attn.out_proj", BIASED),
        Row("attn_output_norm", "norm1", BIASED),
        Row("ffn_up", "mlp.fc11", BIASED),
        Row("ffn_gate", "mlp.fc12", BIASED),
        Row("ffn_down", "mlp.fc2", BIASED),
        Row("layer_output_norm", "norm2", BIASED),
    ),
    (
        Row("token_embd", "embeddings.word_embeddings"),
        Row("token_types", "embeddings.token_type_embeddings"),
        Row("token_embd_norm", "emb_ln", BIASED),
        *DENSE,
    ),
    (CLASSIFIER,),
    ("", "model."),
    "encoder.layers",
)


def from_hf(keys: Keys) -> EncoderConfig:
    """From `config.json` in the published spelling or in that of transformers."""
    published = "n_embd" in keys
    for key in ("prenorm", "causal", "parallel_block", "rotary_emb_interleaved", "use_rms_norm"):
        keys.require(key, False, "such layers are not supported")
    keys.require("rotary_emb_fraction", 1.0, "only a rotation of whole heads is supported")

    def size(old: str, new: str) -> int:
        return keys.integer(old if published else new, WIDTH)

    layers = size("n_layer", "num_hidden_layers")
    rope = keys if published else keys.nested("rope_parameters", optional=True)
    base = rope.number("rotary_emb_base" if published else "rope_theta", (1.0, 1e12), 10_000.0)
    context = keys.integer("max_trained_positions" if published else "max_position_embeddings", (1, 1 << 20), 2048)
    return EncoderConfig(
        arch="nomic-bert",
        vocab_size=keys.integer("vocab_size", WIDTH),
        hidden=size("n_embd", "hidden_size"),
        heads=size("n_head", "num_attention_heads"),
        layers=layers,
        ffn=size("n_inner", "intermediate_size"),
        context=context,
        eps=keys.number("layer_norm_epsilon" if published else "layer_norm_eps", NORM_EPS, 1e-12),
        activation=keys.choice("activation_function" if published else "hidden_act", _GATED, "silu"),
        windows=(None,) * layers,
        bases=(base,) * layers,
        types=keys.integer("type_vocab_size", (0, 1 << 10), 2),
    )


def from_gguf(keys: Keys, vocab_size: int, types: int) -> EncoderConfig:
    """From GGUF metadata."""
    base = keys.number("rope.freq_base", (1.0, 1e12), 10_000.0)
    return config_from_gguf(keys, vocab_size, types, "silu", base)


FAMILIES = {"nomic-bert": EncoderFamily(build, NAMES, from_gguf)}
TYPES = {"nomic_bert": from_hf}
