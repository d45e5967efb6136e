"""Peak arithmetic throughput: kernels with only the inner step of a GEMM, whose operands stay in registers.

Benchmarks compare the GFLOP/s of a linear with this peak. One unit is `STEPS` steps on independent sums: enough sums to
hide the latency of the multiply-add, and few enough to stay in registers.
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from rlx.backends.cpu import dots
from rlx.backends.cpu.isa.amx import BYTES, COUNT, ROW_BYTES, ROWS
from rlx.backends.cpu.kernel import Kernel
from rlx.backends.cpu.target import Target
from rlx.backends.cpu.tiles import BF16X32, F32X16, I8X64, I32X16, LANES, Emitter
from rlx.errors import CompileError

STEPS = 4096
#: Number of products of one step on one sum, by kind.
PRODUCTS = {"int8": 64, "bf16": 32, "f32": 16, "amx-int8": 16 * 16 * 64, "amx-bf16": 16 * 16 * 32}

_BITS = 4  # of the codes: where products are summed in pairs first, several share one widening
_TILE_CHAINS = 4  # the other four tiles hold operands


def chains(kind: str, target: Target) -> int:
    """Number of independent sums: half of the registers with AVX-512, most of them on lower levels; 4 AMX tiles."""
    return _TILE_CHAINS if kind.startswith("amx") else {"avx512": 16, "avx2": 6, "neon": 6}.get(target.vectors, 3)


def operations(kind: str, target: Target) -> int:
    """Multiplications and additions of one unit."""
    return STEPS * chains(kind, target) * PRODUCTS[kind] * 2


def kinds(target: Target) -> tuple[str, ...]:
    """The kinds of arithmetic that a target has instructions for."""
    needs = {kind: target.has(kind) for kind in ("amx-int8", "amx-bf16")} | {"bf16": target.has_bf16_dots}
    return tuple(kind for kind in PRODUCTS if needs.get(kind, True))


def peak(kind: str, target: Target) -> Kernel:
    """A kernel of pure arithmetic. Buffer: `data`, 64 bytes, read and written.

    Args:
        kind: `int8` or `bf16` dot products, `f32` multiply-adds, or tile products (`amx-int8`, `amx-bf16`).
        target: the machine that the code is for.

    Raises:
        CompileError: the target has no instructions for this kind.
    """
    if kind not in kinds(target):
        raise CompileError(f"no {kind} arithmetic to measure", where=f"target {target.level}")
    e = Emitter(target, ["data"], [])
    (_tiles if kind.startswith("amx") else _vectors)(e, kind)
    return e.finish(f"peak_{kind}", f"# {chains(kind, target)} independent {kind} sums, {STEPS} steps a unit\n")


def _vectors(e: Emitter, kind: str) -> None:
    """Sum i starts as the data plus i. At the end, the total of all sums replaces the data."""
    wide = I32X16 if kind == "int8" else F32X16
    start = e.load(wide, e.args["data"], 64)
    add = e.b.add if kind == "int8" else e.b.fadd
    numbers = range(chains(kind, e.target))
    span = dots.span(e.target, _BITS) if kind == "int8" else 1
    shifted = [start] * (len(numbers) + 1)
    if span > 1:  # LLVM would compute equal products once for all sums
        shifted = [e.pick(start, [(lane + i) % LANES for lane in range(LANES)]) for i in range(len(numbers) + span)]
    different = [add(start, e.i32(i) if kind == "int8" else e.f32(i)) for i in numbers]  # LLVM would merge equal sums
    with e.loop(e.args["begin"], e.args["end"], 1, different) as unit:
        with e.loop(0, STEPS, span, unit.values) as step:
            step.values = [_step(e, kind, shifted[i : i + span + 1], total) for i, total in enumerate(step.values)]
        unit.values = step.results
    total = unit.results[0]
    for more in unit.results[1:]:
        total = add(total, more)
    e.store(total, e.args["data"], 64)


def _tiles(e: Emitter, kind: str) -> None:
    """All rows of the operand tiles are the data. At the end, row 0 of the last tile of sums replaces the data."""
    tiles = e.isa.tiles(e)
    tiles.configure([e.i64(ROWS)] * COUNT)
    for tile in range(COUNT):
        tiles.zero(tile)
    for tile in range(_TILE_CHAINS, COUNT):
        tiles.load(tile, e.args["data"], 0)
    dot = tiles.dot_int8 if kind == "amx-int8" else tiles.dot_bf16
    with e.loop(e.args["begin"], e.args["end"]), e.loop(0, STEPS):
        for c in range(_TILE_CHAINS):
            dot(c, _TILE_CHAINS + c % 2, COUNT - 1 - c // 2)
    result = e.stack(BYTES)
    tiles.store(_TILE_CHAINS - 1, result, ROW_BYTES)
    e.store(e.load(F32X16, result, 64), e.args["data"], 64)
    tiles.release()


def _step(e: Emitter, kind: str, operands: Sequence[ir.Value], total: ir.Value) -> ir.Value:
    """Adds the products of the first operand with each of the others."""
    operand = operands[0]
    if kind == "f32":
        return e.fma(total, operand, operand)
    if kind == "bf16":
        pairs = e.b.bitcast(operand, BF16X32)
        return dots.dot_bf16(e, total, pairs, pairs)
    codes, *others = (e.b.bitcast(each, I8X64) for each in operands)
    return dots.dot_u8s8(e, total, [codes] * len(others), others, _BITS)
