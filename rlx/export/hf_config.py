"""Converts `config.json` to GGUF's architecture and metadata keys, ropes included.

Export stage, read by `hf.py`. The keys of a family, and their counterparts in `config.json`, follow the reference
converter of the format. Every value is checked, so that nothing that GGUF cannot represent is lost silently. Of rotary
embeddings it reads `rope_parameters`, flat or one object per attention type, and the older `rope_theta`, `rope_scaling`
and `rope_local_base_freq`; what GGUF has no key for becomes a tensor of divisors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from math import inf, pi
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx.errors import UnsupportedModelError
from rlx.models import from_hf
from rlx.models.architectures import Architecture, by_period, none_has_rope
from rlx.models.config import ModelConfig
from rlx.models.keys import POSITIVE, Keys, is_integer, plain
from rlx.models.registry import ARCHITECTURES, MODEL_TYPES
from rlx.models.rope import Rope, hf_longrope, hf_yarn_scale, yarn_scale
from rlx.models.settings import SETTINGS


class GgufType(IntEnum):
    """The type of a value, by its number in files."""

    UINT8, INT8, UINT16, INT16, UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64, INT64, FLOAT64 = range(13)


Metadata = dict[str, tuple[Any, Any]]


class Writer:
    """Collects keys under the architecture's prefix, with their GGUF types."""

    def __init__(self, arch: str) -> None:
        self.arch, self.found = arch, Metadata()

    def u32(self, key: str, value: int) -> None:
        self.found[f"{self.arch}.{key}"] = value, GgufType.UINT32

    def f32(self, key: str, value: float) -> None:
        self.found[f"{self.arch}.{key}"] = value, GgufType.FLOAT32

    def text(self, key: str, value: str) -> None:
        self.found[f"{self.arch}.{key}"] = value, GgufType.STRING

    def flag(self, key: str, value: bool) -> None:
        self.found[f"{self.arch}.{key}"] = value, GgufType.BOOL

    def integers(self, key: str, values: Sequence[int]) -> None:
        self.found[f"{self.arch}.{key}"] = list(values), (GgufType.ARRAY, GgufType.INT32)

    def floats(self, key: str, values: Sequence[float]) -> None:
        self.found[f"{self.arch}.{key}"] = list(values), (GgufType.ARRAY, GgufType.FLOAT32)

    def flags(self, key: str, values: Sequence[bool]) -> None:
        self.found[f"{self.arch}.{key}"] = list(values), (GgufType.ARRAY, GgufType.BOOL)


# Two architectures whose files omit the base; their readers use the default of the format.
_IMPLIED = {"gemma": 10_000.0, "gemma2": 10_000.0}
_FACTOR, _CONTEXT = (1e-6, 1e6), (1, 1 << 31)
_ORIGINAL = "original_max_position_embeddings"
_NEVER = 1e30  # the divisor of a frequency that is not rotated


@dataclass(frozen=True)
class RopeConfig:
    """The ropes of one model.

    Attributes:
        full: parameters of the layers without a window, or of all layers if there is one rope.
        base, local_base: theta of those layers, and of the layers with a window; None if they share it.
        kind: default, linear, llama3, yarn, longrope or proportional.
        partial: rotated share of a head.
        context: `max_position_embeddings`.
        sections: sizes of the sections of a rope with several positions per token, or None.
        original: the context before scaling, where it is no parameter of the rope.
    """

    full: Keys
    base: float
    local_base: float | None
    kind: str
    partial: float
    context: int
    sections: list[int] | None
    original: int | None


_KINDS = {kind: kind for kind in ("default", "linear", "llama3", "yarn", "longrope", "proportional")}


def rope_config(config: Keys, row: Architecture) -> RopeConfig:
    """Reads the ropes.

    Args:
        row: the architecture, with the defaults of bases that files omit.

    Raises:
        ConfigError: a value of the wrong type or out of range.
        UnsupportedModelError: a rope type that GGUF or its readers do not support.
    """
    local_base, whole = row.local_base, 1.0 if row.partial_rope is None else row.partial_rope
    parameters = config.nested("rope_parameters", optional=True)
    base = config.number("rope_theta", POSITIVE, row.hf_base)
    if any(isinstance(value, Mapping) for value in parameters.mapping.values()):
        full, local = parameters.nested("full_attention"), parameters.nested("sliding_attention", optional=True)
        local.require("rope_type", "default", "GGUF scales the rope of layers without window only")
        local_base = local.number("rope_theta", POSITIVE, local_base or base)
    else:
        full = parameters if "rope_parameters" in config else config.nested("rope_scaling", optional=True)
        if local_base is not None or "rope_local_base_freq" in config:
            local_base = config.number("rope_local_base_freq", POSITIVE, local_base)
    share = config.number("partial_rotary_factor", (0.0, 1.0), whole)
    return RopeConfig(
        full=full,
        base=full.number("rope_theta", POSITIVE, base),
        local_base=local_base,
        kind=full.choice("rope_type" if "rope_type" in full else "type", _KINDS, "default"),
        partial=full.number("partial_rotary_factor", (0.0, 1.0), share),
        context=config.integer("max_position_embeddings", _CONTEXT),
        sections=_sections(full),
        original=config.integer(_ORIGINAL, _CONTEXT) if _ORIGINAL in config else None,
    )


def _sections(full: Keys) -> list[int] | None:
    if "mrope_section" not in full:
        return None
    return full.elements("mrope_section", lambda each: each.integer("mrope_section", (0, 1 << 14)), 3)


def write_rope(rope: RopeConfig, arch: str, out: Writer) -> None:
    """The keys `rope.*`, except sizes.

    Raises:
        UnsupportedModelError: a rope that readers of this architecture's files do not support.
    """
    _check_rope(rope, arch)
    if usual := ARCHITECTURES[arch].rope_sections:
        out.integers("rope.dimension_sections", [*(rope.sections or usual), 0])
    if rope.base != _IMPLIED.get(arch):
        out.f32("rope.freq_base", rope.base)
    if rope.local_base is not None:
        out.f32("rope.freq_base_swa", rope.local_base)
    if rope.kind in ("linear", "yarn"):
        out.text("rope.scaling.type", rope.kind)
        out.f32("rope.scaling.factor", rope.full.number("factor", _FACTOR))
    if rope.kind == "yarn":
        _write_yarn(rope, arch, out)
    if rope.kind == "longrope":
        out.u32("rope.scaling.original_context_length", rope.full.integer(_ORIGINAL, _CONTEXT, rope.original))


def _check_rope(rope: RopeConfig, arch: str) -> None:
    if rope.kind == "llama3" and arch not in ("llama", "exaone4"):
        rope.full.unsupported("rope_type", "llama3", f"GGUF files of {arch} have no place for its divisors")
    if rope.kind == "longrope" and arch != "phi3":
        rope.full.unsupported("rope_type", "longrope", f"GGUF files of {arch} have no place for its factors")
    if (rope.kind == "proportional") != (arch == "gemma4"):
        rope.full.unsupported("rope_type", rope.kind, f"readers of GGUF files of {arch} compute otherwise")
    if rope.partial != 1 and arch != "gemma4" and ARCHITECTURES[arch].partial_rope is None:
        rope.full.unsupported("partial_rotary_factor", rope.partial, f"GGUF files of {arch} turn whole heads")


def long_rope(rope: RopeConfig, head_dim: int) -> Rope:
    """The factors of LongRoPE for short and long texts, and what sines and cosines are multiplied by."""
    return hf_longrope(rope.full, rope.base, int(head_dim * rope.partial), rope.original, rope.context)


def _write_yarn(rope: RopeConfig, arch: str, out: Writer) -> None:
    context, implied = rope.full.integer(_ORIGINAL, _CONTEXT, rope.context), ARCHITECTURES[arch].gguf_defaults
    out.u32("rope.scaling.original_context_length", context)
    if (rounds := rope.full.flag("truncate", True)) != implied.get("rope.scaling.yarn_truncate", True):
        what = "readers of GGUF files of this architecture take another value"
        rope.full.unsupported("truncate", rounds, f"{what} for whether the borders of YaRN are whole pairs")
    for key, name in (
        ("extrapolation_factor", "yarn_ext_factor"), ("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow"),
    ):  # fmt: skip
        if key in rope.full:
            out.f32(f"rope.scaling.{name}", rope.full.number(key, (0.0, 1e6)))
    factor, weight = rope.full.number("factor", _FACTOR), rope.full.number("mscale_all_dim", (0.0, 1e3), 0.0)
    unit, usual = implied.get("rope.scaling.yarn_log_unit", float(arch == "mistral3")), yarn_scale(factor)
    if unit and weight:
        out.f32("rope.scaling.yarn_log_multiplier", unit * weight)
        usual = yarn_scale(factor, 1.0 if unit == 1 else weight) / yarn_scale(factor, weight)
    own = hf_yarn_scale(rope.full) / usual
    if own != 1:  # readers multiply YaRN's default by it; they ignore `yarn_attn_factor`
        out.f32("rope.scaling.attn_factor", own)


def divisors(rope: RopeConfig, head_dim: int) -> npt.NDArray[np.float32] | None:
    """`rope_freqs.weight` float32 [head_dim / 2], which divides the frequencies, or None.

    Args:
        head_dim: head size of the layers that use it, those without a window.
    """
    if rope.kind == "llama3":
        return _llama3(rope, head_dim)
    if rope.kind == "proportional":  # the first pairs are rotated, the others are not
        turning, factor = int(head_dim * rope.partial / 2), rope.full.number("factor", _FACTOR, 1.0)
        return np.array([factor] * turning + [_NEVER] * (head_dim // 2 - turning), np.float32)
    return None


def _llama3(rope: RopeConfig, head_dim: int) -> npt.NDArray[np.float32]:
    """1 for short wavelengths, `factor` for long ones, between by rotations in the original context (Llama 3.1)."""
    low, high = rope.full.number("low_freq_factor", POSITIVE), rope.full.number("high_freq_factor", POSITIVE)
    if high <= low:
        rope.full.wrong("high_freq_factor", high, f"more than low_freq_factor, which is {low}")
    factor = rope.full.number("factor", _FACTOR)
    context = rope.full.integer("original_max_position_embeddings", _CONTEXT)
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    one = np.float32(1)
    wavelength = np.float32(2 * pi) / (one / np.power(np.float32(rope.base), exponent))
    smooth = (np.float32(context) / wavelength - np.float32(low)) / np.float32(high - low)
    between = one / ((one - smooth) / np.float32(factor) + smooth)
    ends = np.where(wavelength > context / low, np.float32(factor), between)
    return np.where(wavelength < context / high, one, ends).astype(np.float32)


# Defaults that published files omit, in addition to those in the table of architectures.
_QWEN35_DEFAULTS = {
    "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
}  # fmt: skip
_DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen35": _QWEN35_DEFAULTS,
    "qwen35moe": _QWEN35_DEFAULTS,
    "gemma3n": {"altup_active_idx": 0},
}

_SIZE, _LAYERS = (1, 1 << 31), (1, 1024)
_TWO_WAY = "use_bidirectional_attention"
_SIGMOID = 2  # of the functions that make scores of a router's logits
_SLIDING, _FULL, _LINEAR = "sliding_attention", "full_attention", "linear_attention"
# Architectures whose GGUF loaders have a built-in rule for sliding layers: every n-th layer does not slide.
_PERIODS = {"gemma2": 2, "gemma3": 6, "gpt-oss": 2}
_ACTIVATIONS = {
    "silu": ("silu", "swish"),
    "gelu": ("gelu_pytorch_tanh", "gelu"),  # the first Gemma files say "gelu" and mean the approximation
}


class TextConfig(Keys):
    """The keys of the text part of a `config.json`, with the defaults of its architecture.

    Attributes:
        arch: `general.architecture`.
        row: how the architecture differs from others.
        predicting: number of MTP blocks after the layers.
    """

    predicting = 0

    def __init__(self, config: Mapping[str, Any], where: object) -> None:
        self.arch, self.row = _architecture(config, where)
        nested = config.get("text_config") or {}
        super().__init__({**_DEFAULTS.get(self.arch, {}), **self.row.hf_defaults, **config, **nested}, where)
        self.whole = config
        if self.row.hf_spelling is not None:
            self.mapping = {**self.mapping, **self.row.hf_spelling(self)}
        self.rope: RopeConfig = rope_config(self, self.row)

    @cached_property
    def model(self) -> ModelConfig:
        """The configuration as the model's own code reads it."""
        return from_hf(self.whole, where=self.where)

    @property
    def file_arch(self) -> str:
        """The architecture that GGUF has for this configuration, whose tensors have the same names."""
        if self.arch == "gemma3" and self.get(_TWO_WAY, None) is True:
            return "gemma-embedding"
        if self.arch == "nemotron_h" and self.experts:
            return "nemotron_h_moe"
        if self.arch == "granitehybrid" and not any(self.recurrent) and self.model.each[0].has_rope:
            return "granitemoe" if self.experts else "granite"
        return self.arch

    @property
    def layers(self) -> int:
        return self.integer("num_hidden_layers", _LAYERS)

    @property
    def heads(self) -> int:
        return self.integer("num_attention_heads", _SIZE)

    @property
    def kv_heads(self) -> int:
        return self.integer("num_key_value_heads", _SIZE, self.heads)

    @property
    def head_dim(self) -> int:
        return self.integer("head_dim", _SIZE, self.integer("hidden_size", _SIZE) // self.heads)

    @property
    def experts(self) -> int:
        """Number of experts per layer, 0 for none."""
        keys = SETTINGS["experts"].hf.split()
        return self.integer(next((key for key in keys if key in self), keys[0]), (0, 1024), 0)

    @property
    def dense_layers(self) -> int:
        """How many of the first layers have no experts."""
        return self.integer(SETTINGS["dense_layers"].hf, (0, self.layers), 0)

    @property
    def left_out(self) -> range:
        """The layers for multi-token prediction that are not written."""
        return range(self.layers, self.layers + self.integer("num_nextn_predict_layers", (0, 64), 0))

    @property
    def tied(self) -> bool:
        return self.flag("tie_word_embeddings", False)

    @property
    def layer_types(self) -> list[str]:
        """The attention type of every layer: `layer_types`, else by the architecture's rule."""
        if self.row.hybrid == "mamba":
            return [_LINEAR if layer.recurrent else _FULL for layer in self.model.each]
        if "layer_types" in self:
            known = {kind: kind for kind in (_SLIDING, _FULL, _LINEAR)}
            if self.row.hybrid == "convolution":
                known["conv"] = _LINEAR
            found = self.elements("layer_types", lambda each: each.choice("layer_types", known), self.layers)
            return [*found[:-1], _FULL] if self.row.hf_ends_full else found
        return self._ruled_types()

    def _ruled_types(self) -> list[str]:
        if self.arch in ("qwen35", "qwen35moe"):
            linear = by_period(self.integer("full_attention_interval", _LAYERS), self.layers)
            return [_LINEAR if each else _FULL for each in linear]
        if self.arch in _PERIODS:
            key = "sliding_window_pattern" if "sliding_window_pattern" in self else "_sliding_window_pattern"
            slides = by_period(self.integer(key, _SIZE, _PERIODS[self.arch]), self.layers)
            return [_SLIDING if each else _FULL for each in slides]
        if self.arch in ("gemma3n", "gemma4"):
            self.get("layer_types", expected="one attention type a layer")
        return [_FULL] * self.layers

    @property
    def sliding(self) -> list[bool]:
        return [kind == _SLIDING for kind in self.layer_types]

    @property
    def recurrent(self) -> list[bool]:
        return [kind == _LINEAR for kind in self.layer_types]

    def of_full_layers(self, published: str, key: str) -> int | None:
        """A size of Gemma 4's full-attention layers: from a separate key, or from overrides of single layers."""
        if published in self and "per_layer_config" not in self:
            return self.integer(published, _SIZE)
        exceptions = self.nested("per_layer_config", optional=True).mapping
        found = {
            value.get(key)
            for name, value in exceptions.items()
            if isinstance(value, Mapping) and key in value and not self.sliding[int(name.rsplit(".", 1)[-1])]
        }
        if len(found) > 1:
            self.unsupported("per_layer_config", sorted(found), f"full-attention layers with more than one {key}")
        return next(iter(found), None)

    @property
    def full_head_dim(self) -> int:
        """Gemma 4's head size in full-attention layers."""
        return self.of_full_layers("global_head_dim", "head_dim") or self.head_dim

    @property
    def shared_kv_layers(self) -> int:
        return self.integer("num_kv_shared_layers", (0, self.layers), 0)


def _architecture(config: Mapping[str, Any], where: object) -> tuple[str, Architecture]:
    keys = Keys(config, where)
    for each in (keys.nested("text_config", optional=True), keys):
        found = each.get("model_type", None)
        if isinstance(found, str) and found in MODEL_TYPES:
            return MODEL_TYPES[found]
    hint = f"Supported are {', '.join(MODEL_TYPES)}."
    raise UnsupportedModelError(f"the model type {keys.text('model_type')!r} is unknown", where=where, hint=hint)


def metadata_from_config(config: TextConfig) -> Metadata:
    """The keys `<architecture>.*`.

    Raises:
        ConfigError: a key is missing, of the wrong type or out of range.
        UnsupportedModelError: a setting that GGUF has no key for and that its readers compute differently.
    """
    _check(config)
    out = Writer(config.file_arch)
    _common(config, out)
    if config.row.rope_layers is not none_has_rope:
        write_rope(config.rope, config.arch, out)
    if "head_dim" in config:
        out.u32("attention.key_length", config.head_dim)
        out.u32("attention.value_length", config.head_dim)
    if config.experts:
        out.u32("expert_count", config.experts)
        key = "top_k_experts" if "top_k_experts" in config else "num_experts_per_tok"
        out.u32("expert_used_count", config.integer(key, (1, config.experts)))
        if config.row.router == "sigmoid":
            out.u32("expert_gating_func", _SIGMOID)
    _OF_FAMILY.get(config.arch, _settings)(config, out)
    return out.found


# -- every family -----------------------------------------------------------------------------------------------------


def _common(config: TextConfig, out: Writer) -> None:
    out.u32("block_count", config.layers + config.predicting)
    if config.predicting:
        out.u32("nextn_predict_layers", config.predicting)
    out.u32("context_length", config.integer("max_position_embeddings", _SIZE))
    out.u32("embedding_length", config.integer("hidden_size", _SIZE))
    _feed_forward(config, out)
    out.u32("attention.head_count", config.heads)
    if config.row.single_blocks or (config.row.hybrid == "mamba" and any(config.recurrent)):
        out.integers("attention.head_count_kv", [layer.kv_heads for layer in config.model.each])
    elif config.row.hybrid == "convolution":
        heads = [0 if recurrent else config.kv_heads for recurrent in config.recurrent]
        out.integers("attention.head_count_kv", heads)
    else:
        out.u32("attention.head_count_kv", 1 if config.row.latent else config.kv_heads)
    names = config.row.hf_keys.get("eps", "rms_norm_eps").split()
    eps = config.number(next((name for name in names if name in config), names[0]), (1e-12, 1.0))
    out.f32(f"attention.layer_norm{'' if config.row.single_blocks else '_rms'}_epsilon", eps)


def _feed_forward(config: TextConfig, out: Writer) -> None:
    """One width, or one per layer; a model with experts in every layer may have none."""
    if config.row.single_blocks:
        experts = config.model.experts
        wide = 0 if experts is None else experts.ffn  # readers take a layer without a width for a recurrent one
        out.integers("feed_forward_length", [wide if layer.sparse else layer.ffn for layer in config.model.each])
        return
    value = plain(config.get("intermediate_size", None if config.experts else 0))
    if value is None:
        return
    if isinstance(value, list):
        if len(value) != config.layers or not all(is_integer(each) for each in value):
            config.wrong("intermediate_size", value, f"an integer, or {config.layers} of them")
        out.integers("feed_forward_length", value)
    else:
        out.u32("feed_forward_length", config.integer("intermediate_size", _SIZE))


def _check(config: TextConfig) -> None:
    """Refuses settings that GGUF cannot represent and whose value its readers assume."""
    gelu = config.arch.startswith("gemma")
    for key in ("hidden_activation", "hidden_act"):
        if key in config:
            allowed = _ACTIVATIONS["gelu" if gelu else "silu"]
            if config.text(key) not in allowed:
                config.unsupported(key, config.get(key), f"GGUF files of {config.arch} mean {allowed[0]}")
            break
    if config.arch != "gemma4":  # for gemma4 it may be "vision", which affects only images
        config.require(_TWO_WAY, config.file_arch == "gemma-embedding", "attention in both directions is not supported")
    elif config.get(_TWO_WAY, None) is True:
        config.unsupported(_TWO_WAY, True, "attention in both directions is not supported")
    if config.row.gguf_period is None and _has_windows(config):
        config.unsupported("sliding_window", config.get("sliding_window"), "GGUF has no windows for this architecture")
    _check_scale(config)


def _has_windows(config: TextConfig) -> bool:
    if any(config.sliding):
        return True
    if "use_sliding_window" in config:
        return config.flag("use_sliding_window") and "sliding_window" in config
    mistral = config.get("model_type", "") in ("mistral", "mixtral", "ministral3", "mistral3")
    window = config.integer("sliding_window", (0, 1 << 62), 0) if mistral else 0
    return 0 < window < config.integer("max_position_embeddings", _SIZE)


def _check_scale(config: TextConfig) -> None:
    """GGUF does not store the scale of Gemma's attention scores: readers derive it from the sizes."""
    if "query_pre_attn_scalar" not in config or config.arch not in ("gemma2", "gemma3"):
        return
    wide = config.layers == config.row.wide_scale_layers
    expected = config.integer("hidden_size", _SIZE) / config.heads if wide else config.head_dim
    if config.number("query_pre_attn_scalar", (1e-6, 1e9)) != expected:
        found = config.get("query_pre_attn_scalar")
        config.unsupported("query_pre_attn_scalar", found, f"readers of GGUF files compute with {expected:g}")


# -- families ---------------------------------------------------------------------------------------------------------


def _nothing(config: TextConfig, out: Writer) -> None:
    """No keys besides the common ones."""


def _settings(config: TextConfig, out: Writer) -> None:
    """The settings that GGUF has keys for, and the windows."""
    for name, key in {**SETTINGS, **config.row.keys}.items():
        target = key.gguf.partition(" ")[0]
        places = [each.rpartition(".") for each in config.row.hf_keys.get(name, key.hf).split()]
        holders = [(config.nested(outer, optional=True) if outer else config, inner) for outer, _, inner in places]
        keys, found = next(((keys, each) for keys, each in holders if each in keys), (config, ""))
        there = f"{out.arch}.{target}" in out.found or found in ("intermediate_size", "layer_norm_epsilon")
        for_experts = target.startswith("expert_") and not config.experts
        lacks = keys.get(found, None) is None or (name == "shared_ffn" and not keys.get(found))
        if not target or not found or there or for_experts or lacks:
            continue
        if key.allowed is None:
            out.flag(target, keys.flag(found))
        elif any(isinstance(bound, float) for bound in key.allowed):
            out.f32(target, keys.number(found, key.allowed))
        else:
            out.u32(target, keys.integer(found, key.allowed))
    if any(config.sliding):
        out.u32("attention.sliding_window", config.integer("sliding_window", _SIZE))
        out.flags("attention.sliding_window_pattern", config.sliding)
    out.u32("rope.dimension_count", int(config.head_dim * config.rope.partial))


def _smollm3(config: TextConfig, out: Writer) -> None:
    if [layer.has_rope for layer in config.model.each] != by_period(4, config.layers):
        found = config.get("no_rope_layers", None)
        config.unsupported("no_rope_layers", found, "readers of GGUF files leave out every fourth layer")
    _settings(config, out)


def _llama(config: TextConfig, out: Writer) -> None:
    out.u32("vocab_size", config.integer("vocab_size", _SIZE))
    out.u32("rope.dimension_count", config.head_dim)


def _qwen3moe(config: TextConfig, out: Writer) -> None:
    if not config.flag("norm_topk_prob", False):
        config.unsupported("norm_topk_prob", False, "readers of GGUF files normalize the weights of the chosen experts")
    config.require("decoder_sparse_step", 1, "layers without experts are not supported")
    config.require("mlp_only_layers", [], "layers without experts are not supported")
    out.u32("expert_feed_forward_length", config.integer("moe_intermediate_size", _SIZE))


def _phi3(config: TextConfig, out: Writer) -> None:
    _settings(config, out)
    out.u32("attention.sliding_window", config.integer("sliding_window", (0, _SIZE[1]), 0))
    if config.rope.kind == "longrope":
        out.f32("rope.scaling.attn_factor", long_rope(config.rope, config.head_dim).scale)


def _gpt_oss(config: TextConfig, out: Writer) -> None:
    for key in config.row.keys.values():
        if (found := config.number(key.hf, key.allowed, key.default)) != key.default:
            config.unsupported(key.hf, found, f"readers of GGUF files compute with {key.default:g}")
    if config.sliding != by_period(_PERIODS[config.arch], config.layers):
        config.unsupported("layer_types", config.layer_types, "readers of GGUF files give every other layer a window")
    out.u32("attention.sliding_window", config.integer("sliding_window", _SIZE))
    out.u32("expert_feed_forward_length", config.integer("intermediate_size", _SIZE))


def _deepseek(config: TextConfig, out: Writer) -> None:
    _settings(config, out)
    latent = config.model.latent
    assert latent is not None
    out.u32("attention.key_length", latent.width)
    out.u32("attention.value_length", latent.keys)
    out.u32("attention.key_length_mla", latent.plain + latent.rope)
    out.u32("rope.dimension_count", latent.rope)


def _mamba(config: TextConfig, out: Writer) -> None:
    """Granite 4 and Nemotron-H."""
    _settings(config, out)
    if config.row.single_blocks:
        config.require("mlp_hidden_act", "relu2", "GGUF files of this architecture mean relu2")
    if not any(layer.has_rope for layer in config.model.each):
        out.flag("rope.scaling.finetuned", False)
    if (net := config.model.recurrence) is None or not any(config.recurrent):
        return
    if [*net.steps] != config.row.gguf_defaults.get("time_step_limit", [0.0, inf]):
        config.unsupported("time_step_limit", list(net.steps), "GGUF has no bounds of time steps")
    out.u32("ssm.conv_kernel", net.taps)
    out.u32("ssm.state_size", net.key_dim)
    out.u32("ssm.group_count", net.key_heads)
    out.u32("ssm.inner_size", net.values)
    out.u32("ssm.time_step_rank", net.value_heads)
    out.u32("rope.dimension_count", config.integer("hidden_size", _SIZE) // config.heads)


def _qwen35(config: TextConfig, out: Writer) -> None:
    config.require("attn_output_gate", True, "GGUF files of this architecture have a gate on attention")
    key, value = (config.integer(f"linear_{name}_head_dim", _SIZE) for name in ("key", "value"))
    if key != value:
        config.unsupported("linear_value_head_dim", value, f"GGUF has one size for it and linear_key_head_dim, {key}")
    value_heads = config.integer("linear_num_value_heads", _SIZE)
    out.u32("ssm.conv_kernel", config.integer("linear_conv_kernel_dim", _SIZE))
    out.u32("ssm.state_size", key)
    out.u32("ssm.group_count", config.integer("linear_num_key_heads", _SIZE))
    out.u32("ssm.time_step_rank", value_heads)
    out.u32("ssm.inner_size", value * value_heads)
    out.flags("attention.recurrent_layers", [*config.recurrent, *[False] * config.predicting])
    out.u32("full_attention_interval", config.integer("full_attention_interval", _LAYERS))
    out.u32("rope.dimension_count", int(config.head_dim * config.rope.partial))


def _qwen35moe(config: TextConfig, out: Writer) -> None:
    _qwen35(config, out)
    out.u32("expert_feed_forward_length", config.integer("moe_intermediate_size", _SIZE))
    out.u32("expert_shared_feed_forward_length", config.integer("shared_expert_intermediate_size", _SIZE))


def _softcaps(config: TextConfig, out: Writer) -> None:
    """Caps on scores and logits. GGUF cannot express the absence of a cap that readers assume."""
    for key, assumed in zip(("attn_logit_softcapping", "final_logit_softcapping"), config.row.gguf_caps, strict=True):
        if cap := config.number(key, (0.0, 1e6), 0.0):
            out.f32(key, cap)
        elif assumed:
            config.unsupported(key, config.get(key, None), f"readers of GGUF files compute with {assumed:g}")


def _gemma2(config: TextConfig, out: Writer) -> None:
    _softcaps(config, out)
    if any(config.sliding):
        out.u32("attention.sliding_window", config.integer("sliding_window", _SIZE))
    if config.sliding != by_period(_PERIODS[config.arch], config.layers):
        out.flags("attention.sliding_window_pattern", config.sliding)


def _gemma3n(config: TextConfig, out: Writer) -> None:
    config.require("altup_correct_scale", True, "readers of GGUF files of this architecture scale")
    _softcaps(config, out)
    out.u32("attention.sliding_window", config.integer("sliding_window", _SIZE))
    out.u32("altup.active_idx", config.integer("altup_active_idx", (0, 64)))
    out.u32("altup.num_inputs", config.integer("altup_num_inputs", (1, 64)))
    out.u32("embedding_length_per_layer_input", config.integer("hidden_size_per_layer_input", _SIZE))
    out.u32("attention.shared_kv_layers", config.shared_kv_layers)
    key = "activation_sparsity_pattern"
    sparsity = config.elements(key, lambda each: each.number(key, (0.0, 0.999999)), config.layers)
    out.floats("activation_sparsity_scale", [NormalDist().inv_cdf(share) if share else -inf for share in sparsity])
    out.flags("attention.sliding_window_pattern", config.sliding)


def _gemma4(config: TextConfig, out: Writer) -> None:
    _softcaps(config, out)
    out.u32("attention.sliding_window", config.integer("sliding_window", _SIZE))
    out.u32("attention.shared_kv_layers", config.shared_kv_layers)
    out.u32("embedding_length_per_layer_input", config.integer("hidden_size_per_layer_input", (0, 1 << 20)))
    out.flags("attention.sliding_window_pattern", config.sliding)
    for name in ("key_length", "value_length"):
        out.u32(f"attention.{name}", config.full_head_dim)
        out.u32(f"attention.{name}_swa", config.head_dim)
    if config.experts:
        key = "expert_intermediate_size" if "expert_intermediate_size" in config else "moe_intermediate_size"
        out.u32("expert_feed_forward_length", config.integer(key, _SIZE))
    if config.flag("use_double_wide_mlp", False):  # the layers that share a KV cache are twice as wide
        width, own = config.integer("intermediate_size", _SIZE), config.layers - config.shared_kv_layers
        out.integers("feed_forward_length", [width * (1 + (i >= own)) for i in range(config.layers)])
    full = config.of_full_layers("num_global_key_value_heads", "num_key_value_heads")
    if full is not None and config.flag("attention_k_eq_v", False):
        heads = [config.kv_heads if slides else full for slides in config.sliding]
        out.integers("attention.head_count_kv", heads)
    out.u32("rope.dimension_count", config.full_head_dim)  # rope_freqs.weight marks the part that is not rotated
    out.u32("rope.dimension_count_swa", config.head_dim)


_OF_FAMILY: dict[str, Callable[[TextConfig, Writer], None]] = {
    "llama": _llama, "qwen2": _nothing, "qwen3": _nothing, "qwen3moe": _qwen3moe,
    "qwen35": _qwen35, "qwen35moe": _qwen35moe, "gemma": _nothing, "gemma2": _gemma2, "gemma3": _gemma2,
    "gemma3n": _gemma3n, "gemma4": _gemma4, "phi3": _phi3, "gpt-oss": _gpt_oss, "deepseek2": _deepseek,
    "granitehybrid": _mamba, "nemotron_h": _mamba, "smollm3": _smollm3,
}  # fmt: skip
