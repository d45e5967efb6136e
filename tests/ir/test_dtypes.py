"""Data types: every row against the `gguf` package, sizes against arithmetic."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from rlx.ir.dtypes import BY_GGML, DTYPES, F8_E4M3, DType

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
