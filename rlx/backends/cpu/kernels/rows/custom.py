"""Kernels of custom ops: a user's loop kernel, lowered as ours are, with its sizes and attributes filled in.

The user's function takes `(operands..., out, begin, end, constants...)`. It becomes an internal function of the module,
which the kernel calls with the constants as literals; LLVM inlines it. Sizes that are known at run time only are
extents.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from functools import lru_cache
from types import FunctionType
from typing import Any, TypeAlias

from rlx.backends import cpu
from rlx.backends.cpu.kernel import Kernel, once, symbol
from rlx.backends.cpu.loops import callees, element, is_python_only, readable
from rlx.errors import CompileError, CustomOpError
from rlx.ir.custom import CustomOp
from rlx.ir.sources import in_library
from rlx.scalars import SUM_FLAGS, f32

#: (name, value) of each parameter after `end`; None for a size that is known at run time.
Constants: TypeAlias = tuple[tuple[str, int | float | None], ...]

_INNER = "of_the_user"
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_IN_FLOAT64 = re.compile(r"= f(?:add|sub|mul|div|rem) [^\n]*\bdouble\b")
_HINT = (
    "A kernel may use whole numbers, f32 arithmetic, range, comparisons, indexing, the functions of rlx.scalars, and "
    "functions under the same rules."
)


def custom(op: CustomOp, constants: Constants) -> Kernel:
    """A kernel of an op. Buffers: the operands, out. Extents: the constants whose value is None.

    Args:
        constants: (name, value) of the parameters after `end`.

    Raises:
        CustomOpError: Numba cannot lower the function, or it computes in float64.
    """
    return _unlowered(op, constants) if is_python_only() else _lowered(op, constants)


def _unlowered(op: CustomOp, constants: Constants) -> Kernel:
    """The kernel in its Python form: the user's function itself."""
    assert op.kernel is not None and op.rule is not None
    params = [(value.name, value.dtype) for value in op.rule.operands] + [("out", op.rule.result.dtype)]
    extents = tuple(name for name, value in constants if value is None)
    source = readable(op.kernel, dict(constants), params)
    return Kernel(
        symbol(op.name, source), tuple(name for name, _ in params), extents, "", source,
        python=_python(op.kernel, len(params), constants), elements=tuple(element(dtype) for _, dtype in params),
    )  # fmt: skip


@once
def _lowered(op: CustomOp, constants: Constants) -> Kernel:
    assert op.kernel is not None and op.rule is not None
    fn, where = narrowed(op.kernel), f"custom op {op.name}, kernel"
    params = [(value.name, value.dtype) for value in op.rule.operands] + [("out", op.rule.result.dtype)]
    types = (*(f"*{dtype}" for _, dtype in params), "i64", "i64", *map(_type, constants))
    try:
        text = cpu.numba_frontend.FRONTEND.lower(fn, _INNER, types, SUM_FLAGS)
    except CompileError as error:
        raise CustomOpError(f"Numba cannot compile it: {_brief(error.what)}", where=where, hint=_HINT) from error
    if _IN_FLOAT64.search(text):
        hint = (
            "Write f32(n) where a whole number n meets an f32 or is divided: `total / f32(n)`. f32 is in rlx.scalars."
        )
        raise CustomOpError("it computes in float64", where=where, hint=hint)
    buffers, extents = [name for name, _ in params], [name for name, value in constants if value is None]
    text = text.replace(f'define void @"{_INNER}"', f'define internal void @"{_INNER}"') + _outer(buffers, constants)
    name = symbol(op.name, text)
    shown = {key: value for key, value in constants if value is not None}
    source = readable(fn, shown, params, SUM_FLAGS)
    python = _python(fn, len(buffers), constants)
    return Kernel(name, tuple(buffers), tuple(extents), text.replace("@outer", f"@{name}"), source, python=python)


def _brief(message: str) -> str:
    """The first sentence of a message of Numba, and the line of the kernel that it shows."""
    plain = _COLOURS.sub("", message)  # with the package colorama, Numba colours it
    lines = [line for line in plain.splitlines() if line.strip() and not line.startswith("Failed in ")]
    at = next((i for i, line in enumerate(lines) if line.strip() == "^" and i), 0)
    number = next((match[1] for line in lines[:at] if (match := re.search(r'^File ".*", line (\d+):', line))), "")
    shown = f" (line {number}: {lines[at - 1].strip()})" if number else ""
    reason = " ".join([lines[0], *(line for line in lines[1:3] if line.strip().startswith(">>>"))]) if lines else plain
    return f"{reason.strip()}{shown}"


def _python(fn: Callable[..., Any], count: int, constants: Constants) -> Callable[..., None]:
    """The kernel as a Python function `(buffers..., extents..., begin, end)`."""

    def run(*arguments: Any) -> None:
        *before, begin, end = arguments
        extents = iter(before[count:])
        values = (next(extents) if value is None else value for _, value in constants)
        fn(*before[:count], begin, end, *(f32(v) if isinstance(v, float) else v for v in values))

    return run


def _type(constant: tuple[str, Any]) -> str:
    return "f32" if isinstance(constant[1], float) else "i64"


def _outer(buffers: list[str], constants: Constants) -> str:
    """The kernel, which calls the user's function."""
    extents = [f"i64 %{name}" for name, value in constants if value is None]
    units = ["i64 %begin", "i64 %end"]
    pointers = [f"ptr %b{i}" for i in range(len(buffers))]
    passed = [*pointers, *units, *(_argument(name, value) for name, value in constants)]
    head = f"define void @outer({', '.join([*pointers, *extents, *units])})"
    return f'\n{head} {{\n  call void @"{_INNER}"({", ".join(passed)})\n  ret void\n}}\n'


def _argument(name: str, value: int | float | None) -> str:
    if value is None:
        return f"i64 %{name}"
    if isinstance(value, float):
        return f"float 0x{struct.pack('>d', float(f32(value))).hex()}"
    return f"i64 {int(value)}"


@lru_cache(256)
def narrowed(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of a user's function whose floats are f32, and that calls such copies of the user's functions."""
    assert isinstance(fn, FunctionType)
    code = fn.__code__
    constants = tuple(f32(c) if isinstance(c, float) else c for c in code.co_consts)
    read: dict[str, Any] = {n: f32(v) for n in code.co_names if isinstance(v := fn.__globals__.get(n), float)}
    read |= {name: narrowed(callee) for name, callee in callees(fn).items() if not in_library(callee)}  # type: ignore[arg-type]
    copy = FunctionType(code.replace(co_consts=constants), {**fn.__globals__, **read}, fn.__name__, fn.__defaults__)
    copy.__dict__.update(fn.__dict__, __wrapped__=fn)
    return copy
