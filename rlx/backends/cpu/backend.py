"""The CPU backend: native code for this machine's instruction set, run by worker threads."""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import partial

import numpy as np

from rlx.backends.cpu import link, machine, steps
from rlx.backends.cpu.calls import Units
from rlx.backends.cpu.launch.code import NativeCode
from rlx.backends.cpu.launch.native import NativeProgram
from rlx.backends.cpu.launch.threads import WorkerPool
from rlx.backends.cpu.layouts import packed_bytes, row_blocks
from rlx.backends.cpu.target import Target
from rlx.backends.cpu.work_stealing import grain
from rlx.backends.device import Backend, Builder, Built, Code, Loadable, Lowered, OnKernel, Packer
from rlx.backends.host import HOST, address
from rlx.backends.memory import Buffer
from rlx.ir.dtypes import DType
from rlx.tracing import span


class Cpu(Backend):
    """The device "cpu"."""

    name, memory, native_loops = "cpu", HOST, True

    def target(self, level: str | None = None) -> Target:
        return Target.host(level)

    def build(self, program: Lowered, target: Target, on_kernel: OnKernel) -> Built:
        from rlx.backends.cpu.llvm import Modules

        start = time.perf_counter()
        with Modules(target, steps.recent(target)) as modules:
            count = (0, 1)

            def counted(done: int, total: int) -> None:
                nonlocal count
                count = done, total
                on_kernel(*count)

            with span("generate the kernels", "compile"):
                linked = link.link_program(program, target, modules.add, counted)
            generated = time.perf_counter()
            with span("wait for LLVM", "compile"):
                compiled = modules.results(lambda: on_kernel(*count))
        for call in linked.custom:
            from rlx.backends.cpu.trials import check_kernel

            check_kernel(call, compiled[f"kernels/{call.kernel.symbol}"].code, program.graph.bounds)
        files = steps.files_of(compiled)
        seconds = {"kernels": generated - start, "llvm": time.perf_counter() - generated}
        files |= {f"kernels/{symbol}.txt": kernel.source for symbol, kernel in linked.kernels.items()}
        return Built(files, linked.manifest, len(linked.kernels), seconds)

    def load(self, stored: Loadable) -> Code:
        objects = steps.objects(stored.files)
        return Code(partial(NativeProgram, NativeCode(objects, ["step"]), stored.manifest), sum(map(len, objects)))

    def workers(self, count: int, builder: Builder) -> WorkerPool:
        return WorkerPool(count, steps.worker_loop(builder))

    def packer(self, dtype: DType, workers: WorkerPool, builder: Builder) -> Packer:
        (step,) = (code := steps.packing(builder, dtype)).addresses.values()

        def pack(raw: np.ndarray, target: Buffer, n: int, k: int) -> None:
            assert raw.flags.c_contiguous and code.addresses  # the code lives as long as this function
            units = row_blocks(n)
            context = np.array([raw.ctypes.data, address(target), n, k, units, grain(Units(units), {}), 0], np.int64)
            workers.share(step, context.ctypes.data)

        return Packer(partial(packed_bytes, dtype), pack)

    def prepare_packing(self, dtypes: Iterable[DType], builder: Builder) -> None:
        for dtype in dtypes:
            steps.packing(builder, dtype)

    def bandwidth(self, workers: WorkerPool, nbytes: int) -> float:
        return machine.read_bandwidth(workers, nbytes=nbytes)

    def peaks(self, workers: WorkerPool, builder: Builder) -> dict[str, float]:
        return machine.arithmetic_peaks(builder, workers)

    def assembly(self, text: str, target: Target) -> str:
        from rlx.backends.cpu.llvm import assembly

        return assembly(text, target)


BACKEND = Cpu()
