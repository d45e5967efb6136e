"""What this machine can do: read bandwidth, arithmetic peaks and the cost of a parallel region, by number of threads.

    python benchmarks/machine.py [--threads N] [--json]

Measured with rlx's own workers, since those are what a model runs on. `versus.py` puts models beside these numbers.
The int8 peak is that of the dot-product instructions of vectors (VNNI); of AMX tiles there is none here.
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
from rlx import ops
from rlx.codegen.llvm import compile_module
from rlx.codegen.target import Target
from rlx.runtime import machine
from rlx.runtime.compile import Compiler
from rlx.runtime.limits import worker_count
from rlx.runtime.memory import AlignedBuffer
from rlx.runtime.native import NativeCode
from rlx.runtime.threads import WorkerPool

BF16_STEPS, BF16_CHAINS = 4096, 12
BF16_OPERATIONS = BF16_STEPS * BF16_CHAINS * 32 * 2  # multiplications and additions of one unit
FEATURES = ("avx2", "avxvnni", "avx512f", "avx512vnni", "avx512bf16", "avx512fp16", "amx-int8", "amx-bf16")
FLAGS = {"avxvnni": "avx_vnni", "avx512vnni": "avx512_vnni", "avx512bf16": "avx512_bf16", "avx512fp16": "avx512_fp16",
         "amx-int8": "amx_int8", "amx-bf16": "amx_bf16"}  # fmt: skip


class Machine:
    """Workers that measure. Idle they sleep, so one may stay open while others are measured."""

    def __init__(self, threads: int | None = None) -> None:
        self.threads = worker_count(threads)
        self.compiler = Compiler()
        self.pool = WorkerPool(self.threads, self.compiler.runtime())

    def read_bandwidth(self, seconds: float = 0.3) -> float:
        """In GB/s, of all workers together."""
        return machine.read_bandwidth(self.pool, seconds)

    def peak(self, kind: str, seconds: float = 0.2) -> float:
        """Multiplications and additions a second, in 10^9: "int8", "f32", or "bf16" where the CPU has dots of it."""
        if kind == "bf16":
            return self._bf16_peak(seconds)
        return machine.arithmetic_peak(kind, self.compiler, self.pool, seconds)

    def peaks(self) -> dict[str, float]:
        """All there are."""
        kinds = ["int8", "f32"] + ["bf16"] * self.compiler.target.has("avx512bf16")
        return {kind: self.peak(kind) for kind in kinds}

    def _bf16_peak(self, seconds: float) -> float:
        object_bytes, _ = compile_module([bf16_llvm(self.compiler.target)], self.compiler.target)
        code = NativeCode(object_bytes, ["bf16_peak"])
        units, best, end = 64 * self.threads, 0.0, time.perf_counter() + seconds
        with AlignedBuffer(64) as data:
            while not best or time.perf_counter() < end:
                context = np.array([data.address, units, 0], np.int64)
                start = time.perf_counter()
                self.pool.share(code.addresses["bf16_peak"], context.ctypes.data)
                best = max(best, units * BF16_OPERATIONS / (time.perf_counter() - start) / 1e9)
        return best

    def close(self) -> None:
        self.pool.close()

    def __enter__(self) -> Machine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def bf16_llvm(target: Target) -> str:
    """A step of pure bf16 dots, operands in registers. Context: where to put the sum, units, a counter of units."""
    chains = range(BF16_CHAINS)
    dot = "@llvm.x86.avx512bf16.dpbf16ps.512"
    sums = "\n".join(
        f"  %s{c} = phi <16 x float> [ {wide('float', float(c))}, %unit ], [ %t{c}, %step ]" for c in chains
    )
    dots = "\n".join(
        f"  %t{c} = call <16 x float> {dot}(<16 x float> %s{c}, <32 x bfloat> %x, <32 x bfloat> %x)" for c in chains
    )
    adds = "\n".join(f"  %a{c} = fadd <16 x float> %{f'a{c - 1}' if c > 1 else 't0'}, %t{c}" for c in chains[1:])
    return f"""target triple = "{target.triple}"
declare <16 x float> {dot}(<16 x float>, <32 x bfloat>, <32 x bfloat>)

define void @bf16_peak(ptr %ctx, i64 %worker, i64 %workers) {{
entry:
  %data = load ptr, ptr %ctx
  %units.at = getelementptr i64, ptr %ctx, i64 1
  %units = load i64, ptr %units.at
  %counter = getelementptr i64, ptr %ctx, i64 2
  %x = load <32 x bfloat>, ptr %data, align 64
  br label %fetch
fetch:
  %mine = atomicrmw add ptr %counter, i64 1 monotonic
  %more = icmp ult i64 %mine, %units
  br i1 %more, label %unit, label %done
unit:
  br label %step
step:
  %i = phi i64 [ 0, %unit ], [ %i.next, %step ]
{sums}
{dots}
  %i.next = add i64 %i, 1
  %on = icmp ult i64 %i.next, {BF16_STEPS}
  br i1 %on, label %step, label %sum
sum:
{adds}
  store volatile <16 x float> %a{BF16_CHAINS - 1}, ptr %data, align 64
  br label %fetch
done:
  ret void
}}
"""


def wide(kind: str, value: float) -> str:
    """A vector of 16 equal numbers as LLVM writes it."""
    return "<" + ", ".join(f"{kind} {value:.1f}" for _ in range(16)) + ">"


def region_seconds(threads: int, regions: int = 256, repeat: int = 50) -> float:
    """What one more parallel region costs a step when there is next to nothing to do in it: the end of a phase, the
    hand-out of work, and a softmax of 16 numbers a worker; of long programs over short ones, medians.
    """

    def median(count: int) -> float:
        graph = rlx.Graph(f"regions{count}")
        x = graph.input("x", [threads, 16])
        for _ in range(count):
            x = ops.softmax(x)
        graph.output("y", x)
        given, seconds = np.zeros((threads, 16), np.float32), []
        with rlx.compile(graph, threads=threads) as program:
            for _ in range(repeat):
                start = time.perf_counter()
                program(x=given)
                seconds.append(time.perf_counter() - start)
        return statistics.median(seconds)

    return (median(regions) - median(1)) / (regions - 1)


def facts() -> dict[str, Any]:
    """What a table of measurements must say about where it was measured."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    pairs = (line.partition(":") for line in info.splitlines())
    fields = {key.strip(): value.strip() for key, _, value in pairs}
    flags = set(fields.get("flags", "").split())
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": fields.get("model name", platform.processor() or platform.machine()),
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
    return row | {"region_us": region_seconds(threads) * 1e6}


def show(about: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """The table, as text."""
    kinds = list(rows[0]["peaks"])
    lines = [
        f"{about['cpu']}, {about['cpus']} CPUs, {', '.join(about['features'])}; {about['date']}, load {about['load']}",
        "threads  read GB/s" + "".join(f"{kind + ' GOP/s':>14}" for kind in kinds) + "     a region",
    ]
    for row in rows:
        peaks = "".join(f"{row['peaks'][kind]:14.0f}" for kind in kinds)
        lines.append(f"{row['threads']:7}{row['read_gb_per_s']:11.1f}{peaks}{row['region_us']:10.2f} us")
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
