"""Mixing, choosing and cutting rows: small matrix products, elements by index, slices, concatenation, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from forms import Form, assert_any_split, call, forms
from levels import LEVELS, name
from native import Array, run

from rlx.backends.cpu.kernels.rows.gather import take
from rlx.backends.cpu.kernels.rows.mix import CHUNK, chunks, mix
from rlx.backends.cpu.kernels.rows.runs import concat_rows, slice_rows
from rlx.backends.cpu.target import Target

targets = pytest.mark.parametrize("target", LEVELS, ids=name)
#: Error of a sum of 16 products, as a share of the sum of their magnitudes: a rounding a step.
MIX_REL = 17 * 2.0**-24


def data(*shape: int) -> Array:
    return np.random.default_rng(shape[-1]).standard_normal(shape).astype(np.float32)


# ------------------------------------------------------------------------------------------------------- mix


@targets
@pytest.mark.parametrize(
    ("m", "n", "width"),
    [
        (1, 1, 37),
        (4, 4, 1),
        (4, 4, CHUNK + 5),
        (4, 4, 3 * CHUNK),
        (1, 4, 16),
        (5, 3, CHUNK + 16),
        (16, 16, 21),
        (3, 7, 40),
    ],
)
def test_mix(target: Target, m: int, n: int, width: int) -> None:
    values, coefficients = data(3, n, width), data(3, m, n)
    out = np.full((4, m, width), 7, np.float32)
    run(mix(m, n, width, target), target, values, coefficients, out, end=3 * chunks(width))
    wide, c = values.astype(np.float64), coefficients.astype(np.float64)
    assert (np.abs(out[:3] - c @ wide) <= MIX_REL * (np.abs(c) @ np.abs(wide))).all()
    assert (out[3] == 7).all(), "wrote past its rows"


# ------------------------------------------------------------------------------------------------------ take


@forms
@pytest.mark.parametrize("shared", [False, True])
def test_take(form: Form, shared: bool) -> None:
    rng = np.random.default_rng(1)
    x, ids = data(5, 60), rng.integers(0, 60, (5, 7)).astype(np.int32)
    x[2, 3], ids[2, 1], ids[4, :2] = np.nan, 3, [0, 59]
    x = x[2].copy() if shared else x
    out = np.zeros((5, 7), np.float32)
    kernel = take(60, 7, shared=shared)
    call(form, kernel, x, ids, out, end=5)
    rows = [x if shared else x[r] for r in range(5)]
    np.testing.assert_array_equal(out, [[row[i] for i in some] for row, some in zip(rows, ids, strict=True)])
    assert_any_split(form, kernel, [x, ids], out, end=5)


# ---------------------------------------------------------------------------------------------------- copies


@targets
@pytest.mark.parametrize(
    ("width", "start", "stop"), [(1, 0, 1), (40, 3, 40), (64, 16, 48), (100, 99, 100), (77, 0, 31)]
)
def test_slice_rows(target: Target, width: int, start: int, stop: int) -> None:
    x = data(4, width)
    x[1, start] = np.nan
    out = np.full((5, stop - start), 7, np.float32)
    kernel = slice_rows(width, start, stop, target)
    run(kernel, target, x, out, end=4)
    np.testing.assert_array_equal(out[:4], x[:, start:stop])
    assert (out[4] == 7).all(), "wrote past its rows"
    assert_any_split(target, kernel, [x], out[:4].copy(), end=4)
    assert f"x[row, {start}:{stop}]" in kernel.source


@targets
@pytest.mark.parametrize("widths", [[5], [16, 32], [1, 15, 33, 2], [31, 64, 1]])
def test_concat_rows(target: Target, widths: list[int]) -> None:
    parts = [data(3, width) for width in widths]
    parts[0][2, -1] = np.nan
    out = np.full((4, sum(widths)), 7, np.float32)
    kernel = concat_rows(widths, target)
    run(kernel, target, *parts, out, end=3)
    np.testing.assert_array_equal(out[:3], np.hstack(parts))
    assert (out[3] == 7).all(), "wrote past its rows"
    assert_any_split(target, kernel, parts, out[:3].copy(), end=3)
