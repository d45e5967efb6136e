"""The scalar vocabulary of loop kernels: half floats against NumPy, exp against float64, keys against sorting."""

from __future__ import annotations

import gguf
import numpy as np
from forms import Form, call, compiled, forms
from hypothesis import given
from hypothesis import strategies as st
from native import Array

from rlx.backends.cpu.loops import loop_kernel
from rlx.ir.dtypes import F16, F32, I32
from rlx.scalars import HOLE, Helper, Ptr, bf16_to_f32, exp, f16_to_f32, f32_to_bf16, f32_to_f16, order_key

#: Units in the last place that `exp` may be off.
EXP_ULP = 2.0

APPLY: Helper = HOLE


def each(x: Ptr, out: Ptr, begin: int, end: int) -> None:
    for i in range(begin, end):
        out[i] = APPLY(x[i])


def apply(form: Form, fn: Helper, x: Array, out_type: type) -> Array:
    types = {np.float32: F32, np.uint16: F16, np.int32: I32}
    kernel = loop_kernel(each, {"APPLY": fn}, [("x", types[x.dtype.type]), ("out", types[out_type])])
    out = np.zeros(x.shape, out_type)
    call(form, kernel, np.ascontiguousarray(x), out, end=x.size)
    return out


def interesting_floats() -> Array:
    """Every exponent with mantissas around the rounding points of f16 and bf16, both signs, infinities and NaNs."""
    mantissas = [0, 1, 0xFFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x3001, 0x7FFF, 0x8000, 0x8001, 0x18000, 0x7FFFFF]
    exponents = np.arange(256, dtype=np.uint32)[:, None] << 23
    bits = (exponents | np.array(mantissas, np.uint32)).reshape(-1)
    return np.concatenate([bits, bits | np.uint32(0x80000000)]).view(np.float32)


def sample(form: Form, values: Array) -> Array:
    """All of them for machine code; plain Python is slow."""
    return values if form else values[:: max(1, len(values) // 500)]


@forms
def test_f16_to_f32_is_exact(form: Form) -> None:
    bits = sample(form, np.arange(65536, dtype=np.uint16))
    found, wanted = apply(form, f16_to_f32, bits, np.float32), bits.view(np.float16).astype(np.float32)
    np.testing.assert_array_equal(found, wanted)
    assert (np.signbit(found) == np.signbit(wanted)).all()


@forms
def test_f32_to_f16_rounds_to_even(form: Form) -> None:
    x = sample(form, interesting_floats())
    with np.errstate(over="ignore"):
        wanted = x.astype(np.float16)
    found = apply(form, f32_to_f16, x, np.uint16)
    np.testing.assert_array_equal(found.view(np.float16), wanted)
    number = ~np.isnan(x)
    np.testing.assert_array_equal(found[number], wanted.view(np.uint16)[number])


@forms
def test_bf16_both_ways(form: Form) -> None:
    x = sample(form, interesting_floats())
    found = apply(form, f32_to_bf16, x, np.uint16)
    wanted = gguf.quants.quantize(x[None], gguf.GGMLQuantizationType.BF16).view(np.uint16)[0]
    number = ~np.isnan(x)
    np.testing.assert_array_equal(found[number], wanted[number])
    back = apply(form, bf16_to_f32, found, np.float32)
    np.testing.assert_array_equal(back.view(np.uint32), found.astype(np.uint32) << 16)
    assert np.isnan(back[~number]).all()


@compiled
def test_exp_against_float64(form: Form) -> None:
    x = np.concatenate([np.linspace(-87.2, 88.0, 100_001), np.linspace(-1e-3, 1e-3, 1001), [0.0]]).astype(np.float32)
    wanted = np.exp(x.astype(np.float64))
    error = np.abs(apply(form, exp, x, np.float32) - wanted) / np.spacing(wanted.astype(np.float32))
    assert error.max() <= EXP_ULP


@given(st.lists(st.floats(width=32), min_size=2, max_size=2))
def test_order_key_orders_as_floats_do(pair: list[float]) -> None:
    a, b = np.array(pair, np.float32)
    with np.errstate(all="ignore"):
        first, second = int(order_key(a)), int(order_key(b))
    if np.isnan(a) or np.isnan(b):
        assert (first > second) == (np.isnan(a) and not np.isnan(b))
    else:
        assert (first > second, first == second) == (a > b, a == b)


@compiled
def test_order_key_compiled_is_the_python_one(form: Form) -> None:
    x = np.concatenate([interesting_floats(), np.array([0xFFC00000, 0x7FC00001], np.uint32).view(np.float32)])
    few = slice(None, None, 13)
    wanted = apply(None, order_key, x[few], np.int32)
    np.testing.assert_array_equal(apply(form, order_key, x, np.int32)[few], wanted)
