"""States of prompts in a store on disk, so that a process that starts anew has what earlier ones computed.

Runtime, under `disk_kv_cache.py`, which moves states between the pool and the store. An entry holds the pages of full
caches of a block of positions, or the rings and recurrent states at a position:

    prefix.bin   f64: prompt tokens that were computed per second when it was written, 0 if nobody knows; then the keys
                 (`prefix.py`) of the positions from the start of the block, i64 each
    states.bin   the pages, one after the other, or the states: a large file with a digest of each page

Its address is the index: digits of the digest of all keys before the block, what it holds, how many positions, and the
digest of all keys to its end. So a look-up computes digests of a prompt and lists what follows each block. It opens
entries only for the last block, which a prompt may leave anywhere. Prompts with a common beginning share blocks.
"""

from __future__ import annotations

import os
import shutil
import struct
import time
from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rlx.engine.kv.prefix import Keys, common_length
from rlx.store.entry import Entry, LargeFile
from rlx.store.folder import Damage
from rlx.store.key import CompileKey
from rlx.store.kinds import PREFIXES
from rlx.store.store import Store

Bytes = npt.NDArray[np.uint8]

BLOCK = 256  # positions of an entry with pages; a multiple of a page
LOOKED_AT = 32  # most entries that a look-up opens for the block that a prompt leaves
TOUCH = 60.0  # seconds between two notes that an entry was used
MOST_SEEN = 1024  # entries whose keys are kept in memory
RETRY = 60.0  # seconds without writing after the system refused it
DISK_SHARE, MOST_BYTES = 10, 64 << 30  # the default limit: one part in so many of the free disk, and at most this

_PREFIX, _STATES = "prefix.bin", "states.bin"
_BEFORE = 28  # digits of an address that entries after the same keys have in common
_IS_PAGES, _IS_STATES = "a", "b"  # the digit after them
_STEP = 1e-6  # seconds by which a position counts as used earlier than the one before it: ends of prompts go first


class Digests:
    """The digests of the first positions of some keys, computed as far as they are asked for.

    Args:
        keys: i64 [positions].
        model: digest of what else the states depend on.
    """

    def __init__(self, keys: Keys, model: bytes) -> None:
        self.keys = keys
        self._at, self._states = [0], {0: blake2b(digest_size=16, key=model)}

    def __getitem__(self, length: int) -> str:
        """The digest of the first `length` keys."""
        if length not in self._states:
            before = self._at[bisect_right(self._at, length) - 1]
            state = self._states[before].copy()
            state.update(self.keys[before:length].astype("<i8").tobytes())
            self._states[length] = state
            insort(self._at, length)
        return self._states[length].hexdigest()

    def address(self, what: str, end: int) -> str:
        """The address of the entry with pages up to a position, or with the states there."""
        start = _block(end)
        return f"{self[start][:_BEFORE]}{what}{end - start:03x}{self[end]}"


@dataclass(frozen=True)
class Run:
    """An entry with pages, and how many of its positions are of use.

    Attributes:
        start, end: its positions.
        used: position after the last one that is of use.
        address: of the entry.
    """

    start: int
    end: int
    used: int
    address: str


@dataclass(frozen=True)
class Found:
    """The result of a look-up.

    Attributes:
        length: how many positions can be read.
        runs: the entries with their pages, in order.
        states: the address of the states at `length`; None if the model has none.
    """

    length: int
    runs: tuple[Run, ...]
    states: str | None

    @property
    def addresses(self) -> list[str]:
        """The entries, in the order of their positions."""
        return [*(run.address for run in self.runs), *([self.states] if self.states else [])]


class PrefixStore:
    """The entries of one model in a folder that several processes and models share.

    Nothing raises: what the system refuses is a `PrefixStoreWarning`, once of each kind; an entry counts as missing.

    Args:
        root: the folder; made if it is missing, for this user alone.
        limit: most bytes of all entries in it; by default a tenth of the disk that is free or taken by them, at most
            64 GiB.
        page: positions of a page.
        page_bytes: bytes of a page of all full caches; 0 if the model has none.
        has_states: whether the model has rings or recurrent states.

    Attributes:
        store: the folder.
        read_bytes, written_bytes: of states, by this process.
    """

    def __init__(self, root: Path, limit: int | None = None, *, page: int, page_bytes: int, has_states: bool) -> None:
        self.page, self.page_bytes, self.has_states = page, page_bytes, has_states
        self.store = Store(os.path.realpath(root), limit or MOST_BYTES, PREFIXES, lenient=True)
        self.read_bytes = self.written_bytes = 0
        self._key: CompileKey | None = None  # nothing is found or written before the model is known
        self._touched: dict[str, float] = {}
        self._seen: dict[str, Keys] = {}  # keys of entries that a look-up has opened
        self._refused_until = 0.0
        if limit is None and self.problem is None:
            self.store.limit = self._default_limit()

    def _default_limit(self) -> int:
        free = shutil.disk_usage(self.store.root).free
        return max(1, min(MOST_BYTES, (free + self.store.eviction.total()) // DISK_SHARE))

    @property
    def problem(self) -> str | None:
        """Why the folder is not used; None if it is."""
        return self.store.problem

    def use(self, key: CompileKey) -> None:
        """Sets the model: the key of all that states depend on. Before it nothing is found or written."""
        self._key = key

    @property
    def is_ready(self) -> bool:
        """Whether the model is known and the folder can be used."""
        return self._key is not None and self.problem is None

    def digests(self, keys: Keys) -> Digests:
        """The digests of some keys, for this model."""
        assert self._key is not None
        return Digests(keys, bytes.fromhex(self._key.digest))

    # -- looking up -----------------------------------------------------------------------------------------------

    def find(self, digests: Digests, most: int) -> Found | None:
        """The longest beginning of some keys whose states are here; None if there is none.

        Args:
            most: most positions of it.
        """
        if not self.is_ready:
            return None
        runs, ends = self._walk(digests, most)
        covered = runs[-1].used if runs else 0 if self.page_bytes else most
        if not self.has_states:
            return Found(covered, tuple(runs), None) if runs else None
        end = max((end for end in ends if end <= covered), default=0)
        used = (replace(run, used=min(run.used, end)) for run in runs if run.start < end)
        return Found(end, tuple(used), digests.address(_IS_STATES, end)) if end else None

    def covering(self, digests: Digests, most: int) -> list[Run]:
        """The entries with the pages of the first positions."""
        return self._walk(digests, most)[0] if self.is_ready and self.page_bytes else []

    def has_states_at(self, digests: Digests, end: int) -> bool:
        """Whether the states at a position are here."""
        return self.store.has(self._entry_key(_IS_STATES, end, digests.address(_IS_STATES, end)))

    def _walk(self, digests: Digests, most: int) -> tuple[list[Run], list[int]]:
        """Block by block: the entries with pages, and the positions at which there are states."""
        runs: list[Run] = []
        ends: list[int] = []
        for at in range(0, most, BLOCK):
            names = self.store.near(digests[at][:_BEFORE])
            ends += [end for _, end in _exact(digests, _IS_STATES, names, at, most)]
            if self.page_bytes:
                run = self._run(digests, names, at, most)
                runs += [run] if run else []
                if run is None or run.used < at + BLOCK:
                    break
        return runs, ends

    def _run(self, digests: Digests, names: list[str], at: int, most: int) -> Run | None:
        """The entry whose positions from `at` on have most in common with the keys."""
        name, end = max(_exact(digests, _IS_PAGES, names, at, most), key=lambda row: row[1], default=("", 0))
        best = Run(at, end, end, name) if end else None
        if end == min(at + BLOCK, most):
            return best
        for name in [name for name in names if name[_BEFORE] == _IS_PAGES][-LOOKED_AT:]:
            common = common_length(self._keys_of(name, at), digests.keys[at:most])
            if common and (best is None or at + common > best.used):
                best = Run(at, at + _length(name), at + common, name)
        return best

    def _keys_of(self, address: str, start: int) -> Keys:
        """The keys of an entry with pages; none if it cannot be read."""
        if address not in self._seen:
            entry = self._open(_IS_PAGES, start + _length(address), address)
            if entry is None:
                return np.empty(0, np.int64)
            if len(self._seen) >= MOST_SEEN:
                self._seen.clear()
            self._seen[address] = _split(entry)[1]
        return self._seen[address]

    # -- reading --------------------------------------------------------------------------------------------------

    def open_run(self, run: Run) -> Entry | None:
        """The entry with pages, whose pieces are the pages; None if it cannot be used."""
        return self._open(_IS_PAGES, run.end, run.address)

    def open_states(self, found: Found) -> Entry | None:
        """The entry with the states, in one piece; None if it cannot be used."""
        assert found.states is not None
        return self._open(_IS_STATES, found.length, found.states)

    def rate(self, entry: Entry) -> float:
        """Prompt tokens per second that were computed when an entry was written; 0 if nobody knows."""
        return _split(entry)[0]

    def read(self, entry: Entry, first: int, count: int, nbytes: int) -> Bytes | None:
        """Pieces of an entry, u8 [count, nbytes]; None if they cannot be used."""
        found = np.empty((count, nbytes), np.uint8)
        try:
            if entry.large[_STATES]["piece"] != nbytes:
                raise Damage("its states have another size")
            entry.read_pieces(_STATES, first, found.reshape(-1).data)
        except (OSError, Damage) as error:
            self._seen.pop(entry.key.digest, None)
            if isinstance(error, Damage):
                self.store.refuse(entry.key, str(error), discard=True)
            elif not isinstance(error, FileNotFoundError):  # another process removed it
                self.store.warn_unread(error)
            return None
        self.read_bytes += found.nbytes
        return found

    def _open(self, what: str, end: int, address: str) -> Entry | None:
        key = self._entry_key(what, end, address)
        entry = self.store.get(key, touch=False)
        if entry is not None and (_STATES not in entry.large or len(_split(entry)[1]) != end - _block(end)):
            self.store.refuse(key, "it holds something else than its key says", discard=True)
            return None
        return entry

    def _entry_key(self, what: str, end: int, address: str) -> CompileKey:
        assert self._key is not None
        span = {"holds": "pages" if what == _IS_PAGES else "states", "positions": [_block(end), end]}
        return replace(self._key, options={**self._key.options, **span}, address=address)

    def touch(self, addresses: Sequence[str]) -> None:
        """Notes that entries were used now; the first ones count as used last."""
        now = time.time()
        for number, address in enumerate(addresses):
            if now - self._touched.get(address, 0.0) >= TOUCH:
                self._touched[address] = now
                self.store.touch(address, now - number * BLOCK * _STEP)

    # -- writing --------------------------------------------------------------------------------------------------

    def write_pages(
        self, digests: Digests, end: int, pages: Sequence[bytes], rate: float = 0.0, used: float | None = None
    ) -> bool:
        """Writes the pages of the block up to position `end`; returns whether they are on disk then.

        Args:
            pages: the bytes of each.
            rate: prompt tokens computed per second; 0 if nobody knows.
            used: when they were last used, in seconds since the epoch; by default now.
        """
        return self._write(_IS_PAGES, digests, end, pages, rate, used)

    def write_states(
        self, digests: Digests, end: int, state: bytes, rate: float = 0.0, used: float | None = None
    ) -> bool:
        """Writes the states at a position; as `write_pages`."""
        return self._write(_IS_STATES, digests, end, [state], rate, used)

    @property
    def may_write(self) -> bool:
        """Whether entries can be written: nobody has refused it in the last minute."""
        return self.is_ready and time.monotonic() >= self._refused_until

    def _write(
        self, what: str, digests: Digests, end: int, parts: Sequence[bytes], rate: float, used: float | None
    ) -> bool:
        if not self.may_write:
            return False
        start, nbytes = _block(end), sum(map(len, parts))
        keys = digests.keys[start:end].astype("<i8").tobytes()
        data = LargeFile(nbytes, [memoryview(part) for part in parts], len(parts[0]))
        key = self._entry_key(what, end, digests.address(what, end))
        at = (time.time() if used is None else used) - start * _STEP
        files = {_PREFIX: struct.pack("<d", rate) + keys}
        if self.store.put(key, files, large={_STATES: data}, used=at).folder is None:
            self._refused_until = time.monotonic() + RETRY
            return False
        self.written_bytes += nbytes
        return True

    def stats(self) -> dict[str, int]:
        """Bytes and counters."""
        return {
            "cache_kv_bytes": self.store.limit,
            "cache_kv_used_bytes": self.store.eviction.total(),
            "cache_kv_read_bytes": self.read_bytes,
            "cache_kv_written_bytes": self.written_bytes,
            "cache_kv_evictions": self.store.evicted,
            "cache_kv_damaged": self.store.damaged,
        }


def _block(end: int) -> int:
    """First position of the block that ends at a position."""
    return (end - 1) // BLOCK * BLOCK if end else 0


def _length(address: str) -> int:
    """Positions of an entry, from the start of its block."""
    return int(address[_BEFORE + 1 : _BEFORE + 4], 16)


def _exact(digests: Digests, what: str, names: list[str], at: int, most: int) -> list[tuple[str, int]]:
    """The entries of a kind all of whose keys are those of the digests: (address, end)."""
    rows = ((name, at + _length(name)) for name in names if name[_BEFORE] == what)
    return [(name, end) for name, end in rows if at < end <= most and digests.address(what, end) == name]


def _split(entry: Entry) -> tuple[float, Keys]:
    """The rate and the keys of an entry."""
    data = entry.read(_PREFIX)
    return struct.unpack_from("<d", data)[0], np.frombuffer(data, "<i8", offset=8).astype(np.int64)
