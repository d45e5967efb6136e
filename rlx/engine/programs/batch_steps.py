"""Measured steps of several sequences, for `rlx bench --rows` and `rlx report`: regions, the choice of tokens, and the
work between steps, each beside its limit.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rlx.backends.program import Observer, Program
from rlx.compiler.measuring import measure_step
from rlx.compiler.profiling import OpTime, op_times
from rlx.engine.kv.sequence import Sequence as Cached
from rlx.engine.model_runner import Batch, Segment
from rlx.engine.programs.programs import ProgramSpec
from rlx.report.source import StepTimes
from rlx.sampling.choice import LIKELIEST

if TYPE_CHECKING:
    from rlx.engine.engine import Engine

STEPS = 8  # a third of the steps of a measurement
MOST_SEQUENCES = 64  # of a batch that a report measures
ROOM = 3 * STEPS + 2  # positions that a measurement takes after the depth


@dataclass(frozen=True)
class BatchStep:
    """The medians of some steps that decode one token each of several sequences, in seconds.

    Attributes:
        rows: number of sequences.
        depth: tokens of each before the first step.
        seconds: of a step and of the choice of its tokens, as an engine's loop sees them.
        choice: of that the choice of tokens.
        between: of that what is neither native code nor the choice.
        waking: of the native code what passes before its first region and after its last one.
        uneven: what the regions of a step take more than the sum of their medians: in every step others are slow.
        kinds: the native code by kind of work, the longest first.
        times: of its regions.
    """

    rows: int
    depth: int
    seconds: float
    choice: float
    between: float
    waking: float
    uneven: float
    kinds: Sequence[OpTime]
    times: StepTimes


def batch_steps(engine: Engine, rows: Sequence[int], depth: int) -> Iterator[BatchStep]:
    """Measures steps of so many sequences of `depth` tokens, of which each has a cache of its own.

    Raises:
        PoolFullError: the cache pool has no room for them.
    """
    prompt = [(7919 * i) % engine.config.vocab_size for i in range(depth)]
    first = engine.open_sequence(shared=False)
    engine.step(Batch([Segment(first, prompt, "none")]))
    snapshot = engine.snapshot_of(first)
    first.discard()
    for count in rows:
        sequences: list[Cached] = []
        try:
            for _ in range(count):
                sequences.append(engine.restored(snapshot))
            yield _measured(engine, sequences, depth)
        finally:
            for sequence in sequences:
                sequence.discard()


def batch_spec(engine: Engine, rows: int, past: int) -> ProgramSpec:
    """The spec of the program of a step of so many sequences, one row each."""
    return engine.bucketing.spec(1, past) if rows == 1 else engine.bucketing.segments(rows)


class _Native(Observer):
    """Keeps the seconds of the native code of the last step."""

    seconds = 0.0

    def after(self, program: Program, seconds: float, steps: int) -> None:
        self.seconds = seconds


def _measured(engine: Engine, sequences: list[Cached], depth: int) -> BatchStep:
    rows, parts, native = len(sequences), list[tuple[float, float, float]](), _Native()
    ids = [(7907 * i) % engine.config.vocab_size for i in range(rows)]

    def run() -> float:
        start = time.perf_counter()
        found = engine.compute(Batch([Segment(s, [token]) for s, token in zip(sequences, ids, strict=True)]))
        computed = time.perf_counter()
        chosen = engine.choose([each for each in found if each is not None], [LIKELIEST] * rows)
        end = time.perf_counter()
        ids[:] = [max(0, each.token) for each in chosen]
        parts.append((end - computed, computed - start - native.seconds, native.seconds))
        return end - start

    run()  # compiles
    spec = batch_spec(engine, rows, depth)
    extents = {"SEQ": rows, "PAST_SEQ": depth + ROOM // 2, "SEGMENTS": rows, "OUTS": rows}
    program, graph = engine._programs[spec], engine._programs.final_graph(spec)
    program.observe(native)
    times = measure_step(program, run, extents, STEPS, 0.0)
    program.ignore(native)
    choice, between, called = np.median(parts[-3 * STEPS : -2 * STEPS] + parts[-STEPS:], axis=0).tolist()
    waits = np.array([[each or 0.0 for each in worker] for worker in times.waits]).mean(0)
    kinds = op_times(program, graph, extents, np.array(times.regions), waits, np.array(times.prologues))
    waking, uneven = called - times.native, times.native - sum(times.regions)
    return BatchStep(rows, depth, times.seconds, choice, between, waking, uneven, kinds, times)
