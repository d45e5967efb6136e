"""Paged cache writes: a kernel that calls the kernel of a contiguous cache once for each page that a call touches.

Position p of page j lies 64 * (pages[j] - j) places after place p. So the rows of a page are written by the contiguous
kernel with its start moved by that distance:

    for page in those of positions past + begin / heads .. past + (end - 1) / heads:
        kernel(..., past=past + 64 * (pages[page] - page))  # the units of begin .. end in this page

A decode step writes one row, so it looks up one page. What it writes to is in no cache of the CPU, and for a head of
keys that is a whole tile of 16 positions. So the memory of the call's heads is prefetched before the first is written,
with that of as many heads after them, which the worker usually writes next.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llvmlite import ir

from rlx.backends.cpu.calls import Call
from rlx.backends.cpu.kernel import Kernel, symbol
from rlx.backends.cpu.layouts import PAGE
from rlx.backends.cpu.loops import is_python_only, python_form
from rlx.backends.cpu.target import Target
from rlx.backends.cpu.tiles import I32, I64, POINTER, Emitter


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
    types = [POINTER] * len(inner.buffers) + [I64] * (len(inner.extents) + 2)
    function = ir.Function(e.module, ir.FunctionType(ir.VoidType(), types), inner.symbol)
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
        e.b.call(function, [*(e.args[name] for name in inner.buffers), *extents.values(), *own])
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
