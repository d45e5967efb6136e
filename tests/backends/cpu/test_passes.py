"""Code of tile kernels: few passes of LLVM have the results of all, sums are kept in registers, and the kernels that
measure the peaks of arithmetic do what is counted.
"""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from attention_case import Case
from levels import LEVELS, machine, name
from native import Array, aligned, assembly, run
from test_linear import activations, weights

from rlx.backends.cpu.kernel import Kernel
from rlx.backends.cpu.kernels.attention import shape
from rlx.backends.cpu.kernels.attention.attention import attention
from rlx.backends.cpu.kernels.linear.linear import linear, units
from rlx.backends.cpu.kernels.linear.peak import PRODUCTS, chains, kinds, operations, peak
from rlx.backends.cpu.llvm_text import WRITTEN
from rlx.backends.cpu.target import Target
from rlx.ir.dtypes import BF16, F16, Q4_K, Q8_0, DType


def with_all_passes(kernel: Kernel) -> Kernel:
    """The kernel without the line that asks for few."""
    assert WRITTEN in kernel.llvm
    return replace(kernel, llvm=kernel.llvm.replace(WRITTEN, ""))


@pytest.mark.parametrize("target", LEVELS, ids=name)
@pytest.mark.parametrize(("dtype", "act", "gated"), [(Q8_0, "q8a", None), (Q4_K, "q8a", "silu"), (BF16, "f32", None)])
def test_linears(dtype: DType, act: str, gated: str | None, target: Target) -> None:
    n, k, rows = 33, 512, 11
    matrices = [weights(dtype, n, k, seed, target)[0] for seed in range(2 if gated else 1)]
    x, _ = activations(act, rows, k)
    kernel = linear(dtype, n, k, act, target, gated=gated)
    results = [np.empty((rows, n), np.float32) for _ in range(2)]
    for each, out in zip((kernel, with_all_passes(kernel)), results, strict=True):
        run(each, target, x, *matrices, out, end=units(n), rows=rows, n=n)
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("target", LEVELS, ids=name)
def test_attention(target: Target) -> None:
    case, kernel = Case(4, 2, 64, F16, ctx=128, filled=100), attention(4, 2, 64, target, kv_dtype=F16, scale=0.125)
    q: Array = aligned(case.q[60:100])
    results = [np.empty(q.shape, np.float32) for _ in range(2)]
    for each, out in zip((kernel, with_all_passes(kernel)), results, strict=True):
        end = -(-len(q) // shape.row_tile(4, 2)) * 2
        run(each, target, q, case.keys, case.values, out, end=end, seq=len(q), past=60, ctx=case.ctx)
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("level", ["generic", "avx2"])
@pytest.mark.parametrize("gated", [None, "silu"])
def test_lines_of_a_linear_of_several_rows(level: str, gated: str | None) -> None:
    """Half of a cold start is the compile of these kernels, and takes as long as they are large."""
    lines = linear(Q8_0, 32, 512, "q8a", machine(level), gated=gated).llvm.count("\n")
    assert lines < (4000 if gated else 2000)


# --------------------------------------------------------------------------------------- sums are kept in registers


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


# ------------------------------------------------------------------------------------------------- arithmetic peaks


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
