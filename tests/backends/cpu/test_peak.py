"""Arithmetic peaks: which kinds a target has, and that the kernels really do what is counted."""

from __future__ import annotations

import re

import numpy as np
import pytest
from levels import LEVELS, PLAIN_BF16_TARGETS, machine, name
from native import aligned, assembly, run

from rlx.backends.cpu.kernels.linear.peak import PRODUCTS, chains, kinds, operations, peak
from rlx.backends.cpu.target import Target
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
        data = aligned(ones[kind.removeprefix("amx-")])
        first = float(data[0])
        run(peak(kind, target), target, data, end=1)
        sums = chains(kind, target)
        steps = operations(kind, target) // (sums * PRODUCTS[kind] * 2)
        want = sums * (first + PRODUCTS[kind] // 16 * steps) + sum(range(sums))
        if kind.startswith("amx"):  # the data become a row of one of the sums, which begin with zero
            want = PRODUCTS[kind] // 256 * steps
        np.testing.assert_allclose(data, want, rtol=1e-6)


@pytest.mark.parametrize("target", LEVELS, ids=name)
def test_bf16_is_measured_where_it_exists(target: Target) -> None:
    """A sum of 16 numbers is one register of AVX-512, or four of NEON."""
    assert ("bf16" in kinds(target)) == target.has_bf16_dots
    if target.has_bf16_dots:
        instruction, each = ("bfdot", 4) if target.vectors == "neon" else ("vdpbf16ps", 1)
        text = assembly(peak("bf16", target), target)
        assert len(re.findall(instruction, text)) == each * chains("bf16", target)


@pytest.mark.parametrize("target", PLAIN_BF16_TARGETS, ids=name)
def test_bf16_is_refused_where_it_does_not_exist(target: Target) -> None:
    with pytest.raises(CompileError, match="no bf16 arithmetic"):
        peak("bf16", target)


def test_tiles_are_multiplied_where_they_exist() -> None:
    """What a machine with tiles runs is written on every x86; whoever has them runs it above."""
    target = machine("amx")
    if not target.triple.startswith("x86_64"):
        pytest.skip("LLVM writes for x86 only where it was built for it")
    for kind, instruction in (("amx-int8", "tdpbssd"), ("amx-bf16", "tdpbf16ps")):
        assert kind in kinds(target) and kind not in kinds(LEVELS[0])
        text = assembly(peak(kind, target), target)
        assert len(re.findall(instruction, text)) == chains(kind, target)
        assert "ldtilecfg" in text and "tilerelease" in text
