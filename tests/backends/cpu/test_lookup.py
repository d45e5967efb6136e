"""Looking up rows of tables as files hold them, against the `gguf` package, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from forms import Form, call, compiled, in_turn
from levels import LEVELS
from native import Array, load
from weight_formats import assert_same_bits, random_file_bytes, reference

from rlx.backends.cpu.kernels.rows.lookup import lookup, pieces
from rlx.backends.cpu.layouts import PACKED_DTYPES, PACKINGS
from rlx.backends.cpu.target import Target
from rlx.ir.dtypes import F16, Q8_0, DType


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
