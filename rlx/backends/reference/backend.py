"""The reference backend: the device "reference". Slow and exact; it shows what every other backend should compute.

A program computes its nodes in order, each by its NumPy meaning. The arena, the private memory of prologues, the packed
weights and the states are those that native code would use.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from rlx.backends.device import Backend, Builder, Built, Code, Loadable, Lowered, OnKernel, Packer, manifest_of
from rlx.backends.host import HOST
from rlx.backends.memory import Buffer, Memory
from rlx.backends.program import Manifest, Program, StepClocks, StepLog
from rlx.backends.reference.evaluate import Evaluation, Used, Weights
from rlx.backends.reference.evaluate import Memory as Values
from rlx.backends.reference.formats import Bytes, Formats
from rlx.ir.dtypes import DType
from rlx.ir.node import Node
from rlx.ir.ops import OPS
from rlx.passes import pipeline
from rlx.passes.capabilities import Capabilities, Layouts
from rlx.passes.program import root


@dataclass(frozen=True)
class Alone:
    """The one worker of the reference backend: the thread that calls a program. It keeps decoded weights."""

    weights: Weights = field(default_factory=lambda: Weights(Formats()))
    n: int = 1

    def close(self) -> None:
        """Drops the weights."""
        self.weights.clear()


class ReferenceProgram(Program):
    """One instance of a program.

    Args:
        lowered: the program after all passes.
        manifest: its description.
        memory: that of its values.
        workers: keeps decoded weights for all programs.
    """

    def __init__(self, lowered: Lowered, manifest: Manifest, memory: Memory, workers: Alone) -> None:
        super().__init__(manifest, workers.n, memory)
        self._lowered, self._weights = lowered, workers.weights
        self._recorded = False
        self._marks = np.zeros((len(lowered.regions) + sum(map(len, lowered.regions)), 3), np.int64)

    def record(self, logs: bool) -> None:
        self._recorded = logs

    @property
    def log(self) -> StepLog | None:
        """The clocks of the last step. The one worker computes each node as a whole: one unit."""
        if not self._recorded:
            return None
        found = StepClocks(self.times[None].copy(), self._marks[None, None].copy())
        return StepLog(1, self.times.nbytes + self._marks.nbytes, lambda: found)

    def launch(self) -> None:
        program = self._lowered
        marks = iter(self._marks)
        self.times[0, 0] = time.perf_counter_ns()
        used = parts_in_use(program, partial(self._operand, 0), self.extents)
        for i, (prologue, region) in enumerate(zip(program.prologues, program.regions, strict=True)):
            evaluation = Evaluation(partial(self._operand, i), self.extents, self._weights, used)
            next(marks)[:] = self._computed(evaluation, prologue, replicated=True)
            for node in region:
                next(marks)[:] = self._computed(evaluation, (node,), replicated=False)
            self.times[0, i + 1] = time.perf_counter_ns()

    def _computed(self, evaluation: Evaluation, nodes: Sequence[Node], replicated: bool) -> tuple[int, int, int]:
        """Computes some nodes; returns their mark, see `StepClocks`."""
        if not nodes:
            return 0, 0, 0
        start = time.perf_counter_ns()
        for node in nodes:
            self.compute(node, evaluation, partial(self.place_of_result, replicated=replicated))
        return start, time.perf_counter_ns(), 1

    def compute(self, node: Node, evaluation: Evaluation, result: Values) -> None:
        """Computes one node.

        Args:
            evaluation: of the step; its memory is that of the node's operands.
            result: where results go.
        """
        evaluation.write(node, *evaluation.result(node), result)

    def bytes_of(self, buffer: Buffer) -> Bytes:
        """Memory of this device, to read and to write."""
        view = buffer.view()
        assert view is not None, "the memory of the host"
        return view

    def _operand(self, region: int, node: Node, nbytes: int) -> Bytes:
        return self.bytes_of(self.memory_of(self._lowered.operand(node, region), nbytes))

    def place_of_result(self, node: Node, nbytes: int, replicated: bool) -> Bytes:
        """The bytes that a node's result goes to."""
        placed = self._lowered.replicated if replicated else None
        return self.bytes_of(self.memory_of((placed or {}).get(root(node)) or self._lowered.buffer(node), nbytes))


def parts_in_use(lowered: Lowered, memory: Values, env: Mapping[str, int]) -> Used:
    """The parts of states that the next step uses; its inputs are set."""
    plain = Evaluation(memory, env, Weights(Formats()), Used({}, {}))
    return Used.of(lowered.graph, lambda node: plain.value(node, memory), env)


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
