#!/usr/bin/env python3
"""The gated delta rule: a prompt's tokens layer by layer beside token by token, and how fast decoding reads its states.

    python benchmarks/delta_rule.py [--rows 512] [--seconds 4] [--target avx2]

"stepwise" is prefill as decoding would do it: one token through all layers, then the next, so that every token reads
and writes every layer's state in memory. "prefill" does the tokens of a layer one after the other with the state in the
caches. Both have the same bits.

The forms run in turns, and the fastest run of each counts, since other programs only ever slow one down. Operations are
those of the recurrence, 6 an element of the state and token (decays aside), whatever a form really does; "its
arithmetic alone" is what it really does, at the machine's measured peak.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from rlx.backends.cpu.kernel import Kernel
from rlx.backends.cpu.kernels.delta import delta
from rlx.backends.cpu.launch.code import NativeCode
from rlx.backends.cpu.launch.loop_functions import range_step
from rlx.backends.cpu.launch.native import WorkerPool
from rlx.backends.cpu.llvm import compile_module
from rlx.backends.cpu.machine import arithmetic_peak
from rlx.backends.cpu.steps import worker_loop
from rlx.backends.cpu.target import Target
from rlx.backends.host import AlignedBuffer
from rlx.compiler.compile import Compiler
from rlx.platform import cpu_count

DIM = 128
SHAPES = ((16, 16), (32, 16))  # (value heads, key heads); the first is Qwen3.5-0.8B's
STEPS = 4  # multiply-adds, or multiplications, per element of the state and token: decay, S^T k, S + k d^T, S^T q
STATE_BYTES = 256 << 20  # of the states that decoding goes through: more than a cache holds


@dataclass(frozen=True)
class Form:
    """A compiled kernel and its number of units."""

    code: NativeCode
    units: int

    def run(self, pool: WorkerPool, addresses: list[int], extents: list[int]) -> float:
        """Seconds of one call by all workers of the pool."""
        (step,) = self.code.addresses.values()
        context = np.array([*addresses, *extents, self.units, max(1, self.units // 32), 0], np.int64)
        start = time.perf_counter()
        pool.share(step, context.ctypes.data)
        return time.perf_counter() - start


def load(kernel: Kernel, target: Target) -> NativeCode:
    name, step = range_step(kernel)
    return NativeCode([compile_module(text, target).code for text in (kernel.llvm, step)], [name])


def form(target: Target, heads: int, key_heads: int, *, single: bool = False) -> Form:
    """The kernel of a prompt's tokens or, with `single`, of one token."""
    fixed = 1 if single else None
    kernel = delta.gated_delta(heads, key_heads, DIM, DIM, target, scale=DIM**-0.5, rows_static=fixed)
    return Form(load(kernel, target), delta.units(heads, DIM, DIM))


def rows(heads: int, key_heads: int, count: int) -> list[np.ndarray]:
    """q, k, v, g, beta and room for the result."""
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, count, key_heads, DIM))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v, g = rng.standard_normal((count, heads, DIM)), -np.exp(rng.normal(-3, 1, (count, heads)))
    arrays = [q, k, v, g, rng.random((count, heads)), np.zeros_like(v)]
    return [place(a) for a in arrays]


def place(array: np.ndarray) -> np.ndarray:
    """A copy in f32 at the start of a page."""
    copy: np.ndarray = AlignedBuffer(4 * array.size, huge=True).view(np.float32, array.shape)
    copy[...] = array
    return copy


def fastest(calls: dict[str, Callable[[], float]], seconds: float) -> dict[str, float]:
    """The shortest time of each call, run in turns."""
    best, end = dict.fromkeys(calls, float("inf")), time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name, call in calls.items():
            best[name] = min(best[name], call())
    return best


def prefill(
    target: Target, pools: list[WorkerPool], peaks: list[float], shape: tuple[int, int], args: argparse.Namespace
) -> None:
    (heads, key_heads), count = shape, args.rows
    prompt = form(target, *shape)
    arrays = [place(np.random.default_rng(1).standard_normal((heads, DIM, DIM))), *rows(*shape, count)]
    addresses = [a.ctypes.data for a in arrays]
    work = count * heads * DIM * DIM / 1e9
    print(f"{heads} heads on {key_heads} key heads, {DIM} by {DIM}, {count} rows")
    for pool, peak in zip(pools, peaks, strict=True):
        took = fastest({"prefill": partial(prompt.run, pool, addresses, [count])}, args.seconds)["prefill"]
        bound, rate = 2 * work * STEPS / peak, 6 * work / took
        print(
            f"  {pool.n:2} workers  prefill  {took * 1e3:7.2f} ms, its arithmetic alone {bound * 1e3:.2f} ms;"
            f"  {rate:.0f} GFLOP/s, peak {peak:.0f}"
        )
        step = stepwise(target, pool, shape, args.seconds / 2) * count
        print(f"  {pool.n:2} workers  stepwise {step * 1e3:7.2f} ms, {step / took:.2f} times as long")


def stepwise(target: Target, pool: WorkerPool, shape: tuple[int, int], seconds: float) -> float:
    """Seconds of one token and layer, where a token goes through as many layers as states fit `STATE_BYTES`; they stand
    side by side like heads.
    """
    layers = STATE_BYTES // (4 * shape[0] * DIM * DIM)
    heads, key_heads = (layers * count for count in shape)
    single = form(target, heads, key_heads, single=True)
    arrays = [place(np.zeros((heads, DIM, DIM))), *rows(heads, key_heads, 1)]
    addresses = [a.ctypes.data for a in arrays]
    return fastest({"decode": partial(single.run, pool, addresses, [])}, seconds)["decode"] / layers


def decode(target: Target, pools: list[WorkerPool], shape: tuple[int, int], seconds: float) -> None:
    for pool in pools:
        took = stepwise(target, pool, shape, seconds)
        rate = 4 * shape[0] * DIM * DIM / took / 1e9
        print(
            f"  {pool.n:2} workers  decode   {took * 1e6:7.1f} us a layer, {rate:.1f} GB/s of state, read and written"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=4, help="of each comparison")
    parser.add_argument("--target", help="generic, avx2 or avx512; the machine's best by default")
    args = parser.parse_args()
    target = Target.host(args.target)
    compiler = Compiler(target)
    library = worker_loop(compiler)
    pools = [WorkerPool(n, library) for n in sorted({1, cpu_count()})]
    peaks = [arithmetic_peak("f32", compiler, pool, 0.5) for pool in pools]
    print(target.level)
    for shape in SHAPES:
        prefill(target, pools, peaks, shape, args)
        decode(target, pools, shape, args.seconds)


if __name__ == "__main__":
    main()
