"""A program without machine code: loop kernels as Python functions, all other nodes by their NumPy meaning."""

from __future__ import annotations

import numpy as np

from rlx.backends.cpu.segments import strides
from rlx.backends.device import Lowered
from rlx.backends.memory import Memory
from rlx.backends.program import Manifest
from rlx.backends.reference.evaluate import Evaluation
from rlx.backends.reference.evaluate import Memory as Values
from rlx.backends.reference.formats import Bytes
from rlx.backends.reference.program import Alone, ReferenceProgram
from rlx.backends.uncompiled.loop_kernels import LoopKernels, run
from rlx.ir import dims
from rlx.ir.node import Node
from rlx.ir.segments import PAST, ROWS, is_segmented


class UncompiledProgram(ReferenceProgram):
    """One instance of a program.

    Args:
        lowered, manifest, memory, workers: as for `ReferenceProgram`.
        kernels: the loop kernels.
    """

    def __init__(
        self, lowered: Lowered, manifest: Manifest, kernels: LoopKernels, memory: Memory, workers: Alone
    ) -> None:
        super().__init__(lowered, manifest, memory, workers)
        self._kernels = kernels

    def compute(self, node: Node, evaluation: Evaluation, result: Values) -> None:
        call = self._kernels.of(node)
        if call is None:
            super().compute(node, evaluation, result)
            return
        operands = [evaluation.memory(each, evaluation.nbytes(each)) for each in node.inputs]
        buffers = [*operands, result(node, evaluation.nbytes(node))]
        if not is_segmented(node):
            run(call, buffers, evaluation.env)
            return
        columns = evaluation.shape(node.inputs[-1])[1]
        table = operands[-1].view(np.int32).reshape(-1, columns)
        for number, segment in enumerate(table.tolist()):
            if segment[ROWS]:
                env = {**evaluation.env, "SEQ": segment[ROWS], "PAST_SEQ": segment[PAST]}
                run(call, _of_segment(node, buffers, number, segment, env), env)


def _of_segment(node: Node, buffers: list[Bytes], number: int, segment: list[int], env: dict[str, int]) -> list[Bytes]:
    """The parts of the buffers that belong to a segment, without that of the table of segments."""
    parts = []
    for stride, buffer in zip(strides(node), [*buffers[:-2], buffers[-1]], strict=True):
        index = number if stride.column is None else segment[stride.column]
        parts.append(buffer[index * dims.value(stride.nbytes, env) :])
    return parts
