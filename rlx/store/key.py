"""The key of an entry: everything that changes its contents and nothing else, as values a person can read.

Store: programs with equal keys have equal code. Keys are compared by their digest, the SHA-256 of their
canonical JSON. `diff` lists the fields in which two keys differ; `rlx.store.misses` explains them.

Making a key imports neither Numba nor llvmlite: their versions come from the metadata of the installed packages.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import cache, cached_property
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from rlx.errors import ArgumentError, CacheError

# What writes code for every device.
_SHARED = ("ir/**/*.py", "passes/**/*.py", "backends/*.py", "scalars.py")

# Numba's settings that change what its front end emits.
_NUMBA_SETTINGS = (
    "BOUNDSCHECK CPU_FEATURES CPU_NAME DEBUGINFO DISABLE_INTEL_SVML ENABLE_AVX ENABLE_PROFILING LLVM_REFPRUNE_PASS "
    "LOOP_VECTORIZE OPT SLP_VECTORIZE"
).split()


def sources_of(*folders: str) -> tuple[str, ...]:
    """Patterns of the sources of devices with these folders of `rlx/backends`, and of what all devices share."""
    own = (f"backends/{folder}/**/*.{kind}".replace("**/**", "**") for folder in folders for kind in ("py", "xz"))
    return (*_SHARED, *own)


def compiler_versions() -> dict[str, Any]:
    """Versions of Numba and LLVM.

    `llvm` is the digest that the package's record holds for llvmlite's library, which has LLVM inside.
    `numba_settings` are those NUMBA_* variables that change code and are set.
    """
    settings = {name: os.environ.get(f"NUMBA_{name}") for name in _NUMBA_SETTINGS}
    return {**_installed(), "numba_settings": {name: value for name, value in settings.items() if value}}


@cache
def _installed() -> dict[str, Any]:
    llvmlite = metadata.distribution("llvmlite")
    return {"numba": metadata.version("numba"), "llvmlite": llvmlite.version, "llvm": _library_digest(llvmlite)}


def _library_digest(llvmlite: Any) -> str:
    """Which build of LLVM this is: hash and size from the package's RECORD, else size and time of the file."""
    libraries = [path for path in llvmlite.files or [] if path.name.startswith(("libllvmlite.", "llvmlite."))]
    binaries = [path for path in libraries if path.suffix in (".so", ".dylib", ".dll")]
    if not binaries:
        raise CacheError("llvmlite's library is not among its installed files", hint="Reinstall llvmlite with pip")
    if binaries[0].hash:
        return f"{binaries[0].hash.mode}={binaries[0].hash.value}"
    stat = Path(binaries[0].locate()).stat()
    return f"{stat.st_size} bytes of {stat.st_mtime_ns}"


#: To be increased when the meaning of the files of an entry changes. Entries of other formats have other keys.
FORMAT = 2

#: What a key may hold, recursively: values that JSON writes in one way only.
Json = None | bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"]


class Absent(Enum):
    """The other side of a difference: the key has no such field."""

    ABSENT = "absent"

    def __str__(self) -> str:
        return "(absent)"


ABSENT = Absent.ABSENT


@dataclass(frozen=True, eq=False)
class CompileKey:
    """The key of a program. Immutable and hashable; two keys are equal if their digests are.

    >>> key = CompileKey("program", "tiny", phase="decode", bucket=[1, 1])
    >>> diff(key, CompileKey("program", "tiny", phase="prefill", bucket=[2, 16]))
    [('phase', 'decode', 'prefill'), ('bucket', [1, 1], [2, 16])]

    Attributes:
        kind: "program"; "pack", code that packs weights; "runtime", the worker loop; "peak" and "linear", code that
            `rlx bench` and `rlx tune` measure; "weights", a packed copy of weights; see `rlx.store.kinds`.
        name: for people: a model's family and size; tells small programs without a graph apart.
        graph: digest of the symbolic graph's text.
        phase: "prefill", "decode" or "batch"; or "greedy", a decode that gives the likeliest token, "verify", a prefill
            that gives it for every guessed token, and "advance", which moves recurrent states by the right guesses.
        bucket: lowest and highest SEQ.
        states: storage format of each cache and recurrent state.
        target: level, triple, processor model and features.
        profile: the compile profile's contents.
        options: further choices: rows, symbols, the numbers that `rlx tune` measures, ...
        versions: of everything that makes code, see `versions`.
        address: the digest, for a kind whose entries are found by what they begin with; by default that of all fields.

    Raises:
        ArgumentError: a value is not made of None, booleans, numbers, strings, sequences and string-keyed mappings.
    """

    kind: str
    name: str = ""
    graph: str = ""
    phase: str = ""
    bucket: Json = None
    states: Mapping[str, Json] = field(default_factory=dict)
    target: Mapping[str, Json] = field(default_factory=dict)
    profile: Mapping[str, Json] = field(default_factory=dict)
    options: Mapping[str, Json] = field(default_factory=dict)
    versions: Mapping[str, Json] = field(default_factory=dict)
    address: str = ""

    def __post_init__(self) -> None:
        for row in fields(self):
            if type(value := getattr(self, row.name)) not in _SCALARS:
                object.__setattr__(self, row.name, _freeze(value, row.name))

    @cached_property
    def digest(self) -> str:
        """The address, or the SHA-256 of the canonical JSON; 64 hexadecimal digits."""
        return self.address or digest_text(self.canonical)

    @cached_property
    def canonical(self) -> str:
        """The key as JSON that is written in one way only."""
        return canonical(self.as_dict())

    def as_dict(self) -> dict[str, Any]:
        """The fields as plain dicts and lists; without an address that is not set."""
        values = {row.name: getattr(self, row.name) for row in fields(self) if row.name != "address" or self.address}
        found: dict[str, Any] = json.loads(json.dumps(values, default=dict))
        return found

    def to_json(self) -> str:
        """The key as indented JSON; `from_json` reads it back."""
        return json.dumps(self.as_dict(), indent=1, sort_keys=True) + "\n"

    @staticmethod
    def from_json(text: str | bytes) -> CompileKey:
        """The key that `to_json` wrote.

        Raises:
            CacheError: the text is not a key.
        """
        try:
            return CompileKey(**json.loads(text))
        except (ValueError, TypeError, RecursionError, ArgumentError) as error:
            raise CacheError(f"not a compile key: {error}", where="key.json") from error

    @property
    def title(self) -> str:
        """The purpose of the program on one line, with the digits that `rlx cache` shows."""
        rows = "-".join(str(row) for row in self.bucket) if isinstance(self.bucket, tuple) else ""
        words = (self.kind, self.name, self.phase, rows, str(self.target.get("level", "")))
        return f"{' '.join(filter(None, words))} (key {self.digest[:12]})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CompileKey) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __str__(self) -> str:
        rows = [f"{name}: {json.dumps(value)}" for name, value in flatten(self).items()]
        return "\n".join([f"key {self.digest[:12]}", *(f"  {row}" for row in rows)])


def canonical(value: Any) -> str:
    """JSON without spaces, with the names in order."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def digest_text(text: str) -> str:
    """SHA-256 of a text, in hexadecimal."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def range_text(bounds: Any) -> str:
    """A bucket or another range as people read it: (2, 16) -> '2-16', (1, 1) -> '1', None -> ''."""
    return "-".join(map(str, dict.fromkeys(bounds))) if bounds else ""


def flatten(key: CompileKey) -> dict[str, Any]:
    """'target.level' -> 'avx2' and so on: every leaf of a key by its path, in order of the fields."""
    return dict(_leaves("", key.as_dict()))


def diff(a: CompileKey, b: CompileKey) -> list[tuple[str, Any, Any]]:
    """The leaves that differ, as (path, in a, in b); `ABSENT` where one key lacks the path. Empty for equal keys."""
    left, right = flatten(a), flatten(b)
    paths = [*left, *(path for path in right if path not in left)]
    rows = [(path, left.get(path, ABSENT), right.get(path, ABSENT)) for path in paths]
    return [row for row in rows if json.dumps(row[1], default=str) != json.dumps(row[2], default=str)]


def _leaves(prefix: str, value: Any) -> list[tuple[str, Any]]:
    if not isinstance(value, dict) or (prefix and not value):
        return [(prefix, value)]
    return [leaf for name in value for leaf in _leaves(_path(prefix, name), value[name])]


def _path(prefix: str, name: str) -> str:
    if not prefix:
        return name
    return f"{prefix}.{name}" if name.isidentifier() else f"{prefix}[{json.dumps(name)}]"


_SCALARS = (str, int, bool, type(None))


def _freeze(value: Any, where: str) -> Any:
    """An immutable copy of a JSON value."""
    if type(value) in _SCALARS or (type(value) is float and math.isfinite(value)):
        return value
    if isinstance(value, Mapping):
        wrong = [name for name in value if type(name) is not str]
        if wrong:
            raise ArgumentError(f"{wrong[0]!r} is no string", where=f"compile key, names in {where}")
        rows = [(name, value[name]) for name in sorted(value)]
        return MappingProxyType(
            {name: item if type(item) in _SCALARS else _freeze(item, f"{where}.{name}") for name, item in rows}
        )
    if isinstance(value, (list, tuple)):
        return tuple(item if type(item) in _SCALARS else _freeze(item, f"{where}[{i}]") for i, item in enumerate(value))
    hint = "Use None, booleans, finite numbers, strings, lists and dicts: values with one way to write them"
    raise ArgumentError(f"{value!r} is a {type(value).__name__}", where=f"compile key, {where}", hint=hint)


# -- versions -------------------------------------------------------------------------------------------------------


class Maker(Protocol):
    """A device, which makes code."""

    @property
    def sources(self) -> tuple[str, ...]:
        """Patterns of its source files, and of those that it shares with other devices."""

    def versions(self) -> Mapping[str, Json]:
        """Versions of the compilers that it uses."""


def versions(maker: Maker | None = None) -> dict[str, Json]:
    """Versions of everything that makes code. A change of any of them is a change of every key of the device.

    `generator` is the digest of our own sources that write code, so that editing a kernel invalidates.

    Args:
        maker: the device; by default all of them, with the compilers of the default one.
    """
    own = compiler_versions() if maker is None else maker.versions()
    sources = sources_of("**") if maker is None else maker.sources
    return {
        "rlx": _own_version(),
        "format": FORMAT,
        "generator": source_digest(None, sources),
        "python": ".".join(platform.python_version_tuple()[:2]),
        **own,
    }


@cache
def _own_version() -> str:
    try:
        return metadata.version("rlx")
    except metadata.PackageNotFoundError:  # run from a source tree; `generator` tells the trees apart
        return "source"


@cache
def source_digest(package: Path | None = None, patterns: tuple[str, ...] = sources_of("**")) -> str:
    """SHA-256 over the names and contents of sources; those that write code by default."""
    root = package or Path(__file__).parent.parent
    total = hashlib.sha256()
    for path in sorted({path for pattern in patterns for path in root.glob(pattern)}):
        total.update(path.relative_to(root).as_posix().encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()
