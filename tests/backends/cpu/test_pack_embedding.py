"""The packing and embedding kernels, and rows of tables as files hold them, against the NumPy layout and the `gguf`
package, bit for bit.
"""

from __future__ import annotations

import numpy as np
import pytest
from forms import Form, assert_any_split, call, compiled, forms, in_turn
from levels import LEVELS
from native import Array, load
from test_layouts import every_scale
from weight_formats import assert_same_bits, random_file_bytes, reference

from rlx.backends.cpu import layouts
from rlx.backends.cpu.kernels.packing.pack import pack
from rlx.backends.cpu.kernels.rows.embedding import embedding
from rlx.backends.cpu.kernels.rows.lookup import lookup, pieces
from rlx.backends.cpu.layouts import PACKED_DTYPES, PACKINGS
from rlx.backends.cpu.target import Target
from rlx.ir.dtypes import F16, MXFP4, NVFP4, Q4_0, Q8_0, DType


def check_pack(form: Form, dtype: DType, n: int, k: int) -> None:
    raw = np.random.default_rng(n + k).integers(0, 256, dtype.size((n, k)), dtype=np.uint8)
    out = np.full(layouts.packed_bytes(dtype, n, k), 0xA5, np.uint8)
    call(form, pack(dtype), raw, out, end=layouts.row_blocks(n), n=n, k=k)
    np.testing.assert_array_equal(out, layouts.pack(dtype, raw, n, k))


@in_turn(PACKED_DTYPES, [None, *LEVELS])
def test_pack_is_the_layouts_own(form: Form, case: DType) -> None:
    check_pack(form, case, 18, PACKINGS[case].superblock)


@in_turn(PACKED_DTYPES, LEVELS[::-1])
def test_pack_shapes(form: Form, case: DType) -> None:
    """And units are packed in any order."""
    for n, supers in ((1, 3), (15, 1), (16, 2), (17, 5), (64, 4)):
        check_pack(form, case, n, PACKINGS[case].superblock * supers)
    n, k = 50, PACKINGS[case].superblock * 2
    raw = random_file_bytes(case, n, k, np.random.default_rng(7))
    out = np.zeros(layouts.packed_bytes(case, n, k), np.uint8)
    assert_any_split(form, pack(case), [raw], out, end=4, n=n, k=k)


def packed_table(dtype: DType, n: int, k: int) -> tuple[Array, Array]:
    """Packed by the native kernel, and the values that the gguf package reads from the file's bytes."""
    raw = random_file_bytes(dtype, n, k, np.random.default_rng(n * k))
    table = np.zeros(layouts.packed_bytes(dtype, n, k), np.uint8)
    call(None if n * k < 4096 else compiled_form(), pack(dtype), raw, table, end=layouts.row_blocks(n), n=n, k=k)
    return table, reference(dtype, raw, n, k)


def compiled_form() -> Form:
    return LEVELS[-1]


@in_turn(PACKED_DTYPES, [None, *LEVELS])
def test_embedding_is_the_reference(form: Form, case: DType) -> None:
    scale = 45.254833  # without one in the next test
    n, k = 21, max(PACKINGS[case].superblock, 32)
    table, wanted = packed_table(case, n, k)
    ids = np.array([20, 0, 3, 15, 16, 3], np.int32)
    out = np.zeros((6, k), np.float32)
    call(form, embedding(case, k, scale), table, ids, out, end=6)
    with np.errstate(over="ignore", invalid="ignore"):
        assert_same_bits(out, wanted[ids] * np.float32(scale))


@in_turn(PACKED_DTYPES, LEVELS[::-1])
def test_embedding_of_every_row(form: Form, case: DType) -> None:
    n, k = 40, 512
    table, wanted = packed_table(case, n, k)
    ids = np.arange(n, dtype=np.int32)[::-1].copy()
    out = np.zeros((n, k), np.float32)
    assert_any_split(form, embedding(case, k), [table, ids], out, end=n)
    assert_same_bits(out, wanted[ids])


def check_table(form: Form, dtype: DType, raw: Array, n: int, k: int) -> None:
    table, out = np.zeros(layouts.packed_bytes(dtype, n, k), np.uint8), np.zeros((n, k), np.float32)
    call(form, pack(dtype), raw, table, end=layouts.row_blocks(n), n=n, k=k)
    call(form, embedding(dtype, k), table, np.arange(n, dtype=np.int32), out, end=n)
    with np.errstate(over="ignore", invalid="ignore"):
        assert_same_bits(out, reference(dtype, raw, n, k))


@forms
@pytest.mark.parametrize("dtype", [Q8_0, Q4_0], ids=str)
def test_signed_codes(form: Form, dtype: DType) -> None:
    """As bytes in the file are; nothing changes for codes of fewer bits."""
    n, k, ids = 19, 64, np.arange(19, dtype=np.int32)
    raw = random_file_bytes(dtype, n, k, np.random.default_rng(8))
    table, out = np.zeros(layouts.packed_bytes(dtype, n, k), np.uint8), np.zeros((n, k), np.float32)
    call(form, pack(dtype, signed=True), raw, table, end=layouts.row_blocks(n), n=n, k=k)
    np.testing.assert_array_equal(table, layouts.pack(dtype, raw, n, k, signed=True))
    call(form, embedding(dtype, k, signed=True), table, ids, out, end=n)
    assert_same_bits(out, reference(dtype, raw, n, k))


@forms
@pytest.mark.parametrize("dtype", [MXFP4, NVFP4], ids=str)
def test_every_scale_of_one_byte(form: Form, dtype: DType) -> None:
    check_table(form, dtype, *every_scale(dtype))


# ---------------------------------------------------------------------------------------- tables as files hold them


def table(dtype: DType, n: int, k: int, shift: int = 0) -> tuple[Array, Array]:
    """A file's bytes from an address that is no multiple of anything, and their values by another reader."""
    raw = random_file_bytes(dtype, n, k, np.random.default_rng([n, k]))
    place = np.empty(raw.size + 64, np.uint8)
    start = -place.ctypes.data % 64 + shift
    place[start : start + raw.size] = raw
    return place[start : start + raw.size], reference(dtype, raw, n, k)


@in_turn(PACKED_DTYPES, [None, *LEVELS])
def test_rows_are_the_reference(form: Form, case: DType) -> None:
    n, k = 5, max(PACKINGS[case].superblock, 64)
    raw, wanted = table(case, n, k, shift=1)
    ids = np.array([4, 0, 3, 3], np.int32)
    out = np.full((5, k), 7, np.float32)
    call(form, lookup(case, k), raw, ids, out, end=4 * pieces(case, k))
    assert_same_bits(out[:4], wanted[ids])
    assert (out[4] == 7).all()


@compiled
@pytest.mark.parametrize("dtype", [Q8_0, F16], ids=str)
def test_rows_far_into_a_large_table(form: Target, dtype: DType) -> None:
    """Bytes beyond 2^32: the kernel is told that the table begins so far before the row there is."""
    k, token = 1024, 2**31 - 1
    raw, wanted = table(dtype, 1, k)
    ids, out = np.array([token], np.int32), np.zeros((1, k), np.float32)
    start = raw.ctypes.data - token * dtype.row_bytes(k)
    load(lookup(dtype, k), form)(start, ids.ctypes.data, out.ctypes.data, 0, 1)
    assert_same_bits(out, wanted)
