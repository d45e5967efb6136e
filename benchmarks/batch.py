#!/usr/bin/env python3
"""Tokens a second of several sequences decoded side by side, beside one alone.

    python benchmarks/make_model.py --shape qwen3-0.6b --type Q4_K_M --out qwen3-0.6b-Q4_K_M.gguf
    python benchmarks/batch.py qwen3-0.6b-Q4_K_M.gguf [--batches 1,2,4,8,16] [--prompt 64] [--tokens 32] [--rounds 5]
    python benchmarks/batch.py qwen3-0.6b-Q4_K_M.gguf --threads 1 --clock cpu    # on a machine that others use, too
    python benchmarks/batch.py qwen3-0.6b-Q4_K_M.gguf --batches 1,8 --adapters 8    # with LoRA adapters, too

Every round decodes the same number of steps with each batch size in turn, so that a busy neighbour troubles all of
them alike, and every time from the end of the prompts, so that all of them read caches of the same length. Figures are
medians over the steps of all rounds, and the fastest step. A step is the native call and the
choice of the likeliest token of each row. Bytes are those of weights and caches that a step must read, operations those
of the op table. Both are compared with limits that are measured before and after: reads of memory, and the products of
the linears (int8, with an integer quantization) from registers. The longer of the two times is a bound for a step.

With `--adapters N` every batch size decodes in turn without and with adapters: N of them, of rank 16 for every matrix
of the layers and with random numbers, of which row i has number i modulo N. The last column compares the two.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter

from rlx.compiler import profiling
from rlx.engine.engine import Engine
from rlx.engine.model_runner import Segment
from rlx.engine.programs import reporting
from rlx.sampling.choice import LIKELIEST
from rlx.weights import open_weights

RANK = 16
CLOCKS = {"wall": time.perf_counter, "cpu": time.thread_time}  # of worker 0: all there is with one thread


def main() -> None:
    args = arguments()
    with tempfile.TemporaryDirectory() as folder:
        adapters = random_adapters(args.model, args.adapters, Path(folder))
        engine = Engine.open(args.model, threads=args.threads, **({"adapters": adapters} if adapters else {}))
    stats, most, now = engine.stats(), max(args.batches), CLOCKS[args.clock]
    print(f"{args.model}: {stats['target']}, {stats['threads']} threads, {args.clock} time")
    limits = [measured_limits(engine)]
    kinds = [0, args.adapters] if adapters else [0]
    seconds: dict[tuple[int, int], list[float]] = {(rows, kind): [] for rows in args.batches for kind in kinds}
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, engine.config.vocab_size, (most, args.prompt)).tolist()
    sequences = {
        kind: [engine.open_sequence(shared=False, adapter=1 + i % kind if kind else 0) for i in range(most)]
        for kind in kinds
    }
    latest = {kind: started(engine, some, prompts) for kind, some in sequences.items()}
    for _ in range(args.rounds):
        for (rows, kind), found in seconds.items():
            for _ in range(args.tokens):
                start = now()
                logits = advanced(engine, sequences[kind][:rows], [[token] for token in latest[kind][:rows]])
                latest[kind][:rows] = chosen(engine, logits)
                found.append(now() - start)
            for sequence in sequences[kind][:rows]:
                sequence.rewind(args.prompt)
    limits.append(measured_limits(engine))
    bandwidth, peak = (max(pair) for pair in zip(*limits, strict=True))
    print(f"limits: {bandwidth:.1f} GB/s of memory, {peak:.0f} GOP/s of int8 products")
    medians = {key: statistics.median(found) for key, found in seconds.items()}
    single = medians[min(args.batches), 0] / min(args.batches)
    print(f"{'rows':>4} {'ms/step':>8} {'fastest':>8} {'tokens/s':>9} {'speedup':>8} "
          f"{'GB/s':>6} {'of it':>6} {'GOP/s':>6} {'of it':>6}{'  with adapters' if adapters else ''}")  # fmt: skip
    for rows in args.batches:
        step = medians[rows, 0]
        moved, operations = (count / step / 1e9 for count in batch_work(engine, rows, args.prompt + args.tokens // 2))
        beside = medians[rows, args.adapters]
        more = f"  {beside * 1e3:8.2f} ms, {step / beside:.2f} of the speed" if adapters else ""
        print(f"{rows:4} {step * 1e3:8.2f} {min(seconds[rows, 0]) * 1e3:8.2f} {rows / step:9.1f} "
              f"{rows * single / step:7.2f}x {moved:6.1f} {moved / bandwidth:6.0%} {operations:6.0f} "
              f"{operations / peak:6.0%}{more}")  # fmt: skip
    engine.close()


def batch_work(engine: Engine, sequences: int, past: int) -> tuple[int, int]:
    """(bytes of weights and caches, operations) of one batch step: one token each for sequences of `past` tokens."""
    graph = engine._programs.final_graph(engine.bucketing.segments(sequences))
    env = {"SEQ": sequences, "SEGMENTS": sequences, "OUTS": sequences, "PAST_SEQ": past}
    return profiling.step_bytes(graph, env), profiling.step_flops(graph, env)


def random_adapters(model: str, count: int, folder: Path) -> dict[str, Path]:
    """Name -> a GGUF file of pairs in f16, for each matrix of the layers."""
    if not count:
        return {}
    with open_weights(model) as loader:
        arch = str(loader.metadata["general.architecture"])
        shapes = {name: info.shape for name, info in loader.tensors.items() if name.startswith("blk.")}
    matrices = {name: shape for name, shape in shapes.items() if len(shape) == 2}
    rng, found = np.random.default_rng(0), dict[str, Path]()
    for number in range(count):
        path = found[f"adapter-{number}"] = folder / f"{number}.gguf"
        writer = GGUFWriter(path, arch)
        writer.add_string("general.type", "adapter")
        writer.add_string("adapter.type", "lora")
        writer.add_float32("adapter.lora.alpha", float(RANK))
        for name, (n, k) in matrices.items():
            writer.add_tensor(f"{name}.lora_a", (0.01 * rng.standard_normal((RANK, k))).astype(np.float16))
            writer.add_tensor(f"{name}.lora_b", (0.01 * rng.standard_normal((n, RANK))).astype(np.float16))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return found


def started(engine: Engine, sequences: list[Any], prompts: list[list[int]]) -> list[int]:
    """The first token of each sequence after its prompt."""
    begun = (advanced(engine, [sequence], [prompt]) for sequence, prompt in zip(sequences, prompts, strict=True))
    return chosen(engine, [logits for (logits,) in begun])


def advanced(engine: Engine, sequences: list[Any], tokens: list[list[int]]) -> list[Any]:
    """One step of the engine: the logits after the tokens of each sequence, valid until the next step."""
    segments = [Segment(sequence, ids) for sequence, ids in zip(sequences, tokens, strict=True)]
    return engine.compute(segments)


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
    parser.add_argument("--adapters", type=int, default=0, help="measure with so many LoRA adapters, too")
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    return parser.parse_args()


if __name__ == "__main__":
    main()
