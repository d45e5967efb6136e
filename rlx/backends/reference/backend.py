"""The reference backend: the device "reference". Slow and exact; it shows what every other backend should compute."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from rlx.backends.device import Backend, Builder, Built, Code, Loadable, Lowered, OnKernel, Packer, manifest_of
from rlx.backends.host import HOST
from rlx.backends.memory import Buffer
from rlx.backends.reference.program import Alone, ReferenceProgram
from rlx.ir.dtypes import DType
from rlx.ir.ops import OPS
from rlx.passes import pipeline
from rlx.passes.capabilities import Capabilities, Layouts

#: Nothing is rounded but what the IR says, and no worker has memory of its own.
CAPABILITIES = Capabilities(bf16_dots=False, bf16_tiles=False, own_cost=0, own_cost_rows=0)


@dataclass(frozen=True)
class Target:
    """The reference has one level."""

    level: str = "reference"
    capabilities: Capabilities = CAPABILITIES

    @property
    def backend(self) -> Backend:
        """The reference backend."""
        return BACKEND

    @property
    def tuning(self) -> dict[str, int]:
        """None: nothing is tuned."""
        return {}

    def describe(self) -> dict[str, str]:
        """The level."""
        return {"level": self.level}


class Reference(Backend):
    """The device "reference"."""

    name, memory = "reference", HOST

    def target(self, level: str | None = None) -> Target:
        """The reference. Levels of other devices change nothing: there is no machine code."""
        return Target()

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
        """Copies matrices: they lie as in the file."""

        def pack(raw: NDArray[np.uint8], target: Buffer, n: int, k: int) -> None:
            target.write(np.ascontiguousarray(raw).reshape(-1))

        return Packer(partial(Layouts().matrix_bytes, dtype), pack)


BACKEND = Reference()
