"""The size limit of the compile cache: the least recently used entries go when a new one needs their room."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from rlx import env
from rlx.errors import CacheError
from rlx.store import entry
from rlx.store.entry import Listing
from rlx.store.folder import REFUSED, Damage, Folder, reason
from rlx.store.temporary import collect

if TYPE_CHECKING:
    from rlx.store.store import Store

_LOCK = "lock"
_TOTAL = "total"  # bytes of all entries, or more: looking at each takes half a millisecond, and there may be thousands
_LOCK_SECONDS = 5.0

# Digests that this process stored, by the folder of the store: all stores of a process share one folder's limit.
_stored: dict[Path, set[str]] = {}


class Eviction:
    """Keeps the folder of a store below the store's limit."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def stored(self, new: str) -> None:
        """Brings the folder below its limit after the entry `new` was stored, and collects what killed writers left."""
        _stored.setdefault(self._store.root, set()).add(new)
        try:
            with Folder(self._store.root) as root, root.lock(_LOCK, _LOCK_SECONDS):
                collect(root)
                with root.child(new[:2]) as shelf:
                    stored = entry.look(shelf, new)
                total = self._total(root)
                if total is None or stored is None or total + stored.nbytes > self._store.limit:
                    self._note_total(self._shrink(root, new))
                else:
                    self._note_total(total + stored.nbytes)
        except TimeoutError:  # the process that holds the lock is evicting
            pass
        except (*REFUSED, CacheError) as error:
            self._store.warn("evict", f"the compile cache {self._store.root} may outgrow its limit: {reason(error)}")

    def _shrink(self, root: Folder, new: str) -> int:
        """Removes the least recently used entries until the limit holds; bytes of what is left.

        Entries that this process stored go last, and never without a warning: the next start compiles them again.
        """
        rows, own = self._store.entries(), _stored.get(self._store.root, set())
        total = sum(row.nbytes for row in rows)
        for row in sorted(rows, key=lambda row: (row.digest in own, row.last_used)):
            if total <= self._store.limit or row.digest == new:
                continue
            if row.digest in own:
                self._warn_too_small(rows)
            with root.child(row.digest[:2]) as shelf:
                if self._store.discard(root, shelf, row.digest):
                    total -= row.nbytes
                    self._store.evicted += 1
        if total > self._store.limit:
            self._warn_too_small(rows)
        return total

    def _warn_too_small(self, rows: list[Listing]) -> None:
        own = _stored.get(self._store.root, set())
        needed = sum(row.nbytes for row in rows if row.digest in own)
        self._store.warn(
            "small",
            f"the limit of the compile cache {self._store.root}, {env.size(self._store.limit)}, is too small: this"
            f" process stored {env.size(needed)}, evicts what it stored itself, and the next start compiles it again."
            f" Raise RLX_CACHE_LIMIT (to {_limit_text(2 * needed)}, for example), or say RLX_CACHE=off",
        )

    def _total(self, root: Folder) -> int | None:
        """Bytes of all entries as last noted, by any process; removed ones may still count. None if nobody noted it."""
        try:
            text = root.read(_TOTAL)
        except (OSError, Damage):
            return None
        return int(text) if re.fullmatch(rb"\d{1,18}", text) else None

    def _note_total(self, nbytes: int) -> None:
        self._store.write_file(_TOTAL, str(nbytes).encode())


def _limit_text(nbytes: int) -> str:
    """A value for RLX_CACHE_LIMIT of at least so many bytes."""
    return f"{-(-nbytes // 2**20)}M"
