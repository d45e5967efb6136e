"""The vector functions of elementwise kernels against NumPy in float64, over all magnitudes and at the ends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from levels import LEVELS, name
from native import run
from numpy.typing import NDArray

from rlx.backends.cpu import vmath
from rlx.backends.cpu.kernels.rows.elementwise import elementwise
from rlx.backends.cpu.target import Target
from rlx.ir.meaning import UNARY
from rlx.ir.stored import round_to

Array = NDArray[Any]
targets = pytest.mark.parametrize("target", LEVELS, ids=name)


def everywhere() -> Array:
    """Numbers of all magnitudes, dense where the functions bend."""
    parts = [np.linspace(-110, 95, 60_000), np.linspace(-1, 1, 20_000), np.logspace(-37, 2, 10_000)]
    return np.concatenate([*parts, -parts[2]]).astype(np.float32)


@targets
@pytest.mark.parametrize(
    ("function", "ceiling", "low", "high"),
    [
        ("exp", vmath.EXP_ERROR, -87.3, 88.7),
        ("tanh", vmath.TANH_ERROR, -110, 95),
        ("sigmoid", vmath.SIGMOID_ERROR, -87.3, 95),
        ("silu", vmath.SILU_ERROR, -88, 95),
        ("gelu_tanh", vmath.GELU_ERROR, -110, 95),
        ("gelu_erf", vmath.GELU_ERROR, -110, 95),
        ("softplus", vmath.SOFTPLUS_ERROR, -87.3, 95),
    ],
)
def test_vector_functions_keep_their_ceilings(
    target: Target, function: str, ceiling: float, low: float, high: float
) -> None:
    x = everywhere()
    x = x[(x > low) & (x < high)]
    got = np.empty_like(x)
    run(elementwise((function, 0), ["full"], x.size, target), target, x, got, end=1, rows=1)
    want = UNARY[function](x.astype(np.float64))
    scale = np.abs(x.astype(np.float64)) if function.startswith("gelu") else np.abs(want)
    assert np.max(np.abs(got - want) / scale) < ceiling
    assert np.max(np.abs(got - want) / scale) > ceiling / 20  # the ceiling says something


@targets
@pytest.mark.parametrize("width", [16, 37])
def test_results_in_bf16_are_those_of_f32_rounded(target: Target, width: int) -> None:
    x = np.random.default_rng(0).standard_normal((3, width)).astype(np.float32)
    plain, halves = np.empty_like(x), np.empty((4, width), np.uint16)
    halves[3] = 7
    run(elementwise(("gelu_tanh", 0), ["full"], width, target), target, x, plain, end=3, rows=3)
    run(elementwise(("gelu_tanh", 0), ["full"], width, target, out="bf16"), target, x, halves, end=3, rows=3)
    np.testing.assert_array_equal((halves[:3].astype(np.uint32) << 16).view(np.float32), round_to(plain, "bf16"))
    assert (halves[3] == 7).all(), "wrote past its rows"


@targets
def test_vector_functions_at_the_ends(target: Target) -> None:
    x = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40, 200, -200], np.float32)
    ends = {
        "exp": [np.nan, np.inf, 0, 1, 1, 1, np.inf, 0],
        "tanh": [np.nan, 1, -1, 0.0, -0.0, 1e-40, 1, -1],
        "sigmoid": [np.nan, 1, 0, 0.5, 0.5, 0.5, 1, 0],
        "silu": [np.nan, np.inf, np.nan, 0.0, -0.0, 5e-41, 200, -0.0],
        "softplus": [np.nan, np.inf, 0, np.log(2), np.log(2), np.log(2), 200, 0],
    }
    for function, want in ends.items():
        got = np.empty_like(x)
        run(elementwise((function, 0), ["full"], 8, target), target, x, got, end=1, rows=1)
        np.testing.assert_allclose(got, np.array(want, np.float32), rtol=0, atol=1e-44, err_msg=function)
        np.testing.assert_array_equal(np.signbit(got[3:]), np.signbit(want[3:]), err_msg=function)
    for function in ("gelu_tanh", "gelu_erf"):
        got = np.empty_like(x)
        run(elementwise((function, 0), ["full"], 8, target), target, x, got, end=1, rows=1)
        assert np.isnan(got[0])
        assert got[1] == np.inf
        assert got[6] == 200
        assert abs(got[7]) < 1e-30


@targets
def test_the_result_may_take_an_operands_place_and_rows_may_be_split(target: Target) -> None:
    rng = np.random.default_rng(3)
    x, y = (rng.standard_normal((7, 37)).astype(np.float32) for _ in range(2))
    kernel = elementwise(("mul", ("silu", 0), 1), ["full", "full"], 37, target)
    whole = np.empty_like(x)
    run(kernel, target, x, y, whole, end=7, rows=7)
    split = x.copy()
    for begin, end in [(5, 7), (0, 1), (1, 1), (1, 5)]:
        run(kernel, target, split, y, split, begin=begin, end=end, rows=7)
    np.testing.assert_array_equal(split, whole)
