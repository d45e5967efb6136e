"""Measurements of the machine: read bandwidth and peak arithmetic rates, which `rlx bench` compares a model with."""

from __future__ import annotations

import time

import numpy as np

from rlx.backends.cpu import steps
from rlx.backends.cpu.kernels.linear.peak import kinds, operations
from rlx.backends.cpu.launch.native import WorkerPool
from rlx.backends.device import Builder
from rlx.backends.host import AlignedBuffer
from rlx.errors import ArgumentError, RlxError

_STREAMS = 4
_LINE = 64
_SUM_BYTES = 128


def read_bandwidth(pool: WorkerPool, seconds: float = 0.3, nbytes: int = 512 << 20) -> float:
    """Read bandwidth of this machine in GB/s (10^9 bytes), measured with all workers of `pool`.

    Args:
        pool: the workers that read; its library holds the kernel.
        seconds: how long to measure; the fastest pass counts, since noise only slows passes down.
        nbytes: size of the memory to read; several times the last-level cache.
    """
    if not seconds > 0:
        raise ArgumentError(f"seconds = {seconds}", where="read_bandwidth", hint="give a time above 0")
    lines = nbytes // (pool.n * _STREAMS * _LINE)
    if lines < 1:
        raise ArgumentError(f"nbytes = {nbytes} is less than a line a worker", where="read_bandwidth")
    total = lines * pool.n * _STREAMS * _LINE
    with AlignedBuffer(total, huge=True) as data, AlignedBuffer(4096 + pool.n * _SUM_BYTES) as sums:
        data.view(np.uint8, total).fill(1)  # untouched pages would all map to one zero page, which fits a cache
        fastest = _fastest_pass(pool, data.address, lines, sums, seconds)
        _check_sums(sums, pool.n, lines)
    return total / fastest / 1e9


def _fastest_pass(pool: WorkerPool, base: int, lines: int, sums: AlignedBuffer, seconds: float) -> float:
    context = sums.address + pool.n * _SUM_BYTES
    sums.view(np.uint64, 3, pool.n * _SUM_BYTES)[:] = base, lines, sums.address
    kernel, taken = pool.library.symbols["rlx_read"], sums.view(np.uint64, (pool.n, _SUM_BYTES // 8))
    fastest, end = float("inf"), time.perf_counter() + seconds
    while fastest == float("inf") or time.perf_counter() < end:
        taken[:, 0] = 0
        start = time.perf_counter()
        pool.share(kernel, context)
        fastest = min(fastest, time.perf_counter() - start)
    return fastest


def _check_sums(sums: AlignedBuffer, n: int, lines: int) -> None:
    """Every byte is 1, so each worker's sum of 64-bit words is known: this detects a kernel that skips memory."""
    expected = lines * _STREAMS * (_LINE // 8) * 0x0101010101010101 % 2**64
    found = sums.view(np.uint64, (n, _SUM_BYTES // 8))[:, 1]
    if not (found == expected).all():
        raise RlxError(f"the read kernel summed {found.tolist()}, expected {expected}", where="read_bandwidth")


def arithmetic_peaks(compiler: Builder, pool: WorkerPool) -> dict[str, float]:
    """`arithmetic_peak` of every kind that the compiler's target has instructions for."""
    found = {kind: arithmetic_peak(kind, compiler, pool) for kind in kinds(compiler.target)}
    if "amx-bf16" in found:  # products of bf16 are then computed on tiles, those of int8 are not
        found |= {"bf16": found["amx-bf16"]} | ({"bf16-dots": found["bf16"]} if "bf16" in found else {})
    return found


def arithmetic_peak(kind: str, compiler: Builder, pool: WorkerPool, seconds: float = 0.1) -> float:
    """Peak arithmetic rate in 10^9 operations per second, of all workers together, with all operands in registers.

    Args:
        kind: "int8" (dot products of bytes summed in i32), "bf16" (dot products of pairs summed in f32), or "f32"
            (fused multiply-adds).

    Raises:
        CompileError: the compiler's target does not support this arithmetic (see `peak.kinds`).
    """
    (step,) = steps.peak(compiler, kind).addresses.values()
    units, best, end = 64 * pool.n, 0.0, time.perf_counter() + seconds
    with AlignedBuffer(64) as data:
        while not best or time.perf_counter() < end:
            context = np.array([data.address, units, 1, 0], np.int64)
            start = time.perf_counter()
            pool.share(step, context.ctypes.data)
            best = max(best, units * operations(kind, compiler.target) / (time.perf_counter() - start) / 1e9)
    return best
