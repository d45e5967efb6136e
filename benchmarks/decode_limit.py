"""How much of decoding is left to the read limit: kernels of each weight format, and whole steps of models.

    python benchmarks/decode_limit.py [MODEL ...] [--threads N] [--rounds N] [--json]

Decoding one token reads every weight once, so the read bandwidth limits it. For 1 to N threads:

- Kernels: the linear of one row in each format, over synthetic weights that no cache holds, beside the kernel that only
  reads. Both are measured in turns; shares are medians over rounds. The kernel that reads has four streams a worker. A
  linear has as many as the tuning says, which some processors follow better: then shares are above 100%.
- Steps, if models are given: greedy tokens without a callback, in turns with the read kernel, at an empty cache. The
  time of a token is divided into linears, other regions, and what is left: the start of a step, and the choice of the
  token. Regions are timed in other steps, of which each is one call, so what is left is uncertain by some percent.

`rlx report MODEL --measure --phase decode` shows the time of each region and how long workers wait.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass

import numpy as np

import rlx
from rlx.backends.cpu import machine
from rlx.backends.cpu.autotune import Bench, Case
from rlx.backends.cpu.launch.native import WorkerPool
from rlx.backends.cpu.steps import worker_loop
from rlx.backends.cpu.target import Target
from rlx.compiler.compile import Compiler, worker_count
from rlx.compiler.profiling import OpTime, clocked, op_times
from rlx.engine.engine import Engine
from rlx.engine.programs import reporting
from rlx.ir.dtypes import BF16, F16, Q4_K, Q6_K, Q8_0, DType

FORMATS = (Q8_0, Q4_K, Q6_K, BF16, F16)
K, N = 2048, 32768
TOKENS = 32
_READ_SECONDS, _READ_BYTES = 0.03, 256 << 20


@dataclass(frozen=True)
class Kernel:
    """The linear of one row.

    Attributes:
        read, rate: GB/s of the kernel that only reads, and of the linear: medians.
        share: the median of their ratios.
    """

    threads: int
    format: str
    read: float
    rate: float
    share: float


@dataclass(frozen=True)
class Step:
    """Decoding a model. Times are in ms a token.

    Attributes:
        read, rate, share: as of a kernel; the rate is that of a whole token.
        linears, others: what regions take, timed in steps of their own.
        between: the rest of a token.
    """

    model: str
    threads: int
    tokens_per_s: float
    read: float
    rate: float
    share: float
    linears: float
    others: float
    between: float


def measure_kernels(threads: int, rounds: int) -> list[Kernel]:
    """Rows of the table of kernels."""
    target, compiler = Target.host(), Compiler(Target.host())
    plain = "bf16" if target.has_bf16_dots else "f32"
    cases = [Case(d, "q8a" if d.is_quantized else plain, 1, N * size_factor(d), K) for d in FORMATS]
    reads, rates = list[float](), [list[float]() for _ in cases]
    largest = max(case.nbytes for case in cases)
    with WorkerPool(threads, worker_loop(compiler)) as pool, Bench(target, pool, largest, Compiler) as bench:
        runs = [bench.prepare(target.tuning, case) for case in cases]
        for _ in range(rounds):
            reads.append(machine.read_bandwidth(pool, _READ_SECONDS, _READ_BYTES))
            for run, case, found in zip(runs, cases, rates, strict=True):
                found.append(case.nbytes / min(run() for _ in range(2)) / 1e9)
    return [
        Kernel(threads, str(case.dtype), statistics.median(reads), statistics.median(found), _share(found, reads))
        for case, found in zip(cases, rates, strict=True)
    ]


def size_factor(dtype: DType) -> int:
    """So many times `N` results that the weights of all formats exceed caches."""
    return 1 if not dtype.is_quantized else 2


def measure_step(model: str, threads: int, rounds: int) -> Step:
    """A row of the table of steps."""
    with rlx.auto_runner(model, threads=threads, max_seq=1024) as runner:
        ids = [100]
        runner.generate(ids, TOKENS, stop_at_eog=False)  # compiles, and touches every page
        engine = runner._engine
        moved, reads, seconds = reporting.step_bytes(engine, TOKENS // 2), list[float](), list[float]()
        for _ in range(rounds):
            reads.append(reporting.read_bandwidth(engine, moved))
            start = time.perf_counter()
            runner.generate(ids, TOKENS, stop_at_eog=False)
            seconds.append((time.perf_counter() - start) / TOKENS)
        kinds = region_times(engine, ids[0])
    linears = sum(kind.seconds for kind in kinds if "linear" in kind.label)
    others = sum(kind.seconds for kind in kinds) - linears
    token, rates = statistics.median(seconds), [moved / each / 1e9 for each in seconds]
    return Step(
        model.rsplit("/", 1)[-1], threads, 1 / token, statistics.median(reads), statistics.median(rates),
        _share(rates, reads), linears * 1e3, others * 1e3, (token - linears - others) * 1e3,
    )  # fmt: skip


def region_times(engine: Engine, token: int) -> list[OpTime]:
    """The median time of each kind of region while `TOKENS` tokens follow each other."""
    sequence = engine.open_sequence(shared=False)
    engine.append(sequence, [token])
    spec, middle = engine.model_runner.bucketing.spec(1, TOKENS // 2), {"SEQ": 1, "PAST_SEQ": TOKENS // 2}
    program, graph = engine._programs[spec], engine._programs.final_graph(spec)

    def run() -> float:
        start = time.perf_counter()
        engine.append(sequence, [token])
        return time.perf_counter() - start

    steps = clocked(program, run, TOKENS)
    return op_times(program, graph, middle, np.median(steps, axis=0))


def _share(rates: list[float], reads: list[float]) -> float:
    return statistics.median(rate / read for rate, read in zip(rates, reads, strict=True))


def show(kernels: list[Kernel], steps: list[Step]) -> str:
    """Both tables, as text."""
    lines = ["threads  format   read GB/s  linear GB/s   share"]
    lines += [f"{k.threads:7}  {k.format:7}{k.read:11.1f}{k.rate:13.1f}{k.share:8.0%}" for k in kernels]
    if steps:
        lines += ["", "threads  tokens/s  read GB/s  step GB/s   share  linears ms  others ms  between ms  model"]
    for s in steps:
        rates = f"{s.threads:7}{s.tokens_per_s:10.1f}{s.read:11.1f}{s.rate:11.1f}{s.share:8.0%}"
        lines.append(f"{rates}{s.linears:12.2f}{s.others:11.2f}{s.between:12.2f}  {s.model}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="model files")
    parser.add_argument("--threads", type=int, default=worker_count(None), help="most threads; the physical cores")
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each kind; 7")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    if args.threads < 1 or args.rounds < 1:
        parser.error("--threads and --rounds: expected 1 or more")
    counts = range(1, args.threads + 1)
    kernels = [row for count in counts for row in measure_kernels(count, args.rounds)]
    steps = [measure_step(model, count, args.rounds) for model in args.models for count in counts]
    rows = {"kernels": [asdict(k) for k in kernels], "steps": [asdict(s) for s in steps]}
    print(json.dumps(rows) if args.json else show(kernels, steps))


if __name__ == "__main__":
    main()
