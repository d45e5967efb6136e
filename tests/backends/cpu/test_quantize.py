"""Prepared activation rows, as Python and as machine code, against independent rounding."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from forms import Form, assert_any_split, call, compiled, forms
from native import Array

from rlx.backends.cpu.kernels.rows.norm import layer_norm, rms_norm
from rlx.backends.cpu.kernels.rows.quantize import quantize
from rlx.backends.cpu.layouts import q8a_bytes, q8a_dequantize, q8a_quantize

#: Relative error of a normed value in plain Python, which adds the squares one after the other.
NORM_REL = 4e-6
#: A code is off by half a step, and by the error of the value before it.
STEP = 0.5 + 127 * NORM_REL


def data(rows: int, width: int) -> tuple[Array, Array]:
    rng = np.random.default_rng(width)
    x = rng.standard_normal((rows, width)) * np.exp(rng.uniform(-4, 4, (rows, 1)))
    return x.astype(np.float32), rng.standard_normal(width).astype(np.float32)


def parts(rows: Array, width: int) -> list[Array]:
    """Codes, scales and sums of q8a rows."""
    at = width + width // 8
    return [rows[:, :width].view(np.int8), rows[:, width:at].copy().view("f4"), rows[:, at:].copy().view("i4")]


def to_bf16(x: Array) -> Array:
    """The GGUF reference's rounding, but for NaN, which stays one."""
    bits: Array = gguf.quants.quantize(x, gguf.GGMLQuantizationType.BF16).view(np.uint16)
    return bits


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
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("width", [32, 96])
def test_norm_into_q8a(form: Form, width: int, weighted: bool) -> None:
    x, w = data(3, width)
    inputs, out = [x, w] if weighted else [x], np.zeros((3, q8a_bytes(width)), np.uint8)
    kernel = rms_norm(width, 1e-6, out="q8a", weighted=weighted)
    call(form, kernel, *inputs, out, end=3)
    wide = x.astype(np.float64)
    want = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-6) * (w if weighted else 1)
    codes, scales, sums = parts(out, width)
    steps = np.abs(want).reshape(3, -1, 32).max(axis=2) / 127
    np.testing.assert_allclose(scales, steps, rtol=NORM_REL)
    assert (np.abs(q8a_dequantize(out, width) - want) <= np.repeat(steps, 32, axis=1) * STEP).all()
    np.testing.assert_array_equal(sums, codes.astype(np.int32).reshape(3, -1, 16).sum(axis=2))
    assert_any_split(form, kernel, inputs, out, end=3)


@forms
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("width", [2, 34, 96])
def test_norm_into_bf16_is_the_rounded_norm(form: Form, width: int, weighted: bool) -> None:
    x, w = data(3, width)
    plain, out = np.zeros_like(x), np.full((3, width), 0xA5A5, np.uint16)
    inputs, kernel = [x, w] if weighted else [x], rms_norm(width, 1e-6, out="bf16", weighted=weighted)
    call(form, rms_norm(width, 1e-6, weighted=weighted), *inputs, plain, end=3)
    call(form, kernel, *inputs, out, end=3)
    np.testing.assert_array_equal(out, to_bf16(plain))
    assert_any_split(form, kernel, inputs, out, end=3)


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
    assert_any_split(form, quantize(width, "bf16"), [x], out, end=4)


def ends() -> Array:
    """Zeros, ties, the largest and the smallest numbers, subnormals whose scale is rounded, NaN, infinities."""
    x = np.random.default_rng(1).standard_normal((10, 32)).astype(np.float32)
    x[0], x[1], x[2] = 0, -0.0, np.arange(32) - 15.5
    x[2, 0] = 127  # the scale is 1 and the rest are ties
    x[3] *= np.float32(1e38)
    x[4] = np.arange(32) * np.float32(1.4e-45) * 6  # the scale is one step of the subnormals
    x[5] = np.float32(1.4e-45) * 3  # the scale is rounded to zero
    x[6, 3], x[7, 30], x[8, 1], x[8, 2] = np.nan, np.inf, -np.inf, np.nan
    x[9] = np.finfo(np.float32).max
    return x


@forms
def test_quantize_is_the_layouts_own(form: Form) -> None:
    for x in (data(4, 32)[0], data(4, 160)[0], ends()):
        width, out = x.shape[1], np.full((len(x), q8a_bytes(x.shape[1])), 0xA5, np.uint8)
        call(form, quantize(width), x, out, end=len(x))
        with np.errstate(all="ignore"):
            want = q8a_quantize(x)
        for found, expected in zip(parts(out, width), parts(want, width), strict=True):
            np.testing.assert_array_equal(found, expected)  # NaN equals NaN
        assert_any_split(form, quantize(width), [x], out, end=len(x))
