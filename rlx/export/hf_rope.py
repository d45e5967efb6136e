"""Converts the rotary embeddings of a `config.json` to GGUF keys, or to a tensor of divisors if there is no key.

Export stage, under `hf_config.py`. Reads `rope_parameters`, flat or one object per attention type, and the older
`rope_theta`, `rope_scaling` and `rope_local_base_freq`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import pi
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from rlx.models.architectures import Architecture
from rlx.models.keys import POSITIVE, Keys
from rlx.models.registry import ARCHITECTURES
from rlx.models.rope import Rope, hf_longrope, hf_yarn_scale, yarn_scale

if TYPE_CHECKING:
    from rlx.export.hf_keys import Writer

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
    _check(rope, arch)
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
        _write_yarn(rope, out)
    if rope.kind == "longrope":
        out.u32("rope.scaling.original_context_length", rope.full.integer(_ORIGINAL, _CONTEXT, rope.original))


def _check(rope: RopeConfig, arch: str) -> None:
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


def _write_yarn(rope: RopeConfig, out: Writer) -> None:
    context = rope.full.integer("original_max_position_embeddings", _CONTEXT, rope.context)
    out.u32("rope.scaling.original_context_length", context)
    rope.full.require("truncate", True, "readers of GGUF files round the borders between fast and slow pairs")
    for key, name in (
        ("extrapolation_factor", "yarn_ext_factor"), ("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow"),
    ):  # fmt: skip
        if key in rope.full:
            out.f32(f"rope.scaling.{name}", rope.full.number(key, (0.0, 1e6)))
    own = hf_yarn_scale(rope.full) / yarn_scale(rope.full.number("factor", _FACTOR))
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
