#!/usr/bin/env python3
"""What each cache mode compiles over one generation: programs, seconds, bytes; and what a new length costs.

    python benchmarks/cache_modes.py [MODEL]        (the embedded demo model by default)

Each mode starts with an empty compile cache. `programs` were made and `kept` are left at the end; `seconds` is the time
to make them and `code` the size of their object code. `move` is the median time from one past to the next within a
program, in which no compiler runs: choosing the program, without the step itself. The tokens of all modes are compared.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import rlx
from rlx import demo

Mode = Callable[[rlx.TokenGenerator, int], rlx.TokenGenerator]

MODES: dict[str, Mode] = {
    "default (buckets of prompts, dynamic decode)": lambda g, n: g,
    "dynamic: with_dynamic_prefill_cache, with_dynamic_decode_cache": lambda g, n: g.with_dynamic_prefill_cache(
        4
    ).with_dynamic_decode_cache(4),
    "bucketed: with_prefill_cache, with_decode_cache": lambda g, n: g.with_prefill_cache(4).with_decode_cache(n),
    "inference: with_inference_caches": lambda g, n: g.with_inference_caches(n),
    "exact: with_prefill_cache, with_exact_decode_cache": lambda g, n: g.with_prefill_cache(4).with_exact_decode_cache(
        16
    ),
}


def moves(g: rlx.TokenGenerator, pasts: range) -> float:
    """Median microseconds to have the program for a past at hand that is not the last one's."""
    engine, times = g._engine, []
    for past in pasts:
        start = time.perf_counter()
        engine._programs[engine.bucketing.spec(1, past)]
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def measure(model: str, mode: Mode, prompt: list[int], tokens: int, threads: int | None) -> tuple[list[int], str]:
    """The tokens of a generation, and the mode's row of the table."""
    cache = rlx.CompileCache(capacity=1024, policy="off")
    length = len(prompt) + tokens
    with rlx.TokenGenerator.from_path(model, cache=cache, max_seq=length, threads=threads) as opened:
        g = mode(opened, length)
        g.prefill(prompt)
        found = g.generate_cached(tokens)
        stats = g.stats()["programs"]
        made = {phase: table.misses for phase, table in stats.items()}
        kept = sum(table.misses - table.evictions for table in stats.values())
        code = sum(table.code_bytes for table in stats.values())
        seconds = sum(table.seconds for table in stats.values())
        move = f"{moves(g, range(length - 4, length)):.0f} us" if made["decode"] < tokens - 1 else "compiles"
    return found, f"| {made['prefill']} + {made['decode']} | {kept} | {seconds:.1f} | {code / 1e3:.0f} | {move} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=str(demo.path()))
    parser.add_argument("--tokens", type=int, default=300, help="tokens of the generation")
    parser.add_argument("--prompt", type=int, default=16, help="tokens of the prompt")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--only", help="modes whose name begins so")
    args = parser.parse_args()
    prompt, first = list(range(1, args.prompt + 1)), None
    print("| mode | programs: prefill + decode | kept | seconds | code, kB | move |\n|---|---|---|---|---|---|")
    for name, mode in MODES.items():
        if args.only and not name.startswith(args.only):
            continue
        found, row = measure(args.model, mode, prompt, args.tokens, args.threads)
        first = first or found
        assert found == first, f"{name} gives other tokens"
        print(f"| {name} {row}", flush=True)


if __name__ == "__main__":
    main()
