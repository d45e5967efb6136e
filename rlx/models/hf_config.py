"""A model's configuration from a parsed `config.json`.

Part of the models stage. Source: the configuration classes of transformers, versions 4 and 5, whose keys differ in some
places.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from statistics import NormalDist
from typing import Any

from rlx.models import rope
from rlx.models.architectures import MODEL_TYPES, Architecture, by_period, none_slides
from rlx.models.config import DeltaNet, Experts, Layer, ModelConfig, sources
from rlx.models.keys import CAP, EPS, HEADS, WIDTH, Keys, known

_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_FULL, _SLIDING, _LINEAR = "full_attention", "sliding_attention", "linear_attention"
_OVERRIDES = {"head_dim", "num_key_value_heads", "intermediate_size"}  # keys allowed in `per_layer_config`
_PARTS = (0.0, 0.999999)  # range of the part of a normal distribution that is cut off
_SPARSE_LAYERS = 10  # default of Gemma 3n
_TWO_WAY = "use_bidirectional_attention"
_VISION_ONLY = (None, False, "vision")  # bidirectional attention between image tokens does not affect text


def from_hf(config: Mapping[str, Any], *, where: object = "config.json") -> ModelConfig:
    """Reads a parsed `config.json` of transformers 5 or earlier; for a model with several parts, its `text_config`.


    Args:
        where: shown in errors: the file.

    Raises:
        ConfigError: a key is missing, of the wrong type, out of range, or contradicts another.
        UnsupportedModelError: an unknown model type, or a feature that rlx does not support.
    """
    arch, row, keys = _text_keys(config, where)
    _require(keys, row)
    layers, hidden = keys.integer("num_hidden_layers", (1, 1024)), keys.integer("hidden_size", (1, 1 << 20))
    heads, context = keys.integer("num_attention_heads", HEADS), keys.integer("max_position_embeddings", (1, 1 << 31))
    head_dim = _head_dim(keys, hidden, heads)
    each = _layers(keys, row, layers, heads, head_dim)
    dims = _rope_dims(each, head_dim)
    usual = row.hf_base, row.local_base, row.partial_rope or 1.0
    ropes = rope.from_hf(keys, dims, *usual, context, row.rope_sections)
    return ModelConfig(
        arch=arch,
        family=row.family,
        vocab_size=keys.integer("vocab_size", WIDTH),
        hidden=hidden,
        heads=heads,
        each=each,
        context=context,
        eps=keys.number("rms_norm_eps", EPS),
        activation=_activation(keys, row),
        rope_style="neox",
        rope=ropes[0],
        local_rope=ropes[1],
        attention_scale=_attention_scale(keys, row, head_dim),
        attention_softcap=keys.number("attn_logit_softcapping", CAP, 0.0) or None,
        logit_softcap=keys.number("final_logit_softcapping", CAP, 0.0) or None,
        tied=keys.flag("tie_word_embeddings", False),
        embedding_scale=sqrt(hidden) if row.scales_embedding else 1.0,
        norm_offset=row.norm_offset,
        plain_norms=row.plain_norms,
        biases=_biases(keys, row),
        experts=_experts(keys, row),
        delta=_delta(keys) if row.hybrid else None,
        per_layer=keys.integer("hidden_size_per_layer_input", (0, 1 << 20), 0) if row.shares_kv else 0,
        streams=keys.integer("altup_num_inputs", (2, 64)) if row.streams else 1,
        bf16=row.bf16,
        stream_scale=keys.flag("altup_correct_scale", True),
        two_way=_two_way(keys, row),
    )


def _text_keys(config: Mapping[str, Any], where: object) -> tuple[str, Architecture, Keys]:
    """The architecture and the keys of the text part, with the model type's defaults for absent keys.

    A null is not absent: for a softcap it means none, whatever the default.
    """
    outer = Keys(config, where)
    arch, row = known(outer, "model_type", MODEL_TYPES)
    text = outer.nested("text_config", optional=True)
    inner = text.text("model_type", row.model_types[0])
    if inner not in row.model_types:
        text.unsupported("model_type", inner, f"expected one of {', '.join(row.model_types)}")
    given = {**config, **config.get("text_config", {})} if text.mapping else config
    return arch, row, Keys({**row.hf_defaults, **given}, where)


def _require(keys: Keys, row: Architecture) -> None:
    if keys.get(_TWO_WAY, None) not in _VISION_ONLY:
        found = keys.get(_TWO_WAY)
        keys.unsupported(_TWO_WAY, found, "attention in both directions is not supported")
    if row.experts == "none":
        for key in ("num_experts", "num_local_experts"):
            keys.require(key, 0, "mixtures of experts are not supported for this architecture")
    if row.partial_rope is None:
        keys.require(
            "partial_rotary_factor", 1.0, "rotating a part of each head is not supported for this architecture"
        )
    if row.streams:
        keys.require("altup_active_idx", 0, "another active stream than the first is not supported")
    if row.hybrid:
        keys.require("attn_output_gate", True, "attention without a gate is not supported for this architecture")


def _two_way(keys: Keys, row: Architecture) -> str:
    """Which layers let an image's rows see each other; where the key counts, null is not the same as none."""
    if row.two_way == "sliding" and _TWO_WAY in keys.mapping:
        return row.two_way if keys.get(_TWO_WAY, None) == "vision" else "none"
    return "none" if "hidden_size_per_layer_input" in keys and keys.get("hidden_size_per_layer_input") else row.two_way


def _activation(keys: Keys, row: Architecture) -> str:
    key = next((key for key in row.hf_activation if key in keys), row.hf_activation[-1])
    return keys.choice(key, {**_ACTIVATIONS, **row.hf_activation_names})


def _biases(keys: Keys, row: Architecture) -> tuple[str, ...]:
    """The linear layers that must have a bias: the architecture's, and those of two switches."""
    attention = ("attn_q", "attn_k", "attn_v", "attn_output") if keys.flag("attention_bias", False) else ()
    mlp = ("ffn_gate", "ffn_up", "ffn_down") if keys.flag("mlp_bias", False) else ()
    return tuple(dict.fromkeys((*row.biases, *attention, *mlp)))


# -- attention --------------------------------------------------------------------------------------------------------


def _head_dim(keys: Keys, hidden: int, heads: int) -> int:
    if "head_dim" not in keys and hidden % heads:
        keys.wrong("hidden_size", hidden, f"a multiple of num_attention_heads, which is {heads}")
    return keys.even("head_dim", HEADS, hidden // heads)


def _attention_scale(keys: Keys, row: Architecture, head_dim: int) -> float:
    if row.attention_scale is not None:
        return row.attention_scale
    return float(keys.number("query_pre_attn_scalar", rope.FACTOR, float(head_dim)) ** -0.5)


def _rope_dims(each: tuple[Layer, ...], head_dim: int) -> tuple[int, int]:
    """Head sizes of the layers without a window, and of those with one."""
    full = {layer.head_dim for layer in each if layer.window is None and not layer.recurrent}
    local = {layer.head_dim for layer in each if layer.window is not None}
    return (full or {head_dim}).pop(), (local or {head_dim}).pop()


def _windows(keys: Keys, row: Architecture, kinds: list[str] | None, layers: int) -> list[int | None]:
    """The window of each layer that slides, by `layer_types` or by the model type's rule."""
    if row.hf_sliding is none_slides:
        return [None] * layers
    slides = [kind == _SLIDING for kind in kinds] if kinds else row.hf_sliding(keys, layers)
    slides[-1] &= not row.hf_ends_full
    if not any(slides):
        return [None] * layers
    if keys.flag("use_sliding_window", True) is False:
        keys.wrong("use_sliding_window", False, "true, because 'layer_types' has sliding layers")
    window = keys.integer("sliding_window", (1, 1 << 31))
    return [window if s else None for s in slides]


# -- layers -----------------------------------------------------------------------------------------------------------


def _kinds(keys: Keys, row: Architecture, layers: int) -> list[str] | None:
    """`layer_types`, if the file has them."""
    if "layer_types" not in keys:
        return None
    allowed = (_FULL, _LINEAR) if row.hybrid else (_FULL, _SLIDING)
    names = {kind: kind for kind in allowed}
    return keys.elements("layer_types", lambda each: each.choice("layer_types", names), layers)


def _recurrent(keys: Keys, row: Architecture, kinds: list[str] | None, layers: int) -> list[bool]:
    if not row.hybrid:
        return [False] * layers
    if kinds is not None:
        return [kind == _LINEAR for kind in kinds]
    return by_period(keys.integer("full_attention_interval", (1, 1024), 4), layers)


def _layers(keys: Keys, row: Architecture, layers: int, heads: int, head_dim: int) -> tuple[Layer, ...]:
    kinds = _kinds(keys, row, layers)
    windows, recurrent = _windows(keys, row, kinds, layers), _recurrent(keys, row, kinds, layers)
    shared = keys.integer("num_kv_shared_layers", (0, layers - 1), 0) if row.shares_kv else 0
    source = sources(windows, shared, keys.where)
    sparse, sparsity = _sparse(keys, row, layers), _sparsity(keys, row, layers)
    default = 0 if row.experts == "must" else None
    ffn = keys.integers("intermediate_size", (0 if row.experts == "must" else 1, WIDTH[1]), layers, default)
    double = keys.flag("use_double_wide_mlp", False)
    same_kv = keys.flag("attention_k_eq_v", False)
    each = []
    for i in range(layers):
        full = row.shares_kv and windows[i] is None
        own = _own(keys, i, full, same_kv)
        kv_heads = own.integer("num_key_value_heads", HEADS, heads)
        if heads % kv_heads:
            keys.wrong("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads, which is {heads}")
        each.append(
            Layer(
                kv_heads=kv_heads,
                head_dim=own.even("head_dim", HEADS, head_dim),
                ffn=own.integer("intermediate_size", (0, WIDTH[1]), ffn[i] * (2 if double and source[i] != i else 1)),
                source=source[i],
                window=windows[i],
                recurrent=recurrent[i],
                sparse=sparse[i],
                keys_as_values=same_kv and full and source[i] == i,
                sparsity=sparsity[i],
            )
        )
    return tuple(each)


def _own(keys: Keys, layer: int, full: bool, same_kv: bool) -> Keys:
    """The head sizes of one layer: the file's, overridden for layers without a window and for this layer."""
    found = {key: keys.get(key) for key in ("head_dim", "num_key_value_heads") if key in keys}
    full = full and "per_layer_config" not in keys
    if full and "global_head_dim" in keys:
        found["head_dim"] = keys.get("global_head_dim")
    if full and same_kv and "num_global_key_value_heads" in keys:
        found["num_key_value_heads"] = keys.get("num_global_key_value_heads")
    own = keys.nested("per_layer_config", optional=True)
    if str(layer) in own:
        own = own.nested(str(layer))
        given = {name.removeprefix(own.prefix): value for name, value in own.mapping.items()}
        for name in given.keys() - _OVERRIDES:
            own.unsupported(name, given[name], f"supported are {', '.join(sorted(_OVERRIDES))}")
        found |= given
    return Keys(found, keys.where)


def _sparse(keys: Keys, row: Architecture, layers: int) -> list[bool]:
    """Which layers have experts."""
    if not _expert_count(keys, row):
        return [False] * layers
    key, last = "mlp_only_layers", (0, layers - 1)
    dense = keys.elements(key, lambda each: each.integer(key, last)) if key in keys else []
    step = keys.integer("decoder_sparse_step", (1, 1024), 1)
    return [layer not in dense and (layer + 1) % step == 0 for layer in range(layers)]


def _sparsity(keys: Keys, row: Architecture, layers: int) -> list[float | None]:
    """Reads the part of a normal distribution that is cut off; Gemma 3n has a default."""
    key = "activation_sparsity_pattern"
    first = _SPARSE_LAYERS if row.streams and layers > _SPARSE_LAYERS else 0
    if key not in keys:
        parts = [0.95] * first + [0.0] * (layers - first)
    elif isinstance(keys.get(key), list):
        parts = keys.elements(key, lambda each: each.number(key, _PARTS), layers)
    else:
        parts = [keys.number(key, _PARTS)] * layers
    return [NormalDist().inv_cdf(part) if part else None for part in parts]


def _expert_count(keys: Keys, row: Architecture) -> int:
    if row.experts == "none" or not keys.flag("enable_moe_block", True):
        return 0
    names = row.hf_experts[0]
    name = next((name for name in names if name in keys), names[0])
    return keys.integer(name, (1, 1024)) if row.experts == "must" else keys.integer(name, (0, 1024), 0)


def _experts(keys: Keys, row: Architecture) -> Experts | None:
    count = _expert_count(keys, row)
    if not count:
        return None
    _, used, normalized = row.hf_experts
    ffn = "moe_intermediate_size" if "moe_intermediate_size" in keys else "intermediate_size"
    return Experts(
        count,
        keys.integer(used, (1, count)),
        keys.integer(ffn, WIDTH),
        keys.integer("shared_expert_intermediate_size", WIDTH) if row.shared_expert else 0,
        normalize=keys.flag(normalized, False) if normalized else True,
    )


def _delta(keys: Keys) -> DeltaNet:
    heads, groups = (keys.integer(f"linear_num_{part}_heads", HEADS) for part in ("value", "key"))
    if heads % groups:
        keys.wrong("linear_num_value_heads", heads, f"a multiple of linear_num_key_heads, which is {groups}")
    key_dim, value_dim = (keys.integer(f"linear_{part}_head_dim", HEADS) for part in ("key", "value"))
    taps = keys.integer("linear_conv_kernel_dim", (2, 64))
    return DeltaNet(groups, heads, key_dim, value_dim, taps, "grouped", log_decay=True)
