"""Makes the files of a program: runs the passes and the backend, and keeps what each of them did.

Compiler, at a miss of the cache; `compile.py` imports it only then.
"""

from __future__ import annotations

import json
import time

from rlx.backends.device import Backend, OnKernel, Target, uses
from rlx.compiler.inspection import REPORT
from rlx.ir.custom import used_by
from rlx.ir.custom_trials import check_meanings
from rlx.ir.graph import Graph
from rlx.passes import pipeline
from rlx.passes.options import Options
from rlx.passes.report import Event, PassReport, Report, fold
from rlx.tracing import span


def build_program(
    graph: Graph, options: Options, target: Target, backend: Backend, on_kernel: OnKernel
) -> dict[str, bytes | str]:
    """The files of a program's entry: code, manifest, and readable forms of every stage.

    Args:
        backend: that of the target when the compiler was made: the environment may name another one by now.
        on_kernel: called with the number of kernels generated so far, and the total.
    """
    files: dict[str, bytes | str] = {}
    start = time.perf_counter()
    reports: list[PassReport] = []
    dump: pipeline.Hook = lambda stage, result: files.update({f"ir/{stage}.txt": str(result)})  # noqa: E731
    check_meanings(graph.nodes(), graph.bounds)
    with span("passes", "compile"):
        program = pipeline.lower(graph, options, dump, reports, backend.passes(options.phase))
    check_meanings(program.graph.nodes(), program.graph.bounds)  # those that `fuse` put in
    custom = used_by(graph.nodes(), fused="custom" in options.fusions)
    files |= {f"ops/{name}.txt": op.source for name, op in custom.items()}
    seconds = {"passes": time.perf_counter() - start}
    built = backend.build(program, target, on_kernel)
    files |= built.files
    files["manifest.json"] = json.dumps(built.manifest)
    kernels = fold(Event(symbol, name) for symbol, name in uses(program, built.manifest))
    report = Report(graph.name, options.phase, options.seq, options.precision, tuple(reports), kernels)
    files[REPORT] = report.to_json()
    rounded = {name: round(spent, 4) for name, spent in (seconds | {**built.seconds}).items()}
    files["stats.json"] = json.dumps({"seconds": rounded, "kernels": built.kernels}, indent=1)
    return files
