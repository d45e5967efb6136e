"""Rounding: the values that f16, bf16, q8_0 and q4_0 can represent, and the bits of bf16, which NumPy lacks.

Part of the IR's meanings, next to `meaning.py`. The formulas of blocks are those of the GGUF registry's reference
encoders, in f32; a test compares them with the `gguf` package.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def round_to(x: Array, dtype: str) -> Array:
    """The values rounded to f16 or bf16, to nearest even."""
    if dtype == "bf16":
        return from_bf16(to_bf16(x.astype(np.float32))).astype(x.dtype)
    return x.astype(np.float16 if dtype == "f16" else np.float32).astype(x.dtype)


def to_bf16(values: Array) -> Array:
    """float32 numbers -> the bits of the nearest bf16 numbers, uint16: the upper halves, ties to even."""
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)  # rounding would carry some NaNs to zero


def from_bf16(bits: Array) -> Array:
    """The bits of bf16 numbers, uint16 -> float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _q8_0(blocks: Array) -> tuple[Array, Array]:
    """Blocks f32[..., 32] -> (scales [..., 1], codes); codes are rounded to nearest, halves away from zero."""
    scales = np.abs(blocks).max(-1, keepdims=True) / np.float32(127)
    scaled = blocks * _inverse(scales)
    size = np.abs(scaled)
    whole = np.floor(size)
    return scales, np.sign(scaled) * (whole + (size - whole >= 0.5))


def _q4_0(blocks: Array) -> tuple[Array, Array]:
    """The first element of the largest magnitude gets code -8; the largest code is 7."""
    first = np.abs(blocks).argmax(-1)[..., None]
    scales = np.take_along_axis(blocks, first, -1) / np.float32(-8)
    codes = np.floor(blocks * _inverse(scales) + np.float32(8.5))
    return scales, np.minimum(codes, np.float32(15)) - np.float32(8)


def _inverse(scales: Array) -> Array:
    inverse = np.float32(1) / scales
    return np.where(np.isfinite(inverse), inverse, np.float32(0))


#: Elements per block, and the function for scales and codes.
BLOCKS: dict[str, tuple[int, Callable[[Array], tuple[Array, Array]]]] = {"q8_0": (32, _q8_0), "q4_0": (32, _q4_0)}


def round_blocks(x: Array, dtype: str) -> Array:
    """The values of x, rounded to blocks along the last axis; a block with a non-finite value becomes NaN."""
    size, codes_of = BLOCKS[dtype]
    blocks = x.astype(np.float32).reshape(*x.shape[:-1], -1, size)
    with np.errstate(all="ignore"):
        scales, codes = codes_of(blocks)
        values = codes * scales.astype(np.float16).astype(np.float32)
    finite = np.isfinite(blocks).all(-1, keepdims=True)
    return np.where(finite, values, np.float32(np.nan)).reshape(x.shape).astype(x.dtype)
