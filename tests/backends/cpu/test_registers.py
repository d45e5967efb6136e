"""Sums are kept in registers: no loop that multiplies writes them to the stack between two steps."""

from __future__ import annotations

import re

import pytest
from levels import LEVELS, name
from native import assembly

from rlx.backends.cpu.kernel import Kernel
from rlx.backends.cpu.kernels.attention.attention import attention
from rlx.backends.cpu.kernels.linear.linear import linear
from rlx.backends.cpu.target import Target
from rlx.ir.dtypes import BF16, F16

#: Levels with multiply-adds, by which the loops are found.
TARGETS = [t for t in LEVELS if t.has("fma")]
_LOOP = re.compile(r"^(\.\w+):\n((?:(?!\.\w+:).*\n)*?)\tj\w+\t\1\n", re.MULTILINE)  # of one block


def loops(kernel: Kernel, target: Target, count: range) -> list[str]:
    """The innermost loops with so many multiply-adds or dot products of bf16, as assembler text."""
    found = [match[2] for match in _LOOP.finditer(assembly(kernel, target))]
    return [loop for loop in found if len(re.findall(r"\tv(?:fn?m|dpbf16)", loop)) in count]


def spilled(loop: str) -> list[str]:
    """Instructions on a fixed place of the stack; scratch memory is there too, but is walked through by an index."""
    return re.findall(r"\tv.*\(%r[sb]p\)[,\n].*", loop)


@pytest.mark.parametrize("target", TARGETS, ids=name)
@pytest.mark.parametrize("gated", [None, "silu"])
def test_tiles_of_a_linear(gated: str | None, target: Target) -> None:
    found = loops(linear(BF16, 32, 512, "f32", target, gated=gated), target, range(24, 65))
    assert found
    assert not [line for loop in found for line in spilled(loop)]


@pytest.mark.parametrize("target", TARGETS, ids=name)
def test_tiles_of_attention(target: Target) -> None:
    kernel = attention(8, 4, 128, target, kv_dtype=F16, scale=0.1)
    found = loops(kernel, target, range(12, 41))  # the softmax has twice as many
    assert len(found) >= 2, "scores and values"
    assert not [line for loop in found for line in spilled(loop)]
