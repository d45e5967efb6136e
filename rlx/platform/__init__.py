"""The operating system as rlx uses it: one object, with a form for Linux, macOS, Windows, and a plain one.

Beside the pipeline: every part may ask `current()`. Nothing else in rlx names a system call, a file of `/proc`, or a
module that only some systems have. The plain form needs Python and C's standard library only. It is what runs on
systems without a form of their own, and everywhere with `RLX_PLATFORM=plain`.
"""

from __future__ import annotations

import os
import sys
from functools import cache, reduce
from importlib import import_module
from operator import or_

from rlx import env
from rlx.platform.base import Platform

__all__ = ["MAX_WORKERS", "Platform", "cpu_count", "current", "flags", "of", "usable_cpus"]

MAX_WORKERS = 1024  # of a pool
_FORMS = {"linux": "Linux", "darwin": "Macos", "win32": "Windows"}  # each in a module that other systems cannot import


@cache
def current() -> Platform:
    """The form of this process; RLX_PLATFORM is read once."""
    return of("plain" if env.plain_platform() else sys.platform)


def flags(*names: str) -> int:
    """Flags of `os.open` by name, such as "O_NOFOLLOW"; those that this system lacks are left out."""
    return reduce(or_, (getattr(os, name, 0) for name in names), 0)


def cpu_count() -> int:
    """Physical cores that this process may use, by affinity and cgroup quota. Hyper-threads count once. At least 1."""
    system = current()
    return max(1, int(min(system.cores(system.allowed_cpus()), system.cpu_quota())))


def usable_cpus() -> float:
    """Logical CPUs that this process may use at a time: the smaller of its affinity and its cgroup quota."""
    system = current()
    return min(len(system.allowed_cpus()), system.cpu_quota())


@cache
def of(system: str) -> Platform:
    """The form of a system, by its name in `sys.platform`; the plain one for others."""
    name = _FORMS.get(system)
    if name is None or (sys.platform == "win32") != (system == "win32"):
        return Platform()
    form: Platform = getattr(import_module(f"rlx.platform.{name.lower()}"), name)()
    return form
