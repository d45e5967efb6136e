"""A folder that is held open by its descriptor, and whose files are trusted only after a look at what was opened.

Store: entries are code, and numbers that answers follow from, so a file counts only if it belongs to this user and
nobody else can change it. A check of a path followed by an open of that path proves nothing, because whoever can write
a parent folder can swap the folder in between. Here every name is opened relative to the descriptor of its folder
(`openat`), without following symbolic links and without waiting for a FIFO. The checks look at the descriptor that was
opened (`fstat`).

Platforms without `dir_fd` (Windows) open by path. There the folder's own access list is what protects it: the default
folder lies in the user's profile.

An entry is written in a temporary folder, which its writer locks, and is renamed into place. A killed process loses its
locks, so an unlocked temporary folder is left over; the next process that opens the store for writing removes it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from rlx import platform
from rlx.closing import Closing

_POSIX = os.name == "posix"
_FLAGS = platform.flags("O_NOFOLLOW", "O_BINARY", "O_CLOEXEC")
_READ = os.O_RDONLY | _FLAGS | platform.flags("O_NONBLOCK")  # without it the open of a FIFO waits for a writer
_FOLDER = os.O_RDONLY | _FLAGS | platform.flags("O_DIRECTORY")
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS

_BASE = "tmp"
_PREFIX = "new-"
_OLD_SECONDS = 86_400.0  # age limit if locks do not work, and for folders of earlier versions of rlx

#: What says that the system refused: disk and descriptors, threads, memory.
REFUSED = (OSError, RuntimeError, MemoryError)


class Damage(Exception):
    """A file is missing, wrong or not to be trusted. Stays inside the store, which reports it as a warning."""


class UntrustedFolder(OSError):
    """Another user owns the folder or can write it, or it is no folder. The message says which."""

    def __str__(self) -> str:
        return str(self.args[0])


def reason(error: BaseException) -> str:
    """The text of the system about an error, else its message, else its type."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def untrusted(info: os.stat_result) -> str | None:
    """Why a file or folder cannot be trusted; None if this user owns it and nobody else can write it."""
    if hasattr(os, "geteuid") and info.st_uid != os.geteuid():
        return f"it belongs to user {info.st_uid}"
    if _POSIX and info.st_mode & 0o022:
        return f"other users can write it (mode {stat.S_IMODE(info.st_mode):04o})"
    return None


class Folder(Closing):
    """An open folder that belongs to this user and that nobody else can write. Close it, or use it in a `with`.

    Names are single components except in `read` and `open_file`, whose folders in between are checked in the same way.

    Args:
        path: where it lies. Only the last component is checked; the parents may belong to anybody.
        parent: the open folder that holds it; `path` is used only for messages then.

    Raises:
        FileNotFoundError: there is none.
        UntrustedFolder: it is no folder, is a symbolic link, or other users own it or can write it.
        OSError: the system refuses.
    """

    def __init__(self, path: Path, parent: Folder | None = None) -> None:
        self.path, self._descriptor = path, None
        self._below: dict[str, Folder] = {}  # folders in here that hold files which were read
        where, at = parent._place(path.name) if parent else (path, {})
        if not platform.current().by_descriptor:
            info = os.stat(where, follow_symlinks=False)
        else:
            try:
                self._descriptor = os.open(where, _FOLDER, **at)
            except OSError as error:
                if error.errno not in (errno.ELOOP, errno.ENOTDIR, errno.EMLINK):
                    raise
                is_link = stat.S_ISLNK(os.stat(where, follow_symlinks=False, **at).st_mode)
                raise UntrustedFolder("it is a symbolic link" if is_link else "it is not a folder") from error
            info = os.fstat(self._descriptor)
        self.identity = info.st_dev, info.st_ino
        no_folder = "it is a symbolic link" if stat.S_ISLNK(info.st_mode) else "it is not a folder"
        if what := no_folder if not stat.S_ISDIR(info.st_mode) else untrusted(info):
            self.close()
            raise UntrustedFolder(what)

    def _place(self, name: str) -> tuple[Path | str, dict[str, int]]:
        """How the system is told of a name in here: (path, keyword arguments)."""
        if self._descriptor is None:
            return self.path / name, {}
        return name, {"dir_fd": self._descriptor}

    # -- reading ------------------------------------------------------------------------------------------------------

    def child(self, name: str) -> Folder:
        """A folder in here; the errors are those of the class."""
        return Folder(self.path / name, self)

    def names(self) -> list[str]:
        """The names of the files in here, sorted."""
        with os.scandir(self.path if self._descriptor is None else self._descriptor) as rows:
            return sorted(row.name for row in rows)

    def stat(self, name: str) -> os.stat_result:
        """About a name in here; a symbolic link is not followed."""
        where, at = self._place(name)
        return os.stat(where, follow_symlinks=False, **at)

    def open_file(self, name: str) -> BinaryIO:
        """A file in here, open for reading.

        Raises:
            Damage: it is missing, no regular file, of another user, writable for others, or has a second name.
            OSError: the system refuses.
        """
        try:
            folder, parts = self, name.split("/")
            for part in parts[:-1]:
                if part not in folder._below:
                    folder._below[part] = folder.child(part)
                folder = folder._below[part]
            where, at = folder._place(parts[-1])
            file = os.fdopen(os.open(where, _READ, **at), "rb")
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            raise Damage(f"{name} is missing") from error
        except UntrustedFolder as error:
            raise Damage(f"the folder of {name} cannot be trusted: {error}") from error
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EMLINK):
                raise Damage(f"{name} is a symbolic link") from error
            if error.errno in (errno.ENXIO, errno.EOPNOTSUPP):  # a socket
                raise Damage(f"{name} is no regular file") from error
            raise
        info = os.fstat(file.fileno())
        if not stat.S_ISREG(info.st_mode):
            problem = "is no regular file"
        elif what := untrusted(info):
            problem = f"cannot be trusted: {what}"
        elif _POSIX and info.st_nlink != 1:
            problem = f"cannot be trusted: it has {info.st_nlink} hard links"
        else:
            return file
        file.close()
        raise Damage(f"{name} {problem}")

    def read(self, name: str) -> bytes:
        """The bytes of a file in here; the errors are those of `open_file`."""
        with self.open_file(name) as file:
            return file.read()

    # -- writing ------------------------------------------------------------------------------------------------------

    def make(self, name: str) -> Folder:
        """A folder in here, made if it is missing, for this user alone."""
        where, at = self._place(name)
        with contextlib.suppress(FileExistsError):
            os.mkdir(where, 0o700, **at)
        return self.child(name)

    @contextlib.contextmanager
    def create(self, name: str, *, sync: bool = True) -> Iterator[BinaryIO]:
        """A new file in here; with `sync` it is on the disk afterwards."""
        where, at = self._place(name)
        with os.fdopen(os.open(where, _NEW, 0o600, **at), "wb") as file:
            yield file
            file.flush()
            if sync:
                os.fsync(file.fileno())

    def touch(self, name: str, used: float | None = None) -> None:
        """Sets the time of a file in here, by default to now; makes an empty one if it is missing."""
        where, at = self._place(name)
        descriptor = os.open(where, os.O_WRONLY | os.O_CREAT | _FLAGS | platform.flags("O_NONBLOCK"), 0o600, **at)
        try:
            times = None if used is None else (used, used)
            os.utime(descriptor if os.utime in os.supports_fd else self.path / name, times)
        finally:
            os.close(descriptor)

    def move(self, name: str, to: Folder, new: str, *, replace: bool = False) -> None:
        """Renames in one step. With `replace` a file takes the place of another one on every platform."""
        (source, a), (target, b) = self._place(name), to._place(new)
        at = {"src_dir_fd": a["dir_fd"], "dst_dir_fd": b["dir_fd"]} if a else {}
        (os.replace if replace else os.rename)(source, target, **at)

    def replace_file(self, name: str, data: bytes, *, sync: bool = True) -> None:
        """Writes a file in here, whole or not at all; this folder then has one for temporary ones."""
        with temporary(self) as (_, made):
            with made.create(name, sync=sync) as file:
                file.write(data)
            made.move(name, self, name, replace=True)

    def unlink(self, name: str) -> None:
        """Removes a file in here."""
        where, at = self._place(name)
        os.unlink(where, **at)

    def remove_tree(self, name: str) -> None:
        """Removes a folder in here and all below it, as far as the system lets; links are not followed."""
        where, at = self._place(name)
        shutil.rmtree(where, ignore_errors=True, dir_fd=at.get("dir_fd"))

    def sync(self) -> None:
        """Waits until the list of names is on the disk."""
        if self._descriptor is not None:
            os.fsync(self._descriptor)

    # -- locks --------------------------------------------------------------------------------------------------------

    def hold(self) -> None:
        """Marks the folder as in use by this process, until it is closed or the process ends: see `is_held`."""
        if self._descriptor is not None:
            platform.current().lock(self._descriptor, shared=True, wait=True)

    def is_held(self) -> bool | None:
        """Whether a living process holds the folder; None where the platform or file system cannot tell.

        Where nobody does, nobody can until this `Folder` is closed.
        """
        if self._descriptor is None or (locked := platform.current().lock(self._descriptor)) is None:
            return None
        return not locked

    @contextlib.contextmanager
    def lock(self, name: str, seconds: float) -> Iterator[None]:
        """One process at a time, through a lock file in here.

        Raises:
            TimeoutError: another process holds it for longer than `seconds`.
        """
        where, at = self._place(name)
        descriptor = os.open(where, os.O_RDWR | os.O_CREAT | _FLAGS, 0o600, **at)
        try:
            end = time.monotonic() + seconds
            while platform.current().lock(descriptor) is False:
                if time.monotonic() > end:
                    raise TimeoutError(f"{name} is locked by another process")
                time.sleep(0.02)
            yield
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Closes the descriptor, and those of folders in here that were read; more than once does no harm."""
        for below in self._below.values():
            below.close()
        self._below = {}
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


# -- temporary folders ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def temporary(root: Folder) -> Iterator[tuple[Folder, Folder]]:
    """(parent, new folder) on the store's file system. The new one is removed at the end unless it was renamed."""
    with root.make(_BASE) as base:
        made = _held(base)
        try:
            with made:
                yield base, made
        finally:
            base.remove_tree(made.path.name)


def _held(base: Folder) -> Folder:
    """A new locked folder. If another process removes it as left over before it is locked, another one is made."""
    while True:
        with contextlib.suppress(FileNotFoundError), contextlib.ExitStack() as stack:
            made = stack.enter_context(base.make(f"{_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"))
            made.hold()
            found = base.stat(made.path.name)
            if (found.st_dev, found.st_ino) == made.identity:
                stack.pop_all()
                return made


def collect(root: Folder) -> None:
    """Removes folders that killed processes left over."""
    with contextlib.suppress(FileNotFoundError), root.child(_BASE) as base:
        for name in base.names():
            with contextlib.suppress(OSError):
                _collect(base, name)


def _collect(base: Folder, name: str) -> None:
    is_old = time.time() - base.stat(name).st_mtime > _OLD_SECONDS
    if not name.startswith(_PREFIX):
        if is_old:
            base.remove_tree(name)
        return
    with base.child(name) as folder:
        held = folder.is_held()
        if is_old if held is None else not held:
            base.remove_tree(name)  # while locked: a process that has just made it waits, then makes another
