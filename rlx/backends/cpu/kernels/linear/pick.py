"""The output layer of a greedy step: a linear of one row that returns only the index of its largest result.

    for tile of 64 units in begin .. end:
        logits = linear(x, w) of the tile, on the stack
        for unit of the tile:
            key = order(cap(logits)), the greatest key if one is NaN or infinite
            best, column = the larger of (best, column) and (key, its column), lane by lane
    atomically: largest = max(largest, (best, ~column)); the last of all units writes the result and clears the memory

Keys are compared before columns, and columns are complemented. So among equal logits the lowest index wins, whatever
the order of the workers.
"""

from __future__ import annotations

from dataclasses import replace

from llvmlite import ir

from rlx.backends.cpu import vmath
from rlx.backends.cpu.kernel import Kernel
from rlx.backends.cpu.layouts import BLOCK_ROWS
from rlx.backends.cpu.target import Target
from rlx.backends.cpu.tiles import F32X16, I32, I32X16, I64, LANES, VOID, Emitter, vector

TILE = 64  # units whose logits are on the stack at the same time: 4 KiB, which stay in the L1 cache
SCRATCH_BYTES = 128  # the largest pair so far, and in a separate cache line the number of finished units
_COUNT = 64  # byte offset of that number
_INFINITE, _SIGN, _LOWEST, _NO_NUMBER = 0x7F800000, 0x7FFFFFFF, -0x80000000, 0x7FFFFFFF


def linear_pick(inner: Kernel, cap: float | None, target: Target) -> Kernel:
    """A kernel: x, w -> i32[1], the index of the first largest element of x W^T; -1 if one is NaN or infinite.

    Buffers: `x` and `w` of `inner`; `scratch` of `SCRATCH_BYTES`, which is zero before the first call and after each
    call; `out`. Extents: `n`. Units: those of `inner`.

    Args:
        inner: a linear of a single row, without bias and residual.
        cap: c for c * tanh(x / c) of the results, None for no cap. It can make different results equal.
    """
    e = Emitter(target, ["x", "w", "scratch", "out"], ["n"])
    tile = e.stack(4 * LANES * TILE)
    begin, end, n = (e.args[name] for name in ("begin", "end", "n"))
    with e.loop(begin, end, TILE, [e.i32(_LOWEST), e.i32(0)]) as tiles:
        last = e.smin(e.b.add(tiles.i, e.i64(TILE)), end)
        out = e.at(tile, (tiles.i, -4 * LANES))  # so that the results of unit `tiles.i` are at `tile`
        e.call(inner.symbol, VOID, [e.args["x"], e.args["w"], out, n, tiles.i, last])
        with e.loop(tiles.i, last, 1, tiles.values) as unit:
            unit.values = _larger(e, out, unit.i, unit.values, cap)
        tiles.values = unit.results
    _add(e, _largest_pair(e, *tiles.results))
    return replace(e.finish("linear_pick", _outline(inner, cap)), calls=(inner,))


def _larger(e: Emitter, logits: ir.Value, unit: ir.Value, best: list[ir.Value], cap: float | None) -> list[ir.Value]:
    """Updates the best keys and columns with the logits of a unit."""
    first = e.b.mul(unit, e.i64(BLOCK_ROWS))
    value = e.load(F32X16, e.at(logits, (unit, 4 * LANES)), 4)
    value = value if cap is None else vmath.softcap(e, value, cap)
    bits = e.b.bitcast(e.b.fadd(value, e.f32(0.0)), I32X16)  # -0 becomes +0, its equal
    size = e.b.and_(bits, e.i32(_SIGN))
    key = e.b.xor(bits, e.b.and_(e.b.ashr(bits, e.i32(31)), e.i32(_SIGN)))
    key = e.b.select(e.b.icmp_signed("<", size, e.i32(_INFINITE)), key, e.i32(_NO_NUMBER))
    there = e.tail_mask(e.b.sub(e.args["n"], first))
    better = e.b.and_(there, e.b.icmp_signed(">", key, best[0]))
    columns = e.b.add(e.splat(e.b.trunc(first, I32)), ir.Constant(I32X16, list(range(LANES))))
    return [e.b.select(better, key, best[0]), e.b.select(better, columns, best[1])]


def _largest_pair(e: Emitter, keys: ir.Value, columns: ir.Value) -> ir.Value:
    """The largest lane as one u64: the key with its sign bit inverted, then the complement of the column."""
    wide = vector(I64)
    high = e.b.zext(e.b.xor(keys, e.i32(_LOWEST)), wide)
    low = e.b.zext(e.b.xor(columns, e.i32(-1)), wide)
    pairs = e.b.or_(e.b.shl(high, ir.Constant(wide, [32] * LANES)), low)
    return e.call("llvm.vector.reduce.umax.v16i64", I64, [pairs])


def _add(e: Emitter, pair: ir.Value) -> None:
    """Merges the largest pair of the units [begin, end) and counts them. The last call to finish writes the result."""
    scratch, mine = e.args["scratch"], e.b.sub(e.args["end"], e.args["begin"])
    count = e.at(scratch, _COUNT)
    e.b.atomic_rmw("umax", scratch, pair, "monotonic")
    before = e.b.atomic_rmw("add", count, mine, "acq_rel")
    units = e.ceil_div(e.args["n"], BLOCK_ROWS)
    with e.when(e.b.icmp_signed("==", e.b.add(before, mine), units)):
        found = e.load(I64, scratch, 8)
        key, column = e.b.lshr(found, e.i64(32)), e.b.xor(e.b.trunc(found, I32), ir.Constant(I32, -1))
        wrong = e.b.icmp_unsigned("==", key, e.i64(_NO_NUMBER + (1 << 31)))
        e.store(e.b.select(wrong, ir.Constant(I32, -1), column), e.args["out"], 4)
        for place in (scratch, count):
            e.store(e.i64(0), place, 8)


def _outline(inner: Kernel, cap: float | None) -> str:
    value = f"softcap({cap})" if cap is not None else ""
    return (
        f"# {inner.symbol}, 64 units at a time\n"
        f"logits = {value}(x @ w[16 * begin : min(16 * end, n)].T)\n"
        "largest = max(largest, (logits, lower index first))  # of all ranges\n"
        "out[0] = index of largest, -1 if a logit is NaN or infinite\n"
    )
