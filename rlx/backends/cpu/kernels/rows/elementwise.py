"""Fused elementwise kernels: an expression over rows of f32, computed in one pass over memory.

    for row in begin .. end:
        for i in 0 .. width:
            out[row, i] = expression(a[row, i], b[i], c[row], d[0], ...)

The expression is a nested tuple such as ("mul", ("silu", 0), 1). An integer is the index of an operand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from llvmlite import ir

from rlx.backends.cpu import vmath
from rlx.backends.cpu.kernel import Kernel
from rlx.backends.cpu.target import Target
from rlx.backends.cpu.tiles import LANES, Emitter
from rlx.errors import CompileError
from rlx.ir.dtypes import ACTIVATIONS, F32

#: ("add", 0, 1), ("silu", 0), ("scale", 0, 0.5), ("const", 2.0), or the index of an operand.
Expression: TypeAlias = tuple[Any, ...] | int

BINARY: dict[str, Callable[[Emitter, ir.Value, ir.Value], ir.Value]] = {
    "add": lambda e, x, y: e.b.fadd(x, y),
    "sub": lambda e, x, y: e.b.fsub(x, y),
    "mul": lambda e, x, y: e.b.fmul(x, y),
    "div": lambda e, x, y: e.b.fdiv(x, y),
    "maximum": vmath.maximum,
}
UNARY: dict[str, Callable[[Emitter, ir.Value], ir.Value]] = vmath.UNARY | {"neg": lambda e, x: e.b.fneg(x)}
WITH_NUMBERS: dict[str, Callable[..., ir.Value]] = {
    "scale": lambda e, x, c: e.b.fmul(x, e.f32(c)),
    "softcap": vmath.softcap,
    "clamp": vmath.clamp,
}

KINDS = ("full", "row", "column", "scalar")


def elementwise(expr: Expression, inputs: Sequence[str], width: int, target: Target, *, out: str = "f32") -> Kernel:
    """A kernel that evaluates `expr` for every element of `rows` rows. A unit is a row.

    Buffers: one f32 buffer per operand, then `out f32[rows, width]`, which may be one of the full operands, or bf16.
    Extents: `rows`.

    Args:
        expr: nested tuples of the ops in `UNARY`, `BINARY`, `WITH_NUMBERS` and `const`.
        inputs: the kind of each operand: `full` (f32[rows, width]), `row` (f32[width], the same for all rows),
            `column` (f32[rows, 1], one number per row) or `scalar` (f32[1]).
        width: elements of a row.
        out: type of the result, `f32` or `bf16`, rounded to nearest even.

    Raises:
        CompileError: an op, a kind or the index of an operand is unknown.
    """
    unknown = set(inputs) - set(KINDS)
    if unknown:
        raise CompileError(f"operand kinds are {', '.join(KINDS)}, found {sorted(unknown)}", where="elementwise")
    names = [f"a{i}" for i in range(len(inputs))]
    e = Emitter(target, [*names, "out"], ["rows"])
    splats = {n: e.splat_f32(e.args[n]) for n, kind in zip(names, inputs, strict=True) if kind == "scalar"}
    strides = {n: 4 * width if kind == "full" else 0 for n, kind in zip(names, inputs, strict=True)}

    def vector(row: ir.Value, column: ir.Value | int, mask: ir.Value | None) -> None:
        places = {n: e.at(e.args[n], (row, stride), (column, 4)) for n, stride in strides.items() if n not in splats}
        operands = [splats[n] if n in splats else e.load_as_f32(F32, places[n], mask) for n in names]
        result = evaluate(e, expr, operands)
        place = e.at(e.args["out"], (row, dtype.row_bytes(width)), (column, dtype.nbytes))
        e.store_from_f32(dtype, result, place, mask)

    dtype, whole = ACTIVATIONS[out], width // LANES * LANES
    with e.loop(e.args["begin"], e.args["end"]) as rows:
        columns_of = (n for n, kind in zip(names, inputs, strict=True) if kind == "column")
        splats |= {n: e.splat_f32(e.at(e.args[n], (rows.i, 4))) for n in columns_of}
        with e.loop(0, whole, LANES) as columns:
            vector(rows.i, columns.i, None)
        if whole < width:
            vector(rows.i, whole, e.tail_mask(e.i64(width - whole)))
    return e.finish("elementwise", _outline(expr, inputs, width))


def evaluate(e: Emitter, expr: Expression, operands: Sequence[ir.Value]) -> ir.Value:
    """Emits an expression over 16 lanes.

    Raises:
        CompileError: an op or the index of an operand is unknown.
    """
    if isinstance(expr, int):
        if not 0 <= expr < len(operands):
            raise CompileError(f"operand {expr} of {len(operands)}", where="elementwise")
        return operands[expr]
    op, *rest = expr
    if op == "const":
        return e.f32(float(rest[0]))
    if op in WITH_NUMBERS:
        return WITH_NUMBERS[op](e, evaluate(e, rest[0], operands), *rest[1:])
    values = [evaluate(e, r, operands) for r in rest]
    table: dict[str, Any] = UNARY if len(values) == 1 else BINARY
    if op not in table:
        raise CompileError(f"no elementwise op {op!r} of {len(values)} operands", where=f"expression {expr}")
    return table[op](e, *values)


def _outline(expr: Expression, inputs: Sequence[str], width: int) -> str:
    index = {"full": "[row, i]", "row": "[i]", "column": "[row]", "scalar": "[0]"}
    operands = [f"a{i}{index[kind]}" for i, kind in enumerate(inputs)]
    return (
        f"for row in range(begin, end):\n    for i in range({width}):  # 16 lanes a step\n"
        f"        out[row, i] = {written(expr, operands)}\n"
    )


def written(expr: Expression, operands: Sequence[str]) -> str:
    """The expression as a readable formula."""
    if isinstance(expr, int):
        return operands[expr]
    op, *rest = expr
    if op == "const":
        return str(rest[0])
    infix = {"add": "+", "sub": "-", "mul": "*", "div": "/"}.get(op)
    numbers = rest[1:] if op in WITH_NUMBERS else []
    values = [written(r, operands) for r in rest[: len(rest) - len(numbers)]] + [str(c) for c in numbers]
    return f"({values[0]} {infix} {values[1]})" if infix else f"{op}({', '.join(values)})"
