"""Root-mean-square norm (arXiv 1910.07467) over rows, as f32 or straight into int8 activation rows.

    y = x / sqrt(mean(x^2) + eps) [* w]

The squares are summed in f32 with as many partial sums as the target has lanes.
"""

from __future__ import annotations

from typing import Any

from rlx.codegen.kernel import Kernel
from rlx.codegen.kernels.quantize import quantize_row, row_holes
from rlx.codegen.loops import HOLE, SUM_FLAGS, Helper, Ptr, Scalar, fastmath, loop_kernel
from rlx.codegen.scalars import f32, sqrt
from rlx.errors import ArgumentError
from rlx.ir.dtypes import F32, Q8A

#: Holes: elements of a row, the epsilon, bytes of a q8a row, `VALUE(x, w, src, i, factor)`.
WIDTH: int = HOLE
EPS: float = HOLE
ROW_BYTES: int = HOLE
VALUE: Helper = HOLE


def rms_norm(width: int, eps: float, *, out: str = "f32", weighted: bool = True) -> Kernel:
    """f32[rows, width] -> f32[rows, width], or q8a rows. Buffers x, [w f32[width],] out; a unit is a row.

    Args:
        width: elements of a row; for q8a a multiple of 32 (else `ShapeError`).
        eps: added to the mean of the squares.
        out: `f32` or `q8a`.
        weighted: whether there is a weight.
    """
    if out not in ("f32", "q8a"):
        raise ArgumentError(f"out must be f32 or q8a, found {out!r}", where="rms_norm")
    holes: dict[str, Any] = {"WIDTH": width, "EPS": float(eps), "VALUE": weighted_value if weighted else scaled_value}
    if out == "q8a":
        holes |= row_holes(width)
    weight = [("w", F32)] if weighted else []
    params = [("x", F32), *weight, ("out", Q8A if out == "q8a" else F32)]
    return loop_kernel(_TEMPLATES[out, weighted], holes, params)


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
    """1 / sqrt(mean(x^2) + eps) of `width` elements from `src` on."""
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


def _rms_norm_q8a(x: Ptr, w: Ptr, out: Ptr, begin: int, end: int) -> None:
    for row in range(begin, end):
        src = row * WIDTH
        quantize_row(x, w, out, src, row * ROW_BYTES, WIDTH, rms_factor(x, src, WIDTH, EPS))


def _rms_norm_plain_q8a(x: Ptr, out: Ptr, begin: int, end: int) -> None:
    for row in range(begin, end):
        src = row * WIDTH
        quantize_row(x, x, out, src, row * ROW_BYTES, WIDTH, rms_factor(x, src, WIDTH, EPS))


_TEMPLATES: dict[tuple[str, bool], Helper] = {
    ("f32", True): _rms_norm,
    ("f32", False): _rms_norm_plain,
    ("q8a", True): _rms_norm_q8a,
    ("q8a", False): _rms_norm_plain_q8a,
}
