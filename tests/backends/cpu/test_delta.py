"""The gated delta rule, with and without correction, against its recurrence in float64, and bits that do not depend on
the split into calls.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from levels import LEVELS, name
from native import aligned, run
from numpy.typing import NDArray

from rlx.backends.cpu.kernel import Kernel
from rlx.backends.cpu.kernels.delta.delta import gated_delta, strip, units
from rlx.backends.cpu.target import Target

Array = NDArray[Any]
targets = pytest.mark.parametrize("target", LEVELS, ids=name)

#: Largest error against float64, as a share of the largest magnitude of the result or the state.
DELTA_ERROR = 3e-6
#: What f32 cannot hold counts as zero.
SMALLEST = 1e-37
SCALE = 0.25


@cache
def written(shape: tuple[int, int, int, int], target: Target, order: str, fixed: int | None, corrects: bool) -> Kernel:
    """The kernel, written once."""
    return gated_delta(*shape, target, scale=SCALE, order=order, corrects=corrects, rows_static=fixed)


def recurrence(
    state: Array, q: Array, k: Array, v: Array, g: Array, beta: Array, order: str, corrects: bool
) -> tuple[Array, Array]:
    """(result, state after), written as I - beta k k^T applied to the decayed state: the rule's other common form.
    Without correction nothing is applied.
    """
    heads, key_heads = v.shape[1], q.shape[1]
    s, out = state.astype(np.float64), np.zeros(v.shape)
    for h in range(heads):
        source = h % key_heads if order == "tiled" else h // (heads // key_heads)
        for t in range(len(v)):
            key, b = k[t, source].astype(np.float64), float(beta[t, h])
            erased = s[h] - corrects * b * np.outer(key, key @ s[h])
            s[h] = np.exp(float(g[t, h])) * erased + b * np.outer(key, v[t, h])
            out[t, h] = SCALE * (q[t, source].astype(np.float64) @ s[h])
    return out, s


class Case:
    """Rows with keys and queries of length 1, and gates of every kind: none, mild, and such that forget all."""

    def __init__(self, rows: int, shape: tuple[int, int, int, int], seed: int = 0) -> None:
        rng = np.random.default_rng([seed, rows, *shape])
        self.shape = shape
        heads, key_heads, key_dim, value_dim = shape
        q, k = rng.standard_normal((2, rows, key_heads, key_dim))
        q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
        g = -np.exp(rng.normal(-2, 2, (rows, heads)))
        beta = 1 / (1 + np.exp(-2 * rng.standard_normal((rows, heads))))
        kinds = rng.random((2, rows, heads))
        g[kinds[0] < 0.2], g[kinds[0] < 0.05] = 0, -50
        beta[kinds[1] < 0.2], beta[kinds[1] < 0.1] = 1, 0
        v = rng.standard_normal((rows, heads, value_dim))
        self.state = rng.standard_normal((heads, key_dim, value_dim)).astype(np.float32)
        self.rows = [x.astype(np.float32) for x in (q, k, v, g, beta)]

    def native(
        self,
        target: Target,
        *,
        calls: list[int] | None = None,
        ranges: list[tuple[int, int]] | None = None,
        order: str = "tiled",
        decode: bool = False,
        corrects: bool = True,
    ) -> tuple[Array, Array]:
        """(result, state after), in calls of some rows each; with `decode`, calls of one row have their own code."""
        heads, _, key_dim, value_dim = self.shape
        state, out, start = aligned(self.state), [], 0
        for count in calls or [len(self.rows[0])]:
            fixed = 1 if decode and count == 1 else None
            kernel = written(self.shape, target, order, fixed, corrects)
            rows = [aligned(x[start : start + count]) for x in self.rows]
            y = np.full((count + 1, heads, value_dim), 7, np.float32)
            total = units(heads, key_dim, value_dim)
            for begin, end in ranges or [(0, total)]:
                extents = {"rows": count} if kernel.extents else {}
                run(kernel, target, state, *rows, y, begin=begin, end=end, **extents)
            assert (y[count] == 7).all(), "wrote past its rows"
            out.append(y[:count])
            start += count
        assert start == len(self.rows[0])
        return np.concatenate(out), state

    def check(self, target: Target, **options: Any) -> None:
        got = self.native(target, **options)
        want_order, corrects = options.get("order", "tiled"), options.get("corrects", True)
        for found, want in zip(got, recurrence(self.state, *self.rows, want_order, corrects), strict=True):
            assert np.abs(found - want).max() <= DELTA_ERROR * np.abs(want).max() + SMALLEST, options


@targets
@pytest.mark.parametrize("rows", [1, 2, 7, 15, 16, 17, 33, 100])
def test_lengths(target: Target, rows: int) -> None:
    Case(rows, (4, 2, 32, 32)).check(target)


@targets
@pytest.mark.parametrize("shape", [(4, 2, 24, 40), (3, 1, 16, 20), (2, 2, 7, 16)], ids=str)
@pytest.mark.parametrize("order", ["tiled", "grouped"])
def test_odd_sides(target: Target, shape: tuple[int, int, int, int], order: str) -> None:
    Case(33, shape).check(target, order=order)
    Case(12, shape).check(target, order=order, calls=[1, 4, 1, 6], decode=True)
    total = units(shape[0], *shape[2:])
    Case(5, shape).check(target, order=order, ranges=[(0, 1), (1, total)])


@targets
@pytest.mark.parametrize("shape", [(4, 2, 128, 64), (6, 2, 16, 48), (3, 1, 7, 20)], ids=str)
def test_without_correction(target: Target, shape: tuple[int, int, int, int]) -> None:
    """In one call, and in several with the same bits."""
    case, how = Case(40, shape), {"order": "grouped", "corrects": False}
    case.check(target, **how)
    calls = case.native(target, calls=[1, 7, 1, 31], decode=True, **how)
    for found, want in zip(calls, case.native(target, **how), strict=True):
        np.testing.assert_array_equal(found, want)


@targets
@pytest.mark.parametrize("shape", [(2, 2, 32, 32), (2, 1, 128, 128), (3, 1, 48, 80), (1, 1, 256, 16)], ids=str)
def test_one_row(target: Target, shape: tuple[int, int, int, int]) -> None:
    Case(1, shape).check(target, calls=[1], decode=True)


@targets
@pytest.mark.parametrize("calls", [[1, 7, 64, 28], [99, 1], [16] * 6 + [4], [1] * 100], ids=len)
def test_texts_in_several_calls(target: Target, calls: list[int]) -> None:
    case = Case(100, (2, 1, 32, 64))
    case.check(target, calls=calls)
    case.check(target, calls=calls, decode=True)
    for found, want in zip(case.native(target, calls=calls, decode=True), case.native(target), strict=True):
        np.testing.assert_array_equal(found, want)


@targets
@pytest.mark.parametrize(("rows", "shape"), [(5, (4, 2, 32, 32)), (35, (4, 2, 32, 32)), (5, (3, 1, 7, 20))], ids=str)
def test_a_state_that_is_written_aside(target: Target, rows: int, shape: tuple[int, int, int, int]) -> None:
    """Of whole vectors, and of odd sides."""
    case = Case(rows, shape)
    kernel = gated_delta(*shape, target, scale=SCALE, aside=True)
    state, out = aligned(case.state), np.full((rows + 1, shape[0], shape[3]), 7, np.float32)
    after = aligned(np.zeros_like(state))
    run(kernel, target, state, *map(aligned, case.rows), after, out, end=units(shape[0], *shape[2:]), rows=rows)
    want, new = case.native(target)
    np.testing.assert_array_equal(out[:rows], want)
    np.testing.assert_array_equal(after, new)
    np.testing.assert_array_equal(state, case.state)
    assert (out[rows] == 7).all()


@targets
def test_extreme_gates(target: Target) -> None:
    """Decays of a whole text that are equal: none, such that the sums of g cancel, and beyond the smallest number."""
    for decay in (0.0, -1e-4, -5.0, -50.0, -1000.0):
        for beta in (0.0, 1.0):
            case = Case(40, (2, 2, 32, 16))
            case.rows[3][:], case.rows[4][:] = decay, beta
            case.check(target)
    case = Case(40, (2, 2, 32, 16))
    case.rows[3][:], case.rows[3][::7] = -1e-3, -300.0
    case.check(target)


@targets
def test_bits_depend_on_no_split_of_the_units(target: Target) -> None:
    case = Case(40, (2, 1, 32, 256))
    heads, _, *dims = case.shape
    total = units(heads, *dims)
    assert total == 8
    ranges = [(total - 1, total), (0, 1), (1, 1), (1, total - 1)]
    for found, want in zip(case.native(target, ranges=ranges), case.native(target), strict=True):
        np.testing.assert_array_equal(found, want)
    single = Case(1, case.shape)
    for found, want in zip(
        single.native(target, ranges=[(5, 8), (0, 5)], decode=True), single.native(target, decode=True), strict=True
    ):
        np.testing.assert_array_equal(found, want)


def test_a_unit_touches_its_columns_only() -> None:
    case, target = Case(20, (2, 1, 32, 256)), LEVELS[-1]
    width = strip(256)
    want, after = case.native(target)
    got, state = case.native(target, ranges=[(1, 2)])
    mine = slice(width, 2 * width)
    np.testing.assert_array_equal(got[:, 0, mine], want[:, 0, mine])
    np.testing.assert_array_equal(state[0, :, mine], after[0, :, mine])
    got[:, 0, mine], state[0, :, mine] = 7, case.state[0, :, mine]
    assert (got == 7).all()
    np.testing.assert_array_equal(state, case.state)


def test_a_number_that_is_not_finite_is_not_hidden() -> None:
    for operand in range(5):
        case = Case(40, (2, 2, 32, 32))
        case.rows[operand][20, 1] = np.nan
        out, _ = case.native(LEVELS[-1])
        assert np.isnan(out[20, 1]).all()
        assert np.isfinite(out[:, 0]).all()
        assert np.isfinite(out[:20]).all()
