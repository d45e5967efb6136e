"""States of prompts on disk: a folder of files, so that a process that starts anew has what earlier ones computed.

Runtime, under `kept_prefixes.py`, which moves states between the pool and this folder:

    <folder>/<model>/*.pages, *.states   the states: see `prefix_names.py`
    <folder>/<model>/key.json            what the values depend on
    <folder>/*.content                   digests of model files
    <folder>/lock                        held by whoever removes files

Files appear by a rename, so that any number of processes may share the folder, and a reader never sees half of one.
Two processes that write the same file write the same content. Whoever would outgrow the limit removes the files that
were used least recently. A file that is damaged is removed with one warning. A folder that cannot be written is only
read, and one that cannot be read is not used, with one warning each.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlx import env
from rlx.engine.kv import prefix_file
from rlx.engine.kv.prefix import Keys
from rlx.engine.kv.prefix_file import PrefixFile, PrefixHeader
from rlx.engine.kv.prefix_folder import FolderSize
from rlx.engine.kv.prefix_names import Digests, Found, PrefixNames, Run, pages_name, states_name
from rlx.partial_file import into_place
from rlx.store.folder import Damage, reason

TOUCH = 60.0  # seconds between two notes that a file was used
RETRY = 60.0  # seconds without writing after the system refused it


class PrefixStoreWarning(UserWarning):
    """The folder of `cache_kv` cannot be used, or a file in it was damaged; prompts are computed instead."""


@dataclass
class StoreCounters:
    """Counters of a process.

    Attributes:
        read_bytes, written_bytes: of files.
        damaged: files that were damaged.
    """

    read_bytes: int = 0
    written_bytes: int = 0
    damaged: int = 0


class PrefixStore:
    """The files of one model in a folder that several processes and models share.

    Nothing raises: what the system refuses is a `PrefixStoreWarning`, once of each kind, and a file counts as missing.

    Args:
        root: the folder; made if it is missing, for this user alone.
        limit: most bytes of all files in it; by default a tenth of the disk that is free or taken by them, at most
            64 GiB.
        page: positions of a page.
        page_bytes: bytes of a page of all full caches; 0 if the model has none.
        has_states: whether the model has rings or recurrent states.

    Attributes:
        counters: what was read and written.
        size: of all files, and its limit.
        problem: why the folder is not used; None if it is.
    """

    def __init__(self, root: Path, limit: int | None = None, *, page: int, page_bytes: int, has_states: bool) -> None:
        self.root, self.page, self.page_bytes, self.has_states = root.absolute(), page, page_bytes, has_states
        self.counters = StoreCounters()
        self._model = b""  # nothing is found or written before it is known
        self._folder = self.root
        self._names = PrefixNames(self._folder, self._keys_of, self._unreadable)
        self._touched: dict[str, float] = {}
        self._refused_until = 0.0
        self._warned: set[str] = set()
        self.problem = self._prepare()
        if self.problem:
            self.warn("folder", f"the folder {self.root} for cache_kv is not used: {self.problem}")
        self.size = FolderSize(self.root, limit)

    def _prepare(self) -> str | None:
        """Makes the folder; returns why it cannot be used, or None."""
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            if os.name == "posix" and stat.S_IMODE(self.root.stat().st_mode) & 0o002:
                return "every user of this machine can write it (chmod o-w it)"
            os.scandir(self.root).close()
        except OSError as error:
            return reason(error)
        return None

    def use(self, model: bytes, about: str) -> None:
        """Sets the model; before it nothing is found or written.

        Args:
            model: digest of all that values depend on, 32 bytes.
            about: the same for people, as JSON.
        """
        if self.problem:
            return
        self._folder = self.root / model.hex()[:32]
        self._names = PrefixNames(self._folder, self._keys_of, self._unreadable)
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            if not (self._folder / "key.json").exists():
                with into_place(self._folder / "key.json", 0o600) as partial:
                    partial.write_text(about, encoding="utf-8")
        except OSError as error:
            self._refuse(error)
        self._model = model

    @property
    def is_ready(self) -> bool:
        """Whether the model is known and the folder can be used."""
        return bool(self._model) and self.problem is None

    # -- looking up -----------------------------------------------------------------------------------------------

    def find(self, digests: Digests, most: int) -> Found | None:
        """The longest beginning of some keys whose states are here; None if there is none.

        Args:
            most: most positions of it.
        """
        if not self.is_ready:
            return None
        return self._names.find(digests, most, bool(self.page_bytes), self.has_states)

    def covering(self, digests: Digests, most: int) -> list[Run]:
        """The files with the pages of the first positions."""
        return self._names.covering(digests, most) if self.page_bytes else []

    def has_states_at(self, digests: Digests, end: int) -> bool:
        """Whether the states at a position are here."""
        return self._names.has_states(digests, end)

    def _keys_of(self, name: str, start: int, end: int) -> Keys | None:
        file = self._open(name, self._pages_header(start, end))
        if file is None:
            return None
        with file:
            return file.keys

    # -- reading --------------------------------------------------------------------------------------------------

    def open_run(self, run: Run) -> PrefixFile | None:
        """A file with pages, whose parts are the pages; None if it cannot be used."""
        return self._checked(run.name, self._pages_header(run.start, run.end))

    def open_states(self, found: Found, nbytes: int) -> PrefixFile | None:
        """A file with states, whose part has `nbytes` bytes; None if it cannot be used."""
        assert found.states is not None
        return self._checked(found.states, self._states_header(found.length, nbytes))

    def read(self, file: PrefixFile, name: str, first: int, count: int) -> prefix_file.Bytes | None:
        """Parts of a file, u8 [count, bytes]; None if they cannot be used."""
        try:
            found = file.read(first, count)
        except (OSError, Damage) as error:
            self._damaged(name, error)
            self._names.forget(name)
            return None
        self.counters.read_bytes += found.nbytes
        return found

    def _checked(self, name: str, expected: PrefixHeader) -> PrefixFile | None:
        file = self._open(name, expected)
        if file is None:
            self._names.forget(name)
        return file

    def _open(self, name: str, expected: PrefixHeader) -> PrefixFile | None:
        try:
            return PrefixFile(self._folder / name, expected)
        except FileNotFoundError:  # another process removed it
            return None
        except (OSError, Damage) as error:
            self._damaged(name, error)
            return None

    def _damaged(self, name: str, error: Exception) -> None:
        """Reports a file that cannot be used, and removes it if it is damaged."""
        if isinstance(error, OSError):
            self._unreadable(error)
            return
        self.counters.damaged += 1
        what = f"a file of cache_kv is damaged and is not used: {error} ({self._folder / name})"
        self.warn("damaged", what)
        with contextlib.suppress(OSError):  # a folder that is read-only keeps it
            (self._folder / name).unlink()

    def _unreadable(self, error: OSError) -> None:
        self.warn("read", f"files of cache_kv in {self._folder} cannot be read: {reason(error)}")

    def _pages_header(self, start: int, end: int) -> PrefixHeader:
        return PrefixHeader(start, end, -(-(end - start) // self.page), self.page_bytes, self._model)

    def _states_header(self, end: int, nbytes: int) -> PrefixHeader:
        return PrefixHeader(0, end, 1, nbytes, self._model)

    def touch(self, names: Sequence[str]) -> None:
        """Notes that files were used now; the first ones count as used last."""
        now = time.time()
        for name in names:
            if now - self._touched.get(name, 0.0) >= TOUCH:
                self._touched[name] = now
                with contextlib.suppress(OSError):
                    os.utime(self._folder / name, (now, now))

    # -- writing --------------------------------------------------------------------------------------------------

    def write_pages(
        self, digests: Digests, start: int, end: int, parts: Sequence[Any], rate: float = 0.0, used: float | None = None
    ) -> bool:
        """Writes the pages of positions start .. end, at most a block; returns whether they are on disk then.

        Args:
            parts: the bytes of each page.
            rate: prompt tokens computed per second; 0 if nobody knows.
            used: when they were last used, in seconds since the epoch; by default now.
        """
        header = self._pages_header(start, end)
        return self._write(pages_name(digests, start, end), header, digests.keys[start:end], parts, rate, used)

    def write_states(
        self, digests: Digests, end: int, state: bytes, rate: float = 0.0, used: float | None = None
    ) -> bool:
        """Writes the states at a position; as `write_pages`."""
        header = self._states_header(end, len(state))
        return self._write(states_name(digests, end), header, digests.keys[:end], [state], rate, used)

    @property
    def may_write(self) -> bool:
        """Whether files can be written: nobody has refused it in the last minute."""
        return self.is_ready and time.monotonic() >= self._refused_until

    def _write(
        self, name: str, header: PrefixHeader, keys: Keys, parts: Sequence[Any], rate: float, used: float | None
    ) -> bool:
        if not self.may_write:
            return False
        header = PrefixHeader(header.start, header.end, header.parts, header.size, header.model, rate)
        if header.nbytes > self.size.limit:
            what = f"a file of {env.size(header.nbytes)} does not fit the limit of {env.size(self.size.limit)}"
            self.warn("limit", f"{what} of the folder {self.root}: raise cache_kv_bytes")
            return False
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            self.size.make_room(header.nbytes)
            prefix_file.write(self._folder / name, header, keys, parts)
            if used is not None:
                os.utime(self._folder / name, (used, used))
        except (OSError, TimeoutError) as error:
            self._refuse(error)
            return False
        self.size.add(header.nbytes)
        self.counters.written_bytes += header.nbytes
        self._names.add(name)
        return True

    def _refuse(self, error: BaseException) -> None:
        self._refused_until = time.monotonic() + RETRY
        self.warn("write", f"states of prompts are not kept in {self.root} (cache_kv): {reason(error)}")

    def warn(self, about: str, message: str) -> None:
        """Warns of something, once each store."""
        if about not in self._warned:
            self._warned.add(about)
            warnings.warn(message, PrefixStoreWarning, stacklevel=3)

    def stats(self) -> dict[str, int]:
        """Bytes and counters."""
        return {
            "cache_kv_bytes": self.size.limit,
            "cache_kv_used_bytes": self.size.nbytes,
            "cache_kv_read_bytes": self.counters.read_bytes,
            "cache_kv_written_bytes": self.counters.written_bytes,
            "cache_kv_evictions": self.size.evictions,
            "cache_kv_damaged": self.counters.damaged,
        }
