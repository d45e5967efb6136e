"""Mixing, choosing and cutting rows: small matrix products, elements by index, slices, concatenation, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from forms import Form, assert_any_split, call, compiled, forms
from levels import LEVELS, name
from native import Array, run

from rlx.backends.cpu.kernels.rows.gather import take
from rlx.backends.cpu.kernels.rows.mix import CHUNK, chunks, mix
from rlx.backends.cpu.kernels.rows.runs import concat_rows, slice_rows
from rlx.backends.cpu.target import Target
from rlx.errors import ArgumentError

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


@targets
def test_mix_adds_in_order_and_keeps_nan(target: Target) -> None:
    values, coefficients = np.zeros((1, 3, 40), np.float32), np.ones((1, 2, 3), np.float32)
    values[0, :, 0] = [1e8, -1e8, 1]  # in any other order the 1 is lost
    values[0, 1, 39] = np.nan
    coefficients[0, 1] = [1, 0, 0]
    out = np.empty((1, 2, 40), np.float32)
    run(mix(2, 3, 40, target), target, values, coefficients, out, end=1)
    assert out[0, 0, 0] == 1 and out[0, 1, 0] == 1e8
    assert np.isnan(out[0, :, 39]).all() and np.isfinite(out[0, :, :39]).all()


@targets
def test_mix_of_any_split(target: Target) -> None:
    values, coefficients = data(2, 4, CHUNK + 19), data(2, 6, 4)
    kernel = mix(6, 4, CHUNK + 19, target)
    assert_any_split(target, kernel, [values, coefficients], np.zeros((2, 6, CHUNK + 19), np.float32), end=4)


@pytest.mark.parametrize(("m", "n"), [(0, 4), (17, 1), (1, 17)])
def test_a_mix_that_is_too_large_is_refused(m: int, n: int) -> None:
    with pytest.raises(ArgumentError, match=f"must lie in 1..16, found {m} and {n}"):
        mix(m, n, 64, LEVELS[0])


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


@compiled
def test_a_slice_takes_back_what_was_put_together(form: Form) -> None:
    assert form is not None
    parts = [data(3, width) for width in (20, 7, 50)]
    whole = np.empty((3, 77), np.float32)
    run(concat_rows([20, 7, 50], form), form, *parts, whole, end=3)
    for part, start in zip(parts, (0, 20, 27), strict=True):
        again = np.empty_like(part)
        run(slice_rows(77, start, start + part.shape[1], form), form, whole, again, end=3)
        np.testing.assert_array_equal(again, part)
