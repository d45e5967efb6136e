"""Rotary embeddings: which frequencies a file asks for, and their values.

Part of the models stage, read by `config.py` and used by `blocks.py`. A file's scaling becomes part of the inverse
frequencies, so the graph knows one rope op only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import pi

import numpy as np
import numpy.typing as npt

from rlx.errors import UnsupportedModelError
from rlx.models.keys import POSITIVE, Keys

DIVISORS = "rope_freqs.weight"
FACTOR = (1e-6, 1e6)
_KINDS = {"default": "default", "linear": "linear", "llama3": "llama3"}
_LONGROPE = ("rope_factors_long.weight", "rope_factors_short.weight")


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
class Rope:
    """One rotary embedding.

    Attributes:
        base: theta.
        dims: rotated elements of a head.
        factor: linear scaling: every frequency is divided by it.
        llama3: Llama 3 scaling, or None.
        divisors: name of the tensor [dims/2] that divides the frequencies one by one, or None.
    """

    base: float
    dims: int
    factor: float = 1.0
    llama3: Llama3 | None = None
    divisors: str | None = None


def inv_freq(rope: Rope, divisors: npt.NDArray[np.float32] | None = None) -> npt.NDArray[np.float32]:
    """Inverse frequencies float32 [dims/2]: base^(-2i/dims) (arXiv 2104.09864), scaled.

    The power and its reciprocal are rounded to float32 one after the other, as transformers does; an angle at a large
    position shows the difference.

    Args:
        divisors: the values of the tensor `rope.divisors`.
    """
    exponent = np.arange(0, rope.dims, 2, dtype=np.float32) / np.float32(rope.dims)
    power = (rope.base ** exponent.astype(np.float64)).astype(np.float32)
    inverse = (np.float32(1) / power).astype(np.float64) / rope.factor
    if rope.llama3 is not None:
        inverse = inverse * _llama3(inverse, rope.llama3)
    if divisors is not None:
        inverse = inverse / divisors
    return inverse.astype(np.float32)


def _llama3(inverse: npt.NDArray[np.float64], scaling: Llama3) -> npt.NDArray[np.float64]:
    """1 for high frequencies, 1/factor for low ones, linear between: in rotations within the original context."""
    rotations = scaling.context * inverse / (2 * pi)
    keep = np.clip((rotations - scaling.low) / (scaling.high - scaling.low), 0, 1)
    return (1 - keep) / scaling.factor + keep


# -- GGUF -------------------------------------------------------------------------------------------------------------


def from_gguf(keys: Keys, dims: int, has_tensor: Callable[[str], bool], local: bool) -> tuple[Rope, Rope | None]:
    """The rope of a GGUF file and, if `local`, the one of its sliding-window layers, which no scaling applies to.

    Raises:
        ConfigError: a key of the wrong type or out of range; with `local`, no base.
        UnsupportedModelError: a scaling that rlx does not have; without `local`, another base for those layers.
    """
    for name in _LONGROPE:
        if has_tensor(name):
            raise UnsupportedModelError(f"the tensor {name} asks for longrope scaling", where=keys.where)
    keys.require("rope.scaling.attn_factor", 1.0, "a factor on rope's sines and cosines is not supported")
    # A family with two ropes has no common base that could stand in for the global one.
    base = keys.number("rope.freq_base", POSITIVE) if local else keys.number("rope.freq_base", POSITIVE, 10_000.0)
    if not local:
        keys.require("rope.freq_base_swa", base, "a rope of its own for some layers is not supported here")
    divisors = DIVISORS if has_tensor(DIVISORS) else None
    rope = Rope(base, dims, factor=_gguf_factor(keys), divisors=divisors)
    return rope, Rope(keys.number("rope.freq_base_swa", POSITIVE, 10_000.0), dims) if local else None


def _gguf_factor(keys: Keys) -> float:
    """Linear scaling factor: the default of the type is linear, of the factor 0, which stands for 1."""
    kind = keys.choice("rope.scaling.type", {"none": "none", "linear": "linear"}, "linear")
    old = keys.number("rope.scale_linear", (0, 1e6), 0.0)
    factor: float = keys.number("rope.scaling.factor", (0, 1e6), old)
    return factor if kind == "linear" and factor else 1.0


# -- config.json ------------------------------------------------------------------------------------------------------


def from_hf(keys: Keys, dims: int, base: float, local_base: float | None) -> tuple[Rope, Rope | None]:
    """The rope of a `config.json` and, where there is one, another of its sliding-window layers.

    Reads `rope_parameters`, flat or one object an attention type, and the older `rope_theta`, `rope_scaling` and
    `rope_local_base_freq`.

    Args:
        base, local_base: the model type's own defaults; no `local_base`: all layers share one rope.

    Raises:
        ConfigError: a value of the wrong type or out of range.
        UnsupportedModelError: a rope type that rlx does not have.
    """
    parameters = keys.nested("rope_parameters", optional=True)
    if any(isinstance(value, Mapping) for value in parameters.mapping.values()):
        rope = _hf_rope(parameters.nested("full_attention"), dims, base)
        return rope, _hf_rope(parameters.nested("sliding_attention"), dims, local_base or base)
    scaling = parameters if "rope_parameters" in keys else keys.nested("rope_scaling", optional=True)
    rope = _hf_rope(scaling, dims, keys.number("rope_theta", POSITIVE, base))
    if local_base is None:
        return rope, None
    return rope, Rope(keys.number("rope_local_base_freq", POSITIVE, local_base), dims)


def _hf_rope(keys: Keys, dims: int, base: float) -> Rope:
    """One object of rope parameters; `base` where it has no `rope_theta`."""
    keys.require("partial_rotary_factor", 1.0, "rotating a part of each head is not supported for this architecture")
    base = keys.number("rope_theta", POSITIVE, base)
    kind = keys.choice("rope_type" if "rope_type" in keys else "type", _KINDS, "default")
    if kind == "linear":
        return Rope(base, dims, factor=keys.number("factor", FACTOR))
    return Rope(base, dims, llama3=_hf_llama3(keys) if kind == "llama3" else None)


def _hf_llama3(keys: Keys) -> Llama3:
    low, high = keys.number("low_freq_factor", POSITIVE), keys.number("high_freq_factor", POSITIVE)
    if high <= low:
        keys.wrong("high_freq_factor", high, f"more than low_freq_factor, which is {low}")
    context = keys.integer("original_max_position_embeddings", (1, 1 << 31))
    return Llama3(keys.number("factor", FACTOR), low, high, context)
