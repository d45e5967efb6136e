"""What a report shows of a model's programs: their sources, also of one that does not compile, and measured steps.

Runners stage, beside `engine.py`, for `rlx report`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rlx.backends.program import Program
from rlx.compiler.measuring import measure_step
from rlx.engine.programs import costs
from rlx.engine.programs.program_spec import DECODE, GREEDY, ProgramSpec
from rlx.engine.programs.tower_programs import compile_tower
from rlx.errors import RlxError
from rlx.passes import pipeline
from rlx.passes.report import PassReport, Report
from rlx.report.source import Machine, Problem, Source, StepTimes

if TYPE_CHECKING:
    from rlx.engine.engine import Engine

#: The order of programs in a report: what one token costs comes first.
_ORDER = ("decode", "greedy", "prefill", "batch")


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
    if tower and engine.tower is not None:
        on_program("the vision tower")
        compile_tower(engine.tower, tower_rows, None)
        names = {spec.name for spec in specs}
        found += [each.report_source(each.name) for each in engine.ready if each.name not in names]
    return found


def _failed(engine: Engine, spec: ProgramSpec, error: RlxError) -> Source:
    """The source of a program that does not compile: its stages up to the one that fails."""
    graph, options = engine._programs.lowering(spec)
    stages, reports = list[tuple[str, str]](), list[PassReport]()
    at = "kernels"
    steps: Iterator[tuple[str, object]] = pipeline.stages(graph, options, reports)
    names = ["graph", *pipeline.names(options.phase)]
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
    """The limits of the machine, and measured steps of programs of one sequence, by name.

    Prompts are as long as their bucket permits. The bandwidth is that of a buffer of as many bytes as a decode step
    reads. It is the best of measurements between the programs: what else runs on the machine only lowers it.

    Args:
        prompt: number of tokens of the prompt; decode steps follow it.

    Raises:
        ArgumentError: the backend is not made for speed.
    """
    found: dict[str, StepTimes] = {}
    rates = [_bandwidth(engine, prompt)]
    for spec in specs:
        rows = min(spec.seq[1], max(prompt, spec.seq[0]), engine.max_seq - 1)
        if spec.phase == "prefill" and rows >= spec.seq[0]:
            engine.reset()
            found[spec.name] = _measure_forward(engine, spec, rows)
            rates.append(_bandwidth(engine, prompt))
    engine.reset()
    engine.forward(_ids(engine, min(prompt, engine.max_seq - 2)))
    if DECODE in specs or GREEDY in specs:
        times = _measure_forward(engine, DECODE, 1)
        found |= {DECODE.name: times} if DECODE in specs else {}
        rates.append(_bandwidth(engine, prompt))
    if GREEDY in specs:
        found[GREEDY.name] = _measure_greedy(engine)
        rates.append(_bandwidth(engine, prompt))
    engine.reset()
    return Machine(max(rates), costs.arithmetic_peaks(engine), engine.stats()["threads"]), found


def _bandwidth(engine: Engine, past: int) -> float:
    """Rate at which the workers read as many bytes as a decode step after `past` tokens."""
    return costs.read_bandwidth(engine, costs.step_bytes(engine, past))


def _ids(engine: Engine, count: int) -> list[int]:
    return [(7919 * i) % engine.config.vocab_size for i in range(count)]


def _measure_forward(engine: Engine, spec: ProgramSpec, rows: int) -> StepTimes:
    """Steps of the engine, each followed by a return to the positions before it."""
    past, ids = engine.past, _ids(engine, rows)
    engine.stepper.refresh(engine.current)
    engine.current.mark()  # so that rewinding costs only a copy

    def run() -> float:
        start = time.perf_counter()
        engine.forward(ids)
        seconds = time.perf_counter() - start
        engine.trim(past)
        return seconds

    return measure_step(engine._programs[spec], run, {"SEQ": rows, "PAST_SEQ": past})


def _measure_greedy(engine: Engine) -> StepTimes:
    """Steps of the greedy program alone, as a native run makes them, with the inputs of the last decode step."""
    decode, greedy = engine._programs[DECODE], engine._programs[GREEDY]
    for name, values in greedy.inputs.items():
        values.reshape(-1)[:] = decode.inputs[name].reshape(-1)
    extents = dict(decode.extents)

    def run() -> float:
        return _run_again(greedy, extents)

    return measure_step(greedy, run, extents)


def _run_again(program: Program, extents: Mapping[str, int]) -> float:
    start = time.perf_counter()
    program.run(**extents)
    return time.perf_counter() - start
