"""The pipeline: one list of passes in named phases, from a symbolic graph to a program with its memory planned.

`print(rlx.passes.pipeline.describe())` prints it. After each pass the verifier runs, then the hook of who wants to see
the result.
"""

from __future__ import annotations

from collections.abc import Callable

from rlx.ir.graph import Graph
from rlx.ir.verify import verify
from rlx.passes.fuse import fuse
from rlx.passes.last_row import last_row
from rlx.passes.layout import layout
from rlx.passes.memory import check_memory, memory
from rlx.passes.options import Options
from rlx.passes.program import Program
from rlx.passes.quantize import quantize
from rlx.passes.schedule import schedule, verify_schedule
from rlx.passes.sequences import sequences
from rlx.passes.simplify import simplify
from rlx.passes.specialize import specialize

Pass = Callable[[Graph, Options], Graph]
Hook = Callable[[str, "Graph | Program"], None]

PREFILL: tuple[tuple[str, tuple[Pass, ...]], ...] = (
    ("algebra", (simplify,)),
    ("extents", (last_row, specialize)),
    ("arithmetic", (quantize,)),
    ("fusion", (fuse,)),
    ("memory layout", (layout,)),
)
# A decode step has one row, a batch one of each sequence: there is no last one to select.
DECODE = tuple((phase, tuple(p for p in passes if p is not last_row)) for phase, passes in PREFILL)
BATCH = (*DECODE, ("sequences", (sequences,)))
BACKEND = ("schedule", "memory")


def lower(graph: Graph, options: Options, hook: Hook | None = None) -> Program:
    """Runs the whole pipeline; the verifier runs after each pass, then `hook(stage name, result)`."""
    hook = hook or (lambda stage, result: None)
    verify(graph)
    hook("00-graph", graph)
    phases = {"prefill": PREFILL, "decode": DECODE, "batch": BATCH}[options.phase]
    passes = [p for _, group in phases for p in group]
    for i, run in enumerate(passes, 1):
        graph = run(graph, options)
        verify(graph)
        hook(f"{i:02}-{run.__name__}", graph)
    return _backend(graph, options, len(passes) + 1, hook)


def _backend(graph: Graph, options: Options, at: int, hook: Hook) -> Program:
    program = schedule(graph, options)
    verify_schedule(program)
    hook(f"{at:02}-schedule", program)
    program = memory(program, reuse="reuse_memory" in options.passes)
    check_memory(program)
    hook(f"{at + 1:02}-memory", program)
    return program


def describe() -> str:
    """The pipeline as text, a line a phase."""
    groups = (*PREFILL, ("of a batch", (sequences,)))
    lines = [f"{name:14} {' -> '.join(p.__name__ for p in passes)}" for name, passes in groups]
    return "\n".join([*lines, f"{'program':14} {' -> '.join(BACKEND)}"])
