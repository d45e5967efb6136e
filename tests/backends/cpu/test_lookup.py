"""Looking up rows of tables as files hold them, against the `gguf` package, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from forms import Form, assert_any_split, call, compiled, in_turn
from levels import LEVELS
from native import Array, load
from weight_formats import assert_same_bits, random_file_bytes, reference

from rlx.backends.cpu.kernels.rows.lookup import lookup, pieces
from rlx.backends.cpu.layouts import PACKED_DTYPES, PACKINGS
from rlx.backends.cpu.target import Target
from rlx.ir.dtypes import BF16, F16, Q4_K, Q8_0, DType


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


@in_turn(PACKED_DTYPES, LEVELS[::-1])
def test_wide_rows_in_pieces_times_a_scale(form: Form, case: DType) -> None:
    n, k, scale = 3, 256 * 9, 45.254833
    raw, wanted = table(case, n, k, shift=3)
    ids = np.array([2, 0], np.int32)
    out = np.zeros((2, k), np.float32)
    assert pieces(case, k) == 2
    assert_any_split(form, lookup(case, k, scale), [raw, ids], out, end=4)
    with np.errstate(over="ignore", invalid="ignore"):
        assert_same_bits(out, wanted[ids] * np.float32(scale))


def test_pieces_are_large_enough() -> None:
    for dtype, widths in {F16: (1, 1023, 10001), Q4_K: (256, 2048, 8192), Q8_0: (32, 1056, 10240)}.items():
        for width in widths:
            assert 1 <= pieces(dtype, width) <= max(1, width // 1024)
    assert pieces(Q4_K, 8960) == 7
    assert pieces(BF16, 8192) == 8


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
