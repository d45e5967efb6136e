"""Loop kernels: plain Python functions over pointers, lowered to LLVM by Numba's front end (`templates.py`).

A loop kernel is a function `(buffers..., extents..., begin, end)` that computes the work units [begin, end). Its holes
are compile-time constants: module-level names in capitals that are bound to `HOLE`, for which `specialize` fills in
literals. The same function runs under plain Python on NumPy arrays. This is how kernels are debugged, and how tests
check the compiled form.

A kernel may use integers, f32 arithmetic, `range`, comparisons, `a if c else b`, indexing, the primitives of
`rlx/scalars.py`, and helpers under the same rules. It may not use `min`, `max`, lists, strings, closures, recursion or
`raise`.
"""

from __future__ import annotations

import inspect
import textwrap
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from types import FunctionType
from typing import Any

from rlx.backends.cpu.kernel import Kernel, symbol
from rlx.backends.cpu.templates import NAME, Template
from rlx.backends.device import Loop
from rlx.errors import CompileError
from rlx.ir.dtypes import DType
from rlx.scalars import HOLE

_STORED_AS = {"f16": "u16", "bf16": "u16"}
_NUMPY = {"f": "float", "i": "int", "u": "uint"}
_KEPT = 256  # kernels of the last calls, which programs of one model share
_lock = threading.Lock()
_python_only: ContextVar[bool] = ContextVar("python_only", default=False)


class NoPythonForm(CompileError):
    """A kernel has no form in plain Python: it is no loop kernel."""


@contextmanager
def python_forms() -> Iterator[None]:
    """In the block, `select` makes kernels in their Python form only: nothing is lowered or generated.

    So a loop kernel may hold anything that Python takes, such as `breakpoint()`. Kernels that are no loop kernels raise
    `NoPythonForm`.
    """
    token = _python_only.set(True)
    try:
        yield
    finally:
        _python_only.reset(token)


def is_python_only() -> bool:
    """Whether kernels are made in their Python form only."""
    return _python_only.get()


def holes_of(fn: Callable[..., Any]) -> frozenset[str]:
    """The names bound to `HOLE` that `fn` and the helpers it calls read."""
    own = (name for name in fn.__code__.co_names if fn.__globals__.get(name) is HOLE)
    return frozenset(own).union(*(holes_of(callee) for callee in callees(fn).values()))


def specialize(fn: Callable[..., Any], holes: Mapping[str, Any]) -> Callable[..., Any]:
    """A copy of `fn` with the holes filled in it and in its helpers. The copy is a plain Python function.

    Args:
        fn: a kernel template.
        holes: a value for each hole: int, float, bool, a tuple of ints, or a helper function.

    Raises:
        CompileError: a hole has no value, or a value has no hole.
    """
    helpers = [value for value in holes.values() if isinstance(value, FunctionType)]
    wanted = holes_of(fn).union(*map(holes_of, helpers))
    if wanted != holes.keys():
        missing, unknown = sorted(wanted - holes.keys()), sorted(holes.keys() - wanted)
        raise CompileError(f"holes without a value: {missing}; values without a hole: {unknown}", where=fn.__name__)
    return _filled(fn, holes, {})


def _filled(
    fn: Callable[..., Any], holes: Mapping[str, Any], known: dict[Callable[..., Any], Callable[..., Any]]
) -> Callable[..., Any]:
    """A copy of `fn` with its holes filled, whose `__wrapped__` is `fn`; `fn` itself if it has no holes.

    Args:
        known: the copies that were made for these holes.
    """
    if fn in known:
        return known[fn]
    own = {n: holes[n] for n in fn.__code__.co_names if fn.__globals__.get(n) is HOLE}
    values = {n: _filled(v, holes, known) if isinstance(v, FunctionType) else v for n, v in own.items()}
    called = {n: _filled(callee, holes, known) for n, callee in callees(fn).items()}
    changed = {n: callee for n, callee in called.items() if callee is not fn.__globals__[n]} | values
    known[fn] = fn
    if changed:
        known[fn] = copy = FunctionType(fn.__code__, {**fn.__globals__, **changed}, fn.__name__, fn.__defaults__)
        copy.__dict__.update(fn.__dict__, __wrapped__=fn)
    return known[fn]


def loop_kernel(
    fn: Callable[..., Any],
    holes: Mapping[str, Any],
    params: Sequence[tuple[str, DType]],
    extents: Sequence[str] = (),
) -> Kernel:
    """Lowers a kernel template with the values of its holes. The results of the last calls are kept.

    Buffers may not overlap: pointers are `noalias`, so that LLVM vectorizes without run-time checks.

    Args:
        fn: the template `(buffers..., extents..., begin, end)`.
        holes: values of its holes (see `specialize`).
        params: name and dtype of each buffer. f16 and bf16 are indexed as u16 bits, block formats and q8a as bytes.
        extents: names of the run-time extents, i64.

    Raises:
        CompileError: the signature or the holes do not fit, or Numba cannot lower the function.
    """
    _check_signature(fn, [name for name, _ in params], extents)
    if is_python_only():
        return _unlowered(fn, holes, params, extents)
    with _lock:
        values = tuple((name, _identity(value), value) for name, value in sorted(holes.items()))
        return _lowered(fn, values, tuple(params), tuple(extents))


def kernel_of(loop: Loop) -> Kernel:
    """The kernel of a loop outside of programs."""
    function, holes = loop.function()
    return loop_kernel(function, holes, loop.buffers, loop.extents)


def python_form(kernel: Kernel) -> Callable[..., Any]:
    """The plain Python function that a loop kernel was lowered from. It runs on flat NumPy arrays.

    Arrays have the element types of the parameters (uint16 for f16 and bf16, uint8 for block formats and q8a).

    Raises:
        CompileError: the kernel is no loop kernel.
    """
    if kernel.python is None:
        raise CompileError("not a loop kernel", where=kernel.symbol)
    return kernel.python


@lru_cache(_KEPT)
def _lowered(
    fn: Callable[..., Any],
    values: tuple[tuple[str, str, Any], ...],
    params: tuple[tuple[str, DType], ...],
    extents: tuple[str, ...],
) -> Kernel:
    """The kernel; `values` has name, identity and value of each hole."""
    holes = {name: value for name, _, value in values}
    filled = specialize(fn, holes)
    types = (*("*" + _stored_as(dtype) for _, dtype in params), *["i64"] * (len(extents) + 2))
    helpers = tuple(getattr(helper, "__wrapped__", helper) for helper in _helpers(filled, []))
    llvm = Template(fn, holes, helpers, types, specialize).llvm()
    name = symbol(fn.__name__.strip("_"), llvm)
    return Kernel(
        symbol=name,
        buffers=tuple(name for name, _ in params),
        extents=extents,
        llvm=llvm.replace(f'@"{NAME}"', f"@{name}"),
        source=readable(filled, holes, params),
        python=filled,
        elements=tuple(element(dtype) for _, dtype in params),
    )


def _unlowered(
    fn: Callable[..., Any], holes: Mapping[str, Any], params: Sequence[tuple[str, DType]], extents: Sequence[str]
) -> Kernel:
    """The kernel in its Python form."""
    filled = specialize(fn, holes)
    source, names = readable(filled, holes, params), tuple(name for name, _ in params)
    elements = tuple(element(dtype) for _, dtype in params)
    name = symbol(fn.__name__.strip("_"), source)
    return Kernel(name, names, tuple(extents), "", source, python=filled, elements=elements)


def element(dtype: DType) -> str:
    """The NumPy name of the type that a buffer is indexed as."""
    stored = _stored_as(dtype)
    return _NUMPY[stored[0]] + stored[1:]


def _stored_as(dtype: DType) -> str:
    return "u8" if dtype.is_quantized else _STORED_AS.get(dtype.name, dtype.name)


def _identity(value: Any) -> str:
    """A hole's value as part of a key. 1, 1.0 and True are equal in Python but different literals."""
    return f"function {id(value)}" if isinstance(value, FunctionType) else repr(value)


def _check_signature(fn: Callable[..., Any], buffers: Sequence[str], extents: Sequence[str]) -> None:
    wanted = [*buffers, *extents, "begin", "end"]
    found = list(inspect.signature(fn).parameters)
    if found != wanted:
        raise CompileError(f"takes ({', '.join(found)}), not ({', '.join(wanted)})", where=f"loop kernel {fn.__name__}")


def readable(
    fn: Callable[..., Any], holes: Mapping[str, Any], params: Sequence[tuple[str, DType]], flags: Sequence[str] = ()
) -> str:
    """The readable form: holes and buffers as comments, the helpers in the order of their use, the kernel."""
    values = (f"#   {name} = {getattr(value, '__name__', value)}" for name, value in sorted(holes.items()))
    header = [f"# {fn.__name__.strip('_')}({', '.join(f'{name}: {dtype}' for name, dtype in params)})", *values]
    if flags:
        header.append(f"#   float operations: {' '.join(flags)}")
    return "\n".join(header) + "\n\n" + "\n\n".join(_text(f) for f in [*_helpers(fn, []), fn])


def _text(fn: Callable[..., Any]) -> str:
    return textwrap.dedent(inspect.getsource(fn))


def _helpers(fn: Callable[..., Any], found: list[Callable[..., Any]]) -> list[Callable[..., Any]]:
    for callee in callees(fn).values():
        if callee not in found:
            _helpers(callee, found)
            found.append(callee)
    return found


def callees(fn: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """The helper functions that `fn` calls, by their names in `fn`."""
    values = {name: fn.__globals__.get(name) for name in fn.__code__.co_names}
    return {name: value for name, value in values.items() if isinstance(value, FunctionType)}
