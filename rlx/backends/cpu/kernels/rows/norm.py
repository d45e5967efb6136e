"""Norms of rows: root mean square (arXiv 1910.07467) and layer norm (arXiv 1607.06450).

    rms_norm      y = x / sqrt(mean(x^2) + eps) [* w]
    layer_norm    y = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) [* w [+ b]]

The result is f32, or directly prepared activation rows. Sums are in f32, with one partial sum per vector lane of the
target.
"""

from __future__ import annotations

from typing import Any

from rlx.backends.cpu.kernel import Kernel
from rlx.backends.cpu.kernels.rows.quantize import row_holes
from rlx.backends.cpu.loops import loop_kernel
from rlx.ir.dtypes import ACTIVATIONS, F32
from rlx.scalars import HOLE, SUM_FLAGS, Helper, Ptr, Scalar, f32, fastmath, sqrt

#: Holes: elements of a row, the epsilon; `VALUE`, `ROW_SIZE` and `PREPARE` are those of `quantize.py`.
WIDTH: int = HOLE
EPS: float = HOLE
VALUE: Helper = HOLE
ROW_SIZE: int = HOLE
PREPARE: Helper = HOLE


def rms_norm(width: int, eps: float, *, out: str = "f32", weighted: bool = True) -> Kernel:
    """f32[rows, width] -> f32[rows, width], or prepared rows. Buffers: x, [w f32[width],] out. A unit is a row.

    Args:
        width: elements of a row.
        eps: added to the mean of the squares.
        out: type of the result: `f32`, `q8a` or `bf16`.
        weighted: whether there is a weight.

    Raises:
        ArgumentError: `out` is another type.
        ShapeError: the width does not fit `out` (see `quantize`).
    """
    template = _rms_norm if weighted else _rms_norm_plain
    return _norm(template, weighted_value if weighted else scaled_value, width, eps, out, ("w",)[: int(weighted)])


def layer_norm(width: int, eps: float, *, out: str = "f32", weights: int = 2) -> Kernel:
    """As `rms_norm`, but a layer norm. Buffers: x, [w f32[width], [b f32[width],]] out.

    Args:
        weights: number of operands after x: 0, a weight, or a weight and a bias.

    Raises:
        ArgumentError, ShapeError: as in `rms_norm`.
    """
    template, value = _LAYER_NORM[weights]
    return _norm(template, value, width, eps, out, ("w", "b")[:weights])


def _norm(template: Helper, value: Helper, width: int, eps: float, out: str, weights: tuple[str, ...]) -> Kernel:
    holes: dict[str, Any] = {**row_holes(width, out), "EPS": float(eps), "VALUE": value}
    params = [("x", F32), *((name, F32) for name in weights), ("out", ACTIVATIONS[out])]
    return loop_kernel(template, holes, params)


def scaled_value(x: Ptr, w: Ptr, b: Ptr, src: int, i: int, factor: Scalar, mean: Scalar) -> Scalar:
    return x[src + i] * factor


def weighted_value(x: Ptr, w: Ptr, b: Ptr, src: int, i: int, factor: Scalar, mean: Scalar) -> Scalar:
    return x[src + i] * factor * w[i]


def centred_value(x: Ptr, w: Ptr, b: Ptr, src: int, i: int, factor: Scalar, mean: Scalar) -> Scalar:
    return (x[src + i] - mean) * factor


def centred_weighted_value(x: Ptr, w: Ptr, b: Ptr, src: int, i: int, factor: Scalar, mean: Scalar) -> Scalar:
    return (x[src + i] - mean) * factor * w[i]


def centred_biased_value(x: Ptr, w: Ptr, b: Ptr, src: int, i: int, factor: Scalar, mean: Scalar) -> Scalar:
    return (x[src + i] - mean) * factor * w[i] + b[i]


@fastmath(*SUM_FLAGS)
def sum_of_squares(x: Ptr, start: int, stop: int) -> Scalar:
    total = f32(0.0)
    for i in range(start, stop):
        total += x[i] * x[i]
    return total


@fastmath(*SUM_FLAGS)
def sum_of_row(x: Ptr, start: int, stop: int) -> Scalar:
    total = f32(0.0)
    for i in range(start, stop):
        total += x[i]
    return total


@fastmath(*SUM_FLAGS)
def sum_of_centred_squares(x: Ptr, start: int, stop: int, mean: Scalar) -> Scalar:
    total = f32(0.0)
    for i in range(start, stop):
        total += (x[i] - mean) * (x[i] - mean)
    return total


def rms_factor(x: Ptr, src: int, width: int, eps: float) -> Scalar:
    """1 / sqrt(mean(x^2) + eps) over `width` elements from `src` on."""
    return f32(1.0) / sqrt(sum_of_squares(x, src, src + width) / f32(width) + f32(eps))


def mean_of_row(x: Ptr, src: int, width: int) -> Scalar:
    return sum_of_row(x, src, src + width) / f32(width)


def centred_factor(x: Ptr, src: int, width: int, eps: float, mean: Scalar) -> Scalar:
    """1 / sqrt(variance + eps) over `width` elements from `src` on."""
    return f32(1.0) / sqrt(sum_of_centred_squares(x, src, src + width, mean) / f32(width) + f32(eps))


def _rms_norm(x: Ptr, w: Ptr, out: Ptr, begin: int, end: int) -> None:
    for row in range(begin, end):
        src = row * WIDTH
        PREPARE(x, w, w, out, src, row * ROW_SIZE, WIDTH, rms_factor(x, src, WIDTH, EPS), f32(0.0))


def _rms_norm_plain(x: Ptr, out: Ptr, begin: int, end: int) -> None:
    for row in range(begin, end):
        src = row * WIDTH
        PREPARE(x, x, x, out, src, row * ROW_SIZE, WIDTH, rms_factor(x, src, WIDTH, EPS), f32(0.0))


def _layer_norm(x: Ptr, w: Ptr, b: Ptr, out: Ptr, begin: int, end: int) -> None:
    for row in range(begin, end):
        src = row * WIDTH
        mean = mean_of_row(x, src, WIDTH)
        PREPARE(x, w, b, out, src, row * ROW_SIZE, WIDTH, centred_factor(x, src, WIDTH, EPS, mean), mean)


def _layer_norm_weighted(x: Ptr, w: Ptr, out: Ptr, begin: int, end: int) -> None:
    for row in range(begin, end):
        src = row * WIDTH
        mean = mean_of_row(x, src, WIDTH)
        PREPARE(x, w, w, out, src, row * ROW_SIZE, WIDTH, centred_factor(x, src, WIDTH, EPS, mean), mean)


def _layer_norm_plain(x: Ptr, out: Ptr, begin: int, end: int) -> None:
    for row in range(begin, end):
        src = row * WIDTH
        mean = mean_of_row(x, src, WIDTH)
        PREPARE(x, x, x, out, src, row * ROW_SIZE, WIDTH, centred_factor(x, src, WIDTH, EPS, mean), mean)


#: Templates of layer norms and their values, by the number of operands after x.
_LAYER_NORM: tuple[tuple[Helper, Helper], ...] = (
    (_layer_norm_plain, centred_value),
    (_layer_norm_weighted, centred_weighted_value),
    (_layer_norm, centred_biased_value),
)
