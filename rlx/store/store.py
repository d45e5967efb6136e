"""The store: a folder on disk of entries that no other user can write, within size limits.

Store: everything that outlives a process, of the kinds in `rlx.store.kinds`. An entry (`rlx.store.entry`) lies at
`<root>/<2 digits>/<digest>/`. It is written in a temporary folder and appears by a rename, so readers need no lock, and
a killed writer damages nothing. A damaged entry is reported, removed and counts as missing. Checksums are against
accidents. Against other users, who could plant code, every folder and file is opened by descriptor and refused if
somebody else owns it or can write it (`rlx.store.folder`).
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rlx import env, platform
from rlx.errors import ArgumentError, CacheError
from rlx.notebook import card
from rlx.store import entry
from rlx.store.entry import Entry, Large, Listing
from rlx.store.folder import REFUSED, Damage, Folder, UntrustedFolder, collect, reason, temporary
from rlx.store.key import CompileKey
from rlx.store.kinds import PROGRAMS, Budget, kind

_SHELF = re.compile("[0-9a-f]{2}")

#: What earlier versions kept beside the shelves: listed and evicted, but never read.
_EARLIER = re.compile(r"[0-9a-f]{32}(\.content)?|tuning\.json")

_LOCK = "lock"
_LOCK_SECONDS = 5.0
_MANY, _MORE = 256, 32  # of so many entries, 1/32 of the limit goes at once: a look at all takes long

# Digests that this process stored, by the folder of the store: all stores of a process share one folder's limit.
_stored: dict[Path, set[str]] = {}


@dataclass(frozen=True)
class StoreStats:
    """The folder in figures.

    Attributes:
        nbytes, limit: size of the entries of the store's budget, and what it may grow to.
        oldest: when the least recently used entry was used, in seconds since the epoch; None without entries.
        problem: why the folder is not used; None if it is.
    """

    root: Path
    entries: int
    nbytes: int
    limit: int
    oldest: float | None
    problem: str | None

    def _repr_html_(self) -> str:
        held = f"{env.size(self.nbytes)} of {env.size(self.limit)}"
        rows = [("entries", self.entries), ("size", held), ("problem", self.problem or "none")]
        return card(f"compile cache in {self.root}", rows)


def default_root() -> Path:
    """RLX_CACHE_DIR, or the platform's folder for caches.

    Raises:
        ArgumentError: RLX_CACHE_DIR names a home folder that is not there.
        CacheError: this user has none, and no other folder was named.
    """
    if chosen := env.cache_dir():
        return chosen
    return platform.current().cache_folder(_home) / "rlx"


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError as error:  # a user without an entry in the system's list, as in some containers
        hint = "Name a folder in RLX_CACHE_DIR, or say RLX_CACHE=off"
        raise CacheError("this user has no home folder", where="compile cache", hint=hint) from error


class Store:
    """A folder of entries.

    Where the folder cannot be trusted or used, a store with a `root` raises; one with the default root, or that is
    `lenient`, warns once, finds nothing and keeps nothing.

    Args:
        root: the folder; made if missing. By default RLX_CACHE_DIR or the user's cache folder.
        limit: bytes; beyond it the least recently used entries are evicted, those that this process stored last. By
            default RLX_CACHE_LIMIT or 2 GiB.
        budget: what is evicted to keep the limit, and what messages say.

    Attributes:
        problem: why the folder is not used; None if it is.
        damaged: entries found damaged so far.
        evicted: entries evicted so far to keep below the limit.
        eviction: keeps the folder below the limit.

    Raises:
        CacheError: `root` is given, and belongs to another user, can be written by others, or is a symbolic link.
        ArgumentError: `limit` is not above 0.
    """

    def __init__(
        self,
        root: Path | str | None = None,
        limit: int | None = None,
        budget: Budget = PROGRAMS,
        *,
        lenient: bool = False,
    ) -> None:
        self.budget = budget
        self.limit = env.cache_limit() if limit is None else limit
        if self.limit <= 0:
            hint = "Give bytes above 0; RLX_CACHE=off stores nothing"
            raise ArgumentError(f"limit = {self.limit}", where="Store", hint=hint)
        self.root = Path(default_root() if root is None else root).absolute()
        self.damaged = self.evicted = 0
        self.eviction = Eviction(self)
        self._warned: set[str] = set()
        self._lock = threading.Lock()
        self._keys: dict[str, CompileKey | None] = {}
        self.problem = self._prepare()
        if self.problem and root is not None and not lenient:
            mend = ", or chmod 700 this one" if "can write it" in self.problem else ""
            hint = f"choose another folder with RLX_CACHE_DIR{mend}"
            raise CacheError(self.problem, where=self.root, hint=hint)
        if self.problem:
            self.warn("folder", f"{budget.folder} {self.root} is not used: {self.problem}")

    def _prepare(self) -> str | None:
        """Makes the folder if it is missing; returns why it cannot be used, or None."""
        try:
            if not os.path.lexists(self.root):
                self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            with Folder(self.root):
                return None
        except UntrustedFolder as error:
            return str(error)
        except OSError as error:
            return f"it cannot be made: {reason(error)}"

    # -- one entry ------------------------------------------------------------------------------------------------

    def get(self, key: CompileKey, discard: bool = True, *, touch: bool = True) -> Entry | None:
        """The entry of a key, checked; None if there is none.

        Args:
            discard: remove the entry if it is damaged.
            touch: note that it was used.
        """
        if self.problem:
            return None
        try:
            with Folder(self.root) as root, root.child(key.digest[:2]) as shelf:
                try:
                    found = entry.load(self.root, shelf, key)
                except Damage as damage:
                    self._report_damage(root, shelf, key.digest, str(damage), discard)
                    return None
                if touch:
                    _touch(shelf, key.digest, None)
                return found
        except FileNotFoundError:
            pass
        except UntrustedFolder as error:
            what = "is not used: a folder in it cannot be trusted"
            self.warn("trust", f"{self.budget.folder} {self.root} {what}: {error}")
        except REFUSED as error:
            self.warn_unread(error)
        return None

    def has(self, key: CompileKey) -> bool:
        """Whether there is an entry of a key; what `get` finds of it may still be damaged."""
        return self.problem is None and (self.root / key.digest[:2] / key.digest).is_dir()

    def near(self, prefix: str) -> list[str]:
        """The digests that start with `prefix`, of two digits at least; no entry is looked at."""
        if self.problem:
            return []
        try:
            with Folder(self.root) as root, root.child(prefix[:2]) as shelf:
                return [name for name in shelf.names() if name.startswith(prefix) and entry.DIGEST.fullmatch(name)]
        except FileNotFoundError:
            pass
        except REFUSED as error:
            self.warn_unread(error)
        return []

    def touch(self, digest: str, used: float | None = None) -> None:
        """Notes when an entry was used, in seconds since the epoch; by default now."""
        with contextlib.suppress(OSError), Folder(self.root) as root, root.child(digest[:2]) as shelf:
            _touch(shelf, digest, used)

    def put(
        self,
        key: CompileKey,
        files: Mapping[str, bytes | str],
        replace: bool = False,
        large: Large | None = None,
        used: float | None = None,
    ) -> Entry:
        """Stores an entry and returns it. If the folder cannot be written, warns once and returns it unstored.

        An entry that is there already stays, unless `replace`: of two writers the second gets what the first stored.

        Args:
            large: files that are mapped or read in pieces and never as a whole; an entry of which they would outgrow
                the limit alone is not stored.
            used: when it was used last, in seconds since the epoch; by default now.

        Raises:
            ArgumentError: a file's name is not a plain relative path, or is one of the store's own.
        """
        contents = entry.encode(files)
        nbytes = sum(file.nbytes for file in large.values()) if large else 0
        if nbytes > self.limit:
            what = f"{nbytes} bytes are not kept in {self.budget.folder} {self.root}, whose limit is {self.limit}"
            self.warn("limit", f"{what}; {self.budget.option} raises it")
        if self.problem or nbytes > self.limit:
            return Entry(key, contents, None)
        try:
            stored = self.write(key, contents, replace, large, used)
        except (*REFUSED, Damage) as error:
            what = f"{self.budget.folder} {self.root} cannot be written, running uncached"
            self.warn("write", f"{what}: {reason(error)}")
            return Entry(key, contents, None)
        self.eviction.stored(key.digest)
        return stored

    def write(
        self,
        key: CompileKey,
        files: Mapping[str, bytes],
        replace: bool,
        large: Large | None = None,
        used: float | None = None,
    ) -> Entry:
        """Writes an entry and moves it into place, whatever the limit; returns the one that is there then.

        Raises:
            OSError, Damage: the folder cannot be written or trusted, or the entry that was there first is damaged.
        """
        if what := self._prepare():  # it may be gone, or no longer ours alone
            raise OSError(what)
        with Folder(self.root) as root, temporary(root) as (base, made):
            entry.fill(made, key, files, large or {}, used, self.budget.is_synced)
            with root.make(key.digest[:2]) as shelf:
                if replace:
                    self.discard(root, shelf, key.digest)
                while not entry.publish(base, made.path.name, shelf, key.digest, self.budget.is_synced):
                    with contextlib.suppress(FileNotFoundError):  # evicted before it was read: the place is free
                        return entry.load(self.root, shelf, key, whole=True)
                return Entry(key, files, self.root)

    def discard(self, root: Folder, shelf: Folder, digest: str) -> bool:
        """Takes an entry out of sight in one step, then deletes it. False if it was gone."""
        with temporary(root) as (_, grave):
            try:
                shelf.move(digest, grave, digest)
            except FileNotFoundError:
                return False
        return True

    def refuse(self, key: CompileKey, what: str, discard: bool) -> None:
        """Reports an entry that cannot be used although its checksums hold, and removes it if `discard`."""
        with contextlib.suppress(OSError), Folder(self.root) as root, root.child(key.digest[:2]) as shelf:
            self._report_damage(root, shelf, key.digest, what, discard)

    def _report_damage(self, root: Folder, shelf: Folder, digest: str, what: str, discard: bool) -> None:
        self.damaged += 1
        about = digest if self.budget.is_for_restarts else "damaged"  # of thousands of others, one is said
        self.warn(about, f"cache entry {digest[:12]} is damaged and not used: {what}")
        if discard:
            with contextlib.suppress(OSError):  # a read-only cache keeps it, and nobody trusts it
                self.discard(root, shelf, digest)

    def warn(self, about: str, message: str) -> None:
        """Warns of something, once each store, with the budget's warning."""
        with self._lock:
            if about in self._warned:
                return
            self._warned.add(about)
        warnings.warn(message, self.budget.warning, stacklevel=4)

    def warn_unread(self, error: BaseException) -> None:
        """Warns that the system refuses to read."""
        what = f"{self.budget.folder} {self.root} cannot be read, {self.budget.again}"
        self.warn("read", f"{what}: {reason(error)}")

    def collect(self) -> None:
        """Removes what killed processes left. Nothing happens where the folder cannot be written."""
        if not self.problem:
            with contextlib.suppress(OSError), Folder(self.root) as root:
                collect(root)

    # -- all entries ----------------------------------------------------------------------------------------------

    def entries(self) -> list[Listing]:
        """All entries, the most recently used first.

        Raises:
            CacheError: the folder cannot be read.
        """
        shelves = self._shelves(earlier=True)
        rows = [row for shelf, names in shelves for name in names if (row := entry.look(shelf, name))]
        return sorted(rows, key=lambda row: (-row.last_used, row.digest))

    def evictable(self) -> list[Listing]:
        """The entries that count for the limit of this store's budget: its kinds, and what nobody can read."""
        return [row for row in self.entries() if _counts(row, self.budget)]

    def stored_keys(self) -> list[CompileKey]:
        """The keys of all entries, unchecked. Each is read from the disk once.

        Raises:
            CacheError: the folder cannot be read.
        """
        found: dict[str, CompileKey | None] = {}
        for shelf, names in self._shelves():
            for name in names:
                found[name] = self._keys[name] if name in self._keys else entry.read_key(shelf, name)
        self._keys = found
        return [key for key in found.values() if key]

    def _shelves(self, earlier: bool = False) -> Iterator[tuple[Folder, list[str]]]:
        """The folders that hold entries, each with the digests in it; those that cannot be trusted are left out.

        Args:
            earlier: with the folder itself and what earlier versions left in it.
        """
        if self.problem:
            return
        with self._named_errors():
            try:
                root = Folder(self.root)
            except FileNotFoundError:
                return
            with root:
                for name in root.names():
                    if earlier and _EARLIER.fullmatch(name):
                        yield root, [name]
                    if not _SHELF.fullmatch(name):
                        continue
                    with contextlib.suppress(FileNotFoundError, UntrustedFolder), root.child(name) as shelf:
                        yield shelf, [digest for digest in shelf.names() if entry.DIGEST.fullmatch(digest)]

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
            if row.key.digest != row.digest:
                raise Damage(f"{entry.KEY} is of another program")
            with Folder(self.root) as root, root.child(row.digest[:2]) as shelf:
                return entry.load(self.root, shelf, row.key, whole=True)
        except (OSError, Damage) as error:
            hint = "`rlx cache verify` removes damaged entries"
            raise CacheError(f"damaged: {error}", where=f"cache entry {row.digest[:12]}", hint=hint) from error

    def remove(self, prefix: str) -> Listing:
        """Removes the one entry whose digest starts with `prefix` and returns what it was.

        Raises:
            CacheError: there is none or more than one, or the folder cannot be written.
        """
        row = self.find(prefix)
        with self._named_errors(), Folder(self.root) as root, entry.shelf_of(root, row.digest) as shelf:
            self.discard(root, shelf, row.digest)
        return row

    def clear(self) -> int:
        """Removes all entries but measured tunings, and what killed writers left; returns the number of entries.

        Raises:
            CacheError: the folder cannot be read or written.
        """
        if self.problem:
            return 0
        with self._named_errors(), Folder(self.root) as root:
            collect(root)
            shelves = self._shelves(earlier=True)
            rows = ((shelf, name) for shelf, names in shelves for name in names if may_go(entry.read_key(shelf, name)))
            return sum(self.discard(root, shelf, name) for shelf, name in rows)

    def verify(self, discard: bool = True) -> list[tuple[str, str]]:
        """Checks every byte of every entry: (digest, what is wrong) of the damaged ones, which are removed.

        Raises:
            CacheError: the folder cannot be read or written.
        """
        wrong: list[tuple[str, str]] = []
        if self.problem:
            return wrong
        with self._named_errors(), Folder(self.root) as root:
            for shelf, names in self._shelves():
                found = [(name, entry.problem(shelf, name)) for name in names]
                wrong += [(name, what) for name, what in found if what is not None]
                for name, what in found:
                    if discard and what is not None:
                        self.discard(root, shelf, name)
        return wrong

    def stats(self) -> StoreStats:
        """The folder in figures."""
        rows = self.entries()
        oldest = rows[-1].last_used if rows else None
        nbytes = sum(row.nbytes for row in rows if _counts(row, self.budget))
        return StoreStats(self.root, len(rows), nbytes, self.limit, oldest, self.problem)

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CacheError(f"the compile cache cannot be used: {reason(error)}", where=self.root) from error


def _counts(row: Listing, budget: Budget) -> bool:
    """Whether an entry counts for the limit of a budget; what nobody can read counts for each."""
    return row.key is None or kind(row.key.kind).budget is budget


def _touch(shelf: Folder, digest: str, used: float | None) -> None:
    with contextlib.suppress(OSError), shelf.child(digest) as folder:  # what cannot be written is read all the same
        folder.touch(entry.LAST_USED, used)


def may_go(key: CompileKey | None) -> bool:
    """Whether an entry goes with all others: a tuning was measured, and is removed by name."""
    return key is None or kind(key.kind).budget is not None


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
            f" Raise {budget.option} (to {-(-2 * needed // 2**20)}M, for example), or say RLX_CACHE=off",
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
