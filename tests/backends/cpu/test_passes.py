"""LLVM runs few passes on tile kernels, with the results of all passes; and how large kernels of a cold start are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from levels import LEVELS, machine, name
from native import Array, aligned, run
from test_attention import Case
from test_linear import activations, weights

from rlx.backends.cpu.kernel import Kernel
from rlx.backends.cpu.kernels.attention.attention import attention
from rlx.backends.cpu.kernels.linear.linear import linear, units
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
        run(each, target, q, case.keys, case.values, out, end=case.units(len(q)), seq=len(q), past=60, ctx=case.ctx)
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("level", ["generic", "avx2"])
@pytest.mark.parametrize("gated", [None, "silu"])
def test_lines_of_a_linear_of_several_rows(level: str, gated: str | None) -> None:
    """Half of a cold start is the compile of these kernels, and takes as long as they are large."""
    lines = linear(Q8_0, 32, 512, "q8a", machine(level), gated=gated).llvm.count("\n")
    assert lines < (4000 if gated else 2000)
