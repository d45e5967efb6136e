"""ModernBERT.

A family file: the equations of one encoder, top to bottom. Norms come before each half of a layer, but not before the
attention of the first one, whose input is normalized already. Every third layer sees the whole text, the others a
window; each kind has a rope of its own. Source: ModernBERT (arXiv 2412.13663).
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

_ACTIVATIONS = {"gelu": "gelu_erf", "gelu_pytorch_tanh": "gelu_tanh", "silu": "silu", "relu": "relu"}
_POOLINGS = {"cls": "cls", "mean": "mean"}
_FULL, _SLIDING = "full_attention", "sliding_attention"


def build(config: EncoderConfig, weights: Weights) -> Graph:
    """The body; see `rlx.models.encoder`."""
    model = EncoderModel(Graph(config.arch), config, weights)
    x = layer_norm(model, model.looked_up("token_embd.weight", config.vocab_size, "tokens"), "token_embd_norm")
    angles = rope_angles(model)
    for layer in model.layers():
        y = layer_norm(layer, x, "attn_norm") if layer.layer else x
        x = x + attention(layer, y, angles)
        x = x + mlp(layer, layer_norm(layer, x, "ffn_norm"))
    model.graph.output(HIDDEN, layer_norm(model, x, "output_norm"))
    return model.graph


NAMES = Table(
    (
        Row("attn_norm", "attn_norm", BIASED),
        Row("attn_qkv", "attn.Wqkv", BIASED),
        Row("attn_output", "attn.Wo", BIASED),
        Row("ffn_norm", "mlp_norm", BIASED),
        Row("ffn_up", "mlp.Wi", BIASED),
        Row("ffn_down", "mlp.Wo", BIASED),
    ),
    (
        Row("token_embd", "embeddings.tok_embeddings"),
        Row("token_embd_norm", "embeddings.norm", BIASED),
        Row("output_norm", "final_norm", BIASED),
        *DENSE,
    ),
    (
        Row("cls", "head.dense", BIASED),
        Row("cls.norm", "head.norm", BIASED),
        Row("cls.output", "classifier", BIASED),
    ),
    ("model.", ""),
)


def from_hf(keys: Keys) -> EncoderConfig:
    """From `config.json`."""
    sizes, window = hf_sizes(keys), keys.integer("local_attention", (1, 1 << 20), 128)
    layers = sizes["layers"]
    if "layer_types" in keys:
        kinds = {_FULL: _FULL, _SLIDING: _SLIDING}
        types = keys.elements("layer_types", lambda each: each.choice("layer_types", kinds), layers)
        local = [kind == _SLIDING for kind in types]
    else:
        local = _by_period(keys.integer("global_attn_every_n_layers", (1, 1024), 3), layers)
    ropes = keys.nested("rope_parameters", optional=True)

    def base(kind: str, published: str, default: float) -> float:
        if kind in ropes:
            ropes.nested(kind).require("rope_type", "default", "scaled ropes of encoders are not supported")
            return ropes.nested(kind).number("rope_theta", (1.0, 1e12), default)
        return keys.number(published, (1.0, 1e12), default)

    bases = base(_FULL, "global_rope_theta", 160_000.0), base(_SLIDING, "local_rope_theta", 10_000.0)
    return EncoderConfig(
        arch="modern-bert",
        **sizes,
        context=keys.integer("max_position_embeddings", (1, 1 << 20)),
        eps=keys.number("norm_eps", NORM_EPS, 1e-5),
        activation=keys.choice("hidden_activation", _ACTIVATIONS, "gelu"),
        windows=tuple(window // 2 if slides else None for slides in local),
        bases=tuple(bases[slides] for slides in local),
        classifier=keys.choice("classifier_activation", _ACTIVATIONS, "gelu"),
        pooling=keys.choice("classifier_pooling", _POOLINGS, "cls"),
    )


def from_gguf(keys: Keys, vocab_size: int, types: int) -> EncoderConfig:
    """From GGUF metadata."""
    sizes, window = gguf_sizes(keys), keys.integer("attention.sliding_window", (1, 1 << 20))
    local = _by_period(keys.integer("attention.sliding_window_pattern", (1, 1024), 3), sizes["layers"])
    usual = {"rope.freq_base": 160_000.0, "rope.freq_base_swa": 10_000.0}
    bases = [keys.number(key, (1.0, 1e12), base) for key, base in usual.items()]
    return EncoderConfig(
        arch="modern-bert",
        vocab_size=vocab_size,
        **sizes,
        activation=keys.choice("hidden_activation", _ACTIVATIONS, "gelu"),
        windows=tuple(window // 2 if slides else None for slides in local),
        bases=tuple(bases[slides] for slides in local),
        classifier="gelu_erf",
        pooling="cls" if keys.integer("classifier.pooling_type", (0, 4), 1) == 2 else "mean",
    )


def _by_period(period: int, layers: int) -> list[bool]:
    """Whether each layer has a window: every `period`-th, from the first one on, has none."""
    return [layer % period != 0 for layer in range(layers)]


FAMILIES = {"modern-bert": EncoderFamily(build, NAMES, from_gguf)}
TYPES = {"modernbert": from_hf}
