"""The pipeline: a list of passes that turn a symbolic graph into a program with a place in memory for every value.

`print(rlx.passes.pipeline.describe())` prints the list. The verifier runs after each pass. `stages` gives the results
one by one, `lower` the last one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from rlx import tracing
from rlx.ir.graph import Graph
from rlx.ir.verify import verify
from rlx.passes.fuse import fuse
from rlx.passes.last_row import last_row
from rlx.passes.layout import layout
from rlx.passes.memory import check_memory, memory
from rlx.passes.options import Options
from rlx.passes.pages import pages
from rlx.passes.program import Program
from rlx.passes.quantize import quantize
from rlx.passes.report import SILENT, Log, PassReport
from rlx.passes.schedule import schedule, verify_schedule
from rlx.passes.segments import segments
from rlx.passes.simplify import simplify
from rlx.passes.specialize import specialize

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
BACKEND = ("schedule", "memory")


def lower(graph: Graph, options: Options, hook: Hook | None = None, reports: list[PassReport] | None = None) -> Program:
    """Runs the whole pipeline.

    Args:
        hook: called with the name and the verified result of each stage.
        reports: gets what each pass did.

    Raises:
        GraphError: as `stages`.
    """
    for stage, result in stages(graph, options, reports):
        if hook:
            hook(stage, result)
    assert isinstance(result, Program)
    return result


def resume(graph: Graph, options: Options, after: str) -> Program:
    """The program of a graph that has been through the passes up to the one called `after`.

    Raises:
        GraphError: what a pass makes of it does not verify.
    """
    result: Graph | Program = graph
    every = names(options.phase)
    for number in range(every.index(after) + 2, len(every) + 1):
        result = _run(number, result, options, SILENT)
    assert isinstance(result, Program)
    return result


def place(graph: Graph, options: Options) -> Program:
    """The program of a graph that has been through all passes but the last two, such as one read from its text."""
    return memory(schedule(graph, options), options.capabilities.layouts, reuse="reuse_memory" in options.passes)


def stages(
    graph: Graph, options: Options, reports: list[PassReport] | None = None
) -> Iterator[tuple[str, Graph | Program]]:
    """The pipeline step by step: ("00-graph", the graph as it was built), then each pass with its verified result.

    Args:
        reports: gets what each pass did.

    Raises:
        GraphError: the graph, or what a pass made of it, does not verify.
    """
    verify(graph)
    yield "00-graph", graph
    result: Graph | Program = graph
    for i, name in enumerate(names(options.phase), 1):
        start, log, before = time.perf_counter(), SILENT if reports is None else Log(), result
        result = _run(i, before, options, log)
        if reports is not None:
            sizes = len(_graph(before).nodes()), len(_graph(result).nodes())
            changed = isinstance(result, Program) or result != before
            reports.append(log.report(name, sizes, changed, time.perf_counter() - start))
        yield f"{i:02}-{name}", result


def _run(number: int, before: Graph | Program, options: Options, log: Log) -> Graph | Program:
    """The result of a pass of the options' phase, counted from 1, verified."""
    with tracing.span(names(options.phase)[number - 1], "pass"):
        return _checked(number, before, options, log)


def _checked(number: int, before: Graph | Program, options: Options, log: Log) -> Graph | Program:
    """As `_run`."""
    passes = _passes(options.phase)
    if isinstance(before, Program):
        program = memory(before, options.capabilities.layouts, log, reuse="reuse_memory" in options.passes)
        check_memory(program)
    elif number > len(passes):
        program = schedule(before, options, log)
        verify_schedule(program)
    else:
        graph = passes[number - 1](before, options, log)
        verify(graph)
        return graph
    return program


def _graph(stage: Graph | Program) -> Graph:
    return stage.graph if isinstance(stage, Program) else stage


def _passes(phase: str) -> list[Pass]:
    groups = {"prefill": PREFILL, "decode": DECODE, "batch": BATCH}[phase]
    return [run for _, group in groups for run in group]


def names(phase: str) -> list[str]:
    """The names of the passes of a phase, in order."""
    return [*(run.__name__ for run in _passes(phase)), *BACKEND]


def describe() -> str:
    """The pipeline as text, one line per group of passes."""
    groups = (*PREFILL, ("sequences", (segments,)))
    lines = [f"{name:14} {' -> '.join(p.__name__ for p in passes)}" for name, passes in groups]
    return "\n".join([*lines, f"{'program':14} {' -> '.join(BACKEND)}"])
