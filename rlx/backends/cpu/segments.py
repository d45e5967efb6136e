"""Batches: a kernel that loops over segments and calls the kernels of a single sequence (see `rlx.ir.segments`).

There are two of them for an op: one for segments of one row, and one for segments of several. `select.py` finds both,
and this module wraps them before they are linked. Each segment has as many units as its kernel would have alone, so a
row gets the same bits as in a call of its own. How many that is, only the call knows. So workers take `PARTS` parts of
equal size, and a part is the share of all units that its number says:

    total = sum(units of segment for all segments)
    for segment: those of its units within begin * total / PARTS .. end * total / PARTS
        kernel(x + first_row * row_bytes, state + slot * slot_bytes, ..., seq=rows, past=past, units)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from llvmlite import ir

from rlx.backends.cpu.calls import SCRATCH, Call, Units
from rlx.backends.cpu.kernel import Kernel
from rlx.backends.cpu.layouts import ALIGN, LAYOUTS
from rlx.backends.cpu.target import Target
from rlx.backends.cpu.tiles import I32, I64, POINTER, Emitter, Index
from rlx.backends.cpu.work_stealing import CHUNKS
from rlx.errors import CompileError
from rlx.ir import dims
from rlx.ir.dims import SEGMENTS, SEQ, DimLike
from rlx.ir.node import Node
from rlx.ir.op_table import of_segment, roles
from rlx.ir.segments import FIRST_ROW, PAST, ROWS, SLOT, SLOT_WRITTEN

PARTS = CHUNKS  # the parts of a call, each a range of its own

_OF_SEGMENT = {"SEQ": 0, "PAST_SEQ": 0}  # symbols whose values a segment has


@dataclass(frozen=True)
class Stride:
    """Where a segment's part of a buffer begins: `nbytes` times a column of the segment, or its number.

    Attributes:
        column: None for the number.
    """

    column: int | None
    nbytes: DimLike


def segmented(node: Node, build: Callable[[Node], Call], target: Target) -> Call:
    """The call for a node with the attribute `segments`. `build` makes the call of a node without it.

    Raises:
        CompileError: the size of a buffer is not known at compile time.
    """
    one, several = (build(of_segment(node, rows)) for rows in (1, SEQ))
    calls = (several,) if one.kernel.symbol == several.kernel.symbol else (one, several)
    scratch = max(-(-_number(call.scratch, node) // ALIGN) * ALIGN for call in calls)
    args = tuple(dict.fromkeys(arg for call in calls for arg in call.args))
    strides = {arg: _stride(node, arg, scratch) for arg in args}
    extents = tuple(dict.fromkeys(_extents_of(calls, strides.values())))
    kernel = _Loop(node, calls, strides, extents, target).kernel()
    # In the call of a single segment, the result has the index that `segments` has here.
    table = len(node.inputs) - 1
    passed = (*(table + 1 if arg == table else arg for arg in args), table)
    return Call(node, kernel, passed, (SEGMENTS, *extents), Units(PARTS), SEGMENTS * scratch if scratch else 0)


def _number(size: DimLike, node: Node) -> int:
    if not isinstance(size, int):
        raise CompileError(f"a segment needs {size} bytes of scratch memory, which is no number", where=repr(node))
    return size


def strides(node: Node) -> list[Stride]:
    """The strides of a node's operands without `segments`, then that of its result."""
    return [_stride(node, arg, 0) for arg in range(len(node.inputs))]


def _stride(node: Node, arg: int, scratch: int) -> Stride:
    """The stride of the buffer of an operand, of the result or of the scratch memory."""
    operands, result = roles(node)
    if arg == SCRATCH:
        return Stride(None, scratch)
    role, value = (result, node) if arg == len(operands) else (operands[arg], node.inputs[arg])
    if role in "wc":
        return Stride(None, 0)
    *outer, width = value.shape[1:] or (1,)  # a number for each row
    if role == "p":
        return Stride(None, width * value.dtype.row_bytes(1))
    if role == "k" and isinstance(width, int):
        return Stride(SLOT, value.dtype.row_bytes(width))
    if not isinstance(width, int):
        raise CompileError(f"rows of {width} elements", where=repr(value), hint="Bind its symbol.")
    size = _product(outer) * LAYOUTS.size(value.dtype, (width,))
    return Stride({"r": FIRST_ROW, "s": SLOT, "a": SLOT_WRITTEN}[role], size)


def _product(sizes: Sequence[DimLike]) -> DimLike:
    """The product of sizes of which at most one is symbolic."""
    symbolic = [size for size in sizes if not isinstance(size, int)]
    number = prod(size for size in sizes if isinstance(size, int))
    return symbolic[0] * number if symbolic else number


def _extents_of(calls: Sequence[Call], strides: Iterable[Stride]) -> Iterator[dims.Dim]:
    """The dims that the kernel needs as extents: what the inner ones need, without what a segment adds to them."""
    needed = [dim for call in calls for dim in (*call.extents, call.units.dim)]
    for dim in (*(dims.bind(dim, _OF_SEGMENT) for dim in needed), *(stride.nbytes for stride in strides)):
        if isinstance(dim, dims.Dim):
            yield dim


class _Loop:
    """Generates the kernel that loops over segments.

    Buffers: those of the inner kernels, then `segments`. Extents: the number of segments, then `extents`.

    Args:
        calls: the calls for segments of one row and of several, or only one if both are the same.
        strides: of each argument of the calls.
    """

    def __init__(
        self,
        node: Node,
        calls: Sequence[Call],
        strides: dict[int, Stride],
        extents: Sequence[dims.Dim],
        target: Target,
    ) -> None:
        self.calls, self.strides = calls, strides
        self.columns = int(str(node.inputs[-1].shape[1]))
        self.names = {arg: name for call in calls for arg, name in zip(call.args, call.kernel.buffers, strict=True)}
        self.extents = {dim: f"extent_{i}" for i, dim in enumerate(extents)}
        buffers = [self.names[arg] for arg in strides]
        self.e = Emitter(target, [*buffers, "segments"], ["count", *self.extents.values()])
        self.functions = [self._declared(call.kernel) for call in calls]

    def _declared(self, kernel: Kernel) -> ir.Function:
        types = [POINTER] * len(kernel.buffers) + [I64] * (len(kernel.extents) + 2)
        return ir.Function(self.e.module, ir.FunctionType(ir.VoidType(), types), kernel.symbol)

    def kernel(self) -> Kernel:
        """The kernel."""
        e, count = self.e, self.e.args["count"]
        with e.loop(0, count, 1, [e.i64(0)]) as each:
            each.values = [e.b.add(each.values[0], self._units(each.i))]
        first, last = (e.b.udiv(e.b.mul(e.args[n], each.results[0]), e.i64(PARTS)) for n in ("begin", "end"))
        with e.loop(0, count, 1, [e.i64(0)]) as segment:
            start, units = segment.values[0], self._units(segment.i)
            own = e.smax(e.b.sub(first, start), 0), e.smin(e.b.sub(last, start), units)
            with e.when(e.b.icmp_signed("<", *own)):
                self._compute(segment.i, own)
            segment.values = [e.b.add(start, units)]
        made = e.finish("segments", self._outline())
        return replace(made, calls=tuple(call.kernel for call in self.calls))

    def _column(self, segment: ir.Value, column: int) -> ir.Value:
        e = self.e
        return e.b.sext(e.load(I32, e.at(e.args["segments"], (segment, 4 * self.columns), 4 * column), 4), I64)

    def _units(self, segment: ir.Value) -> ir.Value:
        """The number of units of a segment."""
        e, rows = self.e, self._column(segment, ROWS)
        counts = [self._count(call.units, segment, rows) for call in self.calls]
        count = counts[0] if len(counts) == 1 else e.b.select(self._is_one(rows), *counts)
        return e.b.select(e.b.icmp_signed(">", rows, e.i64(0)), count, e.i64(0))

    def _count(self, units: Units, segment: ir.Value, rows: ir.Value) -> ir.Value:
        e = self.e
        size = self._value(units.dim, segment, rows)
        if isinstance(size, int):
            return e.i64(units.most({}))
        count = e.b.mul(e.b.udiv(e.b.add(size, e.i64(units.per - 1)), e.i64(units.per)), e.i64(units.times))
        return count if units.busy is None else e.smin(units.busy, count)

    def _is_one(self, rows: ir.Value) -> ir.Value:
        return self.e.b.icmp_signed("==", rows, self.e.i64(1))

    def _value(self, dim: DimLike, segment: ir.Value, rows: ir.Value) -> Index:
        """The value of a dim for a segment."""
        if not isinstance(dim, dims.Dim):
            return dim
        e, terms = self.e, dict(dim.terms)
        value: Index = 0
        if factor := terms.get("SEQ"):
            value = e.mul_add(rows, factor)
        if factor := terms.get("PAST_SEQ"):
            value = e.mul_add(self._column(segment, PAST), factor, value)
        rest = dims.bind(dim, _OF_SEGMENT)
        more: Index = e.args[self.extents[rest]] if isinstance(rest, dims.Dim) else rest
        return e.mul_add(more, 1, value)

    def _compute(self, segment: ir.Value, units: tuple[ir.Value, ir.Value]) -> None:
        """Calls the kernel for some units of a segment."""
        e, rows = self.e, self._column(segment, ROWS)
        places = {arg: self._place(arg, segment) for arg in self.strides}
        if len(self.calls) == 1:
            self._call(0, segment, rows, places, units)
            return
        with e.b.if_else(self._is_one(rows)) as branches:
            for i, branch in enumerate(branches):
                with branch:
                    self._call(i, segment, rows, places, units)

    def _place(self, arg: int, segment: ir.Value) -> ir.Value:
        """Address of a segment's part of a buffer."""
        e, stride = self.e, self.strides[arg]
        index = segment if stride.column is None else self._column(segment, stride.column)
        nbytes = e.args[self.extents[stride.nbytes]] if isinstance(stride.nbytes, dims.Dim) else stride.nbytes
        return e.at(e.args[self.names[arg]], (index, nbytes))

    def _call(
        self,
        number: int,
        segment: ir.Value,
        rows: ir.Value,
        places: dict[int, ir.Value],
        units: tuple[ir.Value, ir.Value],
    ) -> None:
        e, call = self.e, self.calls[number]
        extents = [e.i64(self._value(dim, segment, rows)) for dim in call.extents]
        e.b.call(self.functions[number], [*(places[arg] for arg in call.args), *extents, *units])

    def _outline(self) -> str:
        """The readable outline of the loop."""
        columns = {FIRST_ROW: "first_row", SLOT: "slot", SLOT_WRITTEN: "slot_written", None: "segment"}
        moved = {
            arg: f"{self.names[arg]} + {columns[stride.column]} * {stride.nbytes}" if stride.nbytes else self.names[arg]
            for arg, stride in self.strides.items()
        }
        lines = ["for segment, (first_row, rows, past, slot) in enumerate(segments):"]
        for i, call in enumerate(self.calls):
            passed = ", ".join(moved[arg] for arg in call.args)
            condition = f"if rows {'==' if i == 0 else '>'} 1: " * (len(self.calls) > 1)
            lines.append(f"    {condition}{call.kernel.symbol}({passed})  # SEQ=rows, PAST_SEQ=past")
        return "\n".join([*lines, f"# the units begin .. end of {PARTS} equal parts of those of all segments"]) + "\n"
