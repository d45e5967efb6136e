"""Differences between the architectures, one row each.

Part of the models stage, read by `gguf_config.py` and `hf_config.py`. A new architecture is a row here, a row in
`rlx.models.FAMILIES` and the equations in a family file.

Sources: llama.cpp for defaults that GGUF files omit; the configuration classes of transformers for defaults that
published `config.json` files omit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rlx.models.keys import Keys

Sliding = Callable[[Keys, int], list[bool]]


def none_slides(keys: Keys, layers: int) -> list[bool]:
    """No layer has a window."""
    return [False] * layers


def _all_slide(keys: Keys, layers: int) -> list[bool]:
    """Mistral: every layer has a window if the file has the key."""
    return ["sliding_window" in keys] * layers


def _all_slide_if_asked(keys: Keys, layers: int) -> list[bool]:
    """Qwen 3 MoE: every layer has a window if `use_sliding_window` is true."""
    return [keys.flag("use_sliding_window", False) and "sliding_window" in keys] * layers


def _upper_layers_slide(keys: Keys, layers: int) -> list[bool]:
    """Qwen: the layers from `max_window_layers` on have a window if `use_sliding_window` is true."""
    first = keys.integer("max_window_layers", (0, 1 << 31), layers)
    return [slides and layer >= first for layer, slides in enumerate(_all_slide_if_asked(keys, layers))]


def _every_nth_is_full(n: int) -> Sliding:
    """Gemma: every `n`-th layer has no window, unless the file has another period."""

    def slides(keys: Keys, layers: int) -> list[bool]:
        key = "sliding_window_pattern" if "sliding_window_pattern" in keys else "_sliding_window_pattern"
        return by_period(keys.integer(key, (1, 1 << 31), n), layers)

    return slides


def by_period(period: int, layers: int) -> list[bool]:
    """Whether each layer has a window: False for every `period`-th one, True for the others."""
    return [(layer + 1) % period != 0 for layer in range(layers)]


@dataclass(frozen=True)
class Architecture:
    """How one architecture differs from the others.

    Attributes:
        family: the runner family.
        model_types: `model_type` in `config.json`, of the text part and of models that contain it.
        hf_variants: further model types, each with the fields of this row that differ.
        gguf_rope: rope style of its GGUF files; it is always "neox" for safetensors.
        gguf_period: in GGUF every n-th layer has no window; None: no layer has one.
        gguf_window: default window of its GGUF files, 0 for none.
        gguf_caps: (attention, logits): default softcaps of its GGUF files, 0 for none.
        gguf_local_heads: GGUF has separate keys for the head sizes of sliding layers.
        shares_kv: the last layers may read keys and values of earlier ones.
        partial_rope: default for the rotated part of a head if `config.json` does not have it; None: always all of it.
        rope_sections: the usual sections of positions with three components (M-RoPE); (): positions have one.
        two_way: as in `ModelConfig`, for its models that see images.
        attention_scale: factor of q k^T; None: 1/sqrt(head size), or the file's value.
        hf_sliding: which layers slide if `config.json` has no `layer_types`.
        hf_ends_full: its last layer never slides, even if `config.json` lists it as sliding.
        local_base: default base of the separate rope of sliding layers; None if they share the model's.
        hf_base: default of `rope_theta`.
        hf_activation: keys of the activation in `config.json`; the first existing one counts.
        hf_activation_names: names of activations that its files use differently from others.
        activation: the activation for GGUF, which has no key for it.
        norm_offset: number to add to the norm weights of its safetensors.
        plain_norms: norms without that offset.
        experts: "none", "may", or "must": whether its layers have experts.
        hf_experts: keys of `config.json` for the experts' count, their number used, and whether their weights are
            normalized (None: they always are).
        shared_expert: there is an additional expert for every token.
        hybrid: most of its layers are recurrent.
        streams: it has several copies of the residual stream.
        bf16: its linears tolerate activations rounded to bf16. Measured as the cosine with the exact logits of its
            golden
            checkpoints: at least 0.9998. The other architectures fall to 0.985 to 0.999.
        scales_embedding: embeddings are multiplied by sqrt(hidden).
        biases: linear layers that must have a bias; others may.
        wide_scale_layers: layer count of the one model whose attention scale is 1/sqrt(hidden/heads), which GGUF does
            not store.
        hf_defaults: values of keys that published files omit; a null does not count as omitted.
    """

    family: str
    model_types: tuple[str, ...]
    hf_variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    gguf_rope: str = "neox"
    gguf_period: int | None = None
    gguf_window: int = 0
    gguf_caps: tuple[float, float] = (0.0, 0.0)
    gguf_local_heads: bool = False
    shares_kv: bool = False
    partial_rope: float | None = None
    rope_sections: tuple[int, ...] = ()
    two_way: str = "none"
    attention_scale: float | None = None
    hf_sliding: Sliding = none_slides
    hf_ends_full: bool = False
    local_base: float | None = None
    hf_base: float = 10_000.0
    hf_activation: tuple[str, ...] = ("hidden_act",)
    hf_activation_names: Mapping[str, str] = field(default_factory=dict)
    activation: str = "silu"
    norm_offset: float = 0.0
    plain_norms: tuple[str, ...] = ()
    experts: str = "none"
    hf_experts: tuple[tuple[str, ...], str, str | None] = (
        ("num_experts", "num_local_experts"),
        "num_experts_per_tok",
        None,
    )
    shared_expert: bool = False
    hybrid: bool = False
    streams: bool = False
    bf16: bool = False
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

_GEMMA3N_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262_400,
    "hidden_size": 2048,
    "hidden_size_per_layer_input": 256,
    "intermediate_size": 16_384,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_kv_shared_layers": 15,
    "head_dim": 256,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "sliding_window": 512,
    "final_logit_softcapping": 30.0,
    "hidden_activation": "gelu_pytorch_tanh",
    "altup_num_inputs": 4,
    "tie_word_embeddings": True,
}
_GEMMA4_DEFAULTS: dict[str, Any] = {
    "head_dim": 256,
    "global_head_dim": 512,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default"},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25},
    },
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size_per_layer_input": 0,
    "tie_word_embeddings": True,
}
_QWEN_DEFAULTS: dict[str, Any] = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_QWEN35 = Architecture(
    "qwen35",
    ("qwen3_5_text", "qwen3_5"),
    partial_rope=0.25,
    rope_sections=(11, 11, 10),
    norm_offset=1.0,
    plain_norms=("ssm_norm",),
    hybrid=True,
    hf_base=10_000_000.0,
    hf_defaults={"head_dim": 256, "rms_norm_eps": 1e-6},
)
_MISTRAL: dict[str, Any] = {"hf_sliding": _all_slide, "hf_defaults": {"sliding_window": 4096}}
_MIXTRAL: dict[str, Any] = {"experts": "must", "hf_base": 1_000_000.0}

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(
        "llama32",
        ("llama",),
        bf16=True,
        hf_variants={"mistral": _MISTRAL, "mixtral": {"hf_sliding": _all_slide, **_MIXTRAL}},
        gguf_rope="interleaved",
        experts="may",
    ),
    "qwen2": Architecture(
        "qwen3",
        ("qwen2",),
        bf16=True,
        hf_sliding=_upper_layers_slide,
        biases=("attn_q", "attn_k", "attn_v"),
        hf_defaults=_QWEN_DEFAULTS,
    ),
    "qwen3": Architecture(
        "qwen3",
        ("qwen3",),
        bf16=True,
        hf_sliding=_upper_layers_slide,
        hf_defaults={**_QWEN_DEFAULTS, "head_dim": 128},
    ),
    "qwen3moe": Architecture(
        "qwen3",
        ("qwen3_moe",),
        bf16=True,
        hf_sliding=_all_slide_if_asked,
        experts="must",
        hf_experts=(("num_experts", "num_local_experts"), "num_experts_per_tok", "norm_topk_prob"),
        hf_defaults=_QWEN_DEFAULTS,
    ),
    "qwen35": _QWEN35,
    "qwen35moe": replace(_QWEN35, model_types=("qwen3_5_moe_text", "qwen3_5_moe"), experts="must", shared_expert=True),
    "gemma": Architecture(
        "gemma",
        ("gemma",),
        # The first files say "gelu" in the older key; the model was trained with the tanh approximation.
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
        bf16=True,
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
        two_way="all",
        bf16=True,
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
    "gemma3n": Architecture(
        "gemma",
        ("gemma3n_text", "gemma3n"),
        gguf_period=5,
        gguf_window=512,
        gguf_caps=(0.0, 30.0),
        shares_kv=True,
        attention_scale=1.0,
        hf_sliding=_every_nth_is_full(5),
        local_base=10_000.0,
        hf_base=1_000_000.0,
        hf_activation=("hidden_activation",),
        activation="gelu_tanh",
        streams=True,
        scales_embedding=True,
        hf_defaults=_GEMMA3N_DEFAULTS,
    ),
    "gemma4": Architecture(
        "gemma",
        ("gemma4_text", "gemma4", "gemma4_unified_text", "gemma4_unified"),
        two_way="sliding",
        gguf_period=6,
        gguf_caps=(0.0, 30.0),
        gguf_local_heads=True,
        shares_kv=True,
        hf_ends_full=True,
        attention_scale=1.0,
        hf_sliding=_every_nth_is_full(6),
        local_base=10_000.0,
        hf_base=1_000_000.0,
        hf_activation=("hidden_activation",),
        activation="gelu_tanh",
        experts="may",
        hf_experts=(("num_experts",), "top_k_experts", None),
        scales_embedding=True,
        hf_defaults=_GEMMA4_DEFAULTS,
    ),
}


def _model_types() -> dict[str, tuple[str, Architecture]]:
    """`model_type` of a `config.json` -> the architecture's name and its row, with what differs for that type."""
    table: dict[str, tuple[str, Architecture]] = {}
    for arch, row in ARCHITECTURES.items():
        table |= dict.fromkeys(row.model_types, (arch, row))
        for name, changes in row.hf_variants.items():
            table[name] = arch, replace(row, model_types=(name,), **changes)
    return table


MODEL_TYPES = _model_types()
