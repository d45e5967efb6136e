"""What tests need of the operating system: `@pytest.mark.system("locks")` skips a test where that is missing.

The form of `rlx.platform` decides, so that `make test-plain` skips what the plain form says that it cannot do, and
nothing else.
"""

from __future__ import annotations

import os
import tempfile
from functools import cache
from pathlib import Path

from rlx import platform
from rlx.platform import Platform

#: What may be missing, and what is then said.
REASONS = {
    "affinity": "the system does not say which CPUs and memory a process may use",
    "descriptors": "the system does not open names relative to a folder, and nobody can tell which writers live",
    "fork": "the system has no fork",
    "full": "the system has no /dev/full",
    "limits": "a process cannot limit its files, processes, CPU time and memory",
    "locks": "the system has no locks that end with their process",
    "no root": "root may read anything",
    "permissions": "the system has other permissions than POSIX",
    "proc": "the system has no /proc",
    "quiet terminal": "the system does not keep what is typed between two prompts",
    "release": "the system keeps pages of mapped files, or does not say so",
    "root": "only root can play two users",
}


@cache
def has(what: str) -> bool:
    """Whether the form of this system can do what a test needs; KeyError for a need that is not in the table."""
    system = platform.current()
    found = {
        "affinity": _overrides(system, "allowed_cpus"),
        "descriptors": system.by_descriptor,
        "fork": hasattr(os, "fork"),
        "full": Path("/dev/full").exists(),
        "limits": system.limits_children,
        "no root": hasattr(os, "geteuid") and os.geteuid() != 0,
        "permissions": hasattr(os, "geteuid"),
        "proc": Path("/proc/self/smaps").is_file(),
        "quiet terminal": _overrides(system, "quiet_terminal"),
        "release": _overrides(system, "release"),
        "root": hasattr(os, "geteuid") and os.geteuid() == 0,
    }
    return _locks(system) if what == "locks" else found[what]


def _overrides(system: Platform, method: str) -> bool:
    return getattr(type(system), method) is not getattr(Platform, method)


def _locks(system: Platform) -> bool:
    with tempfile.TemporaryFile() as file:
        return system.lock(file.fileno()) is not None
