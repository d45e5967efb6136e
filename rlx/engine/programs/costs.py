"""Cost measurements of an engine's programs: time per region, bytes and operations per step, and machine limits.

Runners stage, beside `engine.py`, for `rlx bench` and the benchmarks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from rlx.compiler import profiling
from rlx.compiler.measuring import LEAST_BYTES, MEMORY_BYTES
from rlx.compiler.profiling import OpTime, op_times, region_seconds
from rlx.engine.programs.program_spec import DECODE

if TYPE_CHECKING:
    from rlx.engine.engine import Engine


def profile_step(engine: Engine, ids: Sequence[int] = (1,), repeat: int = 5) -> list[OpTime]:
    """Runs the ids several times: the median time of every region, by kind of work, the longest first."""
    engine.stepper.refresh(engine.current)
    engine.current.mark()  # so that rewinding costs only a copy
    spec, env = engine.stepper.spec(len(ids), engine.past), {"SEQ": len(ids), "PAST_SEQ": engine.past}
    program, graph, steps = engine._programs[spec], engine._programs.final_graph(spec), []
    for _ in range(repeat):
        start = time.perf_counter()
        engine.forward(ids)
        seconds = time.perf_counter() - start
        engine.trim(env["PAST_SEQ"])
        steps.append(region_seconds(program, seconds))
    found = op_times(program, graph, env, np.median(steps, axis=0))
    each = [{kind.label: kind.seconds for kind in op_times(program, graph, env, step)} for step in steps]
    for kind in found:
        own = [times[kind.label] for times in each]
        kind.range = min(own), max(own)
    return found


def step_bytes(engine: Engine, past: int) -> int:
    """Bytes of weights and cache that decoding one token reads after `past` others."""
    return profiling.step_bytes(engine._programs.final_graph(DECODE), {"SEQ": 1, "PAST_SEQ": past})


def step_flops(engine: Engine, rows: int, past: int = 0) -> int:
    """Arithmetic operations of a call with `rows` ids, at most the largest bucket, after `past` others."""
    graph = engine._programs.final_graph(engine.stepper.spec(rows, past))
    return profiling.step_flops(graph, {"SEQ": rows, "PAST_SEQ": past})


def batch_work(engine: Engine, sequences: int, past: int) -> tuple[int, int]:
    """(bytes of weights and caches, operations) of one batch step: one token each for sequences of `past` tokens."""
    graph = engine._programs.final_graph(engine.bucketing.segments(sequences))
    env = {"SEQ": sequences, "SEGMENTS": sequences, "OUTS": sequences, "PAST_SEQ": past}
    return profiling.step_bytes(graph, env), profiling.step_flops(graph, env)


def read_bandwidth(engine: Engine, nbytes: int = MEMORY_BYTES) -> float:
    """Read bandwidth of the engine's workers in GB/s.

    Args:
        nbytes: size of the buffer that they read repeatedly. For memory bandwidth, larger than the last-level cache; to
            model a step, as much as the step reads, which may fit the cache.
    """
    nbytes = min(max(nbytes, LEAST_BYTES), MEMORY_BYTES)
    return engine._compiler.backend.bandwidth(engine._workers, nbytes)


def arithmetic_peaks(engine: Engine) -> dict[str, float]:
    """Peak arithmetic rate of the workers in 10^9 operations per second, for every kind that the target supports."""
    return engine._compiler.backend.peaks(engine._workers, engine._compiler)
