"""Slices and concatenations of f32 rows: copies of contiguous elements (runs), as vectors."""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from rlx.backends.cpu.kernel import Kernel
from rlx.backends.cpu.target import Target
from rlx.backends.cpu.tiles import FLOAT, LANES, Emitter, vector


def slice_rows(width: int, start: int, stop: int, target: Target) -> Kernel:
    """f32[rows, width] -> f32[rows, stop - start], elements start .. stop of each. Buffers: x, out. A unit is a row."""
    e = Emitter(target, ["x", "out"], [])
    with e.loop(e.args["begin"], e.args["end"]) as row:
        source = e.at(e.args["x"], (row.i, 4 * width), 4 * start)
        _copy_run(e, source, e.at(e.args["out"], (row.i, 4 * (stop - start))), stop - start)
    return e.finish("slice_rows", f"for row in range(begin, end):\n    out[row] = x[row, {start}:{stop}]\n")


def concat_rows(widths: Sequence[int], target: Target) -> Kernel:
    """f32[rows, width], one buffer per width -> f32[rows, sum of the widths], the rows concatenated.

    Buffers: x0, x1, ..., out. A unit is a row.
    """
    names = [f"x{i}" for i in range(len(widths))]
    e = Emitter(target, [*names, "out"], [])
    text = ["for row in range(begin, end):"]
    with e.loop(e.args["begin"], e.args["end"]) as row:
        at = 0
        for name, width in zip(names, widths, strict=True):
            source = e.at(e.args[name], (row.i, 4 * width))
            _copy_run(e, source, e.at(e.args["out"], (row.i, 4 * sum(widths)), 4 * at), width)
            text.append(f"    out[row, {at}:{at + width}] = {name}[row]")
            at += width
    return e.finish("concat_rows", "\n".join(text) + "\n")


def _copy_run(e: Emitter, source: ir.Value, out: ir.Value, count: int) -> None:
    """Copies `count` numbers: whole vectors in a loop, then vectors of 8, 4, 2 and 1 lanes instead of a mask."""
    whole = count // LANES * LANES
    with e.loop(0, whole, LANES) as loop:
        e.store(e.load(vector(FLOAT), e.at(source, (loop.i, 4))), e.at(out, (loop.i, 4)))
    for lanes in (8, 4, 2, 1):
        if count & lanes:
            e.store(e.load(vector(FLOAT, lanes), e.at(source, 4 * whole)), e.at(out, 4 * whole))
            whole += lanes
