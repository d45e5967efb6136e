"""One entry of the store: a folder that is written whole, and checked before it is used.

Store: `key.json` says what the entry is. `checksums.json` holds the SHA-256 of every other file and of itself. The time
of the empty file `last_used` says when the entry was used last. The other files are the caller's: object code, IR after
each pass, kernel sources. Those that only people read (`TEXTS`), most of the bytes, are read and checked when somebody
asks for them. The store (`rlx.store.store`) decides where entries lie, which are kept, and what happens to a damaged
one.

A large file is mapped or read in pieces, and never read as a whole. `large.json` holds its size, which is checked
before each use, and a digest of each piece, which `read_pieces` and `problem` (`rlx cache verify`) check.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from rlx.arguments import did_you_mean
from rlx.env import size
from rlx.errors import ArgumentError, CacheError
from rlx.notebook import card
from rlx.store.folder import Damage, Folder, UntrustedFolder, reason
from rlx.store.key import CompileKey, canonical, flatten

KEY, CHECKSUMS, LAST_USED, LARGE = "key.json", "checksums.json", "last_used", "large.json"
_OWN = (KEY, CHECKSUMS, LAST_USED, LARGE)
DIGEST = re.compile("[0-9a-f]{64}")
_PLAIN = re.compile(r"(?=.{1,200}\Z)[A-Za-z0-9_+-][A-Za-z0-9_.+-]*(/[A-Za-z0-9_+-][A-Za-z0-9_.+-]*)*")
TEXTS = re.compile(r".*\.ll|kernels/.*\.txt|explain\.json")  # what a program does not need to run
PIECE = 1 << 24  # bytes of a large file that have one digest


@dataclass(frozen=True)
class LargeFile:
    """The contents of a large file.

    Attributes:
        nbytes: size in bytes.
        chunks: the contents, one after the other. A chunk may be invalid once the next one is asked for.
        piece: bytes that have one digest.
    """

    nbytes: int
    chunks: Iterable[memoryview]
    piece: int = PIECE


#: Large files by name.
Large = Mapping[str, LargeFile]


class Entry:
    """The files of an entry.

    Args:
        key: what it is.
        files: name -> contents; of a stored entry those that are held in memory.
        root: the store's folder; None if the entry lives in memory only.
        sums: name -> SHA-256 of each file, where they are known.

    Attributes:
        large: what `large.json` says of each large file: "nbytes", "piece" and "digests".
    """

    def __init__(
        self, key: CompileKey, files: Mapping[str, bytes], root: Path | None, sums: Mapping[str, str] | None = None
    ) -> None:
        self.key, self._root = key, root
        known = sums or {name: sha256(data) for name, data in files.items()}
        self._sums = {name: digest for name, digest in known.items() if name not in _OWN}
        self._held: Mapping[str, bytes] | None = files
        self.large = large_files(files)

    def _repr_html_(self) -> str:
        sizes = "\n".join(f"{name:40} {size(len(self.read(name))):>9}" for name in self.names)
        return card(self.key.title, flatten(self.key).items(), [(f"{len(self.names)} files", sizes)])

    @property
    def folder(self) -> Path | None:
        """Where the entry is stored; None if it lives in memory only."""
        return None if self._root is None else self._root / self.key.digest[:2] / self.key.digest

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the files, in order, without those of the store."""
        return tuple(sorted(self._sums))

    def read(self, name: str) -> bytes:
        """A file's contents, checked.

        Raises:
            CacheError: there is no such file, or it was evicted or damaged since.
        """
        where = f"cache entry {self.key.digest[:12]}"
        if name not in self._sums:
            listed = f"`rlx cache inspect {self.key.digest[:12]}` lists the files"
            hint = did_you_mean(name, self.names, most=3, otherwise=listed)
            raise CacheError(f"no file is called {name!r}", where=where, hint=hint)
        if self._held is not None and name in self._held:
            return self._held[name]
        try:
            with self.open_file(name) as file:
                data = file.read()
        except (OSError, Damage) as error:
            raise CacheError(f"{name} is gone: {reason(error)}", where=where, hint="Compile again") from error
        if sha256(data) != self._sums[name]:
            raise CacheError(f"{name} changed since it was stored", where=where, hint="Run `rlx cache verify`")
        return data

    def read_pieces(self, name: str, first: int, out: memoryview) -> None:
        """Reads pieces of a large file from piece `first` on into `out`, and checks each.

        Raises:
            Damage: one of them was changed, or the file is missing, short or cannot be trusted.
            OSError: the entry is gone, or the system refuses.
        """
        row = self.large[name]
        with self.open_file(name) as file:
            file.seek(first * row["piece"])
            if file.readinto(out) != len(out):  # type: ignore[attr-defined]
                raise Damage(f"{name} was cut short")
        for number, at in enumerate(range(0, len(out), row["piece"]), first):
            if _piece_digest(out[at : at + row["piece"]]).hexdigest() != row["digests"][number]:
                raise Damage(f"wrong checksum of piece {number} of {name}")

    @contextlib.contextmanager
    def open_file(self, name: str) -> Iterator[BinaryIO]:
        """A file of a stored entry, open for reading; its contents are not checked.

        Raises:
            Damage: the file is missing or cannot be trusted.
            OSError: the entry is gone, or the system refuses.
        """
        assert self._root is not None
        digest = self.key.digest
        with (
            Folder(self._root) as root,
            root.child(digest[:2]) as shelf,
            _undisturbed(shelf, digest) as folder,
            folder.open_file(name) as file,
        ):
            yield file

    def release(self) -> None:
        """Frees the contents in memory; from now on `read` takes them from the folder, if there is one."""
        if self._root is not None:
            self._held = None


@dataclass(frozen=True)
class Listing:
    """An entry as its folder shows it, without a check of its files.

    Attributes:
        digest: name of the folder.
        key: None if `key.json` cannot be read.
        nbytes: size of all files.
        last_used: seconds since the epoch.
    """

    digest: str
    folder: Path
    key: CompileKey | None
    nbytes: int
    last_used: float

    def _repr_html_(self) -> str:
        facts: list[tuple[str, object]] = [("size", size(self.nbytes))]
        facts += [] if self.key is None else flatten(self.key).items()
        return card(self.key.title if self.key else f"cache entry {self.digest[:12]}", facts)


# -- reading --------------------------------------------------------------------------------------------------------


def load(root: Path, shelf: Folder, key: CompileKey, *, whole: bool = False) -> Entry:
    """The entry of `key`, with its files checked.

    Args:
        root: the store's folder.
        shelf: the folder that holds the entry's folder.
        whole: check `TEXTS`, too.

    Raises:
        FileNotFoundError: there is no entry.
        Damage: there is one, and it is wrong or cannot be trusted.
        OSError: the system failed; that says nothing about the entry.
    """
    for _ in range(3):
        try:
            with _undisturbed(shelf, key.digest) as folder:
                return Entry(key, *_check(folder, key, root, whole))
        except FileNotFoundError:
            shelf.stat(key.digest)  # replaced: look again; else there is none
    raise FileNotFoundError(shelf.path / key.digest)


@contextlib.contextmanager
def _undisturbed(shelf: Folder, digest: str) -> Iterator[Folder]:
    """The folder of an entry; damage that is found in it while another process removes the entry is none.

    Raises:
        FileNotFoundError: there is no entry, or it was evicted or replaced meanwhile.
        Damage: the folder cannot be trusted.
    """
    with open_folder(shelf, digest) as folder:
        try:
            yield folder
        except Damage as error:
            found = shelf.stat(digest)
            if (found.st_dev, found.st_ino) == folder.identity:
                raise
            raise FileNotFoundError(folder.path) from error


@contextlib.contextmanager
def shelf_of(root: Folder, digest: str) -> Iterator[Folder]:
    """The folder that holds an entry; `root` for what an earlier version left there."""
    with root.child(digest[:2]) if DIGEST.fullmatch(digest) else contextlib.nullcontext(root) as shelf:
        yield shelf


def open_folder(shelf: Folder, digest: str) -> Folder:
    """The folder of an entry; `Damage` if it cannot be trusted, FileNotFoundError if there is none."""
    try:
        return shelf.child(digest)
    except UntrustedFolder as error:
        raise Damage(str(error)) from error


def _check(folder: Folder, key: CompileKey, root: Path, whole: bool) -> tuple[dict[str, bytes], Path, dict[str, str]]:
    """The parts of an entry, all of them checked: its files, the store's folder, the checksums."""
    text = folder.read(CHECKSUMS)
    sums = _parse_checksums(text)
    whole = whole or CHECKSUMS not in sums  # an earlier version wrote it
    files = {name: folder.read(name) for name in sums if name != CHECKSUMS and (whole or not TEXTS.fullmatch(name))}
    wrong = [name for name, data in files.items() if sha256(data) != sums[name]]
    if wrong:
        raise Damage(f"wrong checksum of {', '.join(wrong)}")
    # As bytes, so that a change of any byte of checksums.json itself is seen too.
    if text != (_checksums(sums) if CHECKSUMS in sums else _written(sums)):
        raise Damage(f"{CHECKSUMS} was changed")
    if not _is_of(key, files.pop(KEY, b"")):
        raise Damage(f"{KEY} is of another program")
    for name, row in large_files(files).items():
        with folder.open_file(name) as file:
            if os.fstat(file.fileno()).st_size != row["nbytes"]:
                raise Damage(f"{name} is not of {row['nbytes']} bytes")
    return files, root, sums


def _is_of(key: CompileKey, text: bytes) -> bool:
    """Whether `key.json` says this key. To write the key as people read it takes five times as long as to read it."""
    try:
        return canonical(json.loads(text)) == key.canonical
    except (ValueError, RecursionError):
        return False


def large_files(files: Mapping[str, bytes]) -> dict[str, dict[str, Any]]:
    """The large files of an entry by its other files: name -> {"nbytes": ..., "piece": ..., "digests": [...]}."""
    rows: dict[str, dict[str, Any]] = json.loads(files.get(LARGE, b"{}"))
    return rows


def _parse_checksums(text: bytes) -> dict[str, str]:
    try:
        sums = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Damage(f"{CHECKSUMS} cannot be read") from error
    if not isinstance(sums, dict) or not all(
        name in (KEY, LARGE, CHECKSUMS) or (_PLAIN.fullmatch(name) and name not in _OWN) for name in sums
    ):
        raise Damage(f"{CHECKSUMS} was changed")
    return sums


def problem(shelf: Folder, digest: str) -> str | None:
    """The damage of an entry; None if nothing, or if it is gone."""
    try:
        with open_folder(shelf, digest) as folder:
            key = CompileKey.from_json(folder.read(KEY))
            if key.digest != digest:
                return f"{KEY} is of another program"
            large = load(shelf.path.parent, shelf, key, whole=True).large
            wrong = [name for name, row in large.items() if not _is_whole(folder, name, row)]
            return f"wrong checksum of {', '.join(wrong)}" if wrong else None
    except FileNotFoundError:
        return None
    except (Damage, CacheError) as error:
        with contextlib.suppress(FileNotFoundError):
            shelf.stat(digest)
            return str(error)
        return None


def _is_whole(folder: Folder, name: str, row: Mapping[str, Any]) -> bool:
    """Whether all pieces of a large file fit their digests. Earlier formats had none: nobody reads their entries."""
    digests = row.get("digests")
    if digests is None:
        return True
    with folder.open_file(name) as file:
        return all(_piece_digest(file.read(row["piece"])).hexdigest() == digest for digest in digests)


def look(shelf: Folder, digest: str) -> Listing | None:
    """The entry as its folder shows it, without a check of its files; None if it is gone."""
    try:
        with shelf.child(digest) as folder:
            used = _last_used(shelf, folder)
            return Listing(digest, folder.path, _read_key(folder), _size(folder), used)
    except UntrustedFolder:  # a file, a link, a folder of somebody else: listed, so that it can be removed
        with contextlib.suppress(OSError):
            info = shelf.stat(digest)
            return Listing(digest, shelf.path / digest, None, info.st_size, info.st_mtime)
    except OSError:
        pass
    return None


def read_key(shelf: Folder, digest: str) -> CompileKey | None:
    """The key of an entry, unchecked; None if it cannot be read."""
    with contextlib.suppress(OSError), shelf.child(digest) as folder:
        return _read_key(folder)
    return None


def _read_key(folder: Folder) -> CompileKey | None:
    with contextlib.suppress(OSError, Damage, CacheError):
        return CompileKey.from_json(folder.read(KEY))
    return None


def _last_used(shelf: Folder, folder: Folder) -> float:
    """Time of the file that says so, or of the folder itself where that is gone."""
    try:
        return folder.stat(LAST_USED).st_mtime
    except FileNotFoundError:
        return shelf.stat(folder.path.name).st_mtime


def _size(folder: Folder) -> int:
    """Bytes of all files in a folder and below it."""
    total = 0
    with contextlib.suppress(OSError):
        for name in folder.names():
            with contextlib.suppress(OSError):
                info = folder.stat(name)
                if not stat.S_ISDIR(info.st_mode):
                    total += info.st_size
                    continue
                with folder.child(name) as below:
                    total += _size(below)
    return total


# -- writing --------------------------------------------------------------------------------------------------------


def encode(files: Mapping[str, bytes | str]) -> dict[str, bytes]:
    """The files as bytes.

    Raises:
        ArgumentError: a name is not a plain relative path, or is one of the store's own.
    """
    for name in files:
        if not _PLAIN.fullmatch(name) or name in _OWN:
            hint = f"Use letters, digits, '_', '-', '+', '.' and '/', and none of {', '.join(_OWN)}"
            raise ArgumentError(f"{name!r} cannot be a file of a cache entry", hint=hint)
    return {name: data.encode() if isinstance(data, str) else bytes(data) for name, data in files.items()}


def fill(
    folder: Folder, key: CompileKey, files: Mapping[str, bytes], large: Large, used: float | None, sync: bool
) -> None:
    """Writes a whole entry into an empty folder.

    Args:
        used: when it was used last, in seconds since the epoch; None for now.
        sync: wait until all of it is on the disk.
    """
    rows = {name: _write_large(folder, name, file, sync) for name, file in large.items()}
    files = {KEY: key.to_json().encode(), **files}
    if rows:
        files[LARGE] = json.dumps(rows, sort_keys=True).encode()
    files[CHECKSUMS] = _checksums({name: sha256(data) for name, data in files.items()})
    files[LAST_USED] = b""
    with contextlib.ExitStack() as stack:
        made = {"": folder}
        for place in sorted({name.rpartition("/")[0] for name in files}):
            for part in _parents(place):
                if part not in made:
                    above, _, name = part.rpartition("/")
                    made[part] = stack.enter_context(made[above].make(name))
        _write_files(
            [(made[name.rpartition("/")[0]], name.rpartition("/")[2], data) for name, data in files.items()], sync
        )
        for written in made.values() if sync else ():
            written.sync()
    if used is not None:
        folder.touch(LAST_USED, used)


def _parents(place: str) -> list[str]:
    """'a/b/c' -> 'a', 'a/b', 'a/b/c'."""
    parts = place.split("/")
    return ["/".join(parts[: n + 1]) for n in range(len(parts))]


def _write_files(rows: Sequence[tuple[Folder, str, bytes]], sync: bool) -> None:
    def write(row: tuple[Folder, str, bytes]) -> None:
        folder, name, data = row
        with folder.create(name, sync=sync) as file:
            file.write(data)

    if not sync:
        for row in rows:
            write(row)
        return
    # Side by side: a file system serves several fsyncs with one commit. 40 files took 20 ms, one by one 150.
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, rows))


def _write_large(folder: Folder, name: str, contents: LargeFile, sync: bool) -> dict[str, Any]:
    """Writes the chunks one after the other; what `large.json` says of the file."""
    digests: list[str] = []
    piece, left, nbytes = _piece_digest(), contents.piece, 0
    with folder.create(name, sync=sync) as file:
        for chunk in contents.chunks:
            nbytes += len(chunk)
            while len(chunk):
                part, chunk = chunk[:left], chunk[left:]
                file.write(part)
                piece.update(part)
                left -= len(part)
                if not left:
                    digests.append(piece.hexdigest())
                    piece, left = _piece_digest(), contents.piece
    if left < contents.piece:
        digests.append(piece.hexdigest())
    return {"nbytes": nbytes, "piece": contents.piece, "digests": digests}


def publish(base: Folder, name: str, shelf: Folder, digest: str, sync: bool) -> bool:
    """Moves a complete folder to its place; False if there is one already."""
    try:
        base.move(name, shelf, digest)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise
    if sync:
        shelf.sync()
    return True


def _checksums(sums: Mapping[str, str]) -> bytes:
    """The file of checksums, with one of its other rows."""
    others = {name: digest for name, digest in sums.items() if name != CHECKSUMS}
    return _written({**others, CHECKSUMS: sha256(_written(others))})


def _written(sums: Mapping[str, str]) -> bytes:
    return json.dumps(sums, indent=1, sort_keys=True).encode() + b"\n"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _piece_digest(data: memoryview | bytes = b"") -> hashlib.blake2b:
    """The digest of a piece of a large file: BLAKE2b needs no instructions of its own to be quick."""
    return hashlib.blake2b(data, digest_size=16)
