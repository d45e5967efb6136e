"""The causal convolution against NumPy in float64: odd channel counts, few rows, splits of rows and of units."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from levels import LEVELS, name
from native import aligned, run
from numpy.typing import NDArray

from rlx.backends.cpu.kernels.delta.conv import CHANNELS, causal_conv
from rlx.backends.cpu.target import Target

Array = NDArray[Any]
targets = pytest.mark.parametrize("target", LEVELS, ids=name)

#: Largest |out - float64| as a share of sum |w u|: half a rounding a product and a sum each.
CONV_ERROR = 3e-7


class Case:
    """Random rows, weights and state; `native` leaves the case's arrays alone."""

    def __init__(self, channels: int, taps: int, rows: int) -> None:
        rng = np.random.default_rng([channels, taps])
        self.state = rng.standard_normal((taps - 1, channels)).astype(np.float32)
        self.x = rng.standard_normal((rows, channels)).astype(np.float32)
        self.weight = aligned(rng.standard_normal((channels, taps)).astype(np.float32))

    def native(
        self,
        target: Target,
        calls: list[int] | None = None,
        units: list[tuple[int, int]] | None = None,
        after: Array | None = None,
    ) -> tuple[Array, Array]:
        """(result, state after), the rows given in calls of some rows each, the units in ranges."""
        channels, taps = self.weight.shape
        kernel = causal_conv(channels, taps, target, aside=after is not None)
        edge = np.full((1, channels), 7, np.float32)  # what lies behind the state and the result
        state, out = aligned(np.concatenate([self.state, edge])), []
        start = 0
        for rows in calls or [len(self.x)]:
            x, y = aligned(self.x[start : start + rows]), np.full((rows + 1, channels), 7, np.float32)
            for begin, end in units or [(0, -(-channels // CHANNELS))]:
                buffers = (state, x, self.weight, *([] if after is None else [after]), y)
                run(kernel, target, *buffers, begin=begin, end=end, rows=rows)
            assert (y[rows] == 7).all(), "wrote past its rows"
            out.append(y[:rows])
            start += rows
        assert start == len(self.x)
        assert (state[taps - 1 :] == 7).all(), "wrote past its state"
        return np.concatenate(out), state[: taps - 1]

    def reference(self) -> tuple[Array, Array, Array]:
        """(result, its ceiling, state after): NumPy's own convolution, channel by channel."""
        taps = self.weight.shape[1]
        u = np.concatenate([self.state, self.x]).astype(np.float64)

        def convolved(u: Array, w: Array) -> Array:
            columns = [np.convolve(u[:, c], w[c, ::-1], "valid") for c in range(len(w))]
            return np.stack(columns, axis=1)

        ceiling = CONV_ERROR * convolved(np.abs(u), np.abs(self.weight.astype(np.float64)))
        return convolved(u, self.weight.astype(np.float64)), ceiling, u[len(u) - (taps - 1) :]


@targets
@pytest.mark.parametrize(
    ("channels", "taps", "rows"),
    [(64, 4, 20), (1, 4, 3), (15, 4, 9), (16, 3, 1), (80, 4, 2), (100, 4, 33), (129, 2, 5), (200, 1, 4), (40, 5, 11)],
    ids=str,
)
def test_against_convolution_in_float64(target: Target, channels: int, taps: int, rows: int) -> None:
    case = Case(channels, taps, rows)
    out, state = case.native(target)
    want, ceiling, after = case.reference()
    assert (np.abs(out - want) <= ceiling).all()
    np.testing.assert_array_equal(state, after)


@targets
@pytest.mark.parametrize("channels", [64, 90, 260])
def test_bits_depend_on_no_split(target: Target, channels: int) -> None:
    case = Case(channels, 4, 37)
    out, state = case.native(target)
    count = -(-channels // CHANNELS)
    one_by_one = [(unit, unit + 1) for unit in reversed(range(count))] + [(count, count)]
    for calls, units in [([1, 1, 2, 3, 30], None), ([37], one_by_one), ([2] * 18 + [1], one_by_one)]:
        again, end = case.native(target, calls, units)
        np.testing.assert_array_equal(again, out)
        np.testing.assert_array_equal(end, state)


@targets
@pytest.mark.parametrize("channels", [64, 90])
def test_a_state_that_is_written_aside(target: Target, channels: int) -> None:
    case = Case(channels, 4, 7)
    after = aligned(np.full((4, channels), 7, np.float32))
    out, state = case.native(target, after=after)
    want, new = case.native(target)
    np.testing.assert_array_equal(out, want)
    np.testing.assert_array_equal(state, case.state)
    np.testing.assert_array_equal(after[:3], new)
    assert (after[3] == 7).all()


def test_a_unit_touches_its_channels_only() -> None:
    case, target = Case(150, 4, 6), LEVELS[-1]
    out, _ = case.native(target)
    y, state = np.full((6, 150), 7, np.float32), aligned(case.state)
    run(causal_conv(150, 4, target), target, state, aligned(case.x), case.weight, y, begin=1, end=2, rows=6)
    np.testing.assert_array_equal(y[:, 64:128], out[:, 64:128])
    assert (y[:, :64] == 7).all()
    assert (y[:, 128:] == 7).all()
    np.testing.assert_array_equal(state[:, :64], case.state[:, :64])
    np.testing.assert_array_equal(state[:, 128:], case.state[:, 128:])
