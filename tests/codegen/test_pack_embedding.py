"""The packing and embedding kernels against the NumPy layout and the `gguf` package, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from forms import Form, assert_any_split, call, compiled, forms
from native import Array
from test_layouts import random_file_bytes, reference

from rlx.codegen import layouts
from rlx.codegen.kernels.embedding import embedding
from rlx.codegen.kernels.pack import pack
from rlx.codegen.layouts import PACKED_DTYPES, PACKINGS
from rlx.errors import CompileError, ShapeError
from rlx.ir.dtypes import F16, MXFP4, Q4_0, Q6_K, DType

each_dtype = pytest.mark.parametrize("dtype", PACKED_DTYPES, ids=str)


def check_pack(form: Form, dtype: DType, n: int, k: int) -> None:
    raw = np.random.default_rng(n + k).integers(0, 256, dtype.size((n, k)), dtype=np.uint8)
    out = np.full(layouts.packed_bytes(dtype, n, k), 0xA5, np.uint8)
    call(form, pack(dtype), raw, out, end=layouts.row_blocks(n), n=n, k=k)
    np.testing.assert_array_equal(out, layouts.pack(dtype, raw, n, k))


@forms
@each_dtype
def test_pack_is_the_layouts_own(form: Form, dtype: DType) -> None:
    check_pack(form, dtype, 18, PACKINGS[dtype].superblock)


@compiled
@each_dtype
@pytest.mark.parametrize(("n", "supers"), [(1, 3), (15, 1), (16, 2), (17, 5), (64, 4)])
def test_pack_shapes(form: Form, dtype: DType, n: int, supers: int) -> None:
    check_pack(form, dtype, n, PACKINGS[dtype].superblock * supers)


@compiled
@each_dtype
def test_packing_units_are_independent(form: Form, dtype: DType) -> None:
    n, k = 50, PACKINGS[dtype].superblock * 2
    raw = random_file_bytes(dtype, n, k, np.random.default_rng(7))
    out = np.zeros(layouts.packed_bytes(dtype, n, k), np.uint8)
    assert_any_split(form, pack(dtype), [raw], out, end=4, n=n, k=k)


def packed_table(dtype: DType, n: int, k: int) -> tuple[Array, Array]:
    """Packed by the native kernel, and the values that the gguf package reads from the file's bytes."""
    raw = random_file_bytes(dtype, n, k, np.random.default_rng(n * k))
    table = np.zeros(layouts.packed_bytes(dtype, n, k), np.uint8)
    call(None if n * k < 4096 else compiled_form(), pack(dtype), raw, table, end=layouts.row_blocks(n), n=n, k=k)
    return table, reference(dtype, raw, n, k)


def compiled_form() -> Form:
    from levels import LEVELS

    return LEVELS[-1]


@forms
@each_dtype
@pytest.mark.parametrize("scale", [1.0, 45.254833])
def test_embedding_is_the_reference(form: Form, dtype: DType, scale: float) -> None:
    n, k = 21, max(PACKINGS[dtype].superblock, 32)
    table, wanted = packed_table(dtype, n, k)
    ids = np.array([20, 0, 3, 15, 16, 3], np.int32)
    out = np.zeros((6, k), np.float32)
    call(form, embedding(dtype, k, scale), table, ids, out, end=6)
    with np.errstate(over="ignore", invalid="ignore"):
        np.testing.assert_array_equal(out, wanted[ids] * np.float32(scale))


@compiled
@each_dtype
def test_embedding_of_every_row(form: Form, dtype: DType) -> None:
    n, k = 40, 1024
    table, wanted = packed_table(dtype, n, k)
    ids = np.arange(n, dtype=np.int32)[::-1].copy()
    out = np.zeros((n, k), np.float32)
    assert_any_split(form, embedding(dtype, k), [table, ids], out, end=n)
    np.testing.assert_array_equal(out, wanted[ids])


def test_wrong_arguments() -> None:
    with pytest.raises(CompileError, match="mxfp4"):
        pack(MXFP4)
    with pytest.raises(CompileError, match="mxfp4"):
        embedding(MXFP4, 256)
    with pytest.raises(ShapeError, match="superblocks"):
        embedding(Q6_K, 128)
    with pytest.raises(ShapeError, match="superblocks"):
        embedding(Q4_0, 48)
    assert embedding(F16, 7).symbol.startswith("embedding_")
