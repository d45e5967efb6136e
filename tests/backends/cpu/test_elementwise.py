"""Elementwise kernels and the vector functions in them, against NumPy in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from levels import LEVELS, name
from native import run
from numpy.typing import NDArray

from rlx.backends.cpu import vmath
from rlx.backends.cpu.kernels.rows.elementwise import Expression, elementwise
from rlx.backends.cpu.target import Target
from rlx.ir.stored import round_to

Array = NDArray[Any]
targets = pytest.mark.parametrize("target", LEVELS, ids=name)

_erfc = np.vectorize(math.erfc, otypes=[np.float64])


def _gelu_tanh(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


MEANING: dict[str, Any] = {
    "exp": np.exp,
    "tanh": np.tanh,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu_tanh": _gelu_tanh,
    "gelu_erf": lambda x: 0.5 * x * _erfc(-x / math.sqrt(2)),
    "softplus": lambda x: np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x))),
    "relu": lambda x: np.where(x < 0, 0, x),
    "sqrt": np.sqrt,
    "clamp": lambda x, low, high: _above(low, -_above(None if high is None else -high, -x)),
    "neg": np.negative,
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "maximum": np.maximum,
    "scale": np.multiply,
    "softcap": lambda x, cap: cap * np.tanh(x / cap),
}


def _above(low: float | None, x: Array) -> Array:
    return x if low is None else np.where(x < low, low, x)


def meaning(expr: Expression, operands: list[Array]) -> Array:
    """The expression in float64."""
    if isinstance(expr, int):
        return operands[expr].astype(np.float64)
    op, *rest = expr
    if op == "const":
        return np.float64(rest[0])  # type: ignore[return-value]
    numbers = rest[1:] if op in ("scale", "softcap", "clamp") else []
    return MEANING[op](*(meaning(r, operands) for r in rest[: len(rest) - len(numbers)]), *numbers)  # type: ignore[no-any-return]


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
    want = MEANING[function](x.astype(np.float64))
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


EXPRESSIONS: list[tuple[Expression, list[str]]] = [
    (("mul", ("silu", 0), 1), ["full", "full"]),
    (("add", 0, 1), ["full", "row"]),
    (("mul", ("scale", 0, 0.5), ("sigmoid", 1)), ["full", "scalar"]),
    (("sub", ("softcap", 0, 30.0), ("div", 1, ("const", 3.0))), ["full", "full"]),
    (("add", ("gelu_tanh", 0), ("mul", ("gelu_erf", ("neg", 1)), 2)), ["full", "row", "scalar"]),
    (("mul", 0, ("sub", ("const", 1.0), ("mul", ("tanh", 0), ("tanh", 0)))), ["full"]),
    (("mul", 0, 1), ["full", "column"]),
    (("add", ("mul", 0, ("relu", 1)), ("mul", 2, ("softplus", 3))), ["full", "column", "row", "column"]),
    (("clamp", ("sub", 0, ("mul", 1, 2)), -0.25, 0.5), ["full", "scalar", "column"]),
    (("sqrt", ("mul", 0, 0)), ["full"]),
]


@targets
@pytest.mark.parametrize(("expr", "inputs"), EXPRESSIONS)
@pytest.mark.parametrize(("rows", "width"), [(1, 16), (3, 5), (2, 96), (5, 33)])
def test_expressions(target: Target, expr: Expression, inputs: list[str], rows: int, width: int) -> None:
    rng = np.random.default_rng(width)
    shape = {"full": (rows, width), "row": (width,), "column": (rows, 1), "scalar": (1,)}
    operands = [rng.standard_normal(shape[kind]).astype(np.float32) * 3 for kind in inputs]
    out = np.full((rows + 1, width), 7, np.float32)
    kernel = elementwise(expr, inputs, width, target)
    run(kernel, target, *operands, out, end=rows, rows=rows)
    np.testing.assert_allclose(out[:rows], meaning(expr, operands), rtol=2e-6, atol=2e-6)
    assert (out[rows] == 7).all(), "wrote past its rows"


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
