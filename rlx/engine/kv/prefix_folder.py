"""The size limit of a folder with states of prompts, which several models and processes share.

Runtime, under `prefix_store.py`. Files that were used least recently go when a new one needs their room. One process
at a time removes files.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from rlx.engine.kv.prefix_names import PAGES, STATES

DISK_SHARE, MOST_BYTES = 10, 64 << 30  # the default limit: one part in so many of the free disk, and at most this
RESCAN = 5.0  # seconds after which the size is looked up again: other processes write, too
LOCK, LOCK_SECONDS = "lock", 5.0

_MODEL = re.compile(r"[0-9a-f]{32}")


class FolderSize:
    """The bytes of all files in a folder.

    Args:
        root: the folder.
        limit: most bytes; by default a tenth of the disk that is free or taken by them, at most 64 GiB.

    Attributes:
        evictions: files that this process removed to stay below the limit.
    """

    def __init__(self, root: Path, limit: int | None) -> None:
        self._root, self.evictions = root, 0
        self._total, self._at = 0, -RESCAN
        self.limit = self._default() if limit is None else limit

    def _default(self) -> int:
        try:
            free = shutil.disk_usage(self._root).free
        except OSError:
            free = 0
        return max(1, min(MOST_BYTES, (free + self.nbytes) // DISK_SHARE))

    @property
    def nbytes(self) -> int:
        """Bytes of all files, of all models, as of some seconds ago."""
        now = time.monotonic()
        if now - self._at >= RESCAN:
            self._total, self._at = sum(row[2] for row in _files(self._root)), now
        return self._total

    def add(self, nbytes: int) -> None:
        """Counts a file that was written."""
        self._total += nbytes

    def make_room(self, needed: int) -> None:
        """Removes the files that were used least recently until `needed` more bytes fit the limit.

        Raises:
            TimeoutError: another process has been removing files for seconds.
            OSError: the folder cannot be written.
        """
        if self.nbytes + needed <= self.limit:
            return
        from filelock import FileLock

        with FileLock(self._root / LOCK, timeout=LOCK_SECONDS):
            rows = sorted(_files(self._root))
            total = sum(row[2] for row in rows)
            for _, _, size, path in rows:
                if total + needed <= self.limit:
                    break
                with contextlib.suppress(OSError):  # it is gone, or belongs to another user
                    path.unlink()
                    self.evictions += 1
                total -= 0 if path.exists() else size
            self._total, self._at = total, time.monotonic()


def _files(root: Path) -> Iterator[tuple[int, int, int, Path]]:
    """Files of states below a folder. Those of a prompt were used at one time: the later positions sort first."""
    with contextlib.suppress(OSError):
        for model in os.scandir(root):
            if _MODEL.fullmatch(model.name) and model.is_dir(follow_symlinks=False):
                for row in os.scandir(model.path):
                    if (found := PAGES.fullmatch(row.name) or STATES.fullmatch(row.name)) is not None:
                        with contextlib.suppress(OSError):
                            info = row.stat(follow_symlinks=False)
                            if not stat.S_ISREG(info.st_mode):
                                continue
                            yield info.st_mtime_ns, -int(found[1], 16), info.st_size, Path(row.path)
