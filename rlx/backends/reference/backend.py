"""The reference backend: the device "reference". Slow and exact; it shows what every other backend should compute."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from rlx.backends import backend
from rlx.backends.cpu import layouts
from rlx.backends.cpu.target import Target as CpuTarget
from rlx.backends.device import Backend, Builder, Built, Code, Loadable, Lowered, OnKernel, Packer, manifest_of
from rlx.backends.host import HOST
from rlx.backends.memory import Buffer
from rlx.backends.reference.program import Alone, ReferenceProgram
from rlx.ir.dtypes import DType
from rlx.ir.ops import OPS
from rlx.passes import pipeline
from rlx.passes.capabilities import Capabilities


@dataclass(frozen=True)
class Target:
    """The reference for one CPU: programs are lowered as for it, and hold the same values.

    Attributes:
        capabilities: those of the CPU.
    """

    capabilities: Capabilities
    level: str = "reference"

    @property
    def backend(self) -> Backend:
        """The reference backend."""
        return backend("reference")

    @property
    def tuning(self) -> dict[str, int]:
        """None: nothing is tuned."""
        return {}

    def describe(self) -> dict[str, str]:
        """The level, and the capabilities of the CPU."""
        return {"level": self.level, **{name: str(value) for name, value in asdict(self.capabilities).items()}}


class Reference(Backend):
    """The device "reference"."""

    name, memory = "reference", HOST

    def target(self, level: str | None = None) -> Target:
        """The reference for this machine's CPU at a level."""
        return Target(CpuTarget.host(level).capabilities)

    def build(self, program: Lowered, target: Target, on_kernel: OnKernel) -> Built:
        """Makes no code: the meaning of each op stands for its kernel."""
        nodes = [node for some in (*program.prologues, *program.regions) for node in some]
        on_kernel(len(nodes), len(nodes))
        ops = sorted({node.op for node in nodes})
        sources = {f"kernels/{op}.txt": f"# {(OPS[op].meaning.__doc__ or op).strip()}\n" for op in ops}
        return Built(sources, manifest_of(program, lambda node: node.op), len(ops))

    def load(self, stored: Loadable) -> Code:
        lowered = pipeline.place(stored.graph(), stored.options)
        return Code(partial(ReferenceProgram, lowered, stored.manifest, self.memory), 0)

    def workers(self, count: int, builder: Builder) -> Alone:
        """The calling thread, whatever the count."""
        return Alone()

    def packer(self, dtype: DType, workers: Alone, builder: Builder) -> Packer:
        return packer(dtype)


def packer(dtype: DType, *, signed: bool = False) -> Packer:
    """What packs weights by the definition of their layout, see `rlx.backends.cpu.layouts`.

    Args:
        signed: codes of 8 bits are signed bytes.
    """

    def pack(raw: NDArray[np.uint8], target: Buffer, n: int, k: int) -> None:
        target.write(layouts.pack(dtype, raw.reshape(-1), n, k, signed=signed))

    return Packer(partial(layouts.packed_bytes, dtype), pack)


BACKEND = Reference()
