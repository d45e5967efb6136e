"""The loop kernels of a program as Python functions over NumPy arrays, and calls of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from rlx.backends.cpu.calls import SCRATCH, Call, Units
from rlx.backends.cpu.loops import NoPythonForm, python_form, python_forms
from rlx.backends.cpu.select import select
from rlx.backends.cpu.target import Target
from rlx.backends.reference.formats import Bytes
from rlx.ir import dims
from rlx.ir.dims import SEQ
from rlx.ir.node import Node
from rlx.ir.op_table import of_segment
from rlx.ir.segments import is_segmented
from rlx.passes.schedule import signature

Env = Mapping[str, int]


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
        function(*arrays, *extents, 0, _count(call.units, env))


def _count(units: Units, env: Env) -> int:
    count = -(-dims.value(units.dim, env) // units.per) * units.times
    return count if units.busy is None else min(count, units.busy)
