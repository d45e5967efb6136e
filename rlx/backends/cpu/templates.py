"""LLVM templates of loop kernels: the output of Numba's front end with placeholders for numeric constants.

Kernels that differ in numbers only (a width, an epsilon) have the same types and the same instructions. So a kernel is
lowered once, with a marker value for each number, and the markers are replaced by placeholders. Filling in the numbers
gives exactly the text that Numba would produce for them.

The package contains an archive with the templates of its own kernels (`templates.xz`), because importing Numba and
inferring types takes a quarter of a cold start. The key of a template there is a digest of all of its inputs: the
sources of the kernel and its helpers, the types, the kinds of its holes, this module and the front end, the versions of
Numba and llvmlite. If the archive lacks a key, the kernel is lowered at run time. `python tools/lower_loops.py` writes
the archive.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from types import FunctionType
from typing import Any

from rlx.errors import CompileError
from rlx.scalars import Primitive

ARCHIVE = Path(__file__).with_name("templates.xz")

#: The kernel's name in a template.
NAME = "kernel"

_FRONTEND = "rlx.backends.cpu.numba_frontend"
_INT, _FLOAT = 0x3A5EED0000000001, 1.0 + 2.0**-30  # the first integer marker and the first float marker
_INT_STEP, _FLOAT_STEP = 0x10100000000, 2.0**-40
_FIELD = re.compile(r"<<(\w+)>>")

Value = int | float


@dataclass(frozen=True)
class Template:
    """The inputs of the lowering of a kernel.

    Attributes:
        fn: the function, with open holes.
        holes: the value of each hole: a number, for which a marker may stand, or another value.
        helpers: all functions that it calls, including those in holes.
        types: types of the parameters, in the front end's notation.
        specialize: the function that fills holes.
    """

    fn: Callable[..., Any]
    holes: Mapping[str, Any]
    helpers: tuple[Callable[..., Any], ...]
    types: tuple[str, ...]
    specialize: Callable[[Callable[..., Any], Mapping[str, Any]], Callable[..., Any]]

    def llvm(self) -> str:
        """The LLVM assembly of the kernel with its numbers filled in. The function's name is `NAME`.

        Raises:
            CompileError: Numba cannot lower it.
        """
        kinds = tuple((name, "" if name in self._markers else v) for name, v in sorted(self.holes.items()))
        key = self.fn, self.helpers, kinds, self.types
        if (text := _known.get(key)) is None:
            text = _known[key] = self.shipped() or self.lower()
        return _FIELD.sub(lambda field: _literal(self.holes[field[1]]), text)

    def lower(self) -> str:
        """The text of the template, made by Numba's front end."""
        from rlx.backends.cpu.numba_frontend import FRONTEND

        markers = self._markers
        text = FRONTEND.lower(self.specialize(self.fn, {**self.holes, **markers}), NAME, self.types)
        for name, marker in markers.items():
            text = re.sub(rf"(?<![\w.]){_literal(marker)}(?!\w)", f"<<{name}>>", text)
        return text

    def shipped(self) -> str | None:
        """The text from the archive, or None. The archive holds only functions of this package."""
        if not self.fn.__module__.startswith("rlx.") or (found := archive()) is None:
            return None
        if self.digest not in found.templates:
            return None
        start, size = found.templates[self.digest]
        return found.texts[start : start + size].decode()

    @cached_property
    def digest(self) -> str:
        """The key of the template in the archive: a digest of its inputs."""
        functions = self.fn, *self.helpers
        holes = {name: type(v).__name__ if name in self._markers else _name(v) for name, v in self.holes.items()}
        read = [(n, fn.__globals__.get(n)) for fn in functions for n in fn.__code__.co_names if n not in holes]
        modules = {_FRONTEND, __name__, *(fn.__module__ for fn in functions)}
        modules |= {v.llvm.__module__ for _, v in (*read, *self.holes.items()) if isinstance(v, Primitive)}
        constants = sorted({f"{n} = {v!r}" for n, v in read if isinstance(v, int | float | tuple)})
        parts = [
            _name(self.fn), sorted(holes.items()), self.types, constants,
            [_source_digest(module) for module in sorted(modules)], _versions(),
        ]  # fmt: skip
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]

    @cached_property
    def _markers(self) -> dict[str, Value]:
        """A marker for each numeric hole: integers that fit i64, and floats."""
        ints = [name for name, v in sorted(self.holes.items()) if type(v) is int and -(1 << 63) <= v < 1 << 63]
        floats = [name for name, v in sorted(self.holes.items()) if type(v) is float]
        return {
            **{name: _INT + i * _INT_STEP for i, name in enumerate(ints)},
            **{name: _FLOAT + i * _FLOAT_STEP for i, name in enumerate(floats)},
        }


_known: dict[Any, str] = {}


@dataclass(frozen=True)
class Archive:
    """The archive in memory: the versions that wrote it, and the (start, size) of each template in the texts.

    In the file it is a line of JSON with the index, then the texts, all compressed as one stream, because the texts are
    similar to each other.
    """

    versions: dict[str, str]
    templates: dict[str, tuple[int, int]]
    texts: bytes


@cache
def archive() -> Archive | None:
    """The archive; None if the file is missing or Python was built without LZMA.

    Raises:
        CompileError: the archive is damaged.
    """
    try:
        import lzma

        head, _, texts = lzma.decompress(ARCHIVE.read_bytes()).partition(b"\n")
        return Archive(texts=texts, **json.loads(head))
    except (ImportError, FileNotFoundError):
        return None
    except (lzma.LZMAError, ValueError, TypeError) as error:
        raise CompileError(f"it is damaged: {error}", where=ARCHIVE, hint="Install rlx again.") from error


def installed_versions() -> dict[str, str]:
    """The versions that templates depend on.

    With another Numba or llvmlite no template of the archive is found. Another Python numbers basic blocks differently.
    """
    return {"python": platform.python_version(), **_packages()}


@cache
def _source_digest(module: str) -> str:
    spec = importlib.util.find_spec(module)  # does not import the front end
    assert spec and spec.origin
    return hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()


@cache
def _packages() -> dict[str, str]:
    """The versions of Numba and llvmlite."""
    from importlib import metadata

    return {name: metadata.version(name) for name in ("numba", "llvmlite")}


def _versions() -> list[Any]:
    """The inputs of Numba's front end other than sources: versions and settings."""
    settings = sorted((name, value) for name, value in os.environ.items() if name.startswith("NUMBA_"))
    return [*_packages().values(), settings]


def _name(value: Any) -> str:
    """The name in a digest of a function or of a hole's value that has no marker."""
    if isinstance(value, FunctionType):
        return f"{value.__module__}.{value.__qualname__}"
    return f"primitive {value.name}" if isinstance(value, Primitive) else repr(value)


def _literal(value: Value) -> str:
    """A number in LLVM assembly. Floats are written as the hexadecimal bits of their f64."""
    return f"0x{struct.pack('>d', value).hex()}" if isinstance(value, float) else str(value)
