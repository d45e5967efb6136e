"""How the architectures differ: one row each.

Part of the models stage, read by `config.py`. A new architecture is a row here, a row in `rlx.models.FAMILIES` and the
equations in a family file.

Sources: llama.cpp for what GGUF files leave unsaid; the configuration classes of transformers, whose defaults published
`config.json` files rely on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rlx.models.keys import Keys

Sliding = Callable[[Keys, int], list[bool]]


def none_slides(keys: Keys, layers: int) -> list[bool]:
    """No layer has a window."""
    return [False] * layers


def _upper_layers_slide(keys: Keys, layers: int) -> list[bool]:
    """Qwen: with `use_sliding_window`, the layers from `max_window_layers` on."""
    first = keys.integer("max_window_layers", (0, 1 << 31), layers)
    return [keys.flag("use_sliding_window", False) and layer >= first for layer in range(layers)]


def _every_nth_is_full(n: int) -> Sliding:
    """Gemma: every `n`-th layer attends to everything, unless the file has another period."""

    def slides(keys: Keys, layers: int) -> list[bool]:
        key = "sliding_window_pattern" if "sliding_window_pattern" in keys else "_sliding_window_pattern"
        return by_period(keys.integer(key, (1, 1 << 31), n), layers)

    return slides


def by_period(period: int, layers: int) -> list[bool]:
    """True for the layers with a window, where every `period`-th has none."""
    return [(layer + 1) % period != 0 for layer in range(layers)]


@dataclass(frozen=True)
class Architecture:
    """How one architecture differs from the others.

    Attributes:
        family: the runner family.
        model_types: `model_type` in `config.json`, of the text part and of models that contain it.
        gguf_rope: rope style of its GGUF files; of safetensors it is always "neox".
        gguf_period: in GGUF every n-th layer has no window; None: no layer has one.
        gguf_window: default window of its GGUF files, 0 for none.
        gguf_caps: (attention, logits): default softcaps of its GGUF files, 0 for none.
        hf_sliding: which layers slide according to a `config.json` without `layer_types`.
        local_base: default base of a rope of their own for sliding layers, None if they share the model's.
        hf_base: default of `rope_theta`.
        hf_activation: keys of the activation in `config.json`; the first that is there counts.
        hf_activation_names: what its files call activations differently than others.
        activation: in GGUF, which has no key for it.
        norm_offset: what the norm weights of its safetensors lack.
        scales_embedding: embeddings are multiplied by sqrt(hidden).
        biases: linear layers that must have a bias; others may.
        wide_scale_layers: layer count of the one model whose attention scale is 1/sqrt(hidden/heads), which GGUF does
            not store.
        hf_defaults: values of keys that published files leave out; a null is not left out.
    """

    family: str
    model_types: tuple[str, ...]
    gguf_rope: str = "neox"
    gguf_period: int | None = None
    gguf_window: int = 0
    gguf_caps: tuple[float, float] = (0.0, 0.0)
    hf_sliding: Sliding = none_slides
    local_base: float | None = None
    hf_base: float = 10_000.0
    hf_activation: tuple[str, ...] = ("hidden_act",)
    hf_activation_names: Mapping[str, str] = field(default_factory=dict)
    activation: str = "silu"
    norm_offset: float = 0.0
    scales_embedding: bool = False
    biases: tuple[str, ...] = ()
    wide_scale_layers: int | None = None
    hf_defaults: Mapping[str, Any] = field(default_factory=dict)


_GEMMA_DEFAULTS: dict[str, Any] = {
    "vocab_size": 256_000,
    "hidden_size": 3072,
    "intermediate_size": 24_576,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "hidden_act": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}
_GEMMA2_DEFAULTS: dict[str, Any] = {
    "vocab_size": 256_000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}
_GEMMA3_DEFAULTS: dict[str, Any] = {
    **_GEMMA2_DEFAULTS,
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama32", ("llama",), gguf_rope="interleaved"),
    "qwen2": Architecture(
        "qwen3",
        ("qwen2",),
        hf_sliding=_upper_layers_slide,
        biases=("attn_q", "attn_k", "attn_v"),
        hf_defaults={"use_sliding_window": False},
    ),
    "qwen3": Architecture(
        "qwen3",
        ("qwen3",),
        hf_sliding=_upper_layers_slide,
        hf_defaults={"use_sliding_window": False, "head_dim": 128},
    ),
    "gemma": Architecture(
        "gemma",
        ("gemma",),
        # The first files say "gelu" in the older key; the model was trained with the approximation by tanh.
        hf_activation=("hidden_activation", "hidden_act"),
        hf_activation_names={"gelu": "gelu_tanh"},
        activation="gelu_tanh",
        norm_offset=1.0,
        scales_embedding=True,
        hf_defaults=_GEMMA_DEFAULTS,
    ),
    "gemma2": Architecture(
        "gemma",
        ("gemma2",),
        gguf_period=2,
        gguf_window=4096,
        gguf_caps=(50.0, 30.0),
        hf_sliding=_every_nth_is_full(2),
        hf_activation=("hidden_activation",),
        activation="gelu_tanh",
        norm_offset=1.0,
        scales_embedding=True,
        wide_scale_layers=46,
        hf_defaults=_GEMMA2_DEFAULTS,
    ),
    "gemma3": Architecture(
        "gemma",
        ("gemma3_text", "gemma3"),
        gguf_period=6,
        hf_sliding=_every_nth_is_full(6),
        local_base=10_000.0,
        hf_base=1_000_000.0,
        hf_activation=("hidden_activation",),
        activation="gelu_tanh",
        norm_offset=1.0,
        scales_embedding=True,
        wide_scale_layers=62,
        hf_defaults=_GEMMA3_DEFAULTS,
    ),
}
MODEL_TYPES = {name: arch for arch, row in ARCHITECTURES.items() for name in row.model_types}
