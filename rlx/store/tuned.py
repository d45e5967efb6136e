"""Measured tunings, which `rlx tune` writes into the compile cache's folder: one file, an entry per target and machine.

An entry is valid for the machine and the compiler sources that it was measured with. If a file or an entry cannot be
used, a warning says so, and the level's defaults apply. The file is data only, and every number is checked.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlx import platform as systems
from rlx.backends.device import Target
from rlx.errors import ArgumentError, CacheError, file_error
from rlx.store.cache import CompileCache
from rlx.store.folder import reason
from rlx.store.key import digest_text, versions
from rlx.store.store import CacheWarning, Store

FILE, FORMAT = "tuning.json", 1
_VERSIONS = ("rlx", "generator", "llvm")  # versions that a measurement depends on


@dataclass(frozen=True)
class Measured:
    """An entry of the file.

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
    """The measurement for a target on this machine, with these sources, or None. Warns about an unusable file."""
    path = store.root / FILE
    if store.problem:
        return None
    try:
        entry = _read(store).get(place(target))
        return _measured(entry, target) if entry is not None else None
    except (OSError, ValueError, RecursionError, ArgumentError) as error:
        advice = "the default tuning is used; `rlx tune` measures again, `rlx tune --reset` removes the file"
        warnings.warn(f"{path} is not used: {reason(error)}; {advice}", CacheWarning, stacklevel=2)
        return None


def keep(store: Store, target: Target, measured: Measured) -> Path:
    """Writes an entry, replacing an older one for the same target; returns the path of the file.

    Raises:
        CacheError: the folder cannot be written.
    """
    path = store.root / FILE
    known: Mapping[str, Any] = {}
    with contextlib.suppress(OSError, ValueError, RecursionError):  # a damaged file is replaced
        known = _read(store)
    row = {
        "target": target.describe(),
        "machine": machine(),
        "date": measured.date,
        "threads": measured.threads,
        "versions": _versions(),
        "tuning": dict(measured.tuning),
    }
    text = json.dumps({"format": FORMAT, "entries": {**known, place(target): row}}, indent=1, sort_keys=True) + "\n"
    with _named_errors(path):
        store.write_file(FILE, text.encode())
    return path


def remove(store: Store) -> bool:
    """Removes the file with the entries of all targets; False if there was none.

    Raises:
        CacheError: the folder cannot be written.
    """
    with _named_errors(store.root / FILE):
        return store.remove_file(FILE)


def place(target: Target) -> str:
    """The name of an entry: a digest of the target and of the machine's name, 16 hexadecimal digits."""
    return digest_text(json.dumps([target.describe(), machine()], sort_keys=True))[:16]


def machine() -> str:
    """The processor's model name. Machines that share a cache folder may differ in caches and memory."""
    import platform

    return systems.current().processor() or platform.processor() or platform.machine()


def _read(store: Store) -> Mapping[str, Any]:
    """The entries of the file; none if there is no file.

    Raises:
        ValueError: it is not such a file.
        OSError: it cannot be read or trusted.
    """
    text = store.read_file(FILE)
    if text is None:
        return {}
    found = json.loads(text.decode("utf-8"))
    if not isinstance(found, dict) or not isinstance(found.get("entries"), dict):
        raise ValueError("it holds no tunings")
    if found.get("format") != FORMAT:
        raise ValueError(f"it has format {found.get('format')!r}, expected {FORMAT}")
    entries: Mapping[str, Any] = found["entries"]
    return entries


def _measured(entry: Any, target: Target) -> Measured:
    """An entry's contents, for a target.

    Raises:
        ValueError, ArgumentError: it is damaged, or from other sources.
    """
    if not isinstance(entry, dict) or not isinstance(entry.get("tuning"), dict):
        raise ValueError("an entry is damaged")
    if entry.get("versions") != _versions():
        raise ValueError("it was measured with another version of rlx")
    known = target.backend.default_tuning(target).keys()
    if unknown := entry["tuning"].keys() - known:
        raise ValueError(f"it has an unknown key {min(unknown)!r}")
    if missing := known - entry["tuning"].keys():
        raise ValueError(f"it has no {min(missing)}")
    target.backend.with_tuning(target, entry["tuning"])
    threads = entry.get("threads")
    return Measured(entry["tuning"], str(entry.get("date")), threads if type(threads) is int else 0)


def _versions() -> dict[str, Any]:
    found = versions()
    return {name: found[name] for name in _VERSIONS}


@contextlib.contextmanager
def _named_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise file_error(CacheError, "it cannot be written", error, path) from error
