"""The code of a program: its kernels are selected and linked while LLVM compiles those that are written."""

from __future__ import annotations

import time

from rlx.backends.cpu import steps
from rlx.backends.cpu.link import link_program
from rlx.backends.cpu.llvm import Modules
from rlx.backends.cpu.target import Target
from rlx.backends.cpu.trials import check_kernel
from rlx.backends.device import Built, Lowered, OnKernel
from rlx.tracing import span


def build_program(program: Lowered, target: Target, on_kernel: OnKernel) -> Built:
    """As `Backend.build`."""
    start = time.perf_counter()
    with Modules(target, steps.recent(target)) as modules:
        count = (0, 1)

        def counted(done: int, total: int) -> None:
            nonlocal count
            count = done, total
            on_kernel(*count)

        with span("generate the kernels", "compile"):
            linked = link_program(program, target, modules.add, counted)
        generated = time.perf_counter()
        with span("wait for LLVM", "compile"):
            compiled = modules.results(lambda: on_kernel(*count))
    for call in linked.custom:
        check_kernel(call, compiled[f"kernels/{call.kernel.symbol}"].code, program.graph.bounds)
    files = steps.files_of(compiled)
    seconds = {"kernels": generated - start, "llvm": time.perf_counter() - generated}
    files |= {f"kernels/{symbol}.txt": kernel.source for symbol, kernel in linked.kernels.items()}
    return Built(files, linked.manifest, len(linked.kernels), seconds)
