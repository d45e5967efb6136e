"""One entry of the compile cache on disk: a folder that is written whole, and checked whole before it is used.

Compile cache: `key.json` says what was compiled, `checksums.json` holds the SHA-256 of every other file, the time of
`last_used` says when. The files between are the caller's: object code, IR after each pass, kernel sources. The store
(`rlx.runtime.store`) decides where entries lie, which are kept, and what happens to a damaged one.

A large file is one that is mapped and never read as a whole: `large.json` holds its size, which is checked before each
use, and its SHA-256, which only `problem` checks (`rlx cache verify`).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from rlx.errors import ArgumentError, CacheError
from rlx.runtime.key import CompileKey

KEY, CHECKSUMS, LAST_USED, LARGE = "key.json", "checksums.json", "last_used", "large.json"
_OWN = (KEY, CHECKSUMS, LAST_USED, LARGE)
_PIECE = 1 << 24  # bytes of a large file that are hashed at a time

#: The contents of large files, by name: pieces, one after the other.
Large = Mapping[str, Sequence[memoryview]]

_FLAGS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)


class Damage(Exception):
    """An entry's files are not what its checksums say. Stays inside the cache, which reports it as a warning."""


class Entry:
    """A program's files.

    Attributes:
        key: what it was compiled for.
        folder: where it is stored; None if it lives in memory only.
    """

    def __init__(self, key: CompileKey, files: Mapping[str, bytes], folder: Path | None) -> None:
        self.key, self.folder = key, folder
        self._sums = {name: sha256(data) for name, data in files.items()}
        self._held: Mapping[str, bytes] | None = files

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the files, in order, those of the store aside."""
        return tuple(sorted(self._sums))

    def read(self, name: str) -> bytes:
        """A file's contents, checked.

        Raises:
            CacheError: there is no such file, or it was evicted or damaged since.
        """
        where = f"cache entry {self.key.digest[:12]}"
        if name not in self._sums:
            raise CacheError(f"no file is called {name!r}", where=where, hint=f"Files: {', '.join(self.names)}")
        if self._held is not None:
            return self._held[name]
        assert self.folder is not None
        try:
            data = read_file(self.folder / name)
        except (OSError, Damage) as error:
            raise CacheError(f"{name} is gone: {error}", where=where, hint="Compile again") from error
        if sha256(data) != self._sums[name]:
            raise CacheError(f"{name} changed since it was checked", where=where, hint="Run `rlx cache verify`")
        return data

    def release(self) -> None:
        """Let go of the contents in memory: from now on `read` takes them from the folder, if there is one."""
        if self.folder is not None:
            self._held = None


@dataclass(frozen=True)
class Listing:
    """What a look at an entry's folder tells, without checking its files.

    Attributes:
        key: None if `key.json` cannot be read.
        nbytes: size of all files.
        last_used: seconds since the epoch.
    """

    digest: str
    folder: Path
    key: CompileKey | None
    nbytes: int
    last_used: float


# -- reading --------------------------------------------------------------------------------------------------------


def load(folder: Path, key: CompileKey) -> dict[str, bytes]:
    """The checked files of the entry of `key`.

    Raises:
        FileNotFoundError: there is no entry.
        Damage: there is one, and it is wrong.
        OSError: the system failed; that says nothing about the entry.
    """
    for _ in range(3):
        identity = folder.lstat()
        try:
            return _check(folder, key, identity)
        except Damage:
            # Evicted or replaced while we read: nothing is wrong with it, look again.
            if folder.lstat().st_ino == identity.st_ino:
                raise
    raise FileNotFoundError(folder)


def _check(folder: Path, key: CompileKey, identity: os.stat_result) -> dict[str, bytes]:
    if not stat.S_ISDIR(identity.st_mode):
        raise Damage("it is not a folder")
    text = read_file(folder / CHECKSUMS)
    sums = _parse_checksums(text)
    files = {name: read_file(folder / name) for name in sums}
    wrong = [name for name, data in files.items() if sha256(data) != sums[name]]
    if wrong:
        raise Damage(f"wrong checksum of {', '.join(wrong)}")
    # As bytes, so that a change of any byte of checksums.json itself is seen too.
    if text != _checksums(sums):
        raise Damage(f"{CHECKSUMS} was changed")
    if files.pop(KEY, None) != key.to_json().encode():
        raise Damage(f"{KEY} is of another program")
    for name, row in large_files(files).items():
        if _file_size(folder / name) != row["nbytes"]:
            raise Damage(f"{name} is not of {row['nbytes']} bytes")
    return files


def large_files(files: Mapping[str, bytes]) -> dict[str, dict[str, Any]]:
    """The large files of an entry by its other files: name -> {"nbytes": ..., "sha256": ...}."""
    rows: dict[str, dict[str, Any]] = json.loads(files.get(LARGE, b"{}"))
    return rows


def _file_size(path: Path) -> int:
    """Of a plain file; -1 if it is none."""
    with contextlib.suppress(OSError):
        found = path.lstat()
        return found.st_size if stat.S_ISREG(found.st_mode) else -1
    return -1


def _parse_checksums(text: bytes) -> dict[str, str]:
    try:
        sums = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Damage(f"{CHECKSUMS} cannot be read") from error
    if not isinstance(sums, dict) or not all(name in (KEY, LARGE) or _is_plain(name) for name in sums):
        raise Damage(f"{CHECKSUMS} was changed")
    return sums


def read_file(path: Path) -> bytes:
    """A file's bytes; `Damage` where it is missing or no plain file, OSError where the system failed."""
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | _FLAGS), "rb") as file:
            return file.read()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise Damage(f"{path.name} is missing") from error
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise Damage(f"{path.name} is a symbolic link") from error
        raise


def problem(folder: Path) -> str | None:
    """What is wrong with an entry; None if nothing, or if it is gone."""
    try:
        key = CompileKey.from_json(read_file(folder / KEY))
        files = load(folder, key)
        wrong = [name for name, row in large_files(files).items() if _hash_file(folder / name) != row["sha256"]]
        if wrong:
            return f"wrong checksum of {', '.join(wrong)}"
        return None if key.digest == folder.name else f"{KEY} is of another program"
    except FileNotFoundError:
        return None
    except (Damage, CacheError) as error:
        return str(error) if os.path.lexists(folder) else None


def _hash_file(path: Path) -> str:
    total = hashlib.sha256()
    with os.fdopen(os.open(path, os.O_RDONLY | _FLAGS), "rb") as file:
        while piece := file.read(_PIECE):
            total.update(piece)
    return total.hexdigest()


def look(folder: Path) -> Listing | None:
    """What an entry's folder tells without checking it; None if it is gone."""
    try:
        used = _last_used(folder)
    except OSError:
        return None
    try:
        key = CompileKey.from_json(read_file(folder / KEY))
    except (OSError, Damage, CacheError):
        key = None
    return Listing(folder.name, folder, key, _size(folder), used)


def _last_used(folder: Path) -> float:
    """Time of the file that says so, or of the folder itself where that is gone."""
    try:
        return (folder / LAST_USED).lstat().st_mtime
    except (FileNotFoundError, NotADirectoryError):
        return folder.lstat().st_mtime


def _size(folder: Path) -> int:
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(place, name)).st_size
    return total


def touch(folder: Path) -> None:
    """Note that the entry was used now."""
    with contextlib.suppress(OSError):  # a read-only cache is a fine cache
        (folder / LAST_USED).touch(mode=0o600)


# -- writing --------------------------------------------------------------------------------------------------------


def encode(files: Mapping[str, bytes | str]) -> dict[str, bytes]:
    """The files as bytes.

    Raises:
        ArgumentError: a name is not a plain relative path, or is one of the store's own.
    """
    for name in files:
        if not _is_plain(name):
            hint = f"Use letters, digits, '_', '-', '+', '.' and '/', and none of {', '.join(_OWN)}"
            raise ArgumentError(f"{name!r} cannot be a file of a cache entry", hint=hint)
    return {name: data.encode() if isinstance(data, str) else bytes(data) for name, data in files.items()}


def _is_plain(name: str) -> bool:
    parts = name.split("/")
    plain = len(name) <= 200 and all(re.fullmatch(r"[A-Za-z0-9_+-][A-Za-z0-9_.+-]*", part) for part in parts)
    return plain and name not in _OWN


def fill(folder: Path, key: CompileKey, contents: Mapping[str, bytes], large: Large | None = None) -> None:
    """Write a whole entry into an empty folder and wait until it is on the disk."""
    from concurrent.futures import ThreadPoolExecutor

    rows = {name: _write_large(folder / name, pieces) for name, pieces in (large or {}).items()}
    files = {KEY: key.to_json().encode(), **contents}
    if rows:
        files[LARGE] = json.dumps(rows, indent=1, sort_keys=True).encode()
    sums = _checksums({name: sha256(data) for name, data in files.items()})
    paths = {folder / name: data for name, data in [*files.items(), (CHECKSUMS, sums), (LAST_USED, b"")]}
    for made in {path.parent for path in paths}:
        made.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Side by side, because a file system serves several fsyncs with one commit: 40 files took 20 ms, one by one 150.
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(_write_file, paths, paths.values()))
    for made in {path.parent for path in paths}:
        sync_folder(made)


def _write_file(path: Path, data: bytes) -> None:
    with _new_file(path) as file:
        file.write(data)


def _write_large(path: Path, pieces: Sequence[memoryview]) -> dict[str, Any]:
    """Writes the pieces one after the other; what `large.json` says of the file."""
    total, nbytes = hashlib.sha256(), 0
    with _new_file(path) as file:
        for piece in pieces:
            for at in range(0, len(piece), _PIECE):
                file.write(piece[at : at + _PIECE])
                total.update(piece[at : at + _PIECE])
            nbytes += len(piece)
    return {"nbytes": nbytes, "sha256": total.hexdigest()}


@contextlib.contextmanager
def _new_file(path: Path) -> Iterator[BinaryIO]:
    """A file that is on the disk afterwards."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def publish(made: Path, folder: Path) -> bool:
    """Move a complete folder to its place; False if there is one already."""
    try:
        os.rename(made, folder)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise
    sync_folder(folder.parent)
    return True


def sync_folder(folder: Path) -> None:
    """Wait until a folder's list of names is on the disk."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _checksums(sums: Mapping[str, str]) -> bytes:
    return json.dumps(sums, indent=1, sort_keys=True).encode() + b"\n"


def sha256(data: bytes) -> str:
    """In hexadecimal."""
    return hashlib.sha256(data).hexdigest()
