"""The CPU backend: native code for this machine's instruction set, run by worker threads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.backends import cpu
from rlx.backends.cpu import launch, steps
from rlx.backends.cpu.chooser import Chooser
from rlx.backends.cpu.kernel import Units
from rlx.backends.cpu.launch.code import NativeCode
from rlx.backends.cpu.launch.native import NativeProgram, WorkerPool
from rlx.backends.cpu.layouts import packed_bytes, row_blocks
from rlx.backends.cpu.target import Target, feature_use, processor_features, supported_levels
from rlx.backends.cpu.tuning import Tuning
from rlx.backends.cpu.work_stealing import grain
from rlx.backends.device import (
    Backend,
    Builder,
    Built,
    Code,
    FeatureUse,
    Loadable,
    Loop,
    Lowered,
    OnKernel,
    Outcome,
    Packer,
    no_form,
)
from rlx.backends.host import HOST, address
from rlx.backends.memory import Buffer
from rlx.backends.program import Manifest, Program
from rlx.ir.dtypes import DType
from rlx.sampling.choice import Choose
from rlx.store.key import compiler_versions

if TYPE_CHECKING:
    from rlx.backends.drafts import Heads, Rounds
    from rlx.backends.reference.formats import Formats

_GRAINS = 64  # ranges of units that the workers of a loop take


class Cpu(Backend):
    """The device "cpu"."""

    name, memory, native_loops, native_rounds = "cpu", HOST, True, True

    def versions(self) -> Mapping[str, Any]:
        return compiler_versions()

    def without_code(self) -> Backend:
        return cpu.uncompiled.UNCOMPILED

    def target(self, level: str | None = None) -> Target:
        return Target.host(level)

    def build(self, program: Lowered, target: Target, on_kernel: OnKernel) -> Built:
        built: Built = steps.compiling().build_program(program, target, on_kernel)
        return built

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

    def prepare_choosing(self, builder: Builder) -> None:
        steps.choosing(builder)

    def chooser(self, workers: WorkerPool, builder: Builder) -> Choose:
        return Chooser(workers, builder)

    def bandwidth(self, workers: WorkerPool, nbytes: int) -> float:
        return cpu.machine.read_bandwidth(workers, nbytes=nbytes)

    def peaks(self, workers: WorkerPool, builder: Builder) -> dict[str, float]:
        return cpu.machine.arithmetic_peaks(builder, workers)

    def assembly(self, text: str, target: Target, form: str | None = None) -> str:
        if form is not None:
            raise no_form(self.name, form)
        return str(steps.compiling().assembly(text, target))

    def formats(self, manifest: Manifest) -> Formats:
        return cpu.formats.CpuFormats(manifest["signed_codes"])

    def stored_assembly(self, described: Mapping[str, Any], text: str, code: bytes) -> str:
        level, triple, cpu, features = (str(described[word]) for word in ("level", "triple", "cpu", "features"))
        target = Target(level, triple, cpu, features)
        generate = steps.compiling()
        with generate.Module(text, target) as module:
            same = module.emit() == code
        with generate.Module(text, target) as module:
            warning = "" if same else "# not exactly the stored code: it was made by another version of LLVM\n"
            return f"{warning}{module.assembly()}"

    def levels(self) -> list[str]:
        return list(supported_levels(processor_features()))

    def feature_use(self, target: Target) -> FeatureUse:
        return feature_use(target, processor_features())

    def default_tuning(self, target: Target) -> Tuning:
        return target.default_tuning

    def with_tuning(self, target: Target, tuning: Mapping[str, int]) -> Target:
        return target if target.tuned else replace(target, tuned=Tuning(**tuning))

    def tune(
        self,
        target: Target,
        workers: WorkerPool,
        builders: Callable[[Target], Builder],
        seconds: float,
        progress: Callable[[int, int], None],
    ) -> Outcome:
        autotune = cpu.autotune
        nbytes = autotune.weight_bytes()
        plan = autotune.stages(target, nbytes)
        with autotune.Bench(target, workers, nbytes, builders) as bench:
            return autotune.tune(plan, target.default_tuning, bench, seconds, progress)

    def rounds(self, models: tuple[Program, Program], heads: Heads, **limits: Any) -> Rounds:
        return launch.drafts.run_rounds(models, heads, **limits)

    def loop(self, loop: Loop, workers: WorkerPool, builder: Builder) -> Callable[..., None]:
        code = steps.step_of(
            builder,
            lambda generate: generate.kernel_of(loop),
            what=loop.what,
            kind=loop.kind,
            name=loop.name,
            options={"source": loop.version},
        )
        (step,) = code.addresses.values()

        def run(*given: Any) -> None:
            assert code.addresses  # the code lives as long as this function
            *values, units = (each.ctypes.data if isinstance(each, np.ndarray) else each for each in given)
            context = np.array([*values, units, max(1, units // _GRAINS), 0], np.int64)
            workers.share(step, context.ctypes.data)

        return run


BACKEND = Cpu()
