"""The numbers that quantized blocks stand for: what their codes mean, and their scales and lows (see `blocks.py`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlx.backends.blocks import Blocks
from rlx.backends.blocks_read import Bytes

BLOCK_ROWS = 16
Floats = NDArray[np.float32]


def by_row(field: NDArray[Any]) -> Bytes:
    """A per-row field [blocks, 16, superblocks, ...] -> bytes [blocks, superblocks, ..., 16 x itemsize]."""
    return np.ascontiguousarray(np.moveaxis(field, 1, -1)).view(np.uint8)


def join(*parts: Bytes, lead: int) -> Bytes:
    """Flattens the axes of each part from `lead` on and concatenates the parts."""
    return np.concatenate([p.reshape(*p.shape[:lead], -1) for p in parts], axis=-1)


def split(packed: Bytes, *sizes: int) -> list[Bytes]:
    assert sum(sizes) == packed.shape[-1]
    return np.split(packed, np.cumsum(sizes)[:-1].tolist(), axis=-1)


def f16(field: Bytes) -> Floats:
    """The bytes of the last axis, read as f16 numbers and converted to f32."""
    return np.ascontiguousarray(field).view(np.float16).astype(np.float32)


def meaning(row: Blocks) -> Floats:
    """The number that each code stands for before scaling: `float32[number of codes]`."""
    if row.floats:
        return _e4m3(np.arange(256, dtype=np.uint8))
    if row.signed and not row.levels:
        return np.arange(256, dtype=np.uint8).view(np.int8).astype(np.float32)
    numbers = np.arange(2 ** sum(row.planes)) if row.levels is None else np.array(row.levels)
    return (numbers - row.zero).astype(np.float32)


def _e4m3(bits: Bytes) -> Floats:
    """The values of e4m3fn numbers (see `blocks.py`)."""
    size = np.where(bits & np.uint8(127) == 127, np.float32(np.nan), _e4m3_size(bits))
    return np.where(bits & np.uint8(128), -size, size)


def _e4m3_size(bits: Bytes) -> Floats:
    """Magnitudes of e4m3fn numbers; NaN is not handled."""
    exponent = ((bits >> np.uint8(3)) & np.uint8(15)).astype(np.int32)
    mantissa = (bits & np.uint8(7)).astype(np.float32)
    return np.where(exponent > 0, np.ldexp(mantissa + 8, exponent - 10), np.ldexp(mantissa, -9))


def _bytes(fields: NDArray[Any]) -> list[NDArray[Any]]:
    """Splits fields of one byte each."""
    return np.split(fields, fields.shape[-1] // BLOCK_ROWS, axis=-1)


def _scales_d_m(head: list[Floats], fields: Bytes) -> list[Floats]:
    d, m = split(fields, 32, 32)
    return [f16(d), -f16(m)]


def _scales_d_s(head: list[Floats], fields: Bytes) -> list[Floats]:
    return [head[0] * s.view(np.int8).astype(np.float32) for s in _bytes(fields)]


def _scales_d_s_m(head: list[Floats], fields: Bytes) -> list[Floats]:
    return [d * s.astype(np.float32) for d, s in zip(head, _bytes(fields), strict=True)]


def _scales_d_sm(head: list[Floats], fields: Bytes) -> list[Floats]:
    scales = [head[0] * (s & np.uint8(15)).astype(np.float32) for s in _bytes(fields)]
    return scales + [head[1] * (s >> np.uint8(4)).astype(np.float32) for s in _bytes(fields)]


def _scales_e8m0(head: list[Floats], fields: Bytes) -> list[Floats]:
    return [np.ldexp(np.float32(1), fields.astype(np.int32) - 128)]


def _scales_e4m3(head: list[Floats], fields: Bytes) -> list[Floats]:
    """Scales of NVFP4, read like the reference does: the sign is ignored, and 0x7f is 0."""
    return _bytes(np.where(fields == 0x7F, np.float32(0), _e4m3_size(fields) * np.float32(0.5)))


#: (f16 numbers of a superblock [..., 1, 16], fields [..., subs, bytes]) -> scales, then lows, [..., subs, 16] each.
SCALES: dict[str, Callable[[list[Floats], Bytes], list[Floats]]] = {
    "d": lambda head, fields: [f16(fields)],
    "d_m": _scales_d_m,
    "d_s": _scales_d_s,
    "d_s_m": _scales_d_s_m,
    "d_sm": _scales_d_sm,
    "one": lambda head, fields: [np.broadcast_to(head[0], (*fields.shape[:-1], BLOCK_ROWS))],
    "f32": lambda head, fields: [np.ascontiguousarray(fields).view(np.float32)],
    "e8m0": _scales_e8m0,
    "e4m3": _scales_e4m3,
}
