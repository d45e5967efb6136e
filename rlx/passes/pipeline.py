"""The pipeline: a list of passes that turn a symbolic graph into a program with a place in memory for every value.

`print(rlx.passes.pipeline.describe())` prints the list. The verifier runs after each pass. `stages` gives the results
one by one, `lower` the last one.

`effective` comes before: the first thing that a compile does, before it looks into the cache. Of the options it leaves
those that change the program of a graph, so that equal programs have equal compile keys.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from rlx import tracing
from rlx.ir.graph import Graph
from rlx.ir.verify import verify
from rlx.passes.fuse import fuse
from rlx.passes.layout import layout
from rlx.passes.memory import check_memory, memory
from rlx.passes.options import BACKEND, Options
from rlx.passes.program import Program
from rlx.passes.quantize import quantize
from rlx.passes.report import SILENT, Log, PassReport
from rlx.passes.schedule import schedule, verify_schedule
from rlx.passes.segments import pages, segments
from rlx.passes.simplify import simplify
from rlx.passes.specialize import last_row, specialize

Pass = Callable[[Graph, Options, Log], Graph]
Hook = Callable[[str, "Graph | Program"], None]

PREFILL: tuple[tuple[str, tuple[Pass, ...]], ...] = (
    ("algebra", (simplify,)),
    ("extents", (last_row, specialize)),
    ("arithmetic", (quantize,)),
    ("fusion", (fuse,)),
    ("memory layout", (layout, pages)),
)
# A decode step has one row: there is no last one to select.
DECODE = tuple((phase, tuple(p for p in passes if p is not last_row)) for phase, passes in PREFILL)
BATCH = (*PREFILL, ("sequences", (segments,)))


def lower(
    graph: Graph,
    options: Options,
    hook: Hook | None = None,
    reports: list[PassReport] | None = None,
    passes: Sequence[Pass] | None = None,
) -> Program:
    """Runs the whole pipeline.

    Args:
        hook: called with the name and the verified result of each stage.
        reports: gets what each pass did.
        passes: as of `stages`.

    Raises:
        GraphError: as `stages`.
    """
    for stage, result in stages(graph, options, reports, passes):
        if hook:
            hook(stage, result)
    assert isinstance(result, Program)
    return result


def resume(graph: Graph, options: Options, after: str, passes: Sequence[Pass] | None = None) -> Program:
    """The program of a graph that has been through the passes up to the one called `after`.

    Raises:
        GraphError: what a pass makes of it does not verify.
    """
    result: Graph | Program = graph
    rest = _stages(options.phase, passes)
    for name, run in rest[[name for name, _ in rest].index(after) + 1 :]:
        result = _run(name, run, result, options, SILENT)
    assert isinstance(result, Program)
    return result


def place(graph: Graph, options: Options) -> Program:
    """The program of a graph that has been through all passes but the last two, such as one read from its text."""
    return memory(schedule(graph, options), options.capabilities.layouts, reuse="reuse_memory" in options.passes)


def stages(
    graph: Graph,
    options: Options,
    reports: list[PassReport] | None = None,
    passes: Sequence[Pass] | None = None,
) -> Iterator[tuple[str, Graph | Program]]:
    """The pipeline step by step: ("00-graph", the graph as it was built), then each pass with its verified result.

    Args:
        reports: gets what each pass did.
        passes: those over the graph, in order (`Backend.passes`); by default the usual ones.

    Raises:
        GraphError: the graph, or what a pass made of it, does not verify.
    """
    verify(graph)
    yield "00-graph", graph
    result: Graph | Program = graph
    for i, (name, run) in enumerate(_stages(options.phase, passes), 1):
        start, log, before = time.perf_counter(), SILENT if reports is None else Log(), result
        result = _run(name, run, before, options, log)
        if reports is not None:
            sizes = len(_graph(before).nodes()), len(_graph(result).nodes())
            changed = isinstance(result, Program) or result != before
            reports.append(log.report(name, sizes, changed, time.perf_counter() - start))
        yield f"{i:02}-{name}", result


def _run(name: str, run: Pass | None, before: Graph | Program, options: Options, log: Log) -> Graph | Program:
    """The verified result of a stage: of a pass over the graph, or of one of `BACKEND`."""
    with tracing.span(name, "pass"):
        if isinstance(before, Program):
            program = memory(before, options.capabilities.layouts, log, reuse="reuse_memory" in options.passes)
            check_memory(program)
            return program
        if run is None:
            program = schedule(before, options, log)
            verify_schedule(program)
            return program
        graph = run(before, options, log)
        verify(graph)
        return graph


def _graph(stage: Graph | Program) -> Graph:
    return stage.graph if isinstance(stage, Program) else stage


def usual_passes(phase: str) -> tuple[Pass, ...]:
    """The passes over the graph of a program, in order.

    Args:
        phase: "prefill", "decode" or "batch".
    """
    groups = {"prefill": PREFILL, "decode": DECODE, "batch": BATCH}[phase]
    return tuple(run for _, group in groups for run in group)


def _stages(phase: str, passes: Sequence[Pass] | None) -> list[tuple[str, Pass | None]]:
    """The name of each stage, and its pass over the graph."""
    found = usual_passes(phase) if passes is None else passes
    return [*((run.__name__, run) for run in found), *((name, None) for name in BACKEND)]


def names(phase: str, passes: Sequence[Pass] | None = None) -> list[str]:
    """The names of the passes of a phase, in order."""
    return [name for name, _ in _stages(phase, passes)]


def describe() -> str:
    """The pipeline as text, one line per group of passes."""
    groups = (*PREFILL, ("sequences", (segments,)))
    lines = [f"{name:14} {' -> '.join(p.__name__ for p in passes)}" for name, passes in groups]
    return "\n".join([*lines, f"{'program':14} {' -> '.join(BACKEND)}"])
