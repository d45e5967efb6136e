"""Converts `config.json` to GGUF's architecture and metadata keys, ropes included.

Export stage, read by `hf.py`. The keys of a family, and their counterparts in `config.json`, follow the reference
converter of the format. What the model's own configuration says is checked, so that nothing that GGUF cannot represent
is lost silently. Frequencies of rotary embeddings that GGUF has no key for become a tensor of divisors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from functools import cached_property
from math import inf, pi
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx.models import from_hf
from rlx.models.architectures import by_period, none_has_rope
from rlx.models.config import ModelConfig, Recurrence
from rlx.models.gguf_config import ROUTERS
from rlx.models.hf_config import text_part, with_defaults
from rlx.models.keys import Keys
from rlx.models.registry import MODEL_TYPES
from rlx.models.rope import Llama3, Rope, Yarn, yarn_scale
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

    def sizes(self, key: str, values: Sequence[int]) -> None:
        """One for all layers, or one for each."""
        self.u32(key, values[0]) if len(set(values)) == 1 else self.integers(key, values)

    def floats(self, key: str, values: Sequence[float]) -> None:
        self.found[f"{self.arch}.{key}"] = list(values), (GgufType.ARRAY, GgufType.FLOAT32)

    def flags(self, key: str, values: Sequence[bool]) -> None:
        self.found[f"{self.arch}.{key}"] = list(values), (GgufType.ARRAY, GgufType.BOOL)


# Two architectures whose files omit the base; their readers use the default of the format.
_IMPLIED = {"gemma": 10_000.0, "gemma2": 10_000.0}
_NEVER = 1e30  # the divisor of a frequency that is not rotated


def write_rope(config: TextConfig, out: Writer) -> None:
    """The keys `rope.*`, except sizes."""
    rope, local = config.model.rope, config.model.local_rope
    if config.row.rope_sections:
        out.integers("rope.dimension_sections", [*rope.sections, 0])
    if rope.base != _IMPLIED.get(config.arch):
        out.f32("rope.freq_base", rope.base)
    if local is not None:
        out.f32("rope.freq_base_swa", local.base)
    if rope.factor != 1 and config.arch != "gemma4":
        out.text("rope.scaling.type", "linear")
        out.f32("rope.scaling.factor", rope.factor)
    if rope.yarn is not None:
        _write_yarn(config, rope.yarn, out)
    if rope.long is not None:
        out.u32("rope.scaling.original_context_length", rope.long[0])


def _check_rope(config: TextConfig) -> None:
    rope, arch = config.model.rope, config.arch
    if rope.llama3 is not None and arch not in ("llama", "exaone", "exaone4"):
        config.unsupported("rope_type", "llama3", f"GGUF files of {arch} have no place for its divisors")
    if rope.long is not None and arch not in ("phi3", "minicpm"):
        config.unsupported("rope_type", "longrope", f"GGUF files of {arch} have no place for its factors")
    if rope.turning is not None and arch != "gemma4":
        config.unsupported("rope_type", "proportional", f"readers of GGUF files of {arch} compute otherwise")
    size = config.full_head_dim if arch == "gemma4" else config.head_dim
    if rope.dims != size and config.row.partial_rope is None and config.model.latent is None:
        config.unsupported("partial_rotary_factor", rope.dims / size, f"GGUF files of {arch} turn whole heads")
    local = config.nested("rope_parameters", optional=True).nested("sliding_attention", optional=True)
    local.require("rope_type", "default", "GGUF scales the rope of layers without window only")


def _write_yarn(config: TextConfig, yarn: Yarn, out: Writer) -> None:
    implied = config.row.gguf_defaults
    out.text("rope.scaling.type", "yarn")
    out.f32("rope.scaling.factor", yarn.factor)
    out.u32("rope.scaling.original_context_length", yarn.context)
    if yarn.whole != implied.get("rope.scaling.yarn_truncate", True):
        what = "readers of GGUF files of this architecture take another value"
        config.unsupported("truncate", yarn.whole, f"{what} for whether the borders of YaRN are whole pairs")
    for name, rounds, usual_rounds in (("fast", yarn.fast, 32.0), ("slow", yarn.slow, 1.0)):
        if rounds != usual_rounds:
            out.f32(f"rope.scaling.yarn_beta_{name}", rounds)
    unit = implied.get("rope.scaling.yarn_log_unit", float(config.arch == "mistral3"))
    usual = yarn_scale(yarn.factor)
    if unit and yarn.weight:
        out.f32("rope.scaling.yarn_log_multiplier", unit * yarn.weight)
        usual = yarn_scale(yarn.factor, 1.0 if unit == 1 else yarn.weight) / yarn_scale(yarn.factor, yarn.weight)
    own = config.model.rope.scale / usual
    if own != 1:  # readers multiply YaRN's default by it; they ignore `yarn_attn_factor`
        out.f32("rope.scaling.attn_factor", own)


def divisors(config: TextConfig) -> npt.NDArray[np.float32] | None:
    """`rope_freqs.weight` float32 [dims / 2], which divides the frequencies of layers without a window, or None."""
    rope = config.model.rope
    if rope.llama3 is not None:
        return _llama3(rope, rope.llama3)
    if config.arch == "gemma4":  # the first pairs are rotated, the others are not
        pairs, turning = rope.dims // 2, (rope.turning or rope.dims) // 2
        return np.array([rope.factor] * turning + [_NEVER] * (pairs - turning), np.float32)
    return None


def _llama3(rope: Rope, scaling: Llama3) -> npt.NDArray[np.float32]:
    """1 for short wavelengths, `factor` for long ones, between by rotations in the original context (Llama 3.1)."""
    low, high, context = scaling.low, scaling.high, scaling.context
    exponent = np.arange(0, rope.dims, 2, dtype=np.float32) / np.float32(rope.dims)
    one, factor = np.float32(1), np.float32(scaling.factor)
    wavelength = np.float32(2 * pi) / (one / np.power(np.float32(rope.base), exponent))
    smooth = (np.float32(context) / wavelength - np.float32(low)) / np.float32(high - low)
    between = one / ((one - smooth) / factor + smooth)
    ends = np.where(wavelength > context / low, factor, between)
    return np.where(wavelength < context / high, one, ends).astype(np.float32)


_SIZE, _LAYERS = (1, 1 << 31), (1, 1024)
_TWO_WAY = "use_bidirectional_attention"
# Architectures whose GGUF loaders have a built-in rule for sliding layers: every n-th layer does not slide.
_PERIODS = {"gemma2": 2, "gemma3": 6, "gpt-oss": 2}


class TextConfig(Keys):
    """The keys of the text part of a `config.json`, with the defaults of its architecture.

    Attributes:
        arch: `general.architecture`.
        row: how the architecture differs from others.
        predicting: number of MTP blocks after the layers.
    """

    predicting = 0

    def __init__(self, config: Mapping[str, Any], where: object) -> None:
        inner = Keys(config, where).nested("text_config", optional=True).get("model_type", None)
        if str(inner) in MODEL_TYPES and str(config.get("model_type")) not in MODEL_TYPES:
            config = {**config, "model_type": inner}  # whatever is around it
        self.arch, self.row, self.whole = text_part(config, where)
        super().__init__(with_defaults(self.row, self.whole, where), where)

    @cached_property
    def model(self) -> ModelConfig:
        """The configuration as the model's own code reads it."""
        left_out = {"text_config", *((_TWO_WAY,) if self.two_way else ())}
        return from_hf({key: value for key, value in self.whole.items() if key not in left_out}, where=self.where)

    @property
    def two_way(self) -> bool:
        """Whether it is a decoder that serves as an encoder."""
        return self.arch == "gemma3" and self.get(_TWO_WAY, None) is True

    @property
    def file_arch(self) -> str:
        """The architecture that GGUF has for this configuration, whose tensors have the same names."""
        if self.two_way:
            return "gemma-embedding"
        if self.arch == "nemotron_h" and self.experts:
            return "nemotron_h_moe"
        if self.arch == "granitehybrid" and not any(self.recurrent) and self.model.each[0].has_rope:
            return "granitemoe" if self.experts else "granite"
        return self.arch

    @property
    def layers(self) -> int:
        return self.model.layers

    @property
    def heads(self) -> int:
        return self.model.heads

    @property
    def kv_heads(self) -> int:
        """Of a layer with attention."""
        return next(filter(None, (layer.kv_heads for layer in self.model.each)), self.heads)

    @property
    def head_dim(self) -> int:
        return self.integer("head_dim", _SIZE, self.model.hidden // self.heads)

    @property
    def experts(self) -> int:
        """Number of experts per layer, 0 for none."""
        return self.model.experts.count if self.model.experts else 0

    @property
    def left_out(self) -> range:
        """The layers for multi-token prediction that are not written."""
        return range(self.layers, self.layers + self.integer("num_nextn_predict_layers", (0, 64), 0))

    @property
    def tied(self) -> bool:
        return self.model.tied

    @property
    def window(self) -> int | None:
        """The window of the layers that have one."""
        return next(filter(None, self.model.windows), None)

    @property
    def sliding(self) -> list[bool]:
        return [layer.window is not None for layer in self.model.each]

    @property
    def recurrent(self) -> list[bool]:
        return [layer.recurrent for layer in self.model.each]

    @property
    def shared_kv_layers(self) -> int:
        return sum(layer.source != number for number, layer in enumerate(self.model.each))

    @property
    def full_head_dim(self) -> int:
        """Gemma 4's head size in full-attention layers."""
        found = {layer.head_dim for layer in self.model.each if layer.window is None}
        if len(found) > 1:
            self.unsupported("head_dim", sorted(found), "full-attention layers of several sizes")
        return next(iter(found), self.head_dim)


def metadata_from_config(config: TextConfig) -> Metadata:
    """The keys `<architecture>.*`.

    Raises:
        ConfigError: a key is missing, of the wrong type or out of range.
        UnsupportedModelError: a setting that GGUF has no key for and that its readers compute differently.
    """
    has_rope = config.row.rope_layers is not none_has_rope
    if has_rope:
        _check_rope(config)
    _check(config)
    out = Writer(config.file_arch)
    _common(config, out)
    if has_rope:
        write_rope(config, out)
    if "head_dim" in config:
        out.u32("attention.key_length", config.head_dim)
        out.u32("attention.value_length", config.head_dim)
    if (experts := config.model.experts) is not None:
        out.u32("expert_count", experts.count)
        out.u32("expert_used_count", experts.used)
        if config.row.router != "softmax":
            out.u32("expert_gating_func", next(n for n, router in ROUTERS.items() if router == experts.router))
        _dense_layers(config, out)
    _OF_FAMILY.get(config.arch, _settings)(config, out)
    return out.found


# -- every family -----------------------------------------------------------------------------------------------------


def _common(config: TextConfig, out: Writer) -> None:
    out.u32("block_count", config.layers + config.predicting)
    if config.predicting:
        out.u32("nextn_predict_layers", config.predicting)
    out.u32("context_length", config.model.context)
    out.u32("embedding_length", config.model.hidden)
    _feed_forward(config, out)
    out.u32("attention.head_count", config.heads)
    heads = [layer.kv_heads for layer in config.model.each]
    out.sizes("attention.head_count_kv", [config.kv_heads] if config.row.hybrid == "delta rule" else heads)
    whole = config.row.single_blocks or config.row.norm == "layer"
    out.f32(f"attention.layer_norm{'' if whole else '_rms'}_epsilon", config.model.eps)


def _feed_forward(config: TextConfig, out: Writer) -> None:
    """One width, or one per layer; a model with experts in every layer may have none."""
    experts, widths = config.model.experts, [layer.ffn for layer in config.model.each]
    if config.row.single_blocks:  # readers take a layer without a width for a recurrent one
        wide = 0 if experts is None else experts.ffn
        widths = [wide if layer.sparse else layer.ffn for layer in config.model.each]
    if any(widths):
        out.sizes("feed_forward_length", widths)


def _dense_layers(config: TextConfig, out: Writer) -> None:
    """How many layers have no experts, if they are the first ones."""
    dense = [not layer.sparse for layer in config.model.each]
    first = dense.index(False)
    if config.row.single_blocks or not first:
        return
    if any(dense[first:]):
        config.unsupported("mlp_layer_types", config.get("mlp_layer_types", None), "GGUF has dense layers first only")
    out.u32("leading_dense_block_count", first)


def _check(config: TextConfig) -> None:
    """Refuses settings that GGUF cannot represent and whose value its readers assume."""
    model, row = config.model, config.row
    if model.activation != row.activation:
        config.unsupported("hidden_act", model.activation, f"GGUF files of {config.arch} mean {row.activation}")
    if row.gguf_period is None and any(each is not None and each < model.context for each in model.windows):
        config.unsupported("sliding_window", config.window, "GGUF has no windows for this architecture")
    _check_scale(config)


def _check_scale(config: TextConfig) -> None:
    """GGUF does not store the scale of Gemma's attention scores: readers derive it from the sizes."""
    if "query_pre_attn_scalar" not in config or config.arch not in ("gemma2", "gemma3"):
        return
    wide = config.layers == config.row.wide_scale_layers
    expected = config.model.hidden / config.heads if wide else config.head_dim
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
        there = f"{out.arch}.{target}" in out.found or name == "eps" or found == "intermediate_size"
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
    if (experts := config.model.experts) is not None and config.row.experts == "must":
        out.u32("expert_feed_forward_length", experts.ffn)
        if experts.shared:
            out.u32("expert_shared_feed_forward_length", experts.shared)
    _windows(config, out, pattern=any(config.sliding))
    out.u32("rope.dimension_count", config.model.rope.dims)


def _windows(config: TextConfig, out: Writer, *, pattern: bool) -> None:
    """The window; with `pattern` also which layers have it."""
    if config.window is not None:
        out.u32("attention.sliding_window", config.window)
    if pattern:
        out.flags("attention.sliding_window_pattern", config.sliding)


def _smollm3(config: TextConfig, out: Writer) -> None:
    if [layer.has_rope for layer in config.model.each] != by_period(4, config.layers):
        found = config.get("no_rope_layers", None)
        config.unsupported("no_rope_layers", found, "readers of GGUF files leave out every fourth layer")
    _settings(config, out)


def _exaone4(config: TextConfig, out: Writer) -> None:
    if not any(config.sliding) and not config.model.each[0].has_rope:
        what = "GGUF has no windows for layers that all lack rope"
        config.unsupported("layer_types", config.get("layer_types", None), what)
    _settings(config, out)


def _llama(config: TextConfig, out: Writer) -> None:
    out.u32("vocab_size", config.integer("vocab_size", _SIZE))
    out.u32("rope.dimension_count", config.head_dim)


def _qwen3moe(config: TextConfig, out: Writer) -> None:
    experts = config.model.experts
    assert experts is not None
    if not experts.normalize:
        config.unsupported("norm_topk_prob", False, "readers of GGUF files normalize the weights of the chosen experts")
    config.require("decoder_sparse_step", 1, "layers without experts are not supported")
    config.require("mlp_only_layers", [], "layers without experts are not supported")
    out.u32("expert_feed_forward_length", experts.ffn)


def _phi3(config: TextConfig, out: Writer) -> None:
    _settings(config, out)
    out.u32("attention.sliding_window", config.integer("sliding_window", (0, _SIZE[1]), 0))
    if config.model.rope.long is not None:
        out.f32("rope.scaling.attn_factor", config.model.rope.scale)


def _gpt_oss(config: TextConfig, out: Writer) -> None:
    for key in config.row.keys.values():
        if (found := config.number(key.hf, key.allowed, key.default)) != key.default:
            config.unsupported(key.hf, found, f"readers of GGUF files compute with {key.default:g}")
    if config.sliding != by_period(_PERIODS[config.arch], config.layers):
        config.unsupported(
            "layer_types", config.get("layer_types", None), "readers of GGUF files give every other layer a window"
        )
    _windows(config, out, pattern=False)
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
    if not any(layer.has_rope for layer in config.model.each):
        out.flag("rope.scaling.finetuned", False)
    if (net := config.model.recurrence) is None or not any(config.recurrent):
        return
    if [*net.steps] != config.row.gguf_defaults.get("time_step_limit", [0.0, inf]):
        config.unsupported("time_step_limit", list(net.steps), "GGUF has no bounds of time steps")
    _recurrence(net, out)
    out.u32("rope.dimension_count", config.model.hidden // config.heads)


def _qwen35(config: TextConfig, out: Writer) -> None:
    net = config.model.recurrence
    assert net is not None
    if net.key_dim != net.value_dim:
        why = f"GGUF has one size for it and linear_key_head_dim, {net.key_dim}"
        config.unsupported("linear_value_head_dim", net.value_dim, why)
    _recurrence(net, out)
    out.flags("attention.recurrent_layers", [*config.recurrent, *[False] * config.predicting])
    out.u32("full_attention_interval", config.integer("full_attention_interval", (1, 1024), 4))
    out.u32("rope.dimension_count", config.model.rope.dims)
    if (experts := config.model.experts) is not None:
        out.u32("expert_feed_forward_length", experts.ffn)
        out.u32("expert_shared_feed_forward_length", experts.shared)


def _recurrence(net: Recurrence, out: Writer) -> None:
    out.u32("ssm.conv_kernel", net.taps)
    out.u32("ssm.state_size", net.key_dim)
    out.u32("ssm.group_count", net.key_heads)
    out.u32("ssm.inner_size", net.values)
    out.u32("ssm.time_step_rank", net.value_heads)


def _softcaps(config: TextConfig, out: Writer) -> None:
    """Caps on scores and logits. GGUF cannot express the absence of a cap that readers assume."""
    for key, assumed in zip(("attn_logit_softcapping", "final_logit_softcapping"), config.row.gguf_caps, strict=True):
        if cap := config.number(key, (0.0, 1e6), 0.0):
            out.f32(key, cap)
        elif assumed:
            config.unsupported(key, config.get(key, None), f"readers of GGUF files compute with {assumed:g}")


def _gemma2(config: TextConfig, out: Writer) -> None:
    _softcaps(config, out)
    _windows(config, out, pattern=config.sliding != by_period(_PERIODS[config.arch], config.layers))


def _gemma3n(config: TextConfig, out: Writer) -> None:
    config.require("altup_correct_scale", True, "readers of GGUF files of this architecture scale")
    _shared(config, out)
    out.u32("altup.active_idx", 0)
    out.u32("altup.num_inputs", config.model.streams)
    sparsity = [layer.sparsity for layer in config.model.each]
    out.floats("activation_sparsity_scale", [-inf if each is None else each for each in sparsity])


def _shared(config: TextConfig, out: Writer) -> None:
    """What Gemma 3n and 4 have."""
    _softcaps(config, out)
    _windows(config, out, pattern=True)
    out.u32("attention.shared_kv_layers", config.shared_kv_layers)
    out.u32("embedding_length_per_layer_input", config.model.per_layer)


def _gemma4(config: TextConfig, out: Writer) -> None:
    _shared(config, out)
    for name in ("key_length", "value_length"):
        out.u32(f"attention.{name}", config.full_head_dim)
        out.u32(f"attention.{name}_swa", config.head_dim)
    if (experts := config.model.experts) is not None:
        out.u32("expert_feed_forward_length", experts.ffn)
    out.u32("rope.dimension_count", config.full_head_dim)  # rope_freqs.weight marks the part that is not rotated
    out.u32("rope.dimension_count_swa", config.head_dim)


_OF_FAMILY: dict[str, Callable[[TextConfig, Writer], None]] = {
    "llama": _llama, "qwen2": _nothing, "qwen3": _nothing, "qwen3moe": _qwen3moe,
    "qwen35": _qwen35, "qwen35moe": _qwen35, "qwen3next": _qwen35,
    "gemma": _nothing, "gemma2": _gemma2, "gemma3": _gemma2, "gemma3n": _gemma3n, "gemma4": _gemma4,
    "phi3": _phi3, "gpt-oss": _gpt_oss, "deepseek2": _deepseek, "mistral4": _deepseek,
    "granitehybrid": _mamba, "nemotron_h": _mamba, "smollm3": _smollm3, "exaone4": _exaone4,
}  # fmt: skip
