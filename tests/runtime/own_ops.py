"""Parts of custom ops for the tests, most of them wrong: top-level functions, as a user writes them."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx import ops
from rlx.scalars import exp, f32

TABLE = [1.0, 2.0]
HALF = 0.5
calls = 0


def scaled(x: Any, *, by: float = 2.0) -> Any:
    return x * by


def scaled_kernel(x: Any, out: Any, begin: int, end: int, n: int, by: float) -> None:
    for row in range(begin, end):
        for i in range(row * n, row * n + n):
            out[i] = x[i] * by


def scaled_formula(x: Any, *, by: float) -> Any:
    return ops.scale(x, by)


# -- meanings ----------------------------------------------------------------------------------------------------------


def writes_operand(x: Any) -> Any:
    x[...] = 0
    return x


def counts_calls(x: Any) -> Any:
    global calls
    calls += 1
    return x


def reads_list(x: Any) -> Any:
    return x * TABLE[0]


def reads_list_in_helper(x: Any) -> Any:
    return reads_list(x)


def random_numbers(x: Any) -> Any:
    return x + np.random.default_rng().random(x.shape)


def sums_rows(x: Any) -> Any:
    return x + x.sum(0)


def one_column(x: Any) -> Any:
    return x.sum(-1, keepdims=True)


def raises(x: Any) -> Any:
    return np.linalg.inv(x[0])[:, :, 7]


def text_result(x: Any) -> Any:
    return np.full(x.shape, "word")


def variadic(*x: Any) -> Any:
    return x[0]


def optional(x: Any, y: Any = None) -> Any:
    return x


# -- kernels of `scaled` -----------------------------------------------------------------------------------------------


def too_far(x: Any, out: Any, begin: int, end: int, n: int, by: float) -> None:
    for row in range(begin, end):
        for i in range(n + 1):
            out[row * n + i] = x[row * n + i] * by


def negative_index(x: Any, out: Any, begin: int, end: int, n: int, by: float) -> None:
    for row in range(begin, end):
        for i in range(n):
            out[row * n + i] = x[row * n + i - 1] * by


def into_operand(x: Any, out: Any, begin: int, end: int, n: int, by: float) -> None:
    for i in range(begin * n, end * n):
        x[i] = x[i] * by
        out[i] = x[i]


def other_value(x: Any, out: Any, begin: int, end: int, n: int, by: float) -> None:
    for i in range(begin * n, end * n):
        out[i] = x[i] * by + 1e-3


def by_range(x: Any, out: Any, begin: int, end: int, n: int, by: float) -> None:
    """Right in one range of units, wrong in several."""
    for i in range(begin * n, end * n):
        out[i] = x[i] * by if begin == 0 else f32(0)


def half_written(x: Any, out: Any, begin: int, end: int, n: int, by: float) -> None:
    for row in range(begin, end):
        for i in range(n // 2):
            out[row * n + i] = x[row * n + i] * by


def in_double(x: Any, out: Any, begin: int, end: int, n: int, by: float) -> None:
    for i in range(begin * n, end * n):
        out[i] = x[i] * by / 1 * (n / n)


def uses_list(x: Any, out: Any, begin: int, end: int, n: int, by: float) -> None:
    rows = [begin]
    for i in range(rows[0] * n, end * n):
        out[i] = x[i] * by


def uses_numpy(x: Any, out: Any, begin: int, end: int, n: int, by: float) -> None:
    for i in range(begin * n, end * n):
        out[i] = np.exp(x[i]) * by


def wrong_parameters(x: Any, out: Any, start: int, end: int) -> None:
    return


def unknown_size(x: Any, out: Any, begin: int, end: int, width: int) -> None:
    return


# -- ops that are right ------------------------------------------------------------------------------------------------


def relu2(x: Any) -> Any:
    """The square of the positive part."""
    return np.maximum(x, 0) ** 2


def swish(x: Any, *, beta: float = 1.0) -> Any:
    return x / (1 + np.exp(-beta * x))


def centred(x: Any, shift: Any) -> Any:
    return (x - x.mean(-1, keepdims=True)) * HALF + shift


def glu(x: Any) -> Any:
    """The halves of a row: the first one times the sigmoid of the second."""
    first, second = np.split(x, 2, -1)
    return first / (1 + np.exp(-second))


def sigmoid(x: Any) -> Any:
    return 1.0 / (1.0 + exp(-x))


def glu_kernel(x: Any, out: Any, begin: int, end: int, n: int) -> None:
    for row in range(begin, end):
        for i in range(n):
            out[row * n + i] = x[2 * row * n + i] * sigmoid(x[2 * row * n + n + i])
