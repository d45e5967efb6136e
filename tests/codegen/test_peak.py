"""Arithmetic peaks: which kinds a target has, and that the kernels really do what is counted."""

from __future__ import annotations

import re

import numpy as np
import pytest
from levels import LEVELS, name
from native import aligned, assembly, run

from rlx.codegen.kernels.peak import PRODUCTS, chains, kinds, operations, peak
from rlx.codegen.target import Target
from rlx.errors import CompileError


@pytest.mark.parametrize("target", LEVELS, ids=name)
def test_a_unit_does_what_is_counted(target: Target) -> None:
    """Its sums are chains of dot products of the operand with itself, in whatever order."""
    ones = {
        "int8": np.full(16, 0x01010101, np.int32),
        "bf16": np.full(16, 0x3F803F80, np.int32).view(np.float32),
        "f32": np.ones(16, np.float32),
    }
    for kind in kinds(target):
        data = aligned(ones[kind])
        first = float(data[0])
        run(peak(kind, target), target, data, end=1)
        steps = operations(kind, target) // (chains(target) * PRODUCTS[kind] * 2)
        want = chains(target) * (first + PRODUCTS[kind] // 16 * steps) + sum(range(chains(target)))
        np.testing.assert_allclose(data, want, rtol=1e-6)


@pytest.mark.parametrize("target", LEVELS, ids=name)
def test_bf16_is_measured_where_it_exists(target: Target) -> None:
    assert ("bf16" in kinds(target)) == target.has_bf16_dots
    if target.has_bf16_dots:
        assert len(re.findall("vdpbf16ps", assembly(peak("bf16", target), target))) == chains(target)
    with pytest.raises(CompileError, match="no bf16 arithmetic"):
        peak("bf16", target.without("avx512bf16"))
