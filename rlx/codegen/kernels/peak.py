"""Arithmetic peaks: the inner step of a GEMM with nothing around it, its operands in registers.

What a linear's GFLOP/s are held against. One unit is `STEPS` steps on independent sums: as many as hide the latency of
the multiply-add and stay in registers.
"""

from __future__ import annotations

from llvmlite import ir

from rlx.codegen import dots
from rlx.codegen.kernel import Kernel
from rlx.codegen.target import Target
from rlx.codegen.tiles import BF16X32, F32X16, I8X64, I32X16, Emitter
from rlx.errors import CompileError

STEPS = 4096
#: Products of one step on one sum, by kind.
PRODUCTS = {"int8": 64, "bf16": 32, "f32": 16}


def chains(target: Target) -> int:
    """Independent sums of 16 lanes: half of the registers of the widest level, most of them elsewhere."""
    return {"avx512": 16, "avx2": 6}.get(target.level, 3)


def operations(kind: str, target: Target) -> int:
    """Multiplications and additions of one unit."""
    return STEPS * chains(target) * PRODUCTS[kind] * 2


def kinds(target: Target) -> tuple[str, ...]:
    """The kinds that a target has instructions for."""
    return tuple(kind for kind in PRODUCTS if kind != "bf16" or target.has_bf16_dots)


def peak(kind: str, target: Target) -> Kernel:
    """A kernel of pure arithmetic, "int8" or "bf16" dots or "f32" multiply-adds. Buffer: `data`, 64 bytes, read and
    written.

    Raises:
        CompileError: the target has no such arithmetic.
    """
    if kind not in kinds(target):
        raise CompileError(f"no {kind} arithmetic to measure", where=f"target {target.level}")
    e = Emitter(target, ["data"], [])
    wide = I32X16 if kind == "int8" else F32X16
    start = e.load(wide, e.args["data"], 64)
    add = e.b.add if kind == "int8" else e.b.fadd
    numbers = range(chains(target))
    different = [add(start, e.i32(i) if kind == "int8" else e.f32(i)) for i in numbers]  # or LLVM keeps only one
    with e.loop(e.args["begin"], e.args["end"], 1, different) as unit:
        with e.loop(0, STEPS, 1, unit.values) as step:
            step.values = [_step(e, kind, start, total) for total in step.values]
        unit.values = step.results
    total = unit.results[0]
    for more in unit.results[1:]:
        total = add(total, more)
    e.store(total, e.args["data"], 64)
    return e.finish(f"peak_{kind}", f"# {chains(target)} independent {kind} sums, {STEPS} steps a unit\n")


def _step(e: Emitter, kind: str, operand: ir.Value, total: ir.Value) -> ir.Value:
    if kind == "f32":
        return e.fma(total, operand, operand)
    if kind == "bf16":
        pairs = e.b.bitcast(operand, BF16X32)
        return dots.dot_bf16(e, total, pairs, pairs)
    codes = e.b.bitcast(operand, I8X64)
    return dots.dot_u8s8(e, total, [codes], [codes], 4)
