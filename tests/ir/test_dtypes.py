"""Data types: every row against the `gguf` package, sizes against arithmetic; what caches of block types hold."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from rlx.ir.dtypes import BY_GGML, DTYPES, F8_E4M3, DType
from rlx.ir.stored import BLOCKS, round_blocks

# Types of a `gguf` package newer than this table are its business of another day.
FILE_TYPES = {t.name.lower(): t for t in gguf.GGMLQuantizationType if t.value <= max(BY_GGML)}


@pytest.mark.parametrize("name", FILE_TYPES)
def test_each_gguf_type_has_its_row(name: str) -> None:
    kind, ours = FILE_TYPES[name], DTYPES[name]
    assert (ours.block, ours.nbytes) == gguf.GGML_QUANT_SIZES[kind]
    assert ours.ggml == kind.value
    assert BY_GGML[kind.value] is ours


def test_no_row_claims_an_id_that_gguf_lacks() -> None:
    assert BY_GGML.keys() == {t.value for t in FILE_TYPES.values()}
    assert [t.name for t in DTYPES.values() if t.ggml is None] == ["u8", "f8_e4m3", "q8a"]


@pytest.mark.parametrize("dtype", DTYPES.values())
def test_rows_are_consistent(dtype: DType) -> None:
    assert dtype.is_quantized == (dtype.numpy is None)
    if dtype.numpy:
        assert np.dtype(dtype.numpy).itemsize == dtype.nbytes
    assert dtype.row_bytes(3 * dtype.block) == 3 * dtype.nbytes
    assert dtype.size((2, 5, dtype.block)) == 10 * dtype.nbytes
    assert not (dtype.is_quantized and dtype.is_float)
    assert dtype.has_integer_codes == (dtype.is_quantized and dtype is not F8_E4M3)


# -------------------------------------------------------------------------------------------- caches of block types


types = pytest.mark.parametrize("dtype", BLOCKS)


def reference(x: np.ndarray, dtype: str) -> np.ndarray:
    kind = gguf.GGMLQuantizationType[dtype.upper()]
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(gguf.quants.quantize(x, kind), kind)


@types
def test_values_are_those_of_gguf(dtype: str) -> None:
    rng = np.random.default_rng(0)
    far = rng.standard_normal((2, 500, 64)) * np.exp(rng.uniform(-30, 9, (2, 500, 1)))
    ties = rng.integers(-16, 17, (2, 500, 64)) / 2
    even = (np.arange(64) - 31.5)[None, None].repeat(2, 0)
    steps = (np.arange(64) % 32 - 16)[None, None].repeat(2, 0) * np.array([127 / 16, -8 / 16])[:, None, None]
    x = np.concatenate([far, ties, even, -even, steps, steps + 0.5, np.zeros((2, 1, 64))], axis=1).astype(np.float32)
    np.testing.assert_array_equal(round_blocks(x, dtype), reference(x, dtype))
    np.testing.assert_array_equal(round_blocks(-x, dtype), reference(-x, dtype))
    wide = round_blocks(x.astype(np.float64), dtype)
    assert wide.dtype == np.float64
    np.testing.assert_array_equal(wide, reference(x, dtype))


@types
def test_what_is_not_finite_takes_its_block_with_it(dtype: str) -> None:
    x = np.ones((3, 64), np.float32)
    x[0, 3], x[1, 40] = np.nan, -np.inf
    blocks = round_blocks(x, dtype).reshape(3, 2, 32)
    assert np.isnan(blocks[0, 0]).all() and np.isnan(blocks[1, 1]).all()
    assert np.isfinite(blocks[[0, 1, 2, 2], [1, 0, 0, 1]]).all()
