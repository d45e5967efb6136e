"""BERT, XLM-RoBERTa and Nomic BERT.

A family file: the equations of one encoder, top to bottom. Norms follow each half of a layer. A row of a table is added
for each position, which counts from pad + 1 in XLM-RoBERTa; Nomic BERT has a rope. Sources: BERT (arXiv 1810.04805),
XLM-RoBERTa (arXiv 1911.02116), Nomic Embed (arXiv 2402.01613).
"""

from __future__ import annotations

from rlx.ir.graph import Graph
from rlx.models.builder import Weights
from rlx.models.encoder import (
    HIDDEN,
    NORM_EPS,
    EncoderConfig,
    EncoderFamily,
    EncoderModel,
    attention,
    gguf_sizes,
    hf_sizes,
    layer_norm,
    mlp,
    rope_angles,
)
from rlx.models.keys import WIDTH, Keys
from rlx.models.names import BIASED, CLASSIFIER, DENSE, Row, Table

_ACTIVATIONS = {"gelu": "gelu_erf", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}


def build(config: EncoderConfig, weights: Weights) -> Graph:
    """The body; see `rlx.models.encoder`."""
    model = EncoderModel(Graph(config.arch), config, weights)
    x = model.looked_up("token_embd.weight", config.vocab_size, "tokens")
    if config.bases[0] is None:
        rows = config.first_position + config.context
        x = x + model.looked_up("position_embd.weight", rows, "positions")
    if config.types:
        x = x + model.looked_up("token_types.weight", config.types, "types")
    x = layer_norm(model, x, "token_embd_norm")
    angles = rope_angles(model)
    for layer in model.layers():
        x = layer_norm(layer, x + attention(layer, x, angles), "attn_output_norm")
        x = layer_norm(layer, x + mlp(layer, x), "layer_output_norm")
    model.graph.output(HIDDEN, x)
    return model.graph


NAMES = Table(
    (
        Row("attn_q", "attention.self.query", BIASED),
        Row("attn_k", "attention.self.key", BIASED),
        Row("attn_v", "attention.self.value", BIASED),
        Row("attn_output", "attention.output.dense", BIASED),
        Row("attn_output_norm", "attention.output.LayerNorm", BIASED),
        Row("ffn_up", "intermediate.dense", BIASED),
        Row("ffn_down", "output.dense", BIASED),
        Row("layer_output_norm", "output.LayerNorm", BIASED),
    ),
    (
        Row("token_embd", "embeddings.word_embeddings"),
        Row("position_embd", "embeddings.position_embeddings"),
        Row("token_types", "embeddings.token_type_embeddings"),
        Row("token_embd_norm", "embeddings.LayerNorm", BIASED),
        Row("pooler", "pooler.dense", BIASED),
        *DENSE,
    ),
    (
        Row("cls", "classifier.dense", BIASED),
        Row("cls.output", "classifier.out_proj", BIASED),
        Row("cls.output", "classifier", BIASED),
    ),
    ("bert.", "roberta.", ""),
    "encoder.layer",
)


def from_hf(keys: Keys) -> EncoderConfig:
    """From `config.json`."""
    keys.require("position_embedding_type", "absolute", "only absolute positions are supported")
    keys.require("is_decoder", False, "the checkpoint is a decoder")
    roberta = keys.text("model_type") != "bert"
    first = keys.integer("pad_token_id", (0, 1 << 20), 1) + 1 if roberta else 0
    sizes = hf_sizes(keys)
    return EncoderConfig(
        arch="bert",
        **sizes,
        context=keys.integer("max_position_embeddings", (first + 1, 1 << 20)) - first,
        eps=keys.number("layer_norm_eps", NORM_EPS, 1e-12),
        activation=keys.choice("hidden_act", _ACTIVATIONS, "gelu"),
        windows=(None,) * sizes["layers"],
        bases=(None,) * sizes["layers"],
        types=keys.integer("type_vocab_size", (0, 1 << 10), 2),
        first_position=first,
    )


def from_gguf(keys: Keys, vocab_size: int, types: int) -> EncoderConfig:
    """From GGUF metadata."""
    return config_from_gguf(keys, vocab_size, types, "gelu_erf", None)


def config_from_gguf(keys: Keys, vocab_size: int, types: int, activation: str, base: float | None) -> EncoderConfig:
    """The configuration from GGUF metadata, which names neither the activation nor whether there is a rope."""
    keys.require("expert_count", 0, "experts in encoders are not supported")
    sizes = gguf_sizes(keys)
    return EncoderConfig(
        arch=keys.prefix.removesuffix("."),
        vocab_size=vocab_size,
        **sizes,
        activation=activation,
        windows=(None,) * sizes["layers"],
        bases=(base,) * sizes["layers"],
        types=types,
    )


# -- Nomic BERT: rope in place of a table of positions, a gated feed-forward block, no biases -------------------------

_GATED = {"silu": "silu", "swiglu": "silu", "geglu": "gelu_erf"}
NOMIC_NAMES = Table(
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


def nomic_from_hf(keys: Keys) -> EncoderConfig:
    """From `config.json` in the published spelling or in that of transformers."""
    published = "n_embd" in keys
    for key in ("prenorm", "causal", "parallel_block", "rotary_emb_interleaved", "use_rms_norm"):
        keys.require(key, False, "such layers are not supported")
    keys.require("rotary_emb_fraction", 1.0, "only a rotation of whole heads is supported")

    def size(old: str, new: str) -> int:
        return keys.integer(old if published else new, WIDTH)

    layers = size("n_layer", "num_hidden_layers")
    rope = keys if published else keys.nested("rope_parameters", optional=True)
    if rope.get("rope_type", "dynamic") != "dynamic":  # which changes nothing within the context
        rope.require("rope_type", "default", "scaled ropes of encoders are not supported")
    keys.require("rotary_emb_scale_base", None, "scaled ropes of encoders are not supported")
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


def nomic_from_gguf(keys: Keys, vocab_size: int, types: int) -> EncoderConfig:
    """From GGUF metadata."""
    base = keys.number("rope.freq_base", (1.0, 1e12), 10_000.0)
    return config_from_gguf(keys, vocab_size, types, "silu", base)


#: `general.architecture` -> its family.
FAMILIES = {
    "bert": EncoderFamily(build, NAMES, from_gguf),
    "nomic-bert": EncoderFamily(build, NOMIC_NAMES, nomic_from_gguf),
}
#: `model_type` in `config.json` -> the reader.
TYPES = {**dict.fromkeys(("bert", "roberta", "xlm-roberta", "camembert"), from_hf), "nomic_bert": nomic_from_hf}
