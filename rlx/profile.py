"""Compile profiles: a TOML file of choices about the compile, strict about every key and value.

    [precision]
    mode = "auto"            # or "exact"
    kv_dtype = "f16"         # f32, f16, bf16
    [fusion]
    gated = true             # one switch a group of `rlx.passes.options.FUSIONS`
    [buckets]
    seq = [1, 32, 512]       # largest row count of each program; a prompt runs in chunks of the last
    [target]
    level = "native"         # generic, avx2, avx512
    threads = 2

A profile is part of the compile key through what it changes: two files that choose the same share their programs.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlx.errors import ProfileError
from rlx.passes.options import FUSIONS

KEYS: dict[str, dict[str, type]] = {
    "precision": {"mode": str, "kv_dtype": str},
    "fusion": dict.fromkeys(FUSIONS, bool),
    "buckets": {"seq": list},
    "target": {"level": str, "threads": int},
}
CHOICES = {
    "mode": ("auto", "exact"),
    "kv_dtype": ("f32", "f16", "bf16"),
    "level": ("native", "generic", "avx2", "avx512"),
}


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
    """

    precision: str | None = None
    kv_dtype: str | None = None
    fusions: tuple[str, ...] = FUSIONS
    buckets: tuple[int, ...] = (1, 32, 512)
    level: str | None = None
    threads: int | None = None

    @property
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
        if isinstance(profile, CompileProfile):
            return profile
        if isinstance(profile, str | Path):
            return _from_table(_read(Path(profile)), str(profile))
        return _from_table(profile or {}, "profile")


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ProfileError(f"cannot be read: {error.strerror}", where=path) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ProfileError(f"is no TOML: {error}", where=path) from error


def _from_table(table: Mapping[str, Any], where: str) -> CompileProfile:
    _check_names(table, KEYS, where)
    for section, values in table.items():
        if not isinstance(values, Mapping):
            raise ProfileError(
                f"{section} must be a section, found {values!r}", where=where, hint=f"Write [{section}]."
            )
        _check_names(values, KEYS[section], f"{where} [{section}]")
        for key, value in values.items():
            _check_value(key, value, KEYS[section][key], f"{where} [{section}]")
    precision, target = table.get("precision", {}), table.get("target", {})
    profile = CompileProfile(precision.get("mode"), precision.get("kv_dtype"), level=target.get("level"))
    profile = replace(profile, threads=target.get("threads"), fusions=_fusions(table.get("fusion", {})))
    return replace(profile, buckets=_buckets(table.get("buckets", {}), where))


def _check_names(found: Mapping[str, Any], known: Mapping[str, Any], where: str) -> None:
    for name in found:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(known)}."
            raise ProfileError(f"unknown key {name!r}", where=where, hint=hint)


def _check_value(key: str, value: Any, kind: type, where: str) -> None:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ProfileError(f"{key} must be a {kind.__name__}, found {value!r}", where=where)
    if key in CHOICES and value not in CHOICES[key]:
        raise ProfileError(f"{key} = {value!r} is unknown", where=where, hint=f"Choose from {', '.join(CHOICES[key])}.")
    if isinstance(value, int) and key == "threads" and value < 1:
        raise ProfileError(f"threads must be at least 1, found {value}", where=where)


def _fusions(table: Mapping[str, bool]) -> tuple[str, ...]:
    return tuple(name for name in FUSIONS if table.get(name, True))


def _buckets(table: Mapping[str, Any], where: str) -> tuple[int, ...]:
    ends = tuple(table.get("seq", CompileProfile.buckets))
    numbers = all(isinstance(e, int) and not isinstance(e, bool) and 1 <= e <= 4096 for e in ends)
    if not numbers or len(ends) < 2 or ends[0] != 1 or list(ends) != sorted(set(ends)):
        hint = "Give ascending row counts up to 4096, starting with 1, such as [1, 32, 512]."
        raise ProfileError(f"seq = {list(ends)!r} is no ladder of buckets", where=f"{where} [buckets]", hint=hint)
    return ends
