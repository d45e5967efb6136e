"""A file that appears when it is whole: written under another name beside it, and renamed.

Used by every stage that writes a file for the user. The process that writes a partial file holds a lock on it. A killed
process loses its locks, so a partial file that nobody holds is left over, and the next one that writes into the folder
removes it. Where there are no locks, one that nobody has written for a day is left over.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from rlx import platform

_PARTIAL = re.compile(r".+\.rlx-\d+-[0-9a-f]{8}\.partial")
_ABANDONED_SECONDS = 86_400
_FLAGS = platform.flags("O_NOFOLLOW", "O_CLOEXEC", "O_BINARY")


@contextlib.contextmanager
def into_place(out: Path, mode: int = 0o666, *, replace: bool = True) -> Iterator[Path]:
    """A name beside `out` for the body to write to; at the end it becomes `out`, after an error it is removed.

    Args:
        mode: permissions of the file, less the umask.
        replace: whether it takes the place of a file that is there by then, of whoever wrote it.

    Raises:
        FileExistsError: there is one, and `replace` is not set.
        OSError: the folder cannot be written, or `out` is one itself.
    """
    if not out.name:  # `.` or `/`
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(out))
    collect(out.parent)
    partial, lock = _new(out, mode)
    try:
        yield partial
        if replace:
            partial.replace(out)
        else:
            _add(partial, out)
    finally:
        partial.unlink(missing_ok=True)
        if lock is not None:
            os.close(lock)


def _new(out: Path, mode: int) -> tuple[Path, int | None]:
    """An empty file and the descriptor that locks it. Before it is locked it may be taken for left over; then again."""
    while True:
        partial = out.with_name(f"{out.name[:200]}.rlx-{os.getpid()}-{secrets.token_hex(4)}.partial")
        descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | _FLAGS, mode)
        if not platform.current().renames_open:  # there a file that is open cannot be removed by others either
            os.close(descriptor)
            return partial, None
        platform.current().lock(descriptor, wait=True)
        if os.fstat(descriptor).st_nlink:
            return partial, descriptor
        os.close(descriptor)


def _add(partial: Path, out: Path) -> None:
    """Gives a file its name unless another one has it, which a rename would replace."""
    try:
        out.hardlink_to(partial)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        if os.path.lexists(out):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(out)) from None
        partial.replace(out)


def collect(folder: Path) -> None:
    """Removes the partial files that killed processes of this user left in a folder."""
    with contextlib.suppress(OSError), os.scandir(folder) as rows:
        for name in [row.name for row in rows if _PARTIAL.fullmatch(row.name)]:
            with contextlib.suppress(OSError):
                _remove_unheld(folder / name)


def _remove_unheld(path: Path) -> None:
    """Removes a partial file unless a living process holds it; OSError if one does, or the system cannot tell."""
    if not platform.current().renames_open:  # a writer there has no lock, and between two steps not even the file open
        if _is_abandoned(path.lstat()):
            path.unlink()
        return
    descriptor = os.open(path, os.O_RDWR | _FLAGS | platform.flags("O_NONBLOCK"))
    try:
        info = os.fstat(descriptor)
        is_own = stat.S_ISREG(info.st_mode) and (not hasattr(os, "geteuid") or info.st_uid == os.geteuid())
        is_free = platform.current().lock(descriptor)
        if is_own and (_is_abandoned(info) if is_free is None else is_free):
            path.unlink()
    finally:
        os.close(descriptor)


def _is_abandoned(info: os.stat_result) -> bool:
    """Whether nobody has written for a long time."""
    return time.time() - info.st_mtime > _ABANDONED_SECONDS
