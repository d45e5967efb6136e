"""The half of the CPU backend that generates code, behind one import.

A start from the compile cache needs none of it: `steps.py` and `backend.py` import this module when code is missing.
"""

from __future__ import annotations

import time

from rlx.backends.cpu import steps
from rlx.backends.cpu.kernels.linear.linear import linear
from rlx.backends.cpu.kernels.linear.peak import peak
from rlx.backends.cpu.kernels.packing.pack import pack
from rlx.backends.cpu.kernels.rows.choose import choose
from rlx.backends.cpu.launch.loop import runtime_llvm
from rlx.backends.cpu.launch.loop_functions import range_step, row_step
from rlx.backends.cpu.link import link_program
from rlx.backends.cpu.llvm import Module, Modules, assembly
from rlx.backends.cpu.loops import kernel_of
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


__all__ = [
    "Module",
    "Modules",
    "assembly",
    "build_program",
    "choose",
    "kernel_of",
    "linear",
    "pack",
    "peak",
    "range_step",
    "row_step",
    "runtime_llvm",
]
