"""Root-mean-square norm (arXiv 1910.07467) over rows. The result is f32, or directly prepared activation rows.

    y = x / sqrt(mean(x^2) + eps) [* w]

The squares are summed in f32, with one partial sum per vector lane of the target.
"""

from __future__ import annotations

from typing import Any

from rlx.backends.cpu.kernel import Kernel
from rlx.backends.cpu.kernels.rows.quantize import row_holes
from rlx.backends.cpu.loops import HOLE, SUM_FLAGS, Helper, Ptr, Scalar, fastmath, loop_kernel
from rlx.backends.cpu.scalars import f32, sqrt
from rlx.ir.dtypes import ACTIVATIONS, F32

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
    holes: dict[str, Any] = {"WIDTH": width, "EPS": float(eps), "VALUE": weighted_value if weighted else scaled_value}
    if out != "f32":
        holes |= row_holes(width, out)
    weight = [("w", F32)] if weighted else []
    params = [("x", F32), *weight, ("out", ACTIVATIONS[out])]
    return loop_kernel(_TEMPLATES[out != "f32", weighted], holes, params)


def scaled_value(x: Ptr, w: Ptr, src: int, i: int, factor: Scalar) -> Scalar:
    return x[src + i] * factor


def weighted_value(x: Ptr, w: Ptr, src: int, i: int, factor: Scalar) -> Scalar:
    return x[src + i] * factor * w[i]


@fastmath(*SUM_FLAGS)
def sum_of_squares(x: Ptr, start: int, stop: int) -> Scalar:
    total = f32(0.0)
    for i in range(start, stop):
        total += x[i] * x[i]
    return total


def rms_factor(x: Ptr, src: int, width: int, eps: float) -> Scalar:
    """1 / sqrt(mean(x^2) + eps) over `width` elements from `src` on."""
    return f32(1.0) / sqrt(sum_of_squares(x, src, src + width) / f32(width) + f32(eps))


def norm_row(x: Ptr, w: Ptr, out: Ptr, src: int, factor: Scalar) -> None:
    for i in range(WIDTH):
        out[src + i] = VALUE(x, w, src, i, factor)


def _rms_norm(x: Ptr, w: Ptr, out: Ptr, begin: int, end: int) -> None:
    for row in range(begin, end):
        src = row * WIDTH
        norm_row(x, w, out, src, rms_factor(x, src, WIDTH, EPS))


def _rms_norm_plain(x: Ptr, out: Ptr, begin: int, end: int) -> None:
    for row in range(begin, end):
        src = row * WIDTH
        norm_row(x, x, out, src, rms_factor(x, src, WIDTH, EPS))


def _rms_norm_quantize(x: Ptr, w: Ptr, out: Ptr, begin: int, end: int) -> None:
    for row in range(begin, end):
        src = row * WIDTH
        PREPARE(x, w, out, src, row * ROW_SIZE, WIDTH, rms_factor(x, src, WIDTH, EPS))


def _rms_norm_plain_quantize(x: Ptr, out: Ptr, begin: int, end: int) -> None:
    for row in range(begin, end):
        src = row * WIDTH
        PREPARE(x, x, out, src, row * ROW_SIZE, WIDTH, rms_factor(x, src, WIDTH, EPS))


#: Templates by (whether rows are prepared, whether there is a weight).
_TEMPLATES: dict[tuple[bool, bool], Helper] = {
    (False, True): _rms_norm,
    (False, False): _rms_norm_plain,
    (True, True): _rms_norm_quantize,
    (True, False): _rms_norm_plain_quantize,
}
