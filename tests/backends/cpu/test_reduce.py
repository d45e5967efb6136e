"""Softmax, searches, sums and copies, as Python and as machine code, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from forms import Form, assert_any_split, call, compiled, forms
from native import Array

from rlx.backends.cpu.kernels.rows.copy import copy_rows
from rlx.backends.cpu.kernels.rows.reduce import BLOCK, PART, argmax, row_reduce, top_k
from rlx.backends.cpu.kernels.rows.softmax import softmax

#: Relative error of a softmax value: an exponential (2 units), a sum, a reciprocal, a product; and half a unit of the
#: difference to the maximum, which is the exponent's absolute error.
SOFTMAX_REL = 1e-6
DIFFERENCE_REL = 2.0**-24
#: Below e^-87.3 the exponential is zero.
TINY = 1.25e-38
#: Relative error of a sum of positive numbers; plain Python adds them one after the other.
SUM_REL = {True: 1e-6, False: 4e-6}

WIDTHS = [1, 5, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7]


def data(rows: int, width: int) -> Array:
    return (np.random.default_rng(width).standard_normal((rows, width)) * 4).astype(np.float32)


# ---------------------------------------------------------------------------------------------------- softmax


def check_softmax(form: Form, x: Array) -> Array:
    out = np.zeros_like(x)
    call(form, softmax(x.shape[1]), x, out, end=len(x))
    below = x.astype(np.float64) - x.max(axis=1, keepdims=True)
    wanted = np.exp(below) / np.exp(below).sum(axis=1, keepdims=True)
    limit = wanted * (SOFTMAX_REL - below * DIFFERENCE_REL) + TINY
    assert (np.abs(out - wanted) <= limit).all()
    return out


@forms
@pytest.mark.parametrize("width", WIDTHS)
def test_softmax(form: Form, width: int) -> None:
    check_softmax(form, data(3, width))


@forms
def test_softmax_at_the_edges(form: Form) -> None:
    x = data(5, 9)
    x[0, 2:5] = -np.inf
    x[1] = 3e38 * np.sign(x[1])
    x[2] = -np.inf
    x[3, 8] = np.nan
    x[4, 0] = np.inf
    out = np.zeros_like(x)
    call(form, softmax(9), x, out, end=5)
    assert (out[0, 2:5] == 0).all() and np.isclose(out[0].sum(), 1)
    np.testing.assert_allclose(out[1], (x[1] > 0) / (x[1] > 0).sum(), rtol=SOFTMAX_REL)
    assert np.isnan(out[2:4]).all() and np.isnan(out[4, 0])


# ---------------------------------------------------------------------------------------------------- searches


def check_argmax(form: Form, x: Array) -> None:
    out = np.full(len(x), -1, np.int32)
    call(form, argmax(x.shape[1]), x, out, end=len(x))
    np.testing.assert_array_equal(out, x.argmax(axis=1))


@forms
@pytest.mark.parametrize("width", WIDTHS)
def test_argmax(form: Form, width: int) -> None:
    check_argmax(form, data(4, width))


@forms
def test_argmax_of_equals_is_the_first(form: Form) -> None:
    x = np.zeros((6, 2 * BLOCK + 3), np.float32)
    x[1, [BLOCK + 5, BLOCK + 9, 2]] = [1, 1, -1]
    x[2] = -np.inf
    x[3] = np.where(np.arange(x.shape[1]) % 2, 0.0, -0.0)
    x[4, [3, BLOCK + 1]] = np.inf
    x[5] = -x[5] - 1
    check_argmax(form, x)


@forms
def test_argmax_finds_the_first_nan(form: Form) -> None:
    x = np.full((3, 2 * BLOCK), np.inf, np.float32)
    bits = np.array([0xFFC00001, 0x7FFFFFFF, 0x7FC00000], np.uint32).view(np.float32)  # of either sign
    x[0, 70:73], x[1, 5], x[2, -1] = bits, bits[0], bits[1]
    check_argmax(form, x)


def check_top_k(form: Form, x: Array, k: int) -> None:
    values, indices = np.zeros((len(x), k), np.float32), np.full((len(x), k), -1, np.int32)
    call(form, top_k(x.shape[1], k), x, values, indices, end=len(x))
    wide = np.where(np.isnan(x), np.inf, x.astype(np.float64))
    wide = np.where(np.isinf(x) & (x > 0), 1e300, wide)  # only NaN lies above
    wanted = np.argsort(-wide, axis=1, kind="stable")[:, :k]
    np.testing.assert_array_equal(indices, wanted)
    np.testing.assert_array_equal(values, np.take_along_axis(x, wanted.astype(np.int64), axis=1))


@forms
@pytest.mark.parametrize(("width", "k"), [(1, 1), (9, 9), (BLOCK, 3), (BLOCK + 1, BLOCK + 1), (3 * BLOCK + 7, 20)])
def test_top_k(form: Form, width: int, k: int) -> None:
    check_top_k(form, data(3, width), k)


@forms
@pytest.mark.parametrize(
    ("width", "k", "groups", "kept"), [(64, 8, 8, 4), (12, 3, 6, 3), (30, 10, 3, 1), (30, 30, 3, 3)]
)
def test_top_k_of_groups(form: Form, width: int, k: int, groups: int, kept: int) -> None:
    """Of equal groups the first ones are searched."""
    x = data(5, width)
    x[1] = np.random.default_rng(0).integers(0, 3, width)
    x[2] = 1
    values, indices = np.zeros((5, k), np.float32), np.full((5, k), -1, np.int32)
    call(form, top_k(width, k, groups, kept), x, values, indices, end=5)
    for row, found, chosen in zip(x, values, indices, strict=True):
        sums = np.sort(row.reshape(groups, -1), axis=1)[:, -2:].sum(axis=1)
        searched = np.argsort(-sums, kind="stable")[:kept]
        allowed = np.where(np.isin(np.arange(width) // (width // groups), searched), row, -np.inf)
        np.testing.assert_array_equal(chosen, np.argsort(-allowed, kind="stable")[:k])
        np.testing.assert_array_equal(found, row[chosen])


@forms
def test_top_k_of_equals_nan_and_order(form: Form) -> None:
    x = np.zeros((5, 2 * BLOCK + 9), np.float32)
    x[0] = np.random.default_rng(0).integers(0, 4, x.shape[1])  # many equals
    x[1] = np.arange(x.shape[1])  # every element is inserted
    x[2] = -x[1]
    x[3, [7, 100, 101]] = [np.nan, np.inf, -np.nan]
    x[4] = np.where(np.arange(x.shape[1]) % 3, 0.0, -0.0)
    check_top_k(form, x, 11)


# ---------------------------------------------------------------------------------------------------- the rest


@forms
@pytest.mark.parametrize("width", [1, 77])
def test_row_reduce(form: Form, width: int) -> None:
    x = np.abs(data(4, width))
    wide = x.astype(np.float64)
    for kind, wanted in (("sum", wide.sum(axis=1)), ("mean", wide.mean(axis=1)), ("max", wide.max(axis=1))):
        out = np.zeros(4, np.float32)
        call(form, row_reduce(width, kind), x, out, end=4)
        np.testing.assert_allclose(out, wanted, rtol=0 if kind == "max" else SUM_REL[form is not None])


@compiled
def test_units_are_independent(form: Form) -> None:
    x = data(5, 100)
    assert_any_split(form, softmax(100), [x], np.zeros_like(x), end=5)
    assert_any_split(form, argmax(100), [x], np.zeros(5, np.int32), end=5)
    assert_any_split(form, top_k(100, 7), [x, np.zeros((5, 7), np.float32)], np.zeros((5, 7), np.int32), end=5)
    assert_any_split(form, row_reduce(100, "sum"), [x], np.zeros(5, np.float32), end=5)
    wide = data(3, 2 * PART + 3)
    assert_any_split(form, row_reduce(wide.shape[1], "mean"), [wide], np.zeros(3, np.float32), end=3)
    assert_any_split(form, copy_rows(100), [x], np.zeros_like(x), end=5)
