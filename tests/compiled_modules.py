"""What LLVM made of modules in earlier tests and runs: most of a test run would be LLVM compiling the same again.

Object code is a function of the module's text, the target, LLVM's version and how we call it, and these are the key. So
a hit is what a compile would give. All else runs as ever: passes, kernels, linker, compile cache.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

from rlx.backends.cpu import llvm, steps, target
from rlx.backends.cpu.llvm import Compiled
from rlx.backends.cpu.target import Target
from rlx.backends.cuda import ptx

MOST_BYTES = 500 << 20

folder: Path | None = None  # none: nothing is kept


def keep_in(path: Path) -> None:
    """Keeps modules in a folder from now on, also those of programs and of cards."""
    global folder
    folder = path
    setattr(ptx, "compiled", partial(_remembered_ptx, ptx.compiled))  # noqa: B010
    setattr(steps, "recent", cache(KnownModules))  # noqa: B010


def remove_old(path: Path) -> None:
    """Empties a folder that has become large."""
    with suppress(FileNotFoundError), os.scandir(path) as entries:  # another run may write there
        if sum(entry.stat().st_size for entry in entries) > MOST_BYTES:
            shutil.rmtree(path, ignore_errors=True)


def remembered(kind: str, text: str, for_target: Target, make: Callable[[], Compiled]) -> Compiled:
    """The result of `make` for an LLVM text, by whichever test or run made it first."""
    found = _read(name := _name(kind, text.encode(), _described(for_target)))
    if found is None:
        _write(name, found := make())
    return found


def _remembered_ptx(make: Callable[..., list[str]], modules: Sequence[str], level: str, version: int) -> list[str]:
    names = [_name("ptx", text.encode(), f"{level} {version}") for text in modules]
    found = {name: _read(name) for name in names}
    missing = {name: text for name, text in zip(names, modules, strict=True) if found[name] is None}
    for name, text in zip(missing, make([*missing.values()], level, version), strict=True):
        _write(name, made := Compiled(b"", text))
        found[name] = made
    return [found[name].text for name in names]  # type: ignore[union-attr]


class KnownModules(steps._Recent):
    """The modules of programs for a target, in memory and in the folder."""

    def __init__(self, for_target: Target) -> None:
        super().__init__()
        self._target = for_target

    def get(self, digest: str, default: Compiled | None = None) -> Compiled | None:  # type: ignore[override]
        found = super().get(digest) or _read(self._name_of(digest))
        if found is not None:
            super().__setitem__(digest, found)
        return default if found is None else found

    def __setitem__(self, digest: str, compiled: Compiled) -> None:
        if digest not in self:
            _write(self._name_of(digest), compiled)
        super().__setitem__(digest, compiled)

    def _name_of(self, digest: str) -> str:
        return _name("module", digest.encode(), _described(self._target))


@cache
def _compiler() -> bytes:
    """LLVM's version, and the text of the code that calls it."""
    import llvmlite

    here = Path(__file__).parent / "backends" / "cpu" / "native.py"
    sources = [*(Path(str(module.__file__)) for module in (llvm, target, ptx)), here]
    return b"".join([llvmlite.__version__.encode(), *(path.read_bytes() for path in sources)])


def _described(for_target: Target) -> str:
    return repr(sorted(for_target.describe().items()))


def _name(kind: str, text: bytes, for_target: str) -> str:
    parts = (kind.encode(), text, for_target.encode(), _compiler())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def _read(name: str) -> Compiled | None:
    try:
        packed = (folder / name).read_bytes() if folder else b""
        raw = zlib.decompress(packed) if packed else b""
    except (FileNotFoundError, zlib.error):
        return None
    size = int.from_bytes(raw[:8], "little")
    return Compiled(raw[8 : 8 + size], raw[8 + size :].decode()) if raw else None


def _write(name: str, compiled: Compiled) -> None:
    if folder is not None and folder.is_dir():
        raw = len(compiled.code).to_bytes(8, "little") + compiled.code + compiled.text.encode()
        partial = folder / f"{name}.{os.getpid()}"
        partial.write_bytes(zlib.compress(raw, 1))
        partial.replace(folder / name)
