"""Compile profiles: a TOML file of choices about the compile, strict about every key and value.

    [precision]
    mode = "auto"            # or "exact"
    kv_dtype = "f16"         # f32, f16, bf16, q8_0, q4_0
    [fusion]
    gated = true             # one switch a group of `rlx.passes.options.FUSIONS`
    [buckets]
    seq = [1, 16, 512]       # largest row count of each program; a prompt runs in chunks of the last
    [target]
    level = "native"         # generic, avx2, avx512, amx
    threads = 2

A profile is part of the compile key through what it changes: two files that choose the same share their programs.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rlx.errors import ProfileError
from rlx.ir.dtypes import KV_DTYPES
from rlx.passes.options import FUSIONS

KEYS: dict[str, dict[str, type]] = {
    "precision": {"mode": str, "kv_dtype": str},
    "fusion": dict.fromkeys(FUSIONS, bool),
    "buckets": {"seq": list},
    "target": {"level": str, "threads": int},
}
CHOICES = {
    "mode": ("auto", "exact"),
    "kv_dtype": tuple(dtype.name for dtype in KV_DTYPES),
    "level": ("native", "generic", "avx2", "avx512", "amx"),
}


_KIND_NAMES = {str: "a string", int: "a whole number", bool: "true or false", list: "a list"}
MAX_ROWS = 4096  # of a bucket


@dataclass(frozen=True)
class CompileProfile:
    """What a user may choose about a compile; None leaves the choice to the caller or the default.

    Attributes:
        precision: "auto" or "exact".
        kv_dtype: type of the KV cache.
        fusions: groups of fusion rules that run.
        buckets: largest row count of each program, ascending, starting with 1.
        level: target level.
        threads: workers.

    Raises:
        ProfileError: a value is unknown or out of its range.
    """

    precision: str | None = None
    kv_dtype: str | None = None
    fusions: tuple[str, ...] = FUSIONS
    buckets: tuple[int, ...] = (1, 16, 512)
    level: str | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        given = {"mode": self.precision, "kv_dtype": self.kv_dtype, "level": self.level, "threads": self.threads}
        for key, value in given.items():
            if value is not None:
                _check_value(key, value, int if key == "threads" else str, "CompileProfile")
        _check_names(self.fusions, FUSIONS, "CompileProfile", "fusion")
        _check_buckets(self.buckets, "CompileProfile.buckets")

    @cached_property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """(smallest, largest) row count of each bucket."""
        ends = self.buckets
        return tuple((low + 1, high) for low, high in zip((0, *ends[:-1]), ends, strict=True))

    @staticmethod
    def load(profile: CompileProfile | Mapping[str, Any] | str | Path | None) -> CompileProfile:
        """A profile from a file, a parsed table, or None for the defaults.

        Raises:
            ProfileError: the file is missing or does not parse, or a key or value is unknown.
        """
        if profile is None or isinstance(profile, CompileProfile):
            return profile or CompileProfile()
        if isinstance(profile, str | Path):
            return _from_table(_read(Path(profile)), str(profile))
        if isinstance(profile, Mapping):
            return _from_table(profile, "profile")
        hint = "Give the path of a TOML file, a table, or a CompileProfile."  # type: ignore[unreachable]
        raise ProfileError(f"{profile!r} is no profile", where="profile", hint=hint)


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ProfileError(f"the profile cannot be read: {error.strerror}", where=path) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        hint = 'A profile is a TOML file, such as: [precision] on one line, mode = "exact" on the next.'
        raise ProfileError(f"this is not TOML: {error}", where=path, hint=hint) from error


def _from_table(table: Mapping[str, Any], where: str) -> CompileProfile:
    _check_names(table, KEYS, where)
    for section, values in table.items():
        if not isinstance(values, Mapping):
            hint = f"Write [{section}] on a line of its own, the keys below it."
            raise ProfileError(f"{section} is {values!r}, expected a section", where=where, hint=hint)
        _check_names(values, KEYS[section], f"{where} [{section}]")
        for key, value in values.items():
            _check_value(key, value, KEYS[section][key], f"{where} [{section}]")
    precision, target = table.get("precision", {}), table.get("target", {})
    buckets = table.get("buckets", {}).get("seq", CompileProfile.buckets)
    _check_buckets(buckets, f"{where} [buckets] seq")
    return CompileProfile(
        precision.get("mode"),
        precision.get("kv_dtype"),
        tuple(name for name in FUSIONS if table.get("fusion", {}).get(name, True)),
        tuple(buckets),
        target.get("level"),
        target.get("threads"),
    )


def _check_names(found: Iterable[Any], known: Iterable[str], where: str, what: str = "key") -> None:
    for name in found:
        if name not in known:
            close = difflib.get_close_matches(str(name), known, 1)
            hint = f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(known)}."
            raise ProfileError(f"unknown {what} {name!r}", where=where, hint=hint)


def _check_value(key: str, value: Any, kind: type, where: str) -> None:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ProfileError(f"{key} is {value!r}, expected {_KIND_NAMES[kind]}", where=where)
    if key in CHOICES and value not in CHOICES[key]:
        raise ProfileError(f"{key} is {value!r}, expected one of {', '.join(CHOICES[key])}", where=where)
    if isinstance(value, int) and key == "threads" and value < 1:
        raise ProfileError(f"threads is {value}, expected at least 1", where=where)


def _check_buckets(ends: Sequence[Any], where: str) -> None:
    numbers = all(type(end) is int and 1 <= end <= MAX_ROWS for end in ends)
    if not numbers or len(ends) < 2 or ends[0] != 1 or list(ends) != sorted(set(ends)):
        what = f"{list(ends)} is no ladder of row counts, ascending from 1 to at most {MAX_ROWS}"
        raise ProfileError(what, where=where, hint="Write, for example, [1, 16, 512].")
