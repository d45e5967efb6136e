"""What this machine can do: read bandwidth, arithmetic peaks and the cost of a barrier, by number of threads.

    python benchmarks/machine.py [--threads N] [--json]

Measured with rlx's own workers, since those are what a model runs on. `versus.py` puts models beside these numbers.
The peaks are of the kinds that `rlx.backends.cpu.kernels.linear.peak` has for the machine. A barrier is measured with
what belongs to it in a step: the workers meet, and get the next region's work handed out.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

import rlx
from rlx import backends, ops
from rlx.backends.cpu import machine
from rlx.backends.cpu.launch.native import WorkerPool
from rlx.compiler.compile import Compiler, worker_count
from rlx.compiler.profiling import MEMORY_BYTES

FEATURES = ("avx2", "avxvnni", "avx512f", "avx512vnni", "avx512bf16", "avx512fp16", "amx-int8", "amx-bf16")
FLAGS = {"avxvnni": "avx_vnni", "avx512vnni": "avx512_vnni", "avx512bf16": "avx512_bf16", "avx512fp16": "avx512_fp16",
         "amx-int8": "amx_int8", "amx-bf16": "amx_bf16"}  # fmt: skip


class Machine:
    """Workers that measure. Idle they sleep, so one may stay open while others are measured.

    Args:
        device: the CPU, or that of another backend that is made for speed.
    """

    def __init__(self, threads: int | None = None, device: str = "cpu") -> None:
        self.threads = worker_count(threads)
        self.compiler = Compiler(backends.backend(device).target())
        self.pool = self.compiler.workers(self.threads)

    def read_bandwidth(self, seconds: float = 0.3) -> float:
        """In GB/s, of all workers together."""
        if isinstance(self.pool, WorkerPool):
            return machine.read_bandwidth(self.pool, seconds)
        return self.compiler.backend.bandwidth(self.pool, MEMORY_BYTES)

    def peaks(self) -> dict[str, float]:
        """Multiplications and additions a second, in 10^9, of every kind of arithmetic that the device has."""
        return self.compiler.backend.peaks(self.pool, self.compiler)

    def close(self) -> None:
        self.pool.close()

    def __enter__(self) -> Machine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def barrier_seconds(threads: int, regions: int = 256, repeat: int = 50) -> float:
    """What one more parallel region costs a step when there is next to nothing to do in it: the end of a phase, the
    hand-out of work, and a softmax of 16 numbers a worker; of a long program over a short one, medians.
    """
    few, many = (_step_seconds(threads, count, repeat) for count in (1, regions))
    return (many[0] - few[0]) / (many[1] - few[1])


def _step_seconds(threads: int, count: int, repeat: int) -> tuple[float, int]:
    """The median time of a program of `count` softmaxes, one after the other; and its number of regions."""
    graph = rlx.Graph(f"regions{count}")
    x = graph.input("x", [threads, 16])
    for _ in range(count):
        x = ops.softmax(x)
    graph.output("y", x)
    given, seconds = np.zeros((threads, 16), np.float32), []
    apart = {"fusion": {"prologue": False}}  # so little work would be done by every worker, in one region
    with rlx.compile(graph, threads=threads, profile=apart) as program:
        for _ in range(repeat):
            start = time.perf_counter()
            program(x=given)
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds), len(program._compiled.manifest["regions"])


def facts(name: str | None = None) -> dict[str, Any]:
    """What a table of measurements must say about where it was measured.

    Args:
        name: of the machine, in place of its processor's.
    """
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    pairs = (line.partition(":") for line in info.splitlines())
    fields = {key.strip(): value.strip() for key, _, value in pairs}
    flags = set(fields.get("flags", "").split())
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": name or fields.get("model name", platform.processor() or platform.machine()),
        "cpus": len(os.sched_getaffinity(0)),
        "features": [name for name in FEATURES if FLAGS.get(name, name) in flags],
        "memory_gb": round(pages / 1e9),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
        "load": round(os.getloadavg()[0], 2),
    }


def measure(threads: int) -> dict[str, Any]:
    """One row of the table."""
    with Machine(threads) as found:
        row = {"threads": threads, "read_gb_per_s": found.read_bandwidth(), "peaks": found.peaks()}
    return row | {"barrier_us": barrier_seconds(threads) * 1e6}


def show(about: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """The table, as text."""
    kinds = list(rows[0]["peaks"])
    lines = [
        f"{about['cpu']}, {about['cpus']} CPUs, {', '.join(about['features'])}; {about['date']}, load {about['load']}",
        "threads  read GB/s" + "".join(f"{kind + ' GOP/s':>14}" for kind in kinds) + "    a barrier",
    ]
    for row in rows:
        peaks = "".join(f"{row['peaks'][kind]:14.0f}" for kind in kinds)
        lines.append(f"{row['threads']:7}{row['read_gb_per_s']:11.1f}{peaks}{row['barrier_us']:10.2f} us")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=worker_count(None), help="most threads; the physical cores")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    if args.threads < 1:
        parser.error(f"--threads {args.threads}: expected 1 or more")
    about, rows = facts(), [measure(n) for n in range(1, args.threads + 1)]
    print(json.dumps({"machine": about, "rows": rows}) if args.json else show(about, rows))


if __name__ == "__main__":
    main()
