"""Arithmetic peaks: the inner step of a GEMM with nothing around it, its operands in registers.

What a linear's GFLOP/s are held against. One unit is `STEPS` steps on `CHAINS` independent sums, which hide the
latency of the multiply-add on every machine we know.
"""

from __future__ import annotations

from llvmlite import ir

from rlx.codegen import dots
from rlx.codegen.kernel import Kernel
from rlx.codegen.target import Target
from rlx.codegen.tiles import F32X16, I8X64, I32X16, Emitter

STEPS, CHAINS = 4096, 12

#: Multiplications and additions of one unit, by kind.
OPERATIONS = {"int8": STEPS * CHAINS * 64 * 2, "f32": STEPS * CHAINS * 16 * 2}


def peak(kind: str, target: Target) -> Kernel:
    """A kernel of pure arithmetic, "int8" dots or "f32" multiply-adds. Buffer: `data`, 64 bytes, read and written."""
    e = Emitter(target, ["data"], [])
    wide = I32X16 if kind == "int8" else F32X16
    start = e.load(wide, e.args["data"], 64)
    add = e.b.add if kind == "int8" else e.b.fadd
    different = [add(start, e.i32(i) if kind == "int8" else e.f32(i)) for i in range(CHAINS)]  # or LLVM keeps only one
    with e.loop(e.args["begin"], e.args["end"], 1, different) as unit:
        with e.loop(0, STEPS, 1, unit.values) as step:
            step.values = [_step(e, kind, start, total) for total in step.values]
        unit.values = step.results
    total = unit.results[0]
    for more in unit.results[1:]:
        total = add(total, more)
    e.store(total, e.args["data"], 64)
    return e.finish(f"peak_{kind}", f"# {CHAINS} independent {kind} sums, {STEPS} steps a unit\n")


def _step(e: Emitter, kind: str, operand: ir.Value, total: ir.Value) -> ir.Value:
    if kind == "f32":
        return e.fma(total, operand, operand)
    codes = e.b.bitcast(operand, I8X64)
    return dots.dot_u8s8(e, total, [codes], [codes], 4)
