#!/usr/bin/env python3
"""Tokens a second of several sequences decoded side by side, beside one alone.

    python benchmarks/make_model.py --shape qwen3-0.6b --type Q4_K_M --out qwen3-0.6b-Q4_K_M.gguf
    python benchmarks/batch.py qwen3-0.6b-Q4_K_M.gguf [--batches 1,2,4,8,16] [--prompt 64] [--tokens 32] [--rounds 5]
    python benchmarks/batch.py qwen3-0.6b-Q4_K_M.gguf --threads 1 --clock cpu    # on a machine that others use, too

Every round decodes the same number of steps with each batch size in turn, so that a busy neighbour troubles all of
them alike, and every time from the end of the prompts, so that all of them read caches of the same length. Figures are
medians over the steps of all rounds, and the fastest step. A step is the native call and the
choice of the likeliest token of each row. Bytes are those of weights and caches that a step must read, operations those
of the op table. Both are compared with limits that are measured before and after: reads of memory, and the products of
the linears (int8, with an integer quantization) from registers. The longer of the two times is a bound for a step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np

from rlx.engine.engine import Engine
from rlx.engine.model_runner import Batch, Segment
from rlx.engine.programs import reporting
from rlx.sampling.choice import LIKELIEST

CLOCKS = {"wall": time.perf_counter, "cpu": time.thread_time}  # of worker 0: all there is with one thread


def main() -> None:
    args = arguments()
    engine = Engine.open(args.model, threads=args.threads)
    stats, most, now = engine.stats(), max(args.batches), CLOCKS[args.clock]
    print(f"{args.model}: {stats['target']}, {stats['threads']} threads, {args.clock} time")
    limits = [measured_limits(engine)]
    seconds: dict[int, list[float]] = {rows: [] for rows in args.batches}
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, engine.config.vocab_size, (most, args.prompt)).tolist()
    sequences = [engine.open_sequence(shared=False) for _ in prompts]
    begun = (advanced(engine, [sequence], [prompt]) for sequence, prompt in zip(sequences, prompts, strict=True))
    latest = chosen(engine, [logits for (logits,) in begun])
    for _ in range(args.rounds):
        for rows in args.batches:
            for _ in range(args.tokens):
                start = now()
                found = advanced(engine, sequences[:rows], [[token] for token in latest[:rows]])
                latest[:rows] = chosen(engine, found)
                seconds[rows].append(now() - start)
            for sequence in sequences[:rows]:
                sequence.rewind(args.prompt)
    limits.append(measured_limits(engine))
    bandwidth, peak = (max(pair) for pair in zip(*limits, strict=True))
    print(f"limits: {bandwidth:.1f} GB/s of memory, {peak:.0f} GOP/s of int8 products")
    single = statistics.median(seconds[min(args.batches)]) / min(args.batches)
    print(f"{'rows':>4} {'ms/step':>8} {'fastest':>8} {'tokens/s':>9} {'speedup':>8} "
          f"{'GB/s':>6} {'of it':>6} {'GOP/s':>6} {'of it':>6}")  # fmt: skip
    for rows, found in seconds.items():
        step = statistics.median(found)
        moved, operations = (
            count / step / 1e9 for count in reporting.batch_work(engine, rows, args.prompt + args.tokens // 2)
        )
        print(f"{rows:4} {step * 1e3:8.2f} {min(found) * 1e3:8.2f} {rows / step:9.1f} {rows * single / step:7.2f}x "
              f"{moved:6.1f} {moved / bandwidth:6.0%} {operations:6.0f} {operations / peak:6.0%}")  # fmt: skip
    engine.close()


def advanced(engine: Engine, sequences: list[Any], tokens: list[list[int]]) -> list[Any]:
    """One step of the engine: the logits after the tokens of each sequence, valid until the next step."""
    segments = [Segment(sequence, ids) for sequence, ids in zip(sequences, tokens, strict=True)]
    return engine.compute(Batch(segments))


def chosen(engine: Engine, rows: list[Any]) -> list[int]:
    """The likeliest token of each row of logits, as the engine's loop finds it."""
    return [each.token for each in engine.choose(rows, [LIKELIEST] * len(rows))]


def measured_limits(engine: Engine) -> tuple[float, float]:
    """Read bandwidth in GB/s and peak rate of int8 products in GOP/s, of all workers."""
    return reporting.read_bandwidth(engine), reporting.arithmetic_peaks(engine)["int8"]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    sizes = [1, 2, 4, 8, 16]
    parser.add_argument("--batches", type=lambda text: sorted({int(n) for n in text.split(",")}), default=sizes)
    parser.add_argument("--prompt", type=int, default=64, help="tokens before the first step")
    parser.add_argument("--tokens", type=int, default=32, help="steps of a batch size a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    return parser.parse_args()


if __name__ == "__main__":
    main()
