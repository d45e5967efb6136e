"""Norms of rows: root mean square (arXiv 1910.07467) and layer norm (arXiv 1607.06450).

    rms_norm      y = x / sqrt(mean(x^2) + eps) [* w]
    layer_norm    y = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) [* w [+ b]]

The result is f32, or directly prepared activation rows. Sums are in f32, with one partial sum per vector lane of the
target.
"""

from __future__ import annotations

from typing import Any

from rlx.backends.cpu.kernel import Kernel
from rlx.backends.cpu.kernels.rows.quantize import PREPARE, ROW_SIZE, WIDTH, row_holes
from rlx.backends.cpu.kernels.rows.reduce import part_sum
from rlx.backends.cpu.loops import loop_kernel
from rlx.ir.dtypes import ACTIVATIONS, F32
from rlx.scalars import HOLE, SUM_FLAGS, Helper, Ptr, Scalar, f32, fastmath, sqrt

#: Holes besides those of `quantize.py`: the epsilon, and `MEAN(x, src, width)`, which is subtracted.
EPS: float = HOLE
MEAN: Helper = HOLE


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
    return _norm(no_mean, int(weighted), width, eps, out)


def layer_norm(width: int, eps: float, *, out: str = "f32", weights: int = 2) -> Kernel:
    """As `rms_norm`, but a layer norm. Buffers: x, [w f32[width], [b f32[width],]] out.

    Args:
        weights: number of operands after x: 0, a weight, or a weight and a bias.

    Raises:
        ArgumentError, ShapeError: as in `rms_norm`.
    """
    return _norm(mean_of_row, weights, width, eps, out)


def _norm(mean: Helper, weights: int, width: int, eps: float, out: str) -> Kernel:
    template, value = _NORMS[weights]
    holes: dict[str, Any] = {**row_holes(width, out), "EPS": float(eps), "MEAN": mean, "VALUE": value}
    params = [("x", F32), *((name, F32) for name in ("w", "b")[:weights]), ("out", ACTIVATIONS[out])]
    return loop_kernel(template, holes, params)


def plain_value(x: Ptr, w: Ptr, b: Ptr, src: int, i: int, factor: Scalar, mean: Scalar) -> Scalar:
    return (x[src + i] - mean) * factor


def weighted_value(x: Ptr, w: Ptr, b: Ptr, src: int, i: int, factor: Scalar, mean: Scalar) -> Scalar:
    return (x[src + i] - mean) * factor * w[i]


def biased_value(x: Ptr, w: Ptr, b: Ptr, src: int, i: int, factor: Scalar, mean: Scalar) -> Scalar:
    return (x[src + i] - mean) * factor * w[i] + b[i]


@fastmath(*SUM_FLAGS)
def sum_of_centred_squares(x: Ptr, start: int, stop: int, mean: Scalar) -> Scalar:
    total = f32(0.0)
    for i in range(start, stop):
        total += (x[i] - mean) * (x[i] - mean)
    return total


def no_mean(x: Ptr, src: int, width: int) -> Scalar:
    return f32(0.0)


def mean_of_row(x: Ptr, src: int, width: int) -> Scalar:
    return part_sum(x, src, src + width) / f32(width)


def norm_factor(x: Ptr, src: int, width: int, eps: float, mean: Scalar) -> Scalar:
    """1 / sqrt(mean((x - mean)^2) + eps) over `width` elements from `src` on."""
    return f32(1.0) / sqrt(sum_of_centred_squares(x, src, src + width, mean) / f32(width) + f32(eps))


def norm_rows(x: Ptr, w: Ptr, b: Ptr, out: Ptr, begin: int, end: int) -> None:
    for row in range(begin, end):
        src = row * WIDTH
        mean = MEAN(x, src, WIDTH)
        PREPARE(x, w, b, out, src, row * ROW_SIZE, WIDTH, norm_factor(x, src, WIDTH, EPS, mean), mean)


def _norm_plain(x: Ptr, out: Ptr, begin: int, end: int) -> None:
    norm_rows(x, x, x, out, begin, end)


def _norm_weighted(x: Ptr, w: Ptr, out: Ptr, begin: int, end: int) -> None:
    norm_rows(x, w, w, out, begin, end)


def _norm_biased(x: Ptr, w: Ptr, b: Ptr, out: Ptr, begin: int, end: int) -> None:
    norm_rows(x, w, b, out, begin, end)


#: Templates and their values, by the number of operands after x.
_NORMS: tuple[tuple[Helper, Helper], ...] = (
    (_norm_plain, plain_value),
    (_norm_weighted, weighted_value),
    (_norm_biased, biased_value),
)
