"""Batches: a kernel that loops over segments and calls the kernels of a single sequence (see `rlx.ir.segments`).

There are two of them for an op: one for segments of one row, and one for segments of several. `select.py` finds both,
and this module wraps them before they are linked. Each segment has as many units as its kernel would have alone, so a
row gets the same bits as in a call of its own. How many that is, only the call knows. So workers take parts of equal
work, and a part is the share of all work that its number says:

    total = sum(work of run for all runs)
    for run: those of its units within begin * total / parts .. end * total / parts
        kernel(x + first_row * row_bytes, state + slot * slot_bytes, ..., seq=rows, past=past, units)

A run is a segment, or some adjacent segments of one row whose sequences have their first pages in common: attention
takes these at once, and reads the keys and values in those pages once for all of them. The page tables tell which
pages are the same. A unit of a run is the same unit of all of its segments.

The work of a segment is its number of units. For attention it is its rows times the positions that they see, half of
them where a run has read them already; such units are large, so there are more parts.

Paged cache writes are made in the same way: a kernel that calls the kernel of a contiguous cache once for each page
that a call touches.

Position p of page j lies 64 * (pages[j] - j) places after place p. So the rows of a page are written by the contiguous
kernel with its start moved by that distance:

    for page in those of positions past + begin / heads .. past + (end - 1) / heads:
        kernel(..., past=past + 64 * (pages[page] - page))  # the units of begin .. end in this page

A decode step writes one row, so it looks up one page. What it writes to is in no cache of the CPU, and for a head of
keys that is a whole tile of 16 positions. So the memory of the call's heads is prefetched before the first is written,
with that of as many heads after them, which the worker usually writes next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llvmlite import ir

from rlx.backends.cpu.kernel import CHUNKS, SCRATCH, Call, Kernel, Units, symbol
from rlx.backends.cpu.layouts import ALIGN, LAYOUTS, PAGE
from rlx.backends.cpu.loops import is_python_only, python_form
from rlx.backends.cpu.target import Target
from rlx.backends.cpu.tiles import I32, I64, VOID, Emitter, Index
from rlx.backends.sizes import extent
from rlx.errors import CompileError
from rlx.ir import dims
from rlx.ir.dims import SEGMENTS, SEQ, DimLike
from rlx.ir.node import Node
from rlx.ir.op_table import of_segment, roles
from rlx.ir.segments import FIRST_ROW, PAST, ROWS, SLOT, SLOT_WRITTEN

PARTS = 2 * CHUNKS  # the parts of a call whose work grows with the past; other calls have CHUNKS

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
    parts = PARTS if one.reads_past else CHUNKS
    # In the call of a single segment, the result has the index that `segments` has here.
    table = len(node.inputs) - 1
    passed = (*(table + 1 if arg == table else arg for arg in args), table)
    return Call(
        node, kernel, passed, (SEGMENTS, *extents), Units(parts, ranges=parts), SEGMENTS * scratch if scratch else 0
    )


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
    size = extent(outer, value) * LAYOUTS.size(value.dtype, (width,))
    return Stride({"r": FIRST_ROW, "s": SLOT, "a": SLOT_WRITTEN}[role], size)


def _extents_of(calls: Sequence[Call], strides: Iterable[Stride]) -> Iterator[dims.Dim]:
    """The dims that the kernel needs as extents: what the inner ones need, without what a segment adds to them."""
    needed = [dim for call in calls for dim in (*call.extents, call.units.dim)]
    for dim in (*(dims.bind(dim, _OF_SEGMENT) for dim in needed), *(stride.nbytes for stride in strides)):
        if isinstance(dim, dims.Dim):
            yield dim


@dataclass(frozen=True)
class Run:
    """Segments that are computed at once, as run-time values.

    Attributes:
        first: the number of the first one.
        rows: the rows of each; 0 for none.
        past: the largest number of tokens before them.
        count: how many segments they are.
        shared: the positions that are in the same pages for all.
        seen: the sum of the positions that the rows see.
    """

    first: ir.Value
    rows: ir.Value
    past: ir.Value
    count: ir.Value
    shared: ir.Value
    seen: ir.Value

    def values(self) -> list[ir.Value]:
        return [self.first, self.rows, self.past, self.count, self.shared, self.seen]


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
        self.names = {arg: name for call in calls for arg, name in zip(call.args, call.kernel.buffers, strict=False)}
        self.extents = {dim: f"extent_{i}" for i, dim in enumerate(extents)}
        buffers = [self.names[arg] for arg in strides]
        self.e = Emitter(target, [*buffers, "segments"], ["count", *self.extents.values()])
        self.parts = PARTS if calls[0].reads_past else CHUNKS

    def kernel(self) -> Kernel:
        """The kernel."""
        e, zero = self.e, self.e.i64(0)
        total = self._each_run(lambda run, work, done: None)
        first, last = (e.b.udiv(e.b.mul(e.args[n], total), e.i64(self.parts)) for n in ("begin", "end"))

        def compute(run: Run, work: ir.Value, done: ir.Value) -> None:
            own = e.b.sub(first, done), e.b.sub(last, done)  # of the run's work
            with e.when(e.b.icmp_signed("<", e.smax(own[0], zero), e.smin(own[1], work))):
                self._compute(run, [self._unit(run, at, work) for at in own])

        self._each_run(compute)
        made = e.finish("segments", self._outline())
        return replace(made, calls=tuple(call.kernel for call in self.calls))

    def _column(self, segment: Index, column: int) -> ir.Value:
        e = self.e
        return e.b.sext(e.load(I32, e.at(e.args["segments"], (segment, 4 * self.columns), 4 * column), 4), I64)

    # --- runs ---------------------------------------------------------------------------------------------------------

    def _each_run(self, body: Callable[[Run, ir.Value, ir.Value], None]) -> ir.Value:
        """Emits `body` for each run, with its work and that of those before. Returns the work of all."""
        e, zero, one = self.e, self.e.i64(0), self.e.i64(1)
        if self.calls[0].joins == 1:
            with e.loop(0, e.args["count"], 1, [zero]) as loop:
                run = self._alone(loop.i)
                work, done = self._work(run), loop.values[0]
                body(run, work, done)
                loop.values = [e.b.add(done, work)]
            return loop.results[0]
        # A run ends where the next segment does not join it, so each one is handled with the segment after it.
        count = e.args["count"]
        with e.loop(1, e.b.add(count, one), 1, [zero, *self._alone(zero).values()]) as loop:
            done, run = loop.values[0], Run(*loop.values[1:])
            following = e.smin(loop.i, e.b.sub(count, one))
            more, joins = self._joined(run, following, e.b.icmp_signed("<", loop.i, count))
            work = e.b.select(joins, zero, self._work(run))
            body(run, work, done)
            chosen = zip(more.values(), self._alone(following).values(), strict=True)
            loop.values = [e.b.add(done, work), *(e.b.select(joins, *pair) for pair in chosen)]
        return loop.results[0]

    def _alone(self, segment: ir.Value) -> Run:
        """The run of a single segment."""
        b, rows, past = self.e.b, self._column(segment, ROWS), self._column(segment, PAST)
        return Run(segment, rows, past, self.e.i64(1), self.e.i64(0), b.mul(rows, b.add(past, rows)))

    def _joined(self, run: Run, segment: ir.Value, there: ir.Value) -> tuple[Run, ir.Value]:
        """The run with the segment after it, and whether that is better than to compute it alone."""
        e, b, one = self.e, self.e.b, self.e.i64(1)
        past = self._column(segment, PAST)
        room = b.icmp_signed("<", run.count, e.i64(self.calls[0].joins))
        single = b.and_(self._is_one(run.rows), self._is_one(self._column(segment, ROWS)))
        before = self._column(b.sub(segment, one), PAST)
        common = self._common(segment, e.smin(past, before), b.and_(b.and_(there, room), single))
        shared = b.select(self._is_one(run.count), common, e.smin(common, run.shared))
        saved, saved_now = b.mul(run.shared, b.sub(run.count, one)), b.mul(shared, run.count)
        better = b.and_(b.icmp_signed(">", common, e.i64(0)), b.icmp_signed(">=", saved_now, saved))
        seen = b.add(run.seen, b.add(past, one))
        return Run(run.first, run.rows, e.smax(run.past, past), b.add(run.count, one), shared, seen), better

    def _common(self, segment: ir.Value, positions: ir.Value, wanted: ir.Value) -> ir.Value:
        """The number of the first positions that are in the same pages as those of the segment before, if `wanted`."""
        e, zero = self.e, self.e.i64(0)
        pages = next(arg for arg, name in self.names.items() if name == "pages")
        tables = [self._place(pages, each) for each in (e.b.sub(segment, e.i64(1)), segment)]

        def same(page: Index) -> ir.Value:
            return e.b.icmp_signed("==", *(e.load(I32, e.at(table, (page, 4)), 4) for table in tables))

        count = e.b.select(e.b.and_(wanted, same(0)), e.b.udiv(positions, e.i64(PAGE)), zero)
        with e.loop(0, count, 1, [zero]) as page:  # the number of the first pages that are the same
            next_one = e.b.and_(same(page.i), e.b.icmp_signed("==", page.values[0], page.i))
            page.values = [e.b.add(page.values[0], e.b.zext(next_one, I64))]
        return e.b.mul(page.results[0], e.i64(PAGE))

    # --- work ---------------------------------------------------------------------------------------------------------

    def _work(self, run: Run) -> ir.Value:
        """The work of a run."""
        b, one = self.e.b, self.e.i64(1)
        if not self.calls[0].reads_past:
            return b.select(b.icmp_signed(">", run.rows, self.e.i64(0)), self._units(run), self.e.i64(0))
        return b.sub(run.seen, b.lshr(b.mul(run.shared, b.sub(run.count, one)), one))

    def _unit(self, run: Run, done: ir.Value, work: ir.Value) -> ir.Value:
        """The unit of a run that begins after so much of its work, or at most its number of units."""
        e, units = self.e, self._units(run)
        reached = done if not self.calls[0].reads_past else e.b.sdiv(e.b.mul(e.smax(done, 0), units), work)
        return e.smax(e.smin(reached, units), 0)

    def _units(self, run: Run) -> ir.Value:
        """The number of units of a run."""
        counts = [self._count(call.units, run) for call in self.calls]
        return counts[0] if len(counts) == 1 else self.e.b.select(self._is_one(run.rows), *counts)

    def _count(self, units: Units, run: Run) -> ir.Value:
        e = self.e
        size = self._value(units.dim, run)
        if isinstance(size, int):
            return e.i64(units.most({}))
        count = e.b.mul(e.ceil_div(size, units.per), e.i64(units.times))
        return count if units.busy is None else e.smin(units.busy, count)

    def _is_one(self, rows: ir.Value) -> ir.Value:
        return self.e.b.icmp_signed("==", rows, self.e.i64(1))

    def _value(self, dim: DimLike, run: Run) -> Index:
        """The value of a dim for a run."""
        if not isinstance(dim, dims.Dim):
            return dim
        e, terms = self.e, dict(dim.terms)
        value: Index = 0
        if factor := terms.get("SEQ"):
            value = e.mul_add(run.rows, factor)
        if factor := terms.get("PAST_SEQ"):
            value = e.mul_add(run.past, factor, value)
        rest = dims.bind(dim, _OF_SEGMENT)
        more: Index = e.args[self.extents[rest]] if isinstance(rest, dims.Dim) else rest
        return e.mul_add(more, 1, value)

    # --- calls --------------------------------------------------------------------------------------------------------

    def _compute(self, run: Run, units: list[ir.Value]) -> None:
        """Calls the kernel for some units of a run."""
        e = self.e
        places = {arg: self._place(arg, run.first) for arg in self.strides}
        if len(self.calls) == 1:
            self._call(0, run, places, units)
            return
        with e.b.if_else(self._is_one(run.rows)) as branches:
            for i, branch in enumerate(branches):
                with branch:
                    self._call(i, run, places, units)

    def _place(self, arg: int, segment: ir.Value) -> ir.Value:
        """Address of a segment's part of a buffer."""
        e, stride = self.e, self.strides[arg]
        index = segment if stride.column is None else self._column(segment, stride.column)
        nbytes = e.args[self.extents[stride.nbytes]] if isinstance(stride.nbytes, dims.Dim) else stride.nbytes
        return e.at(e.args[self.names[arg]], (index, nbytes))

    def _call(self, number: int, run: Run, places: dict[int, ir.Value], units: list[ir.Value]) -> None:
        e, call = self.e, self.calls[number]
        buffers, extents = [places[arg] for arg in call.args], [e.i64(self._value(dim, run)) for dim in call.extents]
        if call.joins > 1:
            buffers.append(e.at(e.args["segments"], (run.first, 4 * self.columns)))
            extents += [run.count, run.shared]
        e.call(call.kernel.symbol, VOID, [*buffers, *extents, *units])

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
        return "\n".join([*lines, f"# the units begin .. end of {self.parts} parts of equal work"]) + "\n"


def paged_write(contiguous: Call, heads: int, together: int, target: Target) -> Call:
    """The call for a paged write, whose last operand is the page table.

    Args:
        contiguous: the same with the kernel of a contiguous cache, without a buffer for the page table. Its extents are
            `past` and `ctx`, its units row * heads + head, its last buffer the cache.
        together: positions of a head that share cache lines: 1 in rows, 16 in tiles.
    """
    cache, x = contiguous.node.inputs[:2]
    table = len(contiguous.node.inputs) - 1
    if is_python_only():
        return replace(contiguous, kernel=_python(contiguous.kernel, heads), args=(*contiguous.args, table))
    row_bytes = cache.dtype.row_bytes(int(str(cache.shape[-1]))) if x.shape[0] == 1 else 0
    kernel = _loop(contiguous.kernel, heads, row_bytes, together, target)
    return replace(contiguous, kernel=kernel, args=(*contiguous.args, table))


def _loop(inner: Kernel, heads: int, row_bytes: int, together: int, target: Target) -> Kernel:
    """The kernel that loops over pages. Buffers and extents are those of the inner kernel, then `pages` i32[...].

    Args:
        row_bytes: bytes of a head at a position of the cache, if that is to be prefetched, else 0.
    """
    e = Emitter(target, [*inner.buffers, "pages"], inner.extents)
    past, begin, end, per = e.args["past"], e.args["begin"], e.args["end"], e.i64(heads)
    newest = e.b.add(past, e.b.sdiv(e.b.sub(end, e.i64(1)), per))
    first, last = (e.b.ashr(p, e.i64(6)) for p in (e.b.add(past, e.b.sdiv(begin, per)), newest))
    with e.loop(first, e.b.add(last, e.i64(1))) as page:
        found = e.b.sext(e.load(I32, e.at(e.args["pages"], (page.i, 4)), 4), I64)
        moved = e.mul_add(e.b.sub(found, page.i), PAGE, past)
        start = e.b.sub(e.b.mul(page.i, e.i64(PAGE)), past)  # the first row of the page
        own = (
            e.smax(begin, e.b.mul(start, per)),
            e.smin(end, e.b.mul(e.b.add(start, e.i64(PAGE)), per)),
        )
        if row_bytes:
            count = e.smin(e.b.mul(e.b.sub(own[1], own[0]), e.i64(2)), e.b.sub(per, own[0]))
            place = e.b.add(e.b.mul(own[0], e.args["ctx"]), e.b.and_(moved, e.i64(-together)))
            stride = e.b.mul(e.args["ctx"], e.i64(row_bytes))
            _fetch(e, e.at(e.args[inner.buffers[-1]], (place, row_bytes)), count, stride, row_bytes * together)
        extents = {**{name: e.args[name] for name in inner.extents}, "past": moved}
        e.call(inner.symbol, VOID, [*(e.args[name] for name in inner.buffers), *extents.values(), *own])
    kernel = e.finish("paged", _outline(inner, heads))
    return replace(kernel, calls=(inner,))


def _python(inner: Kernel, heads: int) -> Kernel:
    """The kernel that loops over pages in its Python form, without prefetches."""
    count, write = len(inner.buffers), python_form(inner)

    def pages_of(*args: Any) -> None:
        buffers, table, (past, *extents), (begin, end) = args[:count], args[count], args[count + 1 : -2], args[-2:]
        for page in range((past + begin // heads) // PAGE, (past + (end - 1) // heads) // PAGE + 1):
            start = page * PAGE - past  # the first row of the page
            moved = past + PAGE * (int(table[page]) - page)
            write(*buffers, moved, *extents, max(begin, start * heads), min(end, (start + PAGE) * heads))

    return Kernel(
        symbol("paged", inner.symbol), (*inner.buffers, "pages"), inner.extents, "", _outline(inner, heads), (inner,),
        python=pages_of, elements=(*inner.elements, "int32"),
    )  # fmt: skip


def _fetch(e: Emitter, start: ir.Value, count: ir.Value, stride: ir.Value, nbytes: int) -> None:
    """Prefetches `nbytes` bytes at `count` places, `stride` bytes apart."""
    with e.loop(0, count) as place, e.loop(0, nbytes, 64) as line:
        e.prefetch(e.at(start, (place.i, stride), (line.i, 1)), 64, level=2)


def _outline(inner: Kernel, heads: int) -> str:
    passed = ", ".join(inner.buffers)
    return (
        f"for page in range((past + begin // {heads}) // {PAGE}, (past + (end - 1) // {heads}) // {PAGE} + 1):\n"
        f"    {inner.symbol}({passed}, past=past + {PAGE} * (pages[page] - page))  # the units of begin .. end in it\n"
    )
