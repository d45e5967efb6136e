"""Paged cache writes: a kernel that calls the kernel of a contiguous cache once for each page that a call touches.

Position p of page j lies 64 * (pages[j] - j) places after place p. So the rows of a page are written by the contiguous
kernel with its start moved by that distance:

    for page in those of positions past + begin / heads .. past + (end - 1) / heads:
        kernel(..., past=past + 64 * (pages[page] - page))  # the units of begin .. end in this page

A decode step writes one row, so it looks up one page.
"""

from __future__ import annotations

from dataclasses import replace

from llvmlite import ir

from rlx.backends.cpu.calls import Call
from rlx.backends.cpu.kernel import Kernel
from rlx.backends.cpu.target import Target
from rlx.backends.cpu.tiles import I32, I64, POINTER, Emitter
from rlx.ir.pages import PAGE


def paged_write(contiguous: Call, heads: int, target: Target) -> Call:
    """The call for a paged write, whose last operand is the page table.

    Args:
        contiguous: the same with the kernel of a contiguous cache, without a buffer for the page table. Its extents are
            `past` and `ctx`, its units row * heads + head.
    """
    table = len(contiguous.node.inputs) - 1
    return replace(contiguous, kernel=_loop(contiguous.kernel, heads, target), args=(*contiguous.args, table))


def _loop(inner: Kernel, heads: int, target: Target) -> Kernel:
    """The kernel that loops over pages. Buffers and extents are those of the inner kernel, then `pages` i32[...]."""
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
        extents = {**{name: e.args[name] for name in inner.extents}, "past": moved}
        e.b.call(function, [*(e.args[name] for name in inner.buffers), *extents.values(), *own])
    kernel = e.finish("paged", _outline(inner, heads))
    return replace(kernel, calls=(inner,))


def _outline(inner: Kernel, heads: int) -> str:
    passed = ", ".join(inner.buffers)
    return (
        f"for page in range((past + begin // {heads}) // {PAGE}, (past + (end - 1) // {heads}) // {PAGE} + 1):\n"
        f"    {inner.symbol}({passed}, past=past + {PAGE} * (pages[page] - page))  # the units of begin .. end in it\n"
    )
