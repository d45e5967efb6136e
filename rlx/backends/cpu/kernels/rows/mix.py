"""Mixes the parts of each row: a small matrix of coefficients times a few long vectors.

    out[row, i, c] = sum over j of coefficients[row, i, j] * values[row, j, c], in the order of j

Coefficients stay in registers during the loop over columns. A loaded vector of values serves all results whose
coefficients are in registers.
"""

from __future__ import annotations

from llvmlite import ir

from rlx.backends.cpu.kernel import Kernel
from rlx.backends.cpu.target import Target
from rlx.backends.cpu.tiles import LANES, Emitter
from rlx.errors import ArgumentError
from rlx.ir.dtypes import F32

#: Columns of a work unit, so that workers share a row.
CHUNK = 512
#: Coefficients that are in registers at the same time.
HELD = 16


def chunks(width: int) -> int:
    """Number of work units per row."""
    return -(-width // CHUNK)


def mix(m: int, n: int, width: int, target: Target) -> Kernel:
    """A kernel: values f32[rows, n, width], coefficients f32[rows, m, n] -> f32[rows, m, width].

    Buffers: values, coefficients, out. Extents: none. A unit is a chunk of columns of one row; there are
    `chunks(width)` per row.

    Raises:
        ArgumentError: m or n is not in 1..16.
    """
    if not (1 <= m <= 16 and 1 <= n <= 16):
        raise ArgumentError(f"m and n must lie in 1..16, found {m} and {n}", where="mix")
    e = Emitter(target, ["values", "coefficients", "out"], [])
    with e.loop(e.args["begin"], e.args["end"]) as unit:
        row = e.b.udiv(unit.i, e.i64(chunks(width)))
        start = e.b.mul(e.b.urem(unit.i, e.i64(chunks(width))), e.i64(CHUNK))
        stop = e.smin(e.b.add(start, e.i64(CHUNK)), width)
        group = max(1, HELD // n)
        for first in range(0, m, group):
            results = range(first, min(first + group, m))
            _some_results(e, (m, n, width), row, (start, stop), results)
    return e.finish("mix", _outline(m, n, width))


def _some_results(
    e: Emitter, sizes: tuple[int, int, int], row: ir.Value, columns: tuple[ir.Value, ir.Value], results: range
) -> None:
    """Computes the columns [start, stop) of some of the m results of a row."""
    m, n, width = sizes
    values = e.at(e.args["values"], (row, 4 * n * width))
    out = e.at(e.args["out"], (row, 4 * m * width))
    table = e.at(e.args["coefficients"], (row, 4 * m * n))
    held = {(i, j): e.splat_f32(e.at(table, 4 * (i * n + j))) for i in results for j in range(n)}

    def vector(column: ir.Value, mask: ir.Value | None) -> None:
        totals: dict[int, ir.Value] = {}
        for j in range(n):
            value = e.load_as_f32(F32, e.at(values, 4 * j * width, (column, 4)), mask)
            for i in results:
                c = held[i, j]
                totals[i] = e.fma(c, value, totals[i]) if i in totals else e.b.fmul(c, value)
        for i, total in totals.items():
            e.store_from_f32(F32, total, e.at(out, 4 * i * width, (column, 4)), mask)

    start, stop = columns
    with e.loop(start, e.b.sub(stop, e.i64(LANES - 1)), LANES) as loop:
        vector(loop.i, None)
    if width % LANES:
        rest = e.b.sub(stop, loop.i)
        with e.when(e.b.icmp_signed(">", rest, e.i64(0))):
            vector(loop.i, e.tail_mask(rest))


def _outline(m: int, n: int, width: int) -> str:
    return (
        f"for unit in range(begin, end):\n"
        f"    row, chunk = divmod(unit, {chunks(width)})\n"
        f"    for c in columns {CHUNK} * chunk ... below {width}:  # 16 lanes a step\n"
        f"        for i in range({m}):\n"
        f"            out[row, i, c] = sum(coefficients[row, i, j] * values[row, j, c] for j in range({n}))\n"
    )
