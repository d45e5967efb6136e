#!/usr/bin/env python3
"""What a prompt costs that begins as the one before: 2,000 tokens, then the same 2,000 and 20 more.

    python benchmarks/prefix_reuse.py MODEL... [--prompt 2000] [--more 20] [--answer 8] [--runs 3]

The first prompt is answered with some tokens, as in a chat; the second one forgets that answer, and its logits are
compared with those of a runner that never saw the first.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

import rlx
from rlx.runners import Model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--prompt", type=int, default=2000)
    parser.add_argument("--more", type=int, default=20)
    parser.add_argument("--answer", type=int, default=8)
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    for model in args.models:
        with rlx.auto_runner(model, max_seq=args.prompt + args.more + args.answer + 1) as runner:
            print(f"{model} ({runner.family}): {measure(runner, args)}", flush=True)


def measure(runner: Model, args: argparse.Namespace) -> str:
    ids = np.random.default_rng(0).integers(1, runner.vocab_size, args.prompt + args.more).tolist()
    first, second = [], []
    for count in (args.prompt, args.more):  # compiles
        runner.reset()
        runner.generate(ids[:count], 2, stop_at_eog=False)
    for _ in range(args.runs):
        runner.reset()
        first.append(seconds(runner, ids[: args.prompt]))
        runner.generate(ids[: args.prompt], args.answer, stop_at_eog=False)
        second.append(seconds(runner, ids))
        reused = runner.prefill_logits(ids)
    runner.reset()
    fresh = runner.prefill_logits(ids)
    error = np.abs(reused - fresh).max() / np.abs(fresh).max()
    whole, rest = statistics.median(first), statistics.median(second)
    return (f"{args.prompt} tokens {whole:.3f} s, {args.more} more {rest:.3f} s: {rest / whole:.1%}; "
            f"largest difference of a logit to a fresh session {error:.1e} of the largest")  # fmt: skip


def seconds(runner: Model, ids: list[int]) -> float:
    start = time.perf_counter()
    runner.prefill_logits(ids)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
