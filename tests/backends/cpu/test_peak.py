"""Arithmetic peaks: which kinds a target has, and that the kernels really do what is counted."""

from __future__ import annotations

import numpy as np
import pytest
from levels import LEVELS, name
from native import aligned, run

from rlx.backends.cpu.kernels.linear.peak import PRODUCTS, chains, kinds, operations, peak
from rlx.backends.cpu.target import Target


@pytest.mark.parametrize("target", LEVELS, ids=name)
def test_a_unit_does_what_is_counted(target: Target) -> None:
    """Its sums are chains of dot products of the operand with itself, in whatever order."""
    ones = {
        "int8": np.full(16, 0x01010101, np.int32),
        "bf16": np.full(16, 0x3F803F80, np.int32).view(np.float32),
        "f32": np.ones(16, np.float32),
    }
    for kind in kinds(target):
        data = aligned(ones[kind.removeprefix("amx-")])
        first = float(data[0])
        run(peak(kind, target), target, data, end=1)
        sums = chains(kind, target)
        steps = operations(kind, target) // (sums * PRODUCTS[kind] * 2)
        want = sums * (first + PRODUCTS[kind] // 16 * steps) + sum(range(sums))
        if kind.startswith("amx"):  # the data become a row of one of the sums, which begin with zero
            want = PRODUCTS[kind] // 256 * steps
        np.testing.assert_allclose(data, want, rtol=1e-6)
