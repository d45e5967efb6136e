"""`rlx doctor`: versions, packages, extras, environment variables, and the compile cache."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
import warnings
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from rlx import __version__, backends, env
from rlx import demo as models
from rlx.arguments import did_you_mean
from rlx.cli.doctor.findings import Facts, Findings, shown_path
from rlx.compiler.tuned import find
from rlx.errors import CacheError
from rlx.store.store import Store, default_root

_EXTRA = re.compile(r"""extra\s*==\s*['"]([\w-]+)['"]""")
_NOT_FOR_USERS = ("test", "dev", "docs")
_VERIFIED_BYTES = 256 << 20  # a larger cache takes seconds to check
_PROBE = "doctor.tmp"
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")


def versions(findings: Findings) -> Facts:
    """rlx, Python and the system."""
    package = Path(__file__).resolve().parents[2]
    libc = " ".join(platform.libc_ver()) or None
    return {
        "rlx": __version__,
        "folder": shown_path(package),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "executable": shown_path(sys.executable),
        "system": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "libc": libc,
    }


def packages(findings: Findings) -> Facts:
    """Name -> installed version of every package that rlx needs; those that are missing or do not fit are problems."""
    from packaging.requirements import Requirement

    found: Facts = {}
    for line in metadata.requires("rlx") or []:
        if _EXTRA.search(line):
            continue
        needed = Requirement(line)
        version = _version(needed.name)
        found[needed.name] = version
        wanted = f"rlx needs {needed.name}{needed.specifier}"
        if version is None:
            findings.problem(f"{wanted}, which is not installed", f'pip install "{line}"', prevents=True)
        elif not needed.specifier.contains(version, prereleases=True):
            findings.problem(f"{wanted}; {version} is installed", f'pip install "{line}"')
    return dict(sorted(found.items(), key=lambda row: row[0].lower()))


def extras(findings: Findings) -> Facts:
    """Extra -> whether it is installed, which packages are missing, and the command that installs it."""
    found: Facts = {}
    lines = metadata.requires("rlx") or []
    for extra in metadata.metadata("rlx").get_all("Provides-Extra") or []:
        if extra in _NOT_FOR_USERS:
            continue
        names = _names_of(extra, lines, set())
        missing = sorted(name for name in names if _version(name) is None)
        command = f'pip install "rlx[{extra}]"'
        found[extra] = {"installed": not missing, "missing": missing, "install": command}
    return found


def _names_of(extra: str, lines: list[str], seen: set[str]) -> set[str]:
    """The packages of an extra, those of extras that it includes among them."""
    names: set[str] = set()
    for line in lines:
        marker = _EXTRA.search(line)
        if marker is None or marker[1] != extra:
            continue
        name = re.split(r"[\s<>=!~\[;(]", line, maxsplit=1)[0]
        included = re.match(r"rlx\[([^\]]+)\]", line)
        for other in included[1].split(",") if included else ():
            if other not in seen:
                names |= _names_of(other, lines, seen | {extra})
        if not included:
            names.add(name)
    return names


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def environment(findings: Findings) -> Facts:
    """The variables that are set: those of rlx, checked, and NUMBA_*, which change compiled code. Keys are hidden."""
    known = {variable.name for variable in env.VARIABLES}
    for name in sorted(os.environ):
        if name.startswith("RLX_") and name not in known:
            hint = did_you_mean(name, sorted(known))
            findings.problem(f"the environment variable {name} is none of rlx, and has no effect", hint)
    checks: tuple[Callable[[], Any], ...] = (
        env.cache_policy, env.cache_dir, env.cache_limit, env.threads, env.compile_ahead, env.verify, env.jit,
        env.dynamic_decode, env.debug_level,
    )  # fmt: skip
    for check in checks:
        with findings.noting("environment", prevents=True):
            check()
    with findings.noting("environment"):
        if env.verify():
            findings.problem("RLX_VERIFY=1 makes every step many times slower", "unset it when nothing is verified")
    with findings.noting("environment"):
        if not env.jit():
            findings.problem("RLX_JIT=0 computes kernels as Python functions: very slow", "unset it outside a debugger")
    names = sorted(n for n in os.environ if n.startswith(("RLX_", "NUMBA_")) and os.environ[n].strip())
    return {name: _shown_value(name) for name in names}


def _shown_value(name: str) -> str:
    hidden = any(word in name for word in _SECRET)
    return "(hidden)" if hidden else shown_path(os.environ[name])


def cache(findings: Findings) -> Facts:
    """The compile cache: where it is, how large, whether it is sound and can be written."""
    policy = env.cache_policy()
    if policy == "off":
        return {"policy": policy}
    root = default_root()
    facts: Facts = {"policy": policy, "folder": shown_path(root)}
    try:
        store = Store(root)
    except CacheError as error:
        hint = "chmod 700 it, or choose another folder with RLX_CACHE_DIR; until then every process compiles anew"
        findings.problem(f"the compile cache {root} is not used: {error.what}", hint)
        return facts | {"usable": False}
    stats = store.stats()
    writable = _writable(store, findings)
    facts |= {"usable": True, "writable": writable, "entries": stats.entries}
    facts |= {"bytes": stats.nbytes, "limit_bytes": stats.limit, "free_bytes": shutil.disk_usage(root).free}
    facts["damaged"] = _damaged(store, stats.nbytes, findings)
    with findings.noting("tuning"):
        facts["tuning"] = _tuning(store, findings)
    return facts


def _writable(store: Any, findings: Findings) -> bool:
    from rlx.store.folder import Folder

    try:
        with Folder(store.root) as root:
            root.replace_file(_PROBE, b"")
            root.unlink(_PROBE)
    except OSError as error:
        hint = "make it writable for this user, or choose another one with RLX_CACHE_DIR"
        findings.problem(f"the compile cache {store.root} cannot be written: {error.strerror or error}", hint)
        return False
    return True


def _damaged(store: Any, nbytes: int, findings: Findings) -> int | None:
    """The number of damaged entries; None where there is too much to check in a moment."""
    if nbytes > _VERIFIED_BYTES:
        return None
    damaged = len(store.verify(discard=False))
    if damaged:
        findings.problem(f"{damaged} entries of the compile cache are damaged", "rlx cache verify removes them")
    return damaged


def _tuning(store: Any, findings: Findings) -> str:
    """Where the machine-dependent numbers in kernels come from."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = find(store, backends.backend().target())
    for warning in caught:
        findings.problem(str(warning.message))
    return f"measured on {found.date}" if found else "the level's defaults; rlx tune measures"


def demo(findings: Findings) -> Facts:
    """Whether the models inside the package are there."""
    found: Facts = {}
    for name in models.FILES:
        with findings.noting(name):
            found[name] = models.path(name).stat().st_size
    return found
