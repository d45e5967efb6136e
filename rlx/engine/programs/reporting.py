"""Measurements of an engine's programs, for `rlx bench`, `rlx report` and the benchmarks.

Time per region, bytes and operations per step, the limits of the machine, and the sources of programs, also of one that
does not compile.

Steps of several sequences are measured by their regions, the choice of tokens, and the work between steps, each beside
its limit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from rlx.backends.program import Observer, Program
from rlx.compiler import profiling
from rlx.compiler.profiling import LEAST_BYTES, MEMORY_BYTES, OpTime, clocked, measure_step, op_times
from rlx.engine.kv.sequence import Sequence as Cached
from rlx.engine.model_runner import Segment
from rlx.engine.programs.programs import DECODE, GREEDY, ProgramSpec
from rlx.engine.programs.ready import compile_tower
from rlx.engine.token_run import RunRow
from rlx.errors import RlxError
from rlx.passes import pipeline
from rlx.passes.report import PassReport, Report
from rlx.report.source import Machine, Problem, Source, StepTimes
from rlx.sampling.choice import LIKELIEST

if TYPE_CHECKING:
    from rlx.engine.engine import Engine
    from rlx.engine.kv.snapshot import Snapshot

#: The order of programs in a report: what one token costs comes first.
_ORDER = ("decode", "greedy", "prefill", "batch")


@contextmanager
def steps_after(engine: Engine, past: int, ids: Sequence[int]) -> Iterator[Callable[[], float]]:
    """A function that appends ids to a sequence of `past` tokens, returns the seconds that this took, and goes back."""
    sequence = engine.open_sequence()

    def run() -> float:
        start = time.perf_counter()
        engine.append(sequence, ids)
        seconds = time.perf_counter() - start
        sequence.rewind(past)
        return seconds

    try:
        if past:
            engine.append(sequence, _ids(engine, past))
            sequence.mark()  # so that rewinding costs only a copy
        yield run
    finally:
        sequence.discard()


def profile_step(engine: Engine, ids: Sequence[int] = (1,), repeat: int = 5, past: int = 0) -> list[OpTime]:
    """Runs the ids several times after `past` others: the median time of every region, by kind of work, the longest
    first.
    """
    spec, env = engine.bucketing.spec(len(ids), past), {"SEQ": len(ids), "PAST_SEQ": past}
    program, graph = engine._programs[spec], engine._programs.final_graph(spec)
    with steps_after(engine, past, ids) as run:
        run()
        steps = clocked(program, run, repeat)
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
    graph = engine._programs.final_graph(engine.bucketing.spec(rows, past))
    return profiling.step_flops(graph, {"SEQ": rows, "PAST_SEQ": past})


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


def program_sources(
    engine: Engine,
    specs: Sequence[ProgramSpec],
    tower_rows: int | None = None,
    tower: bool = False,
    on_program: Callable[[str], None] = lambda name: None,
) -> list[Source]:
    """The sources of some programs, compiled or from the cache. A program that does not compile has its error in it.

    Args:
        specs: of the programs.
        tower: whether those of the vision tower come with them, if there is one.
        tower_rows: only programs of the tower that take this number of rows.
        on_program: called with the name of each before it is compiled.
    """
    found = []
    for spec in sorted(specs, key=lambda spec: (_ORDER.index(spec.kind), -spec.seq[1])):
        on_program(spec.name)
        try:
            engine._programs.compile(spec)
        except RlxError as error:
            found.append(_failed(engine, spec, error))
        else:
            ready = next(each for each in engine.ready if each.name == spec.name)
            found.append(ready.report_source(spec.name))
    if tower and engine.vision.tower is not None:
        on_program("the vision tower")
        compile_tower(engine.vision.tower, tower_rows, None)
        names = {spec.name for spec in specs}
        found += [each.report_source(each.name) for each in engine.ready if each.name not in names]
    return found


def _failed(engine: Engine, spec: ProgramSpec, error: RlxError) -> Source:
    """The source of a program that does not compile: its stages up to the one that fails."""
    graph, options = engine._programs.lowering(spec)
    stages, reports = list[tuple[str, str]](), list[PassReport]()
    at = "kernels"
    passes = engine._compiler.backend.passes(options.phase)
    steps: Iterator[tuple[str, object]] = pipeline.stages(graph, options, reports, passes)
    names = ["graph", *pipeline.names(options.phase, passes)]
    try:
        stages.extend((name, str(result)) for name, result in steps)
    except RlxError:
        at = names[len(stages)]
    report = Report(graph.name, options.phase, options.seq, options.precision, tuple(reports))
    problem = Problem(at, type(error).__name__, str(error))
    return Source(
        spec.name, spec.kind, spec.seq, stages, options, engine._compiler.target.level, report, problem=problem
    )


def measure_programs(engine: Engine, specs: Sequence[ProgramSpec], prompt: int) -> tuple[Machine, dict[str, StepTimes]]:
    """The limits of the machine, and measured steps of programs, by name.

    Prompts are as long as their bucket permits; a batch has as many sequences, at most `MOST_SEQUENCES`. The
    bandwidth is that of a buffer of as many bytes as a decode step reads. It is the best of measurements between the
    programs: what else runs on the machine only lowers it.

    Args:
        prompt: number of tokens of the prompt; decode steps follow it.

    Raises:
        ArgumentError: the backend is not made for speed.
    """
    found: dict[str, StepTimes] = {}
    rates = [_bandwidth(engine, prompt)]
    for spec in specs:
        rows = min(spec.seq[1], max(prompt, spec.seq[0]), engine.max_seq - 1)
        if spec.phase == "batch":
            depth = min(prompt, engine.max_seq - ROOM)
            (step,) = batch_steps(engine, [min(spec.seq[1], MOST_SEQUENCES)], depth)
            found[spec.name] = step.times
            rates.append(_bandwidth(engine, prompt))
        if spec.phase == "prefill" and rows >= spec.seq[0]:
            found[spec.name] = _measure_step(engine, spec, rows, 0)
            rates.append(_bandwidth(engine, prompt))
    if DECODE in specs or GREEDY in specs:
        times = _measure_step(engine, DECODE, 1, min(prompt, engine.max_seq - 2))
        found |= {DECODE.name: times} if DECODE in specs else {}
        rates.append(_bandwidth(engine, prompt))
    if GREEDY in specs:
        found[GREEDY.name] = _measure_greedy(engine)
        rates.append(_bandwidth(engine, prompt))
    return Machine(max(rates), arithmetic_peaks(engine), engine.stats()["threads"]), found


def _bandwidth(engine: Engine, past: int) -> float:
    """Rate at which the workers read as many bytes as a decode step after `past` tokens."""
    return read_bandwidth(engine, step_bytes(engine, past))


def _ids(engine: Engine, count: int) -> list[int]:
    return [(7919 * i) % engine.config.vocab_size for i in range(count)]


def _measure_step(engine: Engine, spec: ProgramSpec, rows: int, past: int) -> StepTimes:
    """Steps of the engine after `past` tokens, each followed by a return to the positions before it."""
    with steps_after(engine, past, _ids(engine, rows)) as run:
        return measure_step(engine._programs[spec], run, {"SEQ": rows, "PAST_SEQ": past})


def _measure_greedy(engine: Engine) -> StepTimes:
    """Steps of the greedy program alone, as a native run makes them, with the inputs of the last decode step."""
    decode, greedy = engine._programs[DECODE], engine._programs[GREEDY]
    for name, values in greedy.inputs.items():
        values.reshape(-1)[:] = decode.inputs[name].reshape(-1)
    extents = dict(decode.extents)

    def run() -> float:
        start = time.perf_counter()
        greedy.run(**extents)
        return time.perf_counter() - start

    return measure_step(greedy, run, extents)


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
        in_run: of a step at the same depths that takes the tokens of the one before, see `Engine.run`; None where there
            are no runs.
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
    in_run: float | None
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
    first = engine.open_sequence(shared=False)
    engine.step([Segment(first, _ids(engine, depth), "none")])
    snapshot = engine.snapshot_of(first)
    first.discard()
    for count in rows:
        ids = _ids(engine, count)
        with _restored(engine, snapshot, count) as sequences:
            step = _measured(engine, sequences, [*ids], depth)
        with _restored(engine, snapshot, count) as sequences:
            yield replace(step, in_run=_in_run(engine, sequences, ids))


@contextmanager
def _restored(engine: Engine, snapshot: Snapshot, count: int) -> Iterator[list[Cached]]:
    """So many sequences that go on from a snapshot, each with a cache of its own."""
    sequences: list[Cached] = []
    try:
        for _ in range(count):
            sequences.append(engine.restored(snapshot))
        yield sequences
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


def _measured(engine: Engine, sequences: list[Cached], ids: list[int], depth: int) -> BatchStep:
    """Steps that append ids, and then what they choose, but not those of a run."""
    rows, parts, native = len(sequences), list[tuple[float, float, float]](), _Native()

    def run() -> float:
        start = time.perf_counter()
        found = engine.compute([Segment(s, [token]) for s, token in zip(sequences, ids, strict=True)])
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
    return BatchStep(rows, depth, times.seconds, None, choice, between, waking, uneven, kinds, times)


def _in_run(engine: Engine, sequences: list[Cached], ids: Sequence[int]) -> float | None:
    """Seconds of a step of a run, the mean of all but the first ones; the sequences grow by `3 * STEPS` meanwhile."""
    rows = [RunRow(s, token, 3 * STEPS) for s, token in zip(sequences, ids, strict=True)]
    if (run := engine.run(rows)) is None:
        return None
    run.take(2)
    start, steps = time.perf_counter(), 0
    while run.alive:
        steps += len(run.take(2))
    seconds = time.perf_counter() - start
    run.end()
    return seconds / steps if steps else None
