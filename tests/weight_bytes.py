"""Random bytes of weights of any type."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx.ir.dtypes import BF16, F16, F32, DType
from rlx.ir.stored import dequantize


def random_bytes(dtype: DType, n: int, k: int, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """Random bytes of a matrix, whose values are no NaN and below 1e4."""
    if dtype in (F32, F16):
        return rng.standard_normal((n, k)).astype(str(dtype.numpy)).view(np.uint8).reshape(-1)
    if dtype is BF16:
        bits = rng.standard_normal((n, k)).astype(np.float32).view(np.uint32) >> 16
        return bits.astype(np.uint16).view(np.uint8).reshape(-1)
    raw = rng.integers(0, 256, dtype.size((n, k)), dtype=np.uint8)
    blocks = raw.reshape(-1, dtype.nbytes)
    with np.errstate(all="ignore"):
        sizes = np.abs(dequantize(raw, dtype, (n, k))).reshape(-1, dtype.block).max(1)
    good = np.flatnonzero(sizes < 1e4)
    bad = np.setdiff1d(np.arange(len(blocks)), good)
    blocks[bad] = blocks[rng.choice(good, len(bad))]
    return raw
