"""Packed matrices of a card: every type unpacks to the values of the file."""

from __future__ import annotations

import numpy as np
import pytest

from rlx.backends.cuda import layouts
from rlx.errors import ShapeError
from rlx.ir.dtypes import BF16, F16, F32, I32, Q4_K, DType
from rlx.ir.stored import dequantize


@pytest.mark.parametrize("dtype", layouts.TYPES, ids=str)
@pytest.mark.parametrize(("n", "k"), [(5, 256), (33, 768)])
def test_packing_keeps_the_values(dtype: DType, n: int, k: int) -> None:
    raw = np.random.default_rng(n).integers(0, 256, dtype.size((n, k)), dtype=np.uint8)
    packed = layouts.pack(dtype, raw, n, k)
    assert packed.nbytes == layouts.matrix_bytes(dtype, n, k)
    with np.errstate(all="ignore"):
        expected, found = dequantize(raw, dtype, (n, k)), layouts.unpack(dtype, packed, n, k)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_widths_that_are_no_whole_units(dtype: DType) -> None:
    values = np.random.default_rng(0).standard_normal((3, 37)).astype(np.float32)
    raw = values.view(np.uint8) if dtype is F32 else np.zeros((3, 74), np.uint8)
    found = layouts.unpack(dtype, layouts.pack(dtype, raw.reshape(-1), 3, 37), 3, 37)
    assert np.array_equal(found, values if dtype is F32 else np.zeros((3, 37)))


def test_what_has_no_layout() -> None:
    with pytest.raises(ShapeError, match="i32 has no layout on this device"):
        layouts.matrix_bytes(I32, 16, 32)
    with pytest.raises(ShapeError, match="k = 128 is no multiple of the 256"):
        layouts.matrix_bytes(Q4_K, 16, 128)
