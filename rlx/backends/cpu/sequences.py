"""Batches of sequences: a kernel that loops over rows and calls the kernel of a single row.

Each row is a separate sequence, with its own states and its own length. `select.py` finds the kernel for one row, and
this module wraps it before it is linked. The units are those of the inner kernel times the number of rows, so workers
share rows and heads. The result of a row has the same bits as in a batch of one:

    for unit in begin .. end:                           # the units of one row per call
        row, own = unit // of_a_row, unit % of_a_row
        kernel(x + row * row_bytes, state + slots[row] * slot_bytes, ..., past=lengths[row], own)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from llvmlite import ir

from rlx.backends.cpu.calls import SCRATCH, Call, Units
from rlx.backends.cpu.kernel import Kernel
from rlx.backends.cpu.target import Target
from rlx.backends.cpu.tiles import I32, I64, POINTER, Emitter
from rlx.errors import CompileError
from rlx.ir import dims
from rlx.ir.dims import DimLike
from rlx.ir.node import Node
from rlx.ir.sequences import roles
from rlx.passes.memory import ALIGN


@dataclass(frozen=True)
class _Step:
    """The stride of a buffer of the kernel: `nbytes` from one row to the next, or from one slot to the next."""

    by_slot: bool
    nbytes: DimLike


def by_sequence(node: Node, single: Call, target: Target) -> Call:
    """The call for a node whose rows are separate sequences. `single` is the call for one row of it.

    Raises:
        CompileError: the number of units per row is not known at compile time.
    """
    of_a_row = single.units.most({}) if isinstance(single.units.dim, int) else single.units.busy
    if of_a_row is None:
        raise CompileError(f"a row has {single.units}, which is no number yet", where=repr(node))
    scratch = -(-single.scratch * of_a_row // ALIGN) * ALIGN
    steps = [_step(node, arg, scratch) for arg in single.args]
    slots, past = len(node.inputs) - 2, len(node.inputs) - 1
    # In the call of a single row, the result has the index that `slots` has here.
    args = [past + 1 if arg == slots else arg for arg in single.args]
    extents = [dims.bind(extent, {"PAST_SEQ": 0}) for extent in single.extents]
    return replace(
        single,
        node=node,
        kernel=_loop(single, of_a_row, steps, target),
        args=(*args, slots, past),
        extents=(*extents, *(step.nbytes for step in steps if step.by_slot)),
        units=Units(node.inputs[past].shape[0], times=of_a_row),
        scratch=-(-scratch // of_a_row),
    )


def _step(node: Node, arg: int, scratch: int) -> _Step:
    """The stride of the buffer of an operand, of the result or of the scratch memory."""
    operands, result = roles(node.op, dict(node.attrs))
    if arg == SCRATCH:
        return _Step(False, scratch)
    role, value = (result, node) if arg == len(operands) else (operands[arg], node.inputs[arg])
    if role == "w":
        return _Step(False, 0)
    *outer, width = value.shape[1:]
    if not isinstance(width, int):
        raise CompileError(f"rows of {width} elements", where=repr(value), hint="Bind its symbol.")
    return _Step(role == "s", prod(outer) * value.dtype.row_bytes(width))


def _loop(single: Call, of_a_row: int, steps: Sequence[_Step], target: Target) -> Kernel:
    """The kernel that loops over rows.

    Its extents are those of the inner kernel, with `past` set to 0 in them, then the slot strides in bytes.
    """
    inner = single.kernel
    names = [f"slot_bytes_{name}" for name, step in zip(inner.buffers, steps, strict=True) if step.by_slot]
    e = Emitter(target, [*inner.buffers, "slots", "lengths"], [*inner.extents, *names])
    types = [POINTER] * len(inner.buffers) + [I64] * (len(inner.extents) + 2)
    function = ir.Function(e.module, ir.FunctionType(ir.VoidType(), types), inner.symbol)
    units, begin, end = e.i64(of_a_row), e.args["begin"], e.args["end"]
    first = e.b.udiv(begin, units)
    last = e.b.udiv(e.b.add(end, e.i64(of_a_row - 1)), units)
    with e.loop(first, last) as row:
        slot, past = (e.b.sext(e.load(I32, e.at(e.args[name], (row.i, 4)), 4), I64) for name in ("slots", "lengths"))
        start = e.b.mul(row.i, units)
        own = e.smax(e.b.sub(begin, start), 0), e.smin(of_a_row, e.b.sub(end, start))
        buffers = []
        for name, step in zip(inner.buffers, steps, strict=True):
            index, nbytes = (slot, e.args[f"slot_bytes_{name}"]) if step.by_slot else (row.i, step.nbytes)
            buffers.append(e.at(e.args[name], (index, nbytes)))
        extents = [
            e.mul_add(past, _times_past(dim), e.args[name])
            for name, dim in zip(inner.extents, single.extents, strict=True)
        ]
        e.b.call(function, [*buffers, *map(e.i64, extents), *own])
    kernel = e.finish("sequences", _outline(inner, of_a_row, steps))
    return replace(kernel, calls=(inner,))


def _times_past(dim: DimLike) -> int:
    """The coefficient of PAST_SEQ in a dim."""
    return dict(dim.terms).get("PAST_SEQ", 0) if isinstance(dim, dims.Dim) else 0


def _outline(inner: Kernel, of_a_row: int, steps: Sequence[_Step]) -> str:
    """The readable outline of the loop."""
    moved = [
        f"{name} + {'slots[row]' if step.by_slot else 'row'} * {step.nbytes}" if step.nbytes else name
        for name, step in zip(inner.buffers, steps, strict=True)
    ]
    return (
        f"for row in range(begin // {of_a_row}, ceil(end / {of_a_row})):  # units of a row: {of_a_row}\n"
        f"    {inner.symbol}({', '.join(moved)}, past=lengths[row])  # those of the row among begin .. end\n"
    )
