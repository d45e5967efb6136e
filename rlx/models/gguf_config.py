"""A model's configuration from GGUF metadata.

Part of the models stage. Sources: the GGUF registry's keys, and llama.cpp's defaults for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf, sqrt
from typing import Any

from rlx.errors import ConfigError, UnsupportedModelError
from rlx.models import rope
from rlx.models.architectures import ARCHITECTURES, Architecture, by_period
from rlx.models.config import DeltaNet, Experts, Layer, ModelConfig, sources
from rlx.models.keys import CAP, EPS, HEADS, WIDTH, Keys, is_integer, known

HasTensor = Callable[[str], bool]
MMPROJ = "clip"  # general.architecture of the file with a model's towers

# Keys that change the computation -> (the only supported value, why others are not supported).
_ONLY: dict[str, tuple[Any, str]] = {
    "pooling_type": (0, "this is an embedding or ranking model"),
    "attention.causal": (True, "attention in both directions is not supported"),
}
_PLAIN: dict[str, tuple[Any, str]] = {  # for architectures without such layers
    "expert_count": (0, "mixtures of experts are not supported for this architecture"),
    "nextn_predict_layers": (0, "layers for multi-token prediction are not supported for this architecture"),
    "attention.shared_kv_layers": (0, "sharing keys and values between layers is not supported for this architecture"),
}


def from_gguf(metadata: Mapping[str, Any], has_tensor: HasTensor, *, where: object = "GGUF metadata") -> ModelConfig:
    """Reads GGUF key-values.

    Args:
        has_tensor: whether the file has a tensor of this name.
        where: shown in errors: the file.

    Raises:
        ConfigError: a key is missing, of the wrong type, out of range, or contradicts another.
        UnsupportedModelError: an unknown architecture, or a feature that rlx does not support.
    """
    check_language_model(metadata, where)
    arch, row = known(Keys(metadata, where), "general.architecture", {n: (n, r) for n, r in ARCHITECTURES.items()})
    keys = Keys(metadata, where, f"{arch}.")
    _require(keys, row)
    # MTP blocks come last and are not layers of the model.
    blocks = keys.integer("block_count", (1, 1024))
    layers = blocks - keys.integer("nextn_predict_layers", (0, min(blocks - 1, 64)), 0)
    hidden, heads = keys.integer("embedding_length", (1, 1 << 20)), keys.same("attention.head_count", HEADS, layers)
    context = keys.integer("context_length", (1, 1 << 31))
    dims = _head_dims(keys, row, hidden, heads)
    ropes = _ropes(keys, row, dims, has_tensor, context)
    experts = _experts(keys, row, layers)
    return ModelConfig(
        arch=arch,
        family=row.family,
        vocab_size=_vocab_size(keys, metadata),
        hidden=hidden,
        heads=heads,
        each=_layers(keys, row, layers, heads, dims, experts is not None, has_tensor),
        context=context,
        eps=keys.number("attention.layer_norm_rms_epsilon", EPS),
        activation=row.activation,
        rope_style=row.gguf_rope,
        rope=ropes[0],
        local_rope=ropes[1],
        attention_scale=_attention_scale(keys, row, layers, hidden / heads, dims[0]),
        attention_softcap=keys.number("attn_logit_softcapping", CAP, row.gguf_caps[0]) or None,
        logit_softcap=keys.number("final_logit_softcapping", CAP, row.gguf_caps[1]) or None,
        tied=not has_tensor("output.weight"),
        embedding_scale=sqrt(hidden) if row.scales_embedding else 1.0,
        norm_offset=0.0,
        biases=row.biases,
        experts=experts,
        delta=_delta(keys) if row.hybrid else None,
        per_layer=keys.integer("embedding_length_per_layer_input", (0, 1 << 20), 0) if row.shares_kv else 0,
        streams=keys.integer("altup.num_inputs", (2, 64)) if row.streams else 1,
        bf16=row.bf16,
        # GGUF has no key for it. The models with per-layer embeddings (E2B, E4B) are the causal ones.
        two_way="none" if keys.get("embedding_length_per_layer_input", 0) else row.two_way,
    )


def check_language_model(metadata: Mapping[str, Any], where: object) -> None:
    """Refuses an mmproj file, which holds what a model needs beside its language model to take images or audio.

    Raises:
        UnsupportedModelError: the message says how to use the file.
    """
    if metadata.get("general.architecture") == MMPROJ:
        what = "this file (mmproj) holds a model's tower for images or audio, not its language model"
        hint = "open the file of the language model, and pass this one as `mmproj`"
        raise UnsupportedModelError(what, where=where, hint=hint)


def _require(keys: Keys, row: Architecture) -> None:
    has = {"expert_count": row.experts != "none", "nextn_predict_layers": row.hybrid}
    has["attention.shared_kv_layers"] = row.shares_kv
    for key, (value, because) in {**_ONLY, **{k: v for k, v in _PLAIN.items() if not has[k]}}.items():
        keys.require(key, value, because)
    if row.streams:
        keys.require("altup.active_idx", 0, "another active stream than the first is not supported")


def _vocab_size(keys: Keys, metadata: Mapping[str, Any]) -> int:
    tokens = "tokenizer.ggml.tokens"
    if "vocab_size" in keys or tokens not in metadata:
        return keys.integer("vocab_size", WIDTH)
    count = getattr(metadata, "count", None)  # readers can count an array without decoding it
    found = int(count(tokens) if count else len(metadata[tokens]))
    if not found:
        raise ConfigError(f"'{tokens}' is empty, expected the vocabulary", where=keys.where)
    return found


# -- attention --------------------------------------------------------------------------------------------------------


def _head_dims(keys: Keys, row: Architecture, hidden: int, heads: int) -> tuple[int, int]:
    """Head sizes of layers without a window and of those with one; keys and values have the same."""
    if "attention.key_length" not in keys and hidden % heads:
        keys.wrong("embedding_length", hidden, f"a multiple of attention.head_count, which is {heads}")
    full = keys.even("attention.key_length", HEADS, hidden // heads)
    local = keys.even("attention.key_length_swa", HEADS) if row.gguf_local_heads else full
    only = "only the size of a head, {}, is supported"
    for key, size in (("value_length", full), ("key_length_swa", local), ("value_length_swa", local)):
        keys.require(f"attention.{key}", size, only.format(size))
    return full, local


def _ropes(
    keys: Keys, row: Architecture, dims: tuple[int, int], has_tensor: HasTensor, context: int
) -> tuple[rope.Rope, rope.Rope | None]:
    full, local = dims
    if row.partial_rope is not None:
        full = keys.even("rope.dimension_count", (2, full), full)
    for key, size in (("rope.dimension_count", full), ("rope.dimension_count_swa", local)):
        keys.require(key, size, f"only the size of a head, {size}, is supported")
    only = local if row.local_base is not None else None
    return rope.from_gguf(keys, full, only, has_tensor, context, row.rope_sections)


def _attention_scale(keys: Keys, row: Architecture, layers: int, width: float, head_dim: int) -> float:
    scale = keys.number("attention.scale", (0.0, 1e6), row.attention_scale or 0.0)
    return scale or float(width if layers == row.wide_scale_layers else head_dim) ** -0.5


def _windows(keys: Keys, row: Architecture, layers: int) -> list[int | None]:
    """Reads the window key and the pattern, only for architectures with windows; a window of 0 means none."""
    window = keys.integer("attention.sliding_window", (0, 1 << 31), row.gguf_window) if row.gguf_period else 0
    if not window:
        return [None] * layers
    key = "attention.sliding_window_pattern"
    pattern = keys.get(key, row.gguf_period)
    if is_integer(pattern):
        slides = by_period(keys.integer(key, (1, 1 << 31), row.gguf_period), layers)
    else:
        slides = keys.elements(key, lambda each: each.flag(key), layers)
    return [window if s else None for s in slides]


# -- layers -----------------------------------------------------------------------------------------------------------


def _layers(
    keys: Keys, row: Architecture, layers: int, heads: int, dims: tuple[int, int], sparse: bool, has_tensor: HasTensor
) -> tuple[Layer, ...]:
    windows, recurrent = _windows(keys, row, layers), _recurrent(keys, row, layers)
    kv_heads = keys.integers("attention.head_count_kv", (0, HEADS[1]), layers, heads)
    must = row.experts == "must"
    ffn = keys.integers("feed_forward_length", (0 if must else 1, WIDTH[1]), layers, 0 if must else None)
    shared = keys.integer("attention.shared_kv_layers", (0, layers - 1), 0) if row.shares_kv else 0
    source = sources(windows, shared, keys.where)
    sparsity = _sparsity(keys, layers) if row.streams else [None] * layers
    for layer in range(layers):
        if not recurrent[layer] and (not kv_heads[layer] or heads % kv_heads[layer]):
            found = f"a divisor of head_count, which is {heads}, for layer {layer}"
            keys.wrong("attention.head_count_kv", kv_heads[layer], found)
    return tuple(
        Layer(
            kv_heads=kv_heads[i],
            head_dim=dims[windows[i] is not None],
            ffn=ffn[i],
            source=source[i],
            window=windows[i],
            recurrent=recurrent[i],
            sparse=sparse,
            keys_as_values=_keys_as_values(row, i, windows[i], source[i], has_tensor),
            sparsity=sparsity[i],
        )
        for i in range(layers)
    )


def _recurrent(keys: Keys, row: Architecture, layers: int) -> list[bool]:
    """The array wins over the period; both may cover blocks after the layers."""
    key, blocks = "attention.recurrent_layers", keys.integer("block_count", (1, 1024))
    if not row.hybrid:
        return [False] * layers
    if key in keys:
        return keys.elements(key, lambda each: each.flag(key), blocks)[:layers]
    return by_period(keys.integer("full_attention_interval", (1, 1024), 4), layers)


def _keys_as_values(row: Architecture, layer: int, window: int | None, source: int, has_tensor: HasTensor) -> bool:
    """For architectures that allow it: layers without a window that have no projection for values."""
    may = row.gguf_local_heads and window is None and source == layer
    return may and not (has_tensor(f"blk.{layer}.attn_v.weight") or has_tensor(f"blk.{layer}.attn_qkv.weight"))


def _sparsity(keys: Keys, layers: int) -> list[float | None]:
    """Standard deviations; minus infinity means no sparsity."""
    key = "activation_sparsity_scale"
    if key not in keys:
        return [None] * layers
    found = keys.elements(key, lambda each: each.number(key, (-inf, 1e6)), layers)
    return [None if scale == -inf else scale for scale in found]


def _experts(keys: Keys, row: Architecture, layers: int) -> Experts | None:
    must = row.experts == "must"
    count = keys.integer("expert_count", (1 if must else 0, 1024), None if must else 0)
    if not count:
        return None
    used = keys.same("expert_used_count", (1, count), layers)
    default = keys.same("feed_forward_length", WIDTH, layers) if "expert_feed_forward_length" not in keys else None
    if default and must:
        default //= used
    ffn = keys.same("expert_feed_forward_length", WIDTH, layers, default)
    shared = keys.same("expert_shared_feed_forward_length", WIDTH, layers) if row.shared_expert else 0
    return Experts(count, used, ffn, shared, scale=keys.number("expert_weights_scale", (0, 1e6), 0.0) or 1.0)


def _delta(keys: Keys) -> DeltaNet:
    """The state's sizes; in GGUF value heads share key heads in turn ("tiled")."""
    size, heads = keys.integer("ssm.state_size", HEADS), keys.integer("ssm.time_step_rank", HEADS)
    groups, inner = keys.integer("ssm.group_count", HEADS), keys.integer("ssm.inner_size", WIDTH)
    if inner != size * heads:
        keys.wrong("ssm.inner_size", inner, f"ssm.state_size x ssm.time_step_rank, {size} x {heads}")
    if heads % groups:
        keys.wrong("ssm.time_step_rank", heads, f"a multiple of ssm.group_count, which is {groups}")
    return DeltaNet(groups, heads, size, size, keys.integer("ssm.conv_kernel", (2, 64)), "tiled", log_decay=False)
