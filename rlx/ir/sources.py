"""The source of a custom op: the text and the digest of its functions, and of all that they call and read.

The digest is part of the compile key, so a change of any of these functions compiles programs anew. What a function
reads must therefore be known from its source: functions, modules, classes, and constants. A function that assigns
globals, or reads a global that can change, has side effects and is refused.
"""

from __future__ import annotations

import dis
import hashlib
import inspect
import json
import sys
import sysconfig
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np

from rlx.errors import CustomOpError
from rlx.ir.dims import Dim

_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis))
_PACKAGES = frozenset(("site-packages", "dist-packages"))  # folders of installed packages
_WRITES = {"STORE_GLOBAL": "global", "DELETE_GLOBAL": "global", "STORE_DEREF": "nonlocal", "DELETE_DEREF": "nonlocal"}


@dataclass(frozen=True)
class Source:
    """The sources of a custom op.

    Attributes:
        text: the functions and constants, for people.
        digest: of all that its results depend on, in hexadecimal.
    """

    text: str
    digest: str


def source_of(op: str, functions: Mapping[str, Callable[..., Any]], settings: Mapping[str, Any]) -> Source:
    """The source of an op.

    Args:
        functions: by their part in the op: "meaning", "kernel", ...
        settings: further choices.

    Raises:
        CustomOpError: a source cannot be read, or a function has side effects.
    """
    seen: dict[Any, list[Any]] = {}
    for part, fn in functions.items():
        _visit(fn, f"{part} of {op}", seen)
    rows = [[part, _title(fn)] for part, fn in functions.items()]
    parts = [rows, sorted(map(str, settings.items())), *seen.values()]
    digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    return Source("\n\n".join(_shown(row) for row in seen.values()), digest)


def _shown(row: list[Any]) -> str:
    constants = "".join(f"# {name} = {value}\n" for name, value in row[3])
    return f"# {row[0]}\n{constants}{row[1]}".rstrip() + "\n"


def _visit(fn: Callable[..., Any], where: str, seen: dict[Any, list[Any]]) -> None:
    """Adds a function, and those of the user's that it calls."""
    if fn in seen:
        return
    row: list[Any] = [_title(fn), _text(fn, where), _code(fn.__code__), []]
    seen[fn] = row
    constants: dict[str, str] = {}
    for name, value in _reads(fn, where):
        if isinstance(value, FunctionType) and not in_library(value):
            _visit(value, where, seen)
            constants[name] = f"function {_title(value)}"
        else:
            constants[name] = _constant(name, value, where)
    row[3] = sorted(constants.items())


def _title(fn: Callable[..., Any]) -> str:
    """Its name, without the module: that of a script is another one than where it is imported."""
    return fn.__qualname__


def _text(fn: Callable[..., Any], where: str) -> str:
    try:
        return textwrap.dedent(inspect.getsource(fn))
    except (OSError, TypeError, IndentationError) as error:
        hint = (
            "Define it with `def` in a file or a notebook: what is typed into `python` or made by exec has no source."
        )
        raise CustomOpError(f"the source of {fn.__name__} cannot be read", where=where, hint=hint) from error


def _code(code: CodeType) -> list[Any]:
    """The instructions of a function, which tell whether the text is that of the function."""
    constants = [_code(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts]
    return [code.co_code.hex(), constants, list(code.co_names)]


def in_library(fn: FunctionType) -> bool:
    """Whether a function belongs to Python, rlx or an installed package, which its version identifies."""
    return _is_library(fn.__module__ or "")


def _is_installed(file: Path) -> bool:
    if _PACKAGES.intersection(file.parts):
        return True
    return any(file.is_relative_to(sysconfig.get_paths()[name]) for name in ("stdlib", "platstdlib"))


def _reads(fn: Callable[..., Any], where: str) -> Iterator[tuple[str, Any]]:
    """(name, value) of what a function reads from outside: globals, members of modules, variables around it.

    Raises:
        CustomOpError: it assigns one of them, or one does not exist.
    """
    inside = dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True))
    for name, cell in inside.items():
        try:
            yield name, cell.cell_contents
        except ValueError:
            continue  # the function itself, which is being defined
    for code in _codes(fn.__code__):
        path, value = "", None
        for step in dis.get_instructions(code):
            free = step.argval in inside if "DEREF" in step.opname else True
            if step.opname in _WRITES and free:
                what = f"{fn.__name__} has a side effect: it assigns the {_WRITES[step.opname]} variable {step.argval}"
                raise CustomOpError(what, where=where, hint="Its result may depend on its operands and attributes only")
            if step.opname == "LOAD_GLOBAL":
                path, value = str(step.argval), _global(fn, str(step.argval))
            elif step.opname in ("LOAD_ATTR", "LOAD_METHOD") and isinstance(value, ModuleType):
                path, value = f"{path}.{step.argval}", getattr(value, str(step.argval), None)
            else:
                path, value = "", None
            if path:
                yield path, value


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _global(fn: Callable[..., Any], name: str) -> Any:
    builtins = fn.__globals__.get("__builtins__", {})
    builtins = vars(builtins) if isinstance(builtins, ModuleType) else builtins
    return fn.__globals__.get(name, builtins.get(name))


def _constant(name: str, value: Any, where: str) -> str:
    """A value from outside as text.

    Raises:
        CustomOpError: it can change while the process runs.
    """
    if isinstance(value, tuple | frozenset) and all(isinstance(v, _PLAIN) for v in value):
        return repr(value)
    if isinstance(value, (*_PLAIN, np.generic, Dim)):
        return repr(value)
    if isinstance(value, ModuleType):
        return f"module {value.__name__} {_version(value.__name__)}".rstrip()
    kind = type(value)
    module, label = getattr(value, "__module__", None) or "builtins", getattr(value, "__qualname__", None)
    if callable(value) and isinstance(label, str) and isinstance(module, str) and _is_library(module):
        return f"{module}.{label} {_version(module)}".rstrip()
    if kind.__module__ == "rlx.ir.custom":
        return f"custom op {value.name} {value.digest}"
    label = getattr(value, "__name__", None) or getattr(value, "name", None)
    if kind.__module__.split(".")[0] in ("rlx", "numpy") and isinstance(label, str):  # a ufunc, a dtype, a primitive
        return f"{kind.__module__} {label} {_version(kind.__module__)}".rstrip()
    what = f"reads the variable {name}, a {kind.__name__}, which can change: a side effect"
    hint = "Pass it as an operand (Graph.constant), or use functions, numbers, strings and tuples"
    raise CustomOpError(what, where=where, hint=hint)


def _is_library(module: str) -> bool:
    """Whether a module is part of Python, rlx or an installed package."""
    if module.split(".")[0] == "rlx":
        return True
    file = getattr(sys.modules.get(module), "__file__", None)
    built_in = file is None and module.split(".")[0] in sys.stdlib_module_names and module != "__main__"
    return built_in or (file is not None and _is_installed(Path(file)))


def _version(name: str) -> str:
    """The version of the package of a module; rlx's own sources are in every compile key."""
    found = getattr(sys.modules.get(name.split(".")[0]), "__version__", "")
    return found if isinstance(found, str) and name.split(".")[0] != "rlx" else ""
