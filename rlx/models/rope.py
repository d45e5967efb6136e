"""Rotary embeddings: the frequencies that a file specifies, and their values.

Part of the models stage, read by `reader.py` and used by `blocks.py`. A file's scaling becomes part of the inverse
frequencies, so the graph has a single rope op.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import ceil, floor, log, pi, sqrt
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx.models.keys import FACTOR, POSITIVE, Keys

DIVISORS = "rope_freqs.weight"
PART = (1e-3, 1.0)
_KINDS = {kind: kind for kind in ("default", "linear", "llama3", "yarn", "proportional", "longrope")}
_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
Divisors = str | tuple[float, ...] | None


@dataclass(frozen=True)
class Llama3:
    """The frequency scaling of Llama 3.1 and later.

    Attributes:
        factor: what low frequencies are divided by.
        low, high: `low_freq_factor` and `high_freq_factor`: rotations within the original context below which a
            frequency is scaled in full, and above which not at all.
        context: the original context length.
    """

    factor: float
    low: float
    high: float
    context: int


@dataclass(frozen=True)
class Yarn:
    """YaRN (arXiv 2309.00071): low frequencies are divided by the factor, high ones are kept.

    Attributes:
        factor: what low frequencies are divided by.
        fast, slow: rotations within the original context above which a frequency is kept, and below which it is
            divided in full.
        context: the original context length.
        whole: whether the borders between them are rounded outwards to whole pairs.
        weight: of the scale of all elements of a head (`mscale_all_dim`), see `yarn_scale`; 0 for none.
    """

    factor: float
    fast: float
    slow: float
    context: int
    whole: bool = True
    weight: float = 0.0

    @property
    def head_scale(self) -> float:
        """The factor of queries and of keys."""
        return yarn_scale(self.factor, self.weight)


@dataclass(frozen=True)
class Rope:
    """One rotary embedding.

    Attributes:
        base: theta.
        dims: number of head elements that it spans, paired according to the style.
        factor: linear scaling: every frequency is divided by it.
        llama3, yarn: scaling of that kind, or None.
        divisors: a divisor for each frequency: their values, or the name of a tensor [dims/2]; or None.
        long: in longer sequences than the first number other divisors hold, the second (LongRoPE, arXiv 2402.13753).
        turning: how many of these elements are rotated, the first pairs; None for all. The others are unchanged.
        scale: factor of sines and cosines.
        sections: how many pairs turn by the time, the row and the column of a position in an image, interleaved (see
            `ops.rope_angles`). Without them positions have one component.
    """

    base: float
    dims: int
    factor: float = 1.0
    llama3: Llama3 | None = None
    yarn: Yarn | None = None
    divisors: Divisors = None
    long: tuple[int, Divisors] | None = None
    turning: int | None = None
    scale: float = 1.0
    sections: tuple[int, ...] = ()

    def at_length(self, positions: int) -> Rope:
        """The rope for sequences of up to `positions`."""
        if self.long is None:
            return self
        return replace(self, divisors=self.long[1] if positions > self.long[0] else self.divisors, long=None)


def inv_freq(rope: Rope, divisors: npt.ArrayLike = 1) -> npt.NDArray[np.float32]:
    """Inverse frequencies float32 [dims/2]: base^(-2i/dims) (arXiv 2104.09864), scaled.

    The power and its reciprocal are rounded to float32 separately, as in transformers; angles at large positions depend
    on it.

    Args:
        divisors: the values of `rope.divisors`.
    """
    exponent = np.arange(0, rope.dims, 2, dtype=np.float32) / np.float32(rope.dims)
    power = (rope.base ** exponent.astype(np.float64)).astype(np.float32)
    inverse = (np.float32(1) / power).astype(np.float64) / rope.factor
    if rope.llama3 is not None:
        inverse = inverse * _llama3(inverse, rope.llama3)
    if rope.yarn is not None:
        inverse = inverse * _yarn(rope, rope.yarn)
    inverse = inverse / np.asarray(divisors)
    if rope.turning is not None:
        inverse[rope.turning // 2 :] = 0
    frequencies: npt.NDArray[np.float32] = inverse.astype(np.float32)
    return frequencies


def _llama3(inverse: npt.NDArray[np.float64], scaling: Llama3) -> npt.NDArray[np.float64]:
    """Factor 1 for high frequencies, 1/factor for low ones, linear between: by rotations in the original context."""
    rotations = scaling.context * inverse / (2 * pi)
    keep = np.clip((rotations - scaling.low) / (scaling.high - scaling.low), 0, 1)
    return (1 - keep) / scaling.factor + keep


def _yarn(rope: Rope, scaling: Yarn) -> npt.NDArray[np.float64]:
    """Factor 1 for the first, fast pairs, 1/factor for the last, linear between, by the index of the pair."""

    def pair(rotations: float) -> float:
        """The pair (a real number) with this many rotations in the original context."""
        return rope.dims * log(scaling.context / (rotations * 2 * pi)) / (2 * log(rope.base))

    low, high = pair(scaling.fast), pair(scaling.slow)
    if scaling.whole:
        low, high = floor(low), ceil(high)
    low, high = max(low, 0), min(high, rope.dims - 1)
    ramp = np.clip((np.arange(rope.dims // 2) - low) / max(high - low, 0.001), 0, 1)
    factors: npt.NDArray[np.float64] = ramp / scaling.factor + (1 - ramp)
    return factors


def yarn_scale(factor: float, weight: float = 1.0) -> float:
    """YaRN's factor of sines and cosines: 1 + 0.1 weight ln(factor)."""
    return 0.1 * weight * log(factor) + 1.0 if factor > 1 else 1.0


def _sections(keys: Keys, key: str, count: int, pairs: int, default: tuple[int, ...]) -> tuple[int, ...]:
    """The sections under a key, an array of `count` numbers, of which those after the third are 0.

    Args:
        pairs: their sum.
        default: the usual ones, of which smaller heads have as many as fit; () if the architecture has none, whatever
            the file says.
    """
    if not default or key not in keys:
        rest = [min(part, len(range(i, pairs, 3))) for i, part in enumerate(default)][1:]
        return (pairs - sum(rest), *rest) if default else ()
    found = tuple(keys.elements(key, lambda each: each.integer(key, (0, pairs)), count))
    if sum(found[: len(default)]) != pairs:
        keys.wrong(key, found, f"numbers with the sum {pairs}")
    return found[: len(default)]


# -- GGUF -------------------------------------------------------------------------------------------------------------


def from_gguf(
    keys: Keys,
    dims: int,
    local_dims: int | None,
    has_tensor: Callable[[str], bool],
    context: int,
    sections: tuple[int, ...] = (),
) -> tuple[Rope, Rope | None]:
    """The rope of a GGUF file and, with `local_dims`, that of its sliding-window layers, which is not scaled.

    Args:
        dims, local_dims: number of head elements that they span.
        context: the model's context length, the default of YaRN's original length.
        sections: the usual sections; () for an architecture whose positions have one component.

    Raises:
        ConfigError: a key of the wrong type or out of range; with `local_dims`, a missing base.
        UnsupportedModelError: an unsupported scaling; without `local_dims`, another base for those layers.
    """
    # A family with two ropes has no common base that could replace the global one.
    base = keys.number("rope.freq_base", POSITIVE, None if local_dims else 10_000.0)
    if not local_dims:
        keys.require("rope.freq_base_swa", base, "a separate rope for some layers is not supported here")
    long, divisors = None, DIVISORS if has_tensor(DIVISORS) else None
    if has_tensor(_LONG):
        original = keys.integer("rope.scaling.original_context_length", (1, 1 << 31), context)
        long, divisors = (original, _LONG), _SHORT if has_tensor(_SHORT) else None
    parts = _sections(keys, "rope.dimension_sections", 4, dims // 2, sections)
    rope = Rope(base, dims, divisors=divisors, long=long, sections=parts, **_gguf_scaling(keys, context))
    return rope, Rope(keys.number("rope.freq_base_swa", POSITIVE, 10_000.0), local_dims) if local_dims else None


def _gguf_scaling(keys: Keys, context: int) -> dict[str, Any]:
    """Fields of `Rope`: the default type is linear; the default factor is 0, which means 1."""
    kind = keys.choice("rope.scaling.type", {kind: kind for kind in ("none", "linear", "yarn", "longrope")}, "linear")
    old = keys.number("rope.scale_linear", (0, 1e6), 0.0)
    factor = keys.number("rope.scaling.factor", (0, 1e6), old) or 1.0
    scale = keys.number("rope.scaling.attn_factor", FACTOR, 1.0)
    if kind != "yarn":
        return {"factor": factor if kind == "linear" else 1.0, "scale": scale}
    keys.require("rope.scaling.yarn_ext_factor", 1.0, "mixing in a part of YaRN is not supported")
    # No file says the unit of the weight, nor whether borders are rounded: see `Architecture.gguf_defaults`.
    unit = keys.number("rope.scaling.yarn_log_unit", POSITIVE, 1.0)
    weight = keys.number("rope.scaling.yarn_log_multiplier", (0, 1e3), 0.0) / unit
    fast = keys.number("rope.scaling.yarn_beta_fast", POSITIVE, 32.0)
    slow = keys.number("rope.scaling.yarn_beta_slow", POSITIVE, 1.0)
    original = keys.integer("rope.scaling.original_context_length", (1, 1 << 31), context)
    top = 1.0 if unit == 1.0 else weight or 1.0  # with another unit both weights are the same
    usual = yarn_scale(factor, top) / (yarn_scale(factor, weight) if weight else 1.0)
    scale *= keys.number("rope.scaling.yarn_attn_factor", FACTOR, usual)
    whole = keys.flag("rope.scaling.yarn_truncate", True)
    return {"yarn": Yarn(factor, fast, slow, original, whole, weight), "scale": scale}


# -- config.json ------------------------------------------------------------------------------------------------------


def from_hf(
    keys: Keys,
    dims: tuple[int, int],
    base: float,
    local_base: float | None,
    partial: float | None,
    context: int,
    sections: tuple[int, ...] = (),
) -> tuple[Rope, Rope | None]:
    """The rope of a `config.json` and, where there is one, another of its sliding-window layers.

    Reads `rope_parameters`, flat or one object an attention type, and the older `rope_theta`, `rope_scaling` and
    `rope_local_base_freq`.

    Args:
        dims: head sizes of the layers without a window, and of those with one.
        base, local_base: the model type's defaults; without `local_base` all layers share one rope.
        partial: the model type's default for the rotated part of a head; None if it always turns all of it.
        context: the model's context length.
        sections: as for `from_gguf`.

    Raises:
        ConfigError: a value of the wrong type or out of range.
        UnsupportedModelError: an unsupported rope type, a part of each head where all of it turns, or, without
            `local_base`, another base for layers with a window.
    """
    parameters = keys.nested("rope_parameters", optional=True)
    partial = _part(keys, partial)
    if any(isinstance(value, Mapping) for value in parameters.mapping.values()):
        rope = _hf_rope(parameters.nested("full_attention"), dims[0], base, partial, context)
        return rope, _hf_rope(parameters.nested("sliding_attention"), dims[1], local_base or base, None, context)
    scaling = parameters if "rope_parameters" in keys else keys.nested("rope_scaling", optional=True)
    key, theta = "original_max_position_embeddings", keys.number("rope_theta", POSITIVE, base)
    original = keys.integer(key, (2, 1 << 31)) if key in keys else None
    rope = _hf_rope(scaling, dims[0], theta, partial, context, original)
    rope = replace(rope, sections=_sections(scaling, "mrope_section", len(sections), rope.dims // 2, sections))
    if local_base is None:
        keys.require("rope_local_base_freq", rope.base, "a separate rope for some layers is not supported here")
        return rope, None
    return rope, Rope(keys.number("rope_local_base_freq", POSITIVE, local_base), dims[1])


def _part(keys: Keys, usual: float | None) -> float | None:
    """The rotated part of a head; None if `usual` says that all of it always turns."""
    if usual is not None:
        return keys.number("partial_rotary_factor", PART, usual)
    keys.require("partial_rotary_factor", 1.0, "rotating a part of each head is not supported for this architecture")
    return None


def _hf_rope(
    keys: Keys, dims: int, base: float, partial: float | None, context: int, original: int | None = None
) -> Rope:
    """One object of rope parameters; `base` is the default of `rope_theta`, `original` of LongRoPE's context."""
    base = keys.number("rope_theta", POSITIVE, base)
    kind = keys.choice("rope_type" if "rope_type" in keys else "type", _KINDS, "default")
    part = _part(keys, (partial or 1.0) if kind == "proportional" else partial) or 1.0
    turning = int(dims * part)
    if kind == "proportional":
        turning -= turning % 2  # as in transformers: a whole number of pairs
    if turning < 2 or turning % 2:
        keys.wrong("partial_rotary_factor", part, f"an even number of a head's {dims} elements to turn")
    if kind == "proportional":  # frequencies as if all elements were rotated, but the slow pairs are not
        return Rope(base, dims, factor=keys.number("factor", FACTOR, 1.0), turning=turning if turning < dims else None)
    if kind == "linear":
        return Rope(base, turning, factor=keys.number("factor", FACTOR))
    if kind == "yarn":
        return _hf_yarn(keys, base, turning, context)
    if kind == "longrope":
        return hf_longrope(keys, base, turning, original, context)
    return Rope(base, turning, llama3=_hf_llama3(keys) if kind == "llama3" else None)


def _hf_llama3(keys: Keys) -> Llama3:
    low, high = keys.number("low_freq_factor", POSITIVE), keys.number("high_freq_factor", POSITIVE)
    if high <= low:
        keys.wrong("high_freq_factor", high, f"more than low_freq_factor, which is {low}")
    context = keys.integer("original_max_position_embeddings", (1, 1 << 31))
    return Llama3(keys.number("factor", FACTOR), low, high, context)


def _hf_yarn(keys: Keys, base: float, dims: int, context: int) -> Rope:
    factor = keys.number("factor", FACTOR)
    original = keys.integer("original_max_position_embeddings", (1, 1 << 31), context)
    fast, slow = keys.number("beta_fast", POSITIVE, 32.0), keys.number("beta_slow", POSITIVE, 1.0)
    weight = keys.number("mscale_all_dim", (0, 1e3), 0.0)
    yarn = Yarn(factor, fast, slow, original, keys.flag("truncate", True), weight)
    return Rope(base, dims, yarn=yarn, scale=hf_yarn_scale(keys))


def hf_longrope(keys: Keys, base: float, dims: int, original: int | None, context: int) -> Rope:
    """LongRoPE: `dims` elements of a head turn; `original` is the default of the original context."""
    original = keys.integer("original_max_position_embeddings", (2, 1 << 31), original)
    long, short = (
        tuple(keys.elements(key, lambda each: each.number(key, FACTOR), dims // 2))  # noqa: B023
        for key in ("long_factor", "short_factor")
    )
    factor = keys.number("factor", FACTOR, context / original)
    scale = sqrt(1 + log(factor) / log(original)) if factor > 1 else 1.0
    scale = keys.number("attention_factor", FACTOR, scale)
    return Rope(base, dims, divisors=short, long=(original, long), scale=scale)


def hf_yarn_scale(keys: Keys) -> float:
    """The factor of sines and cosines for an object of YaRN's parameters."""
    factor = keys.number("factor", FACTOR)
    mscale, all_dims = keys.number("mscale", (0, 1e3), 0.0), keys.number("mscale_all_dim", (0, 1e3), 0.0)
    scale = yarn_scale(factor)
    if mscale and all_dims:
        scale = yarn_scale(factor, mscale) / yarn_scale(factor, all_dims)
    return keys.number("attention_factor", FACTOR, scale)


def by_neighbours(array: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """Rows of each head [2, d/2] as [d/2, 2]: for rope over neighbouring pairs instead of halves."""
    split = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return split.swapaxes(1, 2).reshape(array.shape)


def by_halves(array: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """The opposite of `by_neighbours`."""
    split = array.reshape(heads, array.shape[0] // heads // 2, 2, *array.shape[1:])
    return split.swapaxes(1, 2).reshape(array.shape)
