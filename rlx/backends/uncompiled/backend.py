"""The device "cpu" with RLX_JIT=0: the same programs, after all passes and in the same memory, without machine code."""

from __future__ import annotations

from functools import partial

from rlx.backends.cpu.target import Target
from rlx.backends.device import Builder, Built, Code, Loadable, Lowered, OnKernel, Packer, manifest_of
from rlx.backends.reference.backend import Reference, packer
from rlx.backends.reference.evaluate import Weights
from rlx.backends.reference.program import Alone
from rlx.backends.uncompiled.loop_kernels import LoopKernels
from rlx.backends.uncompiled.program import UncompiledProgram
from rlx.errors import ArgumentError
from rlx.ir.dtypes import DType
from rlx.ir.node import Node
from rlx.ir.ops import OPS
from rlx.passes import pipeline


class Uncompiled(Reference):
    """Loop kernels as the Python functions that they are; all other kernels by the NumPy meaning of their ops."""

    name = "cpu"

    def target(self, level: str | None = None) -> Target:  # type: ignore[override]
        return Target.host(level)

    def build(self, program: Lowered, target: Target, on_kernel: OnKernel) -> Built:  # type: ignore[override]
        """Makes no code. The sources are those of the Python functions, or say what an op means."""
        nodes = [node for some in (*program.prologues, *program.regions) for node in some]
        kernels, sources = LoopKernels(target), dict[str, str]()

        def name(node: Node) -> str:
            call = kernels.of(node)
            text = f"# {(OPS[node.op].meaning.__doc__ or node.op).strip()}\n" if call is None else call.kernel.source
            found = node.op if call is None else call.kernel.symbol
            sources[f"kernels/{found}.txt"] = text
            return found

        for done, node in enumerate(nodes):
            on_kernel(done, len(nodes))
            name(node)
        lowered_for = {"target": [target.level, target.triple, target.cpu, target.features]}
        manifest = manifest_of(program, name, signed_codes=target.isa.signed_codes)
        return Built(sources, manifest | lowered_for, len(sources))

    def load(self, stored: Loadable) -> Code:
        lowered = pipeline.place(stored.graph(), stored.options)
        kernels = LoopKernels(Target(*stored.manifest["target"]))
        return Code(partial(UncompiledProgram, lowered, stored.manifest, kernels, self.memory), 0)

    def workers(self, count: int, builder: Builder) -> Alone:
        return Alone(Weights(_signed_codes(builder)))

    def packer(self, dtype: DType, workers: Alone, builder: Builder) -> Packer:
        return packer(dtype, signed=_signed_codes(builder))

    def bandwidth(self, workers: Alone, nbytes: int) -> float:
        raise _no_speed()

    def peaks(self, workers: Alone, builder: Builder) -> dict[str, float]:
        raise _no_speed()


def _signed_codes(builder: Builder) -> bool:
    """Whether weights are packed with signed codes, as the target's machine code reads them."""
    return bool(builder.target.isa.signed_codes)


def _no_speed() -> ArgumentError:
    return ArgumentError("no speed to measure: there is no machine code", where="RLX_JIT", hint="Unset it.")


BACKEND = Uncompiled()
