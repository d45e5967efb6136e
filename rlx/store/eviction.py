"""The size limits of the store: the least recently used entries of a budget go when a new one needs their room."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from rlx import env
from rlx.errors import CacheError
from rlx.store import entry
from rlx.store.entry import Listing
from rlx.store.folder import REFUSED, Damage, Folder, collect, reason

if TYPE_CHECKING:
    from rlx.store.store import Store

_LOCK = "lock"
_LOCK_SECONDS = 5.0
_MANY, _MORE = 256, 32  # of so many entries, 1/32 of the limit goes at once: a look at all takes long

# Digests that this process stored, by the folder of the store: all stores of a process share one folder's limit.
_stored: dict[Path, set[str]] = {}


class Eviction:
    """Keeps what a folder holds of a store's budget below the store's limit.

    The bytes of all entries are noted in a file, by every process: to look at each takes half a millisecond, and there
    may be thousands.
    """

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
                total = self._noted(root)
                if total is None or stored is None or total + stored.nbytes > self._store.limit:
                    self._note(self._shrink(root, new))
                else:
                    self._note(total + stored.nbytes)
        except TimeoutError:  # the process that holds the lock is evicting
            pass
        except (*REFUSED, CacheError) as error:
            what = f"{self._store.budget.folder} {self._store.root} may outgrow its limit: {reason(error)}"
            self._store.warn("evict", what)

    def _shrink(self, root: Folder, new: str) -> int:
        """Removes the least recently used entries until the limit holds; bytes of what is left.

        Entries that the next start needs and that this process stored go last, and never without a warning.
        """
        rows, own = self._store.evictable(), self._own()
        total, most = sum(row.nbytes for row in rows), self._store.limit
        if total > most and len(rows) > _MANY:
            most -= most // _MORE
        for row in sorted(rows, key=lambda row: (row.digest in own, row.last_used)):
            if total <= most or row.digest == new:
                continue
            if row.digest in own:
                self._warn_too_small(rows)
            with entry.shelf_of(root, row.digest) as shelf:
                if self._store.discard(root, shelf, row.digest):
                    total -= row.nbytes
                    self._store.evicted += 1
        if total > self._store.limit:
            self._warn_too_small(rows)
        return total

    def _own(self) -> set[str]:
        return _stored.get(self._store.root, set()) if self._store.budget.is_for_restarts else set()

    def _warn_too_small(self, rows: list[Listing]) -> None:
        own, budget = self._own(), self._store.budget
        needed = sum(row.nbytes for row in rows if row.digest in own)
        self._store.warn(
            "small",
            f"the limit of {budget.folder} {self._store.root}, {env.size(self._store.limit)}, is too small: this"
            f" process stored {env.size(needed)}, evicts what it stored itself, and the next start compiles it again."
            f" Raise {budget.option} (to {_limit_text(2 * needed)}, for example), or say RLX_CACHE=off",
        )

    def total(self) -> int:
        """Bytes of all entries as last noted, by any process; removed ones may still count."""
        if self._store.problem:
            return 0
        try:
            with Folder(self._store.root) as root:
                noted = self._noted(root)
            return sum(row.nbytes for row in self._store.evictable()) if noted is None else noted
        except (OSError, CacheError):
            return 0

    def _noted(self, root: Folder) -> int | None:
        """The contents of the file; None if there is none."""
        try:
            text = root.read(self._store.budget.total)
        except (OSError, Damage):
            return None
        return int(text) if re.fullmatch(rb"\d{1,18}", text) else None

    def _note(self, nbytes: int) -> None:
        with Folder(self._store.root) as root:
            root.replace_file(self._store.budget.total, str(nbytes).encode(), sync=self._store.budget.is_synced)


def _limit_text(nbytes: int) -> str:
    """A value for RLX_CACHE_LIMIT of at least so many bytes."""
    return f"{-(-nbytes // 2**20)}M"
