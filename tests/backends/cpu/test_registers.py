"""Sums are kept in registers: no loop that multiplies writes them to the stack between two steps."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from levels import BF16_TARGETS, DOT_TARGETS, LEVELS, name
from native import assembly

from rlx.backends.cpu.kernel import Kernel
from rlx.backends.cpu.kernels.attention.attention import attention
from rlx.backends.cpu.kernels.attention.bf16_dots import DottedAttention
from rlx.backends.cpu.kernels.linear.linear import linear
from rlx.backends.cpu.target import Target
from rlx.ir.dtypes import BF16, F16, Q4_K, Q8_0

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


@pytest.mark.parametrize("gated", [None, "silu"])
def test_tiles_of_int8(gated: str | None) -> None:
    """The sums of dots stay; those of what is scaled do not fit beside them, and go to the stack once a sub-block."""
    target = next((t for t in TARGETS if t.level == "avx2"), None)
    if target is None:
        pytest.skip("the machine lacks AVX2")
    target = replace(target, features=f"{target.features},+avxvnni")  # only looked at
    text = assembly(linear(Q4_K, 32, 512, "q8a", target, gated=gated), target)
    steps = [match[2] for match in _LOOP.finditer(text) if match[2].count("vpdpbusd") == 96]
    assert len(steps) == (2 if gated else 1)
    assert all(len(spilled(step)) < 48 for step in steps)


@pytest.mark.parametrize("target", [t for t in DOT_TARGETS if t.isa.moves_signs], ids=name)
def test_tiles_of_magnitudes_and_signs(target: Target) -> None:
    """A product takes four instructions, with one more for each row and two to four for the codes of each block."""
    text, sums = assembly(linear(Q8_0, 32, 512, "q8a", target), target), 8 if target.level == "avx2" else 12
    steps = [m[2] for m in _LOOP.finditer(text) if m[2].count("vpmaddwd") == 2 * sums and "vfm" not in m[2]]
    (step,) = (step for step in steps if "vpsignb" not in step)  # which streamed codes take
    assert step.count("vpmaddubsw") == len(re.findall(r"\tvpxor", step)) == step.count("vpaddd") == 2 * sums
    assert step.count("\n") < 5.5 * 2 * sums
    assert not [line for step in steps for line in spilled(step)]


@pytest.mark.parametrize("gated", [None, "silu"])
def test_int8_tiles_of_streamed_weights(gated: str | None) -> None:
    """Eight rows of a step of a batch: 64 dots, and 128 of a gated linear if both matrices were taken at once."""
    target = next((t for t in TARGETS if t.has_vnni512), None)
    if target is None:
        pytest.skip("the machine lacks AVX-512 VNNI")
    text = assembly(linear(Q4_K, 32, 512, "q8a", target, gated=gated), target)
    steps = [match[2] for match in _LOOP.finditer(text) if match[2].count("vpdpbusd") >= 64]
    assert steps
    assert all(len(spilled(step)) <= 1 for step in steps)  # a number of the superblock may be an operand in memory


@pytest.mark.parametrize("target", BF16_TARGETS, ids=name)
def test_dot_products_of_attention(target: Target) -> None:
    found = loops(attention(8, 4, 128, target, kv_dtype=F16, scale=0.1, writer=DottedAttention), target, range(16, 17))
    assert len(found) == 2, "scores and values"
    assert not [line for loop in found for line in spilled(loop)]
