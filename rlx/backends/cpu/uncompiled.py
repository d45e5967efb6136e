"""The device "cpu" with RLX_JIT=0: the same programs, after all passes and in the same memory, without machine code.

Loop kernels run as the Python functions that they are, over NumPy arrays, for a debugger; all other nodes by the
meaning of their ops, as on the device "reference".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlx.backends.cpu import layouts
from rlx.backends.cpu.backend import Cpu
from rlx.backends.cpu.formats import CpuFormats
from rlx.backends.cpu.kernel import SCRATCH, Call
from rlx.backends.cpu.launch.native import WorkerPool
from rlx.backends.cpu.loops import NoPythonForm, python_form, python_forms
from rlx.backends.cpu.segments import strides
from rlx.backends.cpu.select import select
from rlx.backends.cpu.steps import worker_loop
from rlx.backends.cpu.target import Target
from rlx.backends.device import Builder, Built, Code, Loadable, Loop, Lowered, OnKernel, Outcome, Packer, manifest_of
from rlx.backends.memory import Buffer, Memory
from rlx.backends.program import Manifest
from rlx.backends.reference.backend import Alone, ReferenceProgram
from rlx.backends.reference.evaluate import Evaluation, Weights
from rlx.backends.reference.evaluate import Memory as Values
from rlx.backends.reference.formats import Bytes
from rlx.errors import ArgumentError
from rlx.ir import dims
from rlx.ir.dims import SEQ
from rlx.ir.dtypes import DType
from rlx.ir.node import Node
from rlx.ir.op_table import of_segment
from rlx.ir.ops import OPS
from rlx.ir.segments import PAST, ROWS, is_segmented
from rlx.passes import pipeline
from rlx.passes.schedule import signature
from rlx.platform import cpu_count
from rlx.sampling.choice import Choose, choose_rows
from rlx.store.key import sources_of

Env = Mapping[str, int]


class Uncompiled(Cpu):
    """Loop kernels as the Python functions that they are; all other kernels by the NumPy meaning of their ops."""

    native_loops = False

    @property
    def sources(self) -> tuple[str, ...]:
        return sources_of("cpu", "reference")

    def build(self, program: Lowered, target: Target, on_kernel: OnKernel) -> Built:
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
        manifest = manifest_of(program, name) | {"signed_codes": target.isa.signed_codes}
        return Built(sources, manifest | lowered_for, len(sources))

    def load(self, stored: Loadable) -> Code:
        lowered = pipeline.place(stored.graph(), stored.options)
        kernels = LoopKernels(Target(*stored.manifest["target"]))
        return Code(partial(UncompiledProgram, lowered, stored.manifest, kernels, self.memory), 0)

    def workers(self, count: int, builder: Builder) -> Alone:  # type: ignore[override]
        return Alone(Weights(CpuFormats(_signed_codes(builder))))

    def packer(self, dtype: DType, workers: Alone, builder: Builder) -> Packer:  # type: ignore[override]
        """The packer of weights by the definition of their layout, see `layouts.py`."""
        signed = _signed_codes(builder)

        def pack(raw: NDArray[np.uint8], target: Buffer, n: int, k: int) -> None:
            target.write(layouts.pack(dtype, raw.reshape(-1), n, k, signed=signed))

        return Packer(partial(layouts.packed_bytes, dtype), pack)

    def prepare_packing(self, dtypes: object, builder: Builder) -> None:
        """Packing takes no code."""

    def prepare_choosing(self, builder: Builder) -> None:
        """Nor does the choice of tokens."""

    def chooser(self, workers: object, builder: Builder) -> Choose:
        return choose_rows

    def bandwidth(self, workers: object, nbytes: int) -> float:
        raise _no_speed()

    def peaks(self, workers: object, builder: Builder) -> dict[str, float]:
        raise _no_speed()

    def tune(self, *arguments: Any, **options: Any) -> Outcome:
        raise _no_speed()

    def loop(self, loop: Loop, workers: object, builder: Builder) -> Callable[..., None]:
        """Encoders of files are compiled all the same: as Python functions they would take days."""
        return super().loop(loop, WorkerPool(cpu_count(), worker_loop(builder)), builder)


UNCOMPILED = Uncompiled()


def _signed_codes(builder: Builder) -> bool:
    """Whether weights are packed with signed codes, as the target's machine code reads them."""
    return bool(builder.target.isa.signed_codes)


def _no_speed() -> ArgumentError:
    return ArgumentError("no speed to measure: there is no machine code", where="RLX_JIT", hint="Unset it.")


class LoopKernels:
    """Finds the call of a node's loop kernel.

    Args:
        target: the machine that the programs are lowered for.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._known: dict[object, Call | None] = {}

    def of(self, node: Node) -> Call | None:
        """The call of the loop kernel of a node, in its Python form; None if the node has another kind of kernel.

        Of a node with `segments` it is the kernel for a segment of several rows.
        """
        one = of_segment(node, SEQ) if is_segmented(node) else node
        key = signature((one,))
        if key not in self._known:
            self._known[key] = self._selected(one)
        call = self._known[key]
        return None if call is None else replace(call, node=one)

    def _selected(self, node: Node) -> Call | None:
        with python_forms():
            try:
                call = select(node, self._target)
            except NoPythonForm:
                return None
        return call if call.kernel.elements else None  # one without may be known from an earlier compile


def run(call: Call, buffers: Sequence[Bytes], env: Env) -> None:
    """Calls a kernel in its Python form for all of its units.

    Args:
        buffers: the bytes of each operand and of the result, uint8.
        env: the values of the symbols.
    """
    kernel = call.kernel
    function = python_form(kernel)
    scratch = np.zeros(dims.value(call.scratch, env), np.uint8)
    raw = [scratch if arg == SCRATCH else buffers[arg] for arg in call.args]
    arrays = [each.view(element) for each, element in zip(raw, kernel.elements, strict=True)]
    extents = [dims.value(extent, env) for extent in call.extents]
    with np.errstate(all="ignore"):  # integers wrap, quotients may be NaN
        function(*arrays, *extents, 0, call.units.at(env))


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
