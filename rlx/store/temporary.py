"""Temporary folders of the store: an entry is written in one and renamed into place.

Compile cache: a temporary folder is locked by the process that writes it. A killed process loses its locks, so an
unlocked folder is left over; the next process that opens the cache for writing removes it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator

from rlx.store.folder import Folder

BASE = "tmp"
_PREFIX = "new-"
_OLD_SECONDS = 86_400.0  # age limit if locks do not work, and for folders of earlier versions of rlx


@contextlib.contextmanager
def temporary(root: Folder) -> Iterator[tuple[Folder, Folder]]:
    """(parent, new folder) on the store's file system. The new one is removed at the end unless it was renamed."""
    with root.make(BASE) as base:
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
    with contextlib.suppress(FileNotFoundError), root.child(BASE) as base:
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
