"""BERT and XLM-RoBERTa.

A family file: the equations of one encoder, top to bottom. Norms follow each half of a layer. A row of a table is added
for each position, which counts from pad + 1 in XLM-RoBERTa. Sources: BERT (arXiv 1810.04805), XLM-RoBERTa (arXiv
1911.02116).
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
from rlx.models.keys import Keys
from rlx.models.names import BIASED, DENSE, Row, Table

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


#: `general.architecture` -> its family.
FAMILIES = {"bert": EncoderFamily(build, NAMES, from_gguf)}
#: `model_type` in `config.json` -> the reader.
TYPES = dict.fromkeys(("bert", "roberta", "xlm-roberta", "camembert"), from_hf)
