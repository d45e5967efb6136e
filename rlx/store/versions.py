"""Sources and versions of compilers that a device's code depends on, for compile keys.

Store, beside `key.py`: nothing here imports a compiler; versions come from the metadata of the installed packages.
"""

from __future__ import annotations

import os
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from rlx.errors import CacheError

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
