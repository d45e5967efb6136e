"""The compile cache on disk: a folder of entries that no other user can write, within a size limit.

Compile cache: an entry (`rlx.runtime.entry`) lies at `<root>/<2 digits>/<digest>/` and appears there by renaming a
complete folder, so readers need no lock, and a killed writer leaves nothing but a temporary folder that a later writer
collects. A damaged entry is reported, removed and counts as missing. Checksums are against accidents; that others
cannot write the folder is what protects from them, because the files are code.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import stat
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rlx import env
from rlx.errors import ArgumentError, CacheError
from rlx.runtime import entry
from rlx.runtime.entry import Damage, Entry, Listing
from rlx.runtime.key import CompileKey

_TEMPORARY, _LOCK = "tmp", "lock"
_TOTAL = "total"  # bytes of all entries, or more: looking at each takes half a millisecond, and there may be thousands
_LOCK_SECONDS = 5.0
_ABANDONED_SECONDS = 3600.0


class CacheWarning(UserWarning):
    """The compile cache's folder cannot be used, or an entry was damaged; the program runs without it."""


@dataclass(frozen=True)
class StoreStats:
    """The folder in figures.

    Attributes:
        nbytes, limit: size of all entries, and what it may grow to.
        oldest: when the least recently used entry was used, in seconds since the epoch; None without entries.
        problem: why the folder is not used; None if it is.
    """

    root: Path
    entries: int
    nbytes: int
    limit: int
    oldest: float | None
    problem: str | None


def default_root() -> Path:
    """RLX_CACHE_DIR, or the platform's folder for caches.

    Raises:
        ArgumentError: RLX_CACHE_DIR names a home folder that is not there.
        CacheError: this user has none, and no other folder was named.
    """
    if chosen := env.cache_dir():
        return chosen
    system: str = sys.platform
    if system == "darwin":
        return _home() / "Library" / "Caches" / "rlx"
    if system == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or _home() / "AppData" / "Local") / "rlx"
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The standard says to ignore a relative XDG_CACHE_HOME.
    return (base if base.is_absolute() else _home() / ".cache") / "rlx"


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError as error:  # a user without an entry in the system's list, as in some containers
        hint = "Name a folder in RLX_CACHE_DIR, or say RLX_CACHE=off"
        raise CacheError("this user has no home folder", where="compile cache", hint=hint) from error


class Store:
    """The folder of compiled programs.

    Where the folder cannot be trusted or used, a store with a `root` raises; one with the default root warns once,
    finds nothing and keeps nothing.

    Args:
        root: the folder; made if missing. By default RLX_CACHE_DIR or the user's cache folder.
        limit: bytes; beyond it the least recently used entries go. RLX_CACHE_LIMIT or 2 GiB by default.

    Attributes:
        problem: why the folder is not used; None if it is.
        damaged: entries found damaged so far.
        evicted: entries dropped so far to keep below the limit.

    Raises:
        CacheError: `root` is given, and belongs to another user, can be written by others, or is a symbolic link.
        ArgumentError: `limit` is not above 0.
    """

    def __init__(self, root: Path | str | None = None, limit: int | None = None) -> None:
        self.limit = env.cache_limit() if limit is None else limit
        if self.limit <= 0:
            hint = "Give bytes above 0; RLX_CACHE=off stores nothing"
            raise ArgumentError(f"limit = {self.limit}", where="Store", hint=hint)
        self.root = Path(default_root() if root is None else root).absolute()
        self.damaged = self.evicted = 0
        self._warned: set[str] = set()
        self._lock = threading.Lock()
        self.problem = _prepare(self.root)
        if self.problem and root is not None:
            raise CacheError(self.problem, where=self.root, hint="Choose another folder, or chmod 700 it")
        if self.problem:
            self._warn("folder", f"the compile cache {self.root} is not used: {self.problem}")

    # -- one entry ------------------------------------------------------------------------------------------------

    def get(self, key: CompileKey, discard: bool = True) -> Entry | None:
        """The entry of a key, every file checked and held in memory; None if there is none.

        Args:
            discard: remove the entry if it is damaged.
        """
        if self.problem:
            return None
        folder = self._folder(key)
        try:
            files = entry.load(folder, key)
        except FileNotFoundError:
            return None
        except Damage as damage:
            self._report_damage(folder, str(damage), discard)
            return None
        except OSError as error:
            self._warn("read", f"the compile cache {self.root} cannot be read, compiling again: {error}")
            return None
        entry.touch(folder)
        return Entry(key, files, folder)

    def put(
        self,
        key: CompileKey,
        files: Mapping[str, bytes | str],
        replace: bool = False,
        large: entry.Large | None = None,
    ) -> Entry:
        """Store an entry and return it. If the folder cannot be written, warn once and return it unstored.

        An entry that is there already stays, unless `replace`: of two writers the second gets what the first stored.

        Args:
            large: files that are mapped from the entry's folder and never read as a whole; an entry of which they would
                outgrow the limit alone is not stored.

        Raises:
            ArgumentError: a file's name is not a plain relative path, or is one of the store's own.
        """
        contents = entry.encode(files)
        nbytes = sum(len(piece) for pieces in (large or {}).values() for piece in pieces)
        if nbytes > self.limit:
            what = f"{nbytes} bytes are not kept in the compile cache {self.root}, whose limit is {self.limit}"
            self._warn("limit", f"{what}; RLX_CACHE_LIMIT raises it")
        if self.problem or nbytes > self.limit:
            return Entry(key, contents, None)
        try:
            stored = self._write(key, contents, replace, large)
        except (OSError, Damage) as error:
            self._warn("write", f"the compile cache {self.root} cannot be written, running uncached: {error}")
            return Entry(key, contents, None)
        self._evict(keep=self._folder(key))
        return Entry(key, stored, self._folder(key))

    def _write(
        self, key: CompileKey, contents: dict[str, bytes], replace: bool, large: entry.Large | None
    ) -> dict[str, bytes]:
        """Make the entry's folder and move it into place; returns what is there then."""
        if what := _prepare(self.root):  # it may be gone, or no longer ours alone
            raise OSError(what)
        folder = self._folder(key)
        with _temporary(self.root) as made:
            entry.fill(made, key, contents, large)
            folder.parent.mkdir(mode=0o700, exist_ok=True)
            if replace:
                self._discard(folder)
            return contents if entry.publish(made, folder) else entry.load(folder, key)

    def _folder(self, key: CompileKey) -> Path:
        return self.root / key.digest[:2] / key.digest

    def _discard(self, folder: Path) -> bool:
        """Take an entry out of sight in one step, then delete it. False if it was gone."""
        with _temporary(self.root) as grave:
            try:
                os.rename(folder, grave / folder.name)
            except FileNotFoundError:
                return False
        return True

    def _report_damage(self, folder: Path, what: str, discard: bool) -> None:
        self.damaged += 1
        self._warn(folder.name, f"cache entry {folder.name[:12]} is damaged and not used: {what}")
        if discard:
            with contextlib.suppress(OSError):  # a read-only cache keeps it, and nobody trusts it
                self._discard(folder)

    def _warn(self, about: str, message: str) -> None:
        with self._lock:
            if about in self._warned:
                return
            self._warned.add(about)
        warnings.warn(message, CacheWarning, stacklevel=4)

    # -- all entries ----------------------------------------------------------------------------------------------

    def entries(self) -> list[Listing]:
        """All entries, the most recently used first.

        Raises:
            CacheError: the folder cannot be read.
        """
        rows = (entry.look(folder) for folder in self._folders())
        return sorted((row for row in rows if row), key=lambda row: (-row.last_used, row.digest))

    def _folders(self) -> list[Path]:
        """Whatever lies where an entry would."""
        if self.problem:
            return []
        with self._named_errors():
            shelves = [shelf for shelf in _children(self.root) if re.fullmatch("[0-9a-f]{2}", shelf.name)]
            folders = [folder for shelf in shelves for folder in _children(shelf)]
        return sorted(folder for folder in folders if re.fullmatch("[0-9a-f]{64}", folder.name))

    def find(self, prefix: str) -> Listing:
        """The one entry whose digest starts with `prefix`.

        Raises:
            CacheError: there is none, or more than one.
        """
        found = [row for row in self.entries() if prefix and row.digest.startswith(prefix.lower())]
        if not found:
            raise CacheError(f"no entry starts with {prefix!r}", where=self.root, hint="See `rlx cache ls`")
        if len(found) > 1:
            names = ", ".join(sorted(row.digest[: len(prefix) + 6] for row in found)[:5])
            raise CacheError(f"{len(found)} entries start with {prefix!r}: {names}", where=self.root)
        return found[0]

    def open(self, prefix: str) -> Entry:
        """The entry whose digest starts with `prefix`, checked.

        Raises:
            CacheError: there is none or more than one, or it is damaged.
        """
        row = self.find(prefix)
        try:
            if row.key is None:
                raise Damage(f"{entry.KEY} cannot be read")
            return Entry(row.key, entry.load(row.folder, row.key), row.folder)
        except (OSError, Damage) as error:
            hint = "`rlx cache verify` removes damaged entries"
            raise CacheError(f"damaged: {error}", where=f"cache entry {row.digest[:12]}", hint=hint) from error

    def remove(self, prefix: str) -> Listing:
        """Remove the one entry whose digest starts with `prefix` and return what it was.

        Raises:
            CacheError: there is none or more than one, or the folder cannot be written.
        """
        row = self.find(prefix)
        with self._named_errors():
            self._discard(row.folder)
        return row

    def clear(self) -> int:
        """Remove all entries and what killed writers left; returns the number of entries.

        Raises:
            CacheError: the folder cannot be read or written.
        """
        with self._named_errors():
            _collect_abandoned(self.root / _TEMPORARY)
            return sum(self._discard(folder) for folder in self._folders())

    def verify(self, discard: bool = True) -> list[tuple[str, str]]:
        """Check every byte of every entry: (digest, what is wrong) of the damaged ones, which are removed.

        Raises:
            CacheError: the folder cannot be read or written.
        """
        with self._named_errors():
            found = [(folder, entry.problem(folder)) for folder in self._folders()]
            wrong = [(folder, what) for folder, what in found if what is not None]
            for folder, _ in wrong if discard else []:
                self._discard(folder)
        return [(folder.name, what) for folder, what in wrong]

    def stats(self) -> StoreStats:
        """The folder in figures."""
        rows = self.entries()
        oldest = rows[-1].last_used if rows else None
        return StoreStats(self.root, len(rows), sum(row.nbytes for row in rows), self.limit, oldest, self.problem)

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CacheError(f"the compile cache cannot be used: {error}", where=self.root) from error

    def _evict(self, keep: Path) -> None:
        """Bring the folder below its limit, least recently used first, and collect what killed writers left."""
        from filelock import FileLock, Timeout

        try:
            with FileLock(self.root / _LOCK, timeout=_LOCK_SECONDS, mode=0o600):
                _collect_abandoned(self.root / _TEMPORARY)
                total, stored = self._total(), entry.look(keep)
                if total is None or stored is None or total + stored.nbytes > self.limit:
                    self._note_total(self._shrink(keep))
                else:
                    self._note_total(total + stored.nbytes)
        except Timeout:  # whoever holds the lock is evicting
            pass
        except (OSError, CacheError) as error:
            self._warn("evict", f"the compile cache {self.root} may outgrow its limit: {error}")

    def _shrink(self, keep: Path) -> int:
        """Remove what has not been used longest until the limit holds; bytes of what is left."""
        rows = self.entries()
        total = sum(row.nbytes for row in rows)
        for row in reversed(rows):
            if total > self.limit and row.folder != keep and self._discard(row.folder):
                total -= row.nbytes
                self.evicted += 1
        return total

    def _total(self) -> int | None:
        """Bytes of all entries as last noted, by any process; removed ones may still count. None if nobody noted it."""
        try:
            text = entry.read_file(self.root / _TOTAL)
        except (OSError, Damage):
            return None
        return int(text) if re.fullmatch(rb"\d{1,18}", text) else None

    def _note_total(self, nbytes: int) -> None:
        with _temporary(self.root) as made:
            (made / _TOTAL).write_text(str(nbytes))
            os.replace(made / _TOTAL, self.root / _TOTAL)


def _prepare(root: Path) -> str | None:
    """Make the folder if it is missing; returns why it cannot be trusted, or None."""
    try:
        if not os.path.lexists(root):
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = root.lstat()
    except OSError as error:
        return f"it cannot be made: {error}"
    if not stat.S_ISDIR(info.st_mode):
        return "it is a symbolic link" if stat.S_ISLNK(info.st_mode) else "it is not a folder"
    if hasattr(os, "geteuid") and info.st_uid != os.geteuid():
        return f"it belongs to user {info.st_uid}"
    if os.name == "posix" and info.st_mode & 0o022:
        return f"other users can write it (mode {stat.S_IMODE(info.st_mode):04o})"
    return None


def _children(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


# -- temporary folders ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _temporary(root: Path) -> Iterator[Path]:
    """A new folder on the store's file system, gone afterwards unless it was renamed. Its name says who made it."""
    base = root / _TEMPORARY
    base.mkdir(mode=0o700, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{_machine()}-{os.getpid()}-", dir=base))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@functools.cache
def _machine() -> str:
    """Tells machines, and containers on one machine, apart that share the folder: process ids mean nothing abroad."""
    import socket

    name = socket.gethostname()
    with contextlib.suppress(OSError):
        name += os.readlink("/proc/self/ns/pid")
    return entry.sha256(name.encode())[:8]


def _collect_abandoned(base: Path) -> None:
    """Remove temporary folders whose process is gone, and very old ones."""
    for folder in _children(base):
        machine, pid, *_ = [*folder.name.split("-"), "", ""]
        with contextlib.suppress(OSError):
            old = time.time() - folder.lstat().st_mtime > _ABANDONED_SECONDS
            if old or (machine == _machine() and pid.isdigit() and not _is_alive(int(pid))):
                shutil.rmtree(folder, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    if os.name != "posix":
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
