#!/usr/bin/env python3
"""A model of many gigabytes: time to open it, memory, first token, decoding; `rlx serve` beside llama.cpp's server.

    python benchmarks/make_model.py --shape qwen3-30b-a3b --type Q4_K_M --out qwen3-30b-a3b-Q4_K_M.gguf
    python benchmarks/big_model.py qwen3-30b-a3b-Q4_K_M.gguf --server ~/llama.cpp/build/bin/llama-server --threads 2
    RLX_CACHE_LIMIT=40G python benchmarks/big_model.py qwen3-30b-a3b-Q4_K_M.gguf --keep-packed

The sides run one after the other, each as a process that answers the same prompts of random ids over HTTP. Seconds to
open are those from the start of the process until it answers. Memory is that of the process after the last request:
its own, and pages of mapped files. A first run without the model's programs in the compile cache compiles them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from many_requests import Server, free_port
from serve_versus import IDS, RlxServer

CONTEXT = 1024
DECODED = 48
PROMPTS = (32, 512)


class Rlx(RlxServer):
    """`rlx serve`, for one request at a time."""

    def __init__(self, args: argparse.Namespace, *more: str) -> None:
        port = free_port()
        command = [
            sys.executable,
            "-m",
            "rlx",
            "serve",
            args.model,
            "--port",
            str(port),
            "--slots",
            "1",
            "--log",
            "none",
        ]
        command += ["--max-seq", str(CONTEXT), *(["--threads", str(args.threads)] if args.threads else []), *more]
        self.start(command, port, " ".join(["rlx serve", *more]))


class Llama(Server):
    """llama.cpp's server, for one request at a time."""

    def __init__(self, args: argparse.Namespace) -> None:
        port = free_port()
        command = [args.server, "--model", args.model, "--parallel", "1", "--ctx-size", str(CONTEXT)]
        threads = str(args.threads)
        more = ["--threads", threads, "--threads-batch", threads] if args.threads else []
        self.start([*command, "--host", "127.0.0.1", "--port", str(port), *more], port, "llama-server")


def measure(start: Callable[[], Server], repeat: int) -> None:
    """Prints a side's row."""
    begin = time.perf_counter()
    side = start()
    opened = time.perf_counter() - begin
    rng = np.random.default_rng(0)
    try:
        first: dict[int, list[float]] = {length: [] for length in PROMPTS}
        rates = []
        for _ in range(repeat):
            for length in PROMPTS:
                times = [time.perf_counter()]
                prompt = [int(token) for token in rng.integers(0, IDS, length)]
                for _ in side.tokens(prompt, DECODED if length == PROMPTS[0] else 2):
                    times.append(time.perf_counter())
                first[length].append(times[1] - times[0])
                if length == PROMPTS[0]:
                    rates.append((len(times) - 2) / (times[-1] - times[1]))
        own, mapped = memory(side.pid)
    finally:
        side.close()
    firsts = "".join(f"{statistics.median(seconds):11.2f}" for seconds in first.values())
    print(f"{side.name:26}{opened:8.1f}{firsts}{statistics.median(rates):10.2f}{own:9.1f}{mapped:9.1f}", flush=True)


def memory(pid: int) -> tuple[float, float]:
    """GiB of a process's own memory, and of pages of files that it has mapped."""
    rows = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(rows["RssAnon"].split()[0]) / 2**20, int(rows["RssFile"].split()[0]) / 2**20


def main() -> None:
    args = arguments()
    path = Path(args.model)
    print(f"{path.name}, {path.stat().st_size / 2**30:.1f} GiB, {args.threads or 'default'} threads")
    print("                              open  first token, s, of   tokens/s   memory, GiB")
    print("                                 s  32 ids    512 ids     decode      own    files")
    measure(lambda: Rlx(args, *(["--keep-packed"] if args.keep_packed else [])), args.repeat)
    if args.server:
        measure(lambda: Llama(args), args.repeat)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a GGUF file")
    parser.add_argument("--server", metavar="PATH", help="llama.cpp's llama-server")
    parser.add_argument("--threads", type=int, help="by default each side's own choice")
    parser.add_argument("--keep-packed", action="store_true", help="map packed weights from the compile cache")
    parser.add_argument("--repeat", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
