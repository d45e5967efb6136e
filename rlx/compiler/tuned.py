"""Measured tunings, which `rlx tune` writes into the compile cache: an entry per target, machine and version.

Compiler stage. An entry is valid for the machine and the compiler sources that it was measured with. If it cannot be
used, a warning says so, and the level's defaults apply. It is data only, and every number is checked.
"""

from __future__ import annotations

import json
import platform
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from rlx import platform as systems
from rlx.backends.device import Target
from rlx.errors import ArgumentError, CacheError, file_error
from rlx.store.cache import CompileCache
from rlx.store.folder import Damage
from rlx.store.key import FORMAT, CompileKey, digest_text, versions
from rlx.store.kinds import CacheWarning
from rlx.store.store import Store

FILE, KIND = "tuning.json", "tuning"
_VERSIONS = ("rlx", "generator", "llvm")  # versions that a measurement depends on
_SAME = 32  # digits of an address that the entries of a target and a machine have in common
_ADVICE = "the default tuning is used; `rlx tune` measures again, `rlx tune --reset` removes it"


@dataclass(frozen=True)
class Measured:
    """A measured tuning of a target.

    Attributes:
        tuning: the numbers.
        date: when they were measured, in ISO 8601.
        threads: number of workers during the measurement.
    """

    tuning: Mapping[str, int]
    date: str
    threads: int


def tuned(target: Target, cache: CompileCache) -> Target:
    """The target with its measured tuning, if there is one. A tuning that is already set stays."""
    if not target.backend.default_tuning(target) or cache.store is None or cache.policy == "off":
        return target
    found = find(cache.store, target)
    tuned: Target = target.backend.with_tuning(target, found.tuning) if found else target
    return tuned


def find(store: Store, target: Target) -> Measured | None:
    """The measurement for a target on this machine, with these sources, or None. Warns about an unusable one."""
    key = _key(target)
    entry = store.get(key, discard=False)
    if entry is not None:
        try:
            return _measured(entry.read(FILE), target)
        except (ValueError, RecursionError, ArgumentError, CacheError) as error:
            warnings.warn(f"{path(store, target)} is not used: {error}; {_ADVICE}", CacheWarning, stacklevel=2)
    elif others := [digest for digest in store.near(key.digest[:_SAME]) if digest != key.digest]:
        where = store.root / others[0][:2] / others[0] / FILE
        what = f"{where} is not used: it was measured with another version of rlx; {_ADVICE}"
        warnings.warn(what, CacheWarning, stacklevel=2)
    return None


def keep(store: Store, target: Target, measured: Measured) -> Path:
    """Writes an entry, replacing older ones for the same target; returns the path of the file.

    Raises:
        CacheError: the folder cannot be written.
    """
    key = _key(target)
    row = {"date": measured.date, "threads": measured.threads, "tuning": dict(measured.tuning)}
    text = json.dumps(row, indent=1, sort_keys=True) + "\n"
    try:
        store.write(key, {FILE: text.encode()}, replace=True)
    except (OSError, Damage) as error:
        raise file_error(CacheError, "it cannot be written", error, path(store, target)) from error
    for digest in store.near(key.digest[:_SAME]):
        if digest != key.digest:
            store.remove(digest)
    return path(store, target)


def remove(store: Store) -> bool:
    """Removes the entries of all targets; False if there was none.

    Raises:
        CacheError: the folder cannot be written.
    """
    rows = [row for row in store.entries() if (row.key.kind == KIND if row.key else row.digest == FILE)]
    for row in rows:
        store.remove(row.digest)
    return bool(rows)


def path(store: Store, target: Target) -> Path:
    """The file of a target's entry."""
    digest = _key(target).digest
    return store.root / digest[:2] / digest / FILE


def machine() -> str:
    """The processor's model name. Machines that share a cache folder may differ in caches and memory."""
    return systems.current().processor() or platform.processor() or platform.machine()


def _key(target: Target) -> CompileKey:
    found = versions()
    named = {**{name: found[name] for name in _VERSIONS}, "format": FORMAT}
    key = CompileKey(KIND, machine(), target=target.describe())
    return replace(key, versions=named, address=key.digest[:_SAME] + digest_text(json.dumps(named))[_SAME:])


def _measured(data: bytes, target: Target) -> Measured:
    """The contents of an entry, for a target.

    Raises:
        ValueError, ArgumentError: they are not such numbers.
    """
    row, names = json.loads(data), target.backend.default_tuning(target).keys()
    if not isinstance(row, dict) or not isinstance(row.get("tuning"), dict):
        raise ValueError("it holds no tuning")
    if unknown := row["tuning"].keys() - names:
        raise ValueError(f"it has an unknown key {min(unknown)!r}")
    if missing := names - row["tuning"].keys():
        raise ValueError(f"it has no {min(missing)}")
    target.backend.with_tuning(target, row["tuning"])
    threads = row.get("threads")
    return Measured(row["tuning"], str(row.get("date")), threads if type(threads) is int else 0)
