"""Kernels of rows, as Python and as machine code, against the meanings of their ops in float64: odd widths, NaN and
infinities, the row behind the last one, any split of the units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from forms import Form, assert_any_split, call, forms
from levels import LEVELS, name
from native import Array

from rlx.backends.cpu.kernel import Kernel
from rlx.backends.cpu.kernels.rows.elementwise import elementwise
from rlx.backends.cpu.kernels.rows.gather import take
from rlx.backends.cpu.kernels.rows.mix import CHUNK, chunks, mix
from rlx.backends.cpu.kernels.rows.norm import layer_norm, rms_norm
from rlx.backends.cpu.kernels.rows.reduce import BLOCK, PART, argmax, row_reduce, top_k
from rlx.backends.cpu.kernels.rows.rope import rope, rope_angles
from rlx.backends.cpu.kernels.rows.runs import concat_rows, slice_rows
from rlx.backends.cpu.kernels.rows.softmax import softmax
from rlx.backends.cpu.target import Target
from rlx.ir.op_table import OPS

targets = pytest.mark.parametrize("target", LEVELS, ids=name)

#: Relative error of a normed value: the f32 sum of squares, a square root, a quotient, two products. Plain Python adds
#: the squares one after the other.
NORM = {True: 1e-6, False: 4e-6}
#: A mean has an error of a few units of the largest element, which the quotient by the deviation makes larger.
LAYER_NORM = 4 * NORM[False]
#: Relative error of a softmax value: an exponential (2 units), a sum, a reciprocal, a product; and half a unit of the
#: difference to the maximum, which is the exponent's absolute error. Below e^-87.3 the exponential is zero.
SOFTMAX, DIFFERENCE, TINY = 1e-6, 2.0**-24, 1.25e-38
#: Error of a sum of 16 products, as a share of the sum of their magnitudes: a rounding a step.
MIX = 17 * 2.0**-24
#: Error of a turned element relative to its pair, three roundings; with the norm's own error before it; and that of a
#: cosine or sine, one unit in the last place of numbers below 1.
TURN, TURNED_NORM, ANGLE = 3 * 2.0**-24, 2e-6, 2.0**-23

Limit = Callable[[Array, bool], Array | float]  # of what is wanted, and whether the form is machine code


class Case:
    """A kernel, its buffers before the result, and what the op's meaning says of them in float64.

    Attributes:
        want: what the op's meaning says; without an op, the operand itself.
        make: the kernel for a target; without one, the form in Python.
        limit: the largest error of each number.
        units: of a call.
    """

    def __init__(
        self, op: str, make: Callable[[Any], Kernel], *operands: Array, limit: Limit | float = 0.0,
        units: int = 0, shape: tuple[int, ...] = (), **attrs: Any,
    ) -> None:  # fmt: skip
        self.make, self.operands, self.limit = make, list(operands), limit
        wide = [x.astype(np.float64) if x.dtype == np.float32 else x for x in operands]
        with np.errstate(all="ignore"):
            self.want = OPS[op].meaning(wide, attrs, {}) if op else operands[0].copy()
        self.want = self.want.reshape(shape or self.want.shape)
        self.units = units or len(self.want)

    def check(self, form: Form) -> None:
        kernel, dtype = self.make(form), np.int32 if self.want.dtype == np.int32 else np.float32
        out = np.full((len(self.want) + 1, *self.want.shape[1:]), 7, dtype)
        extents = {"rows": len(self.want)} if "rows" in kernel.extents else {}
        call(form, kernel, *self.operands, out, end=self.units, **extents)
        assert (out[-1] == 7).all(), "wrote past its rows"
        limit = self.limit if isinstance(self.limit, float) else self.limit(self.want, form is not None)
        exact = np.isnan(self.want) | np.isinf(self.want)
        np.testing.assert_array_equal(out[:-1][exact], self.want[exact])
        error = np.abs(out[:-1] - np.where(exact, out[:-1], self.want))
        assert (error[~exact] <= np.broadcast_to(limit, error.shape)[~exact]).all()
        assert_any_split(form, kernel, self.operands, out[:-1].copy(), end=self.units, **extents)


def data(*shape: int, scale: float = 1.0) -> Array:
    return (np.random.default_rng(shape[-1]).standard_normal(shape) * scale).astype(np.float32)


SEQ, HEADS = 5, 3


def heads(head_dim: int, n_rot: int) -> tuple[Array, Array]:
    """Rows of heads, and the cosines and sines that turn them."""
    turn = np.random.default_rng(head_dim + n_rot).uniform(-3, 3, (SEQ, n_rot // 2))
    return data(SEQ, HEADS, head_dim), np.concatenate([np.cos(turn), np.sin(turn)], axis=1).astype(np.float32)


def relative(by: dict[bool, float]) -> Limit:
    return lambda want, compiled: by[compiled] * np.abs(want)


# ---------------------------------------------------------------------------------------------------- the table


def norms() -> Iterator[Case]:
    for width, eps in ((1, 1e-6), (7, 1e-5), (33, 1e-6), (128, 1.0)):
        x = data(3, width) * np.exp(np.linspace(-4, 4, 3, dtype=np.float32))[:, None]
        for w in ([], [data(width)]):
            made = rms_norm(width, eps, weighted=bool(w))
            yield Case("rms_norm", lambda form, made=made: made, x, *w, limit=relative(NORM), eps=eps)
    odd = data(3, 64)
    odd[0, 5], odd[1, 7] = np.nan, np.inf
    yield Case("rms_norm", lambda _: rms_norm(64, 1e-6, weighted=False), odd, limit=relative(NORM), eps=1e-6)
    for width, eps in ((7, 1e-5), (33, 1e-6), (128, 1.0)):
        x = data(3, width) + np.array([[0.0], [30.0], [-300.0]], np.float32)
        for weights in range(3):
            operands = [data(width), data(width)[::-1].copy()][:weights]
            ceiling = LAYER_NORM * (1 + np.abs(x).max(1) / x.std(1))[:, None] * (1 + np.abs(data(width)).max() ** 2)
            made = layer_norm(width, eps, weights=weights)
            yield Case(
                "layer_norm", lambda _, made=made: made, x, *operands,
                limit=lambda want, compiled, ceiling=ceiling: ceiling, eps=eps, out="f32",
            )  # fmt: skip


def softmaxes() -> Iterator[Case]:
    def limited(x: Array) -> Limit:
        with np.errstate(all="ignore"):
            below = np.maximum(x.astype(np.float64) - x.max(1, keepdims=True), -1e3)
        return lambda want, _: want * (SOFTMAX - below * DIFFERENCE) + TINY

    rows = [data(3, width, scale=4) for width in (1, 5, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7)]
    ends = data(5, 9, scale=4)
    ends[0, 2:5], ends[1], ends[2], ends[3, 8], ends[4, 0] = -np.inf, 3e38 * np.sign(ends[1]), -np.inf, np.nan, np.inf
    for x in (*rows, ends[:2], ends[2:4]):
        yield Case("softmax", lambda _, n=x.shape[1]: softmax(n), x, limit=limited(x))


def searches() -> Iterator[Case]:
    """Of equals the first; NaN of either sign lies above infinity."""
    odd = np.zeros((6, 2 * BLOCK + 3), np.float32)
    odd[1, [BLOCK + 5, BLOCK + 9, 2]] = [1, 1, -1]
    odd[2], odd[3], odd[5] = -np.inf, np.where(np.arange(odd.shape[1]) % 2, 0.0, -0.0), -1
    odd[4, [3, BLOCK + 1]] = np.inf
    nans, bits = np.full((3, 2 * BLOCK), np.inf, np.float32), np.array([0xFFC00001, 0x7FFFFFFF, 0x7FC00000], np.uint32)
    nans[0, 70:73], nans[1, 5], nans[2, -1] = bits.view(np.float32), *bits.view(np.float32)[:2]
    for x in (*(data(4, width) for width in (1, 5, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7)), odd, nans):
        yield Case("argmax", lambda _, n=x.shape[1]: argmax(n), x)


def sums() -> Iterator[Case]:
    for width in (1, 77, 100, 2 * PART + 3):
        x = np.abs(data(4, width))
        for kind in ("sum", "mean"):
            made = row_reduce(width, kind)
            yield Case(f"reduce_{kind}", lambda _, made=made: made, x, limit=relative(NORM), axis=-1)


def copies() -> Iterator[Case]:
    """Elements by number, parts of rows, rows one after the other, small matrix products."""
    x, ids = data(5, 60), np.random.default_rng(1).integers(0, 60, (5, 7)).astype(np.int32)
    x[2, 3], ids[2, 1], ids[4, :2] = np.nan, 3, [0, 59]
    yield Case("take", lambda _: take(60, 7), x, ids)
    yield Case("take", lambda _: take(60, 7, shared=True), x[2].copy(), ids)


def machine_copies() -> Iterator[Case]:
    """The same, of kernels that are written for a target."""
    for width, start, stop in ((1, 0, 1), (40, 3, 40), (64, 16, 48), (100, 99, 100), (77, 0, 31)):
        x = data(4, width)
        x[1, start] = np.nan
        yield Case("slice", lambda t, a=(width, start, stop): slice_rows(*a, t), x, start=start, stop=stop, axis=1)
    for widths in ([5], [16, 32], [1, 15, 33, 2], [31, 64, 1]):
        parts = [data(3, width) for width in widths]
        parts[0][2, -1] = np.nan
        case = Case("", lambda t, widths=widths: concat_rows(widths, t), *parts)
        case.want = np.hstack(parts)
        yield case
    for m, n, width in (
        (1, 1, 37), (4, 4, 1), (4, 4, CHUNK + 5), (4, 4, 3 * CHUNK), (1, 4, 16), (5, 3, CHUNK + 16), (16, 16, 21),
        (3, 7, 40),
    ):  # fmt: skip
        values, c = data(3, n, width), data(3, m, n)
        ceiling = MIX * (np.abs(c).astype(float) @ np.abs(values))
        yield Case(
            "mix", lambda t, a=(m, n, width): mix(*a, t), values, c, units=3 * chunks(width),
            limit=lambda want, _, ceiling=ceiling: ceiling,
        )  # fmt: skip


def turns() -> Iterator[Case]:
    positions = np.array([0, 1, 2, 1000, 131071, 1_000_000], np.int32)
    inverse = (10000.0 ** -(np.arange(0, 20, 2) / 20)).astype(np.float32)
    for scale in (1.0, 1.25):
        made = rope_angles(10, scale=scale)
        yield Case(
            "rope_angles", lambda _, made=made: made, positions, inverse, limit=ANGLE * scale,
            scale=scale, sections=None, interleaved=False,
        )  # fmt: skip
    for style in ("interleaved", "neox"):
        for head_dim, n_rot in ((16, 16), (64, 64), (40, 24), (6, 2), (8, 0)):
            x, angles = heads(head_dim, n_rot)
            made = rope(HEADS, head_dim, n_rot, style)
            limit = TURN * float(np.abs(x).max()) * 2
            yield Case(
                "rope", lambda _, made=made: made, x, angles, limit=limit, units=SEQ * HEADS, style=style, norm_eps=None
            )
        x, angles = heads(32, 16)
        made = rope(HEADS, 32, 16, style, norm_eps=1e-5)
        yield Case(
            "rope", lambda _, made=made: made, x, data(32), angles, units=SEQ * HEADS, style=style, norm_eps=1e-5,
            limit=lambda want, _: TURNED_NORM * np.abs(want).max(),
        )  # fmt: skip


EXPRESSIONS: list[tuple[Any, list[str]]] = [
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


def expressions() -> Iterator[Case]:
    for expr, inputs in EXPRESSIONS:
        for rows, width in ((1, 16), (3, 5), (2, 96), (5, 33)):
            shapes = {"full": (rows, width), "row": (width,), "column": (rows, 1), "scalar": (1,)}
            operands = [data(*shapes[kind], scale=3) for kind in inputs]
            yield Case(
                "elementwise", lambda t, a=(expr, inputs, width): elementwise(*a, t), *operands, expr=expr, out="f32",
                limit=lambda want, _: 2e-6 + 2e-6 * np.abs(want),
            )  # fmt: skip


TABLE = {"norm": norms, "softmax": softmaxes, "argmax": searches, "sums": sums, "copies": copies, "rope": turns}


@forms
@pytest.mark.parametrize("kernels", TABLE)
def test_a_kernel_means_what_its_op_does(kernels: str, form: Form) -> None:
    for case in TABLE[kernels]():
        case.check(form)


@targets
@pytest.mark.parametrize("kernels", [machine_copies, expressions])
def test_a_kernel_for_a_target_means_what_its_op_does(kernels: Callable[[], Iterator[Case]], target: Target) -> None:
    for case in kernels():
        case.check(target)


# ---------------------------------------------------------------------------------------------------- top-k


def largest(x: Array, k: int) -> Array:
    """Indices of the k largest of each row, the first of equals first; NaN lies above infinity."""
    wide = np.where(np.isnan(x), np.inf, np.where(x == np.inf, 1e300, x.astype(np.float64)))
    return np.argsort(-wide, axis=1, kind="stable")[:, :k]


def largest_of_groups(x: Array, k: int, groups: int, kept: int) -> Array:
    """The same, of the groups whose two largest have the largest sums; of equal groups the first ones."""
    sums = np.sort(x.reshape(len(x), groups, -1), axis=2)[:, :, -2:].sum(axis=2)
    searched = np.argsort(-sums, axis=1, kind="stable")[:, :kept]
    group = np.arange(x.shape[1]) // (x.shape[1] // groups)
    return largest(np.where((group[:, None] == searched[:, None]).any(-1), x, -np.inf), k)


@forms
@pytest.mark.parametrize(
    "k", [(1, 1), (9, 9), (BLOCK, 3), (BLOCK + 1, BLOCK + 1), (3 * BLOCK + 7, 20), (2 * BLOCK + 9, 11), (100, 7),
          (64, 8, 8, 4), (12, 3, 6, 3), (30, 10, 3, 1), (30, 30, 3, 3)], ids=str,
)  # fmt: skip
def test_top_k(form: Form, k: tuple[int, ...]) -> None:
    """Of random rows, of many equals, and of rows in order; without groups of NaN and infinities, too."""
    x = data(5, k[0], scale=4)
    x[0], x[1], x[2] = np.random.default_rng(0).integers(0, 3, k[0]), 1, np.arange(k[0])
    if len(k) == 2 and k[0] > 101:
        x[3, [7, 100, 101]], x[4] = [np.nan, np.inf, -np.nan], np.where(np.arange(k[0]) % 3, 0.0, -0.0)
    want = largest(x, k[1]) if len(k) == 2 else largest_of_groups(x, *k[1:])
    values, indices, kernel = np.zeros((5, k[1]), np.float32), np.full((6, k[1]), -1, np.int32), top_k(*k)
    call(form, kernel, x, values, indices, end=5)
    np.testing.assert_array_equal(indices[:5], want)
    np.testing.assert_array_equal(values, np.take_along_axis(x, want, axis=1))
    assert (indices[5] == -1).all(), "wrote past its rows"
    assert_any_split(form, kernel, [x, values], indices[:5].copy(), end=5)
