"""RMS norm and prepared activation rows, as Python and as machine code, against float64 and independent rounding."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from forms import Form, assert_any_split, call, compiled, forms
from native import Array

from rlx.backends.cpu.kernels.rows.norm import layer_norm, rms_norm
from rlx.backends.cpu.kernels.rows.quantize import quantize
from rlx.backends.cpu.layouts import q8a_bytes, q8a_dequantize, q8a_quantize

#: Relative error of a normed value: the f32 sum of squares, a square root, a quotient, two products.
NORM_REL = 1e-6
#: Plain Python adds the squares one after the other.
NORM_REL_PYTHON = 4e-6
#: A code is off by half a step, and by the error of the value before it.
STEP = 0.5 + 127 * NORM_REL_PYTHON


def reference(x: Array, w: Array | None, eps: float) -> Array:
    wide = x.astype(np.float64)
    y = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + eps)
    return y if w is None else y * w


def data(rows: int, width: int) -> tuple[Array, Array]:
    rng = np.random.default_rng(width)
    x = rng.standard_normal((rows, width)) * np.exp(rng.uniform(-4, 4, (rows, 1)))
    return x.astype(np.float32), rng.standard_normal(width).astype(np.float32)


def check_norm(form: Form, rows: int, width: int, eps: float, weighted: bool) -> None:
    x, w = data(rows, width)
    out = np.zeros_like(x)
    inputs = [x, w] if weighted else [x]
    call(form, rms_norm(width, eps, weighted=weighted), *inputs, out, end=rows)
    limit = NORM_REL if form else NORM_REL_PYTHON
    np.testing.assert_allclose(out, reference(x, w if weighted else None, eps), rtol=limit)


@forms
@pytest.mark.parametrize(("width", "eps"), [(1, 1e-6), (7, 1e-5), (33, 1e-6), (128, 1.0)])
@pytest.mark.parametrize("weighted", [True, False])
def test_rms_norm(form: Form, width: int, eps: float, weighted: bool) -> None:
    check_norm(form, 3, width, eps, weighted)


def centred(x: Array, weights: list[Array], eps: float) -> Array:
    """Layer norm in float64."""
    y = reference(x.astype(np.float64) - x.astype(np.float64).mean(axis=1, keepdims=True), None, eps)
    y = y * weights[0] if weights else y
    return y + weights[1] if len(weights) > 1 else y


@forms
@pytest.mark.parametrize(("width", "eps"), [(7, 1e-5), (33, 1e-6), (128, 1.0)])
@pytest.mark.parametrize("weights", [0, 1, 2])
def test_layer_norm(form: Form, width: int, eps: float, weights: int) -> None:
    x, w = data(3, width)
    x += np.array([[0.0], [30.0], [-300.0]], np.float32)
    operands = [w, w[::-1].copy()][:weights]
    out = np.zeros_like(x)
    call(form, layer_norm(width, eps, weights=weights), x, *operands, out, end=3)
    want = centred(x, operands, eps)
    # The mean has an error of a few units of the largest element.
    ceiling = 4 * NORM_REL_PYTHON * (1 + np.abs(x).max(1) / x.std(1))[:, None] * (1 + np.abs(w).max() ** 2)
    assert (np.abs(out - want) <= ceiling).all()


@compiled
@pytest.mark.parametrize("weights", [0, 1, 2])
def test_layer_norms_prepare_rows(form: Form, weights: int) -> None:
    """The rows that `quantize` makes of the f32 result."""
    x, w = data(3, 96)
    operands = [w, w[::-1].copy()][:weights]
    plain = np.zeros_like(x)
    call(form, layer_norm(96, 1e-6, weights=weights), x, *operands, plain, end=3)
    for out, dtype, size in (("q8a", np.uint8, q8a_bytes(96)), ("bf16", np.uint16, 96)):
        together, apart = (np.zeros((3, size), dtype) for _ in range(2))
        call(form, layer_norm(96, 1e-6, out=out, weights=weights), x, *operands, together, end=3)
        call(form, quantize(96, out), plain, apart, end=3)
        np.testing.assert_array_equal(together, apart)


@forms
def test_nan_and_infinity_come_through(form: Form) -> None:
    x, _ = data(3, 64)
    x[0, 5], x[1, 7] = np.nan, np.inf
    out = np.zeros_like(x)
    call(form, rms_norm(64, 1e-6, weighted=False), x, out, end=3)
    assert np.isnan(out[0]).all()
    assert np.isnan(out[1, 7]) and (out[1, :7] == 0).all()
    assert np.isfinite(out[2]).all()


@forms
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("width", [32, 96])
def test_norm_into_q8a(form: Form, width: int, weighted: bool) -> None:
    x, w = data(3, width)
    out = np.zeros((3, q8a_bytes(width)), np.uint8)
    inputs = [x, w] if weighted else [x]
    call(form, rms_norm(width, 1e-6, out="q8a", weighted=weighted), *inputs, out, end=3)
    wanted = reference(x, w if weighted else None, 1e-6)
    scales = np.abs(wanted).reshape(3, -1, 32).max(axis=2) / 127
    np.testing.assert_allclose(scales_of(out, width), scales, rtol=NORM_REL_PYTHON)
    error = np.abs(q8a_dequantize(out, width) - wanted)
    assert (error <= np.repeat(scales, 32, axis=1) * STEP).all()
    codes = out[:, :width].view(np.int8).astype(np.int32)
    np.testing.assert_array_equal(sums_of(out, width), codes.reshape(3, -1, 16).sum(axis=2))


def scales_of(rows: Array, width: int) -> Array:
    return np.ascontiguousarray(rows[:, width : width + width // 8]).view(np.float32)


def sums_of(rows: Array, width: int) -> Array:
    return np.ascontiguousarray(rows[:, width + width // 8 :]).view(np.int32)


@forms
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("width", [2, 34, 96])
def test_norm_into_bf16_is_the_rounded_norm(form: Form, width: int, weighted: bool) -> None:
    x, w = data(3, width)
    plain, out = np.zeros_like(x), np.full((3, width), 0xA5A5, np.uint16)
    inputs = [x, w] if weighted else [x]
    call(form, rms_norm(width, 1e-6, weighted=weighted), *inputs, plain, end=3)
    call(form, rms_norm(width, 1e-6, out="bf16", weighted=weighted), *inputs, out, end=3)
    np.testing.assert_array_equal(out, to_bf16(plain))


# ---------------------------------------------------------------------------------------------------- bf16 rows


def to_bf16(x: Array) -> Array:
    """The GGUF reference's rounding, but for NaN, which stays one."""
    bits: Array = gguf.quants.quantize(x, gguf.GGMLQuantizationType.BF16).view(np.uint16)
    return bits


@forms
@pytest.mark.parametrize("width", [2, 160])
def test_bf16_rows_are_rounded_to_nearest_even(form: Form, width: int) -> None:
    x, _ = data(4, width)
    x[0, 0], x[1, 1] = 1 + 2**-8, 1 + 3 * 2**-8  # ties
    x[2, 0], x[3, 0], x[3, 1] = np.finfo(np.float32).max, -np.inf, 1e-40
    out = np.full((4, width), 0xA5A5, np.uint16)
    call(form, quantize(width, "bf16"), x, out, end=4)
    np.testing.assert_array_equal(out, to_bf16(x))
    assert (out[0, 0], out[1, 1], out[2, 0]) == (0x3F80, 0x3F82, 0x7F80)


# ---------------------------------------------------------------------------------------------------- q8a rows


def check_quantize(form: Form, x: Array) -> None:
    rows, width = x.shape
    out = np.full((rows, q8a_bytes(width)), 0xA5, np.uint8)
    call(form, quantize(width), x, out, end=rows)
    with np.errstate(all="ignore"):
        wanted = q8a_quantize(x)
    np.testing.assert_array_equal(out[:, :width], wanted[:, :width])
    np.testing.assert_array_equal(scales_of(out, width), scales_of(wanted, width))  # NaN equals NaN
    np.testing.assert_array_equal(sums_of(out, width), sums_of(wanted, width))


@forms
@pytest.mark.parametrize("width", [32, 160])
def test_quantize_is_the_layouts_own(form: Form, width: int) -> None:
    check_quantize(form, data(4, width)[0])


@forms
def test_quantize_at_the_edges(form: Form) -> None:
    """Zeros, ties, the largest and the smallest numbers, subnormals whose scale is rounded, NaN, infinities."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((10, 32)).astype(np.float32)
    x[0] = 0
    x[1] = -0.0
    x[2] = np.arange(32) - 15.5
    x[2, 0] = 127  # the scale is 1 and the rest are ties
    x[3] *= np.float32(1e38)
    x[4] = np.arange(32) * np.float32(1.4e-45) * 6  # the scale is one step of the subnormals
    x[5] = np.float32(1.4e-45) * 3  # the scale is rounded to zero
    x[6, 3] = np.nan
    x[7, 30] = np.inf
    x[8, 1], x[8, 2] = -np.inf, np.nan
    x[9] = np.float32(np.finfo(np.float32).max)
    check_quantize(form, x)


@forms
def test_units_are_independent(form: Form) -> None:
    x, w = data(4, 64)
    f32, q8a = np.zeros_like(x), np.zeros((4, q8a_bytes(64)), np.uint8)
    assert_any_split(form, rms_norm(64, 1e-6), [x, w], f32, end=4)
    assert_any_split(form, rms_norm(64, 1e-6, out="q8a"), [x, w], q8a, end=4)
    assert_any_split(form, quantize(64), [x], q8a, end=4)
    bf16 = np.zeros((4, 64), np.uint16)
    assert_any_split(form, rms_norm(64, 1e-6, out="bf16"), [x, w], bf16, end=4)
    assert_any_split(form, quantize(64, "bf16"), [x], bf16, end=4)
