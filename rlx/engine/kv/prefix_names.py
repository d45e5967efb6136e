"""The names of the files of a folder with states of prompts, which are its index.

Runtime, under `prefix_store.py`:

    <start>-<digest before>-<end>-<digest>.pages   pages of full caches, a block of positions
    <end>-<digest>.states                          rings and recurrent states at a position

A digest is the BLAKE2b of all keys (`prefix.py`) up to a position. So a look-up computes the digests of a prompt, and
opens a file only for the last block, which a prompt may leave anywhere. Prompts with a common beginning share blocks.
"""

from __future__ import annotations

import os
import re
import threading
import time
from bisect import bisect_right, insort
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np

from rlx.engine.kv.prefix import Keys

BLOCK = 256  # positions of a file with pages; a multiple of a page
LOOKED_AT = 32  # most files that a look-up opens for the block that a prompt leaves
SETTLED_NS = 50_000_000  # nanoseconds after which the time of a folder's change tells it from a later one

PAGES = re.compile(r"([0-9a-f]{8})-([0-9a-f]{32})-([0-9a-f]{8})-([0-9a-f]{32})\.pages")
STATES = re.compile(r"([0-9a-f]{8})-([0-9a-f]{32})\.states")


class Digests:
    """The digests of the first positions of some keys, computed as far as they are asked for."""

    def __init__(self, keys: Keys) -> None:
        self.keys = keys
        self._at, self._states = [0], {0: blake2b(digest_size=16)}

    def __getitem__(self, length: int) -> str:
        """The digest of the first `length` keys."""
        if length not in self._states:
            before = self._at[bisect_right(self._at, length) - 1]
            state = self._states[before].copy()
            state.update(self.keys[before:length].astype("<i8").tobytes())
            self._states[length] = state
            insort(self._at, length)
        return self._states[length].hexdigest()


@dataclass(frozen=True)
class Run:
    """A file with pages, and how many of its positions are of use.

    Attributes:
        start, end: its positions.
        used: position after the last one that is of use.
        name: of the file.
    """

    start: int
    end: int
    used: int
    name: str


@dataclass(frozen=True)
class Found:
    """What a look-up found.

    Attributes:
        length: how many positions can be read.
        runs: the files with their pages, in order.
        states: the file with the states at `length`; None if the model has none.
    """

    length: int
    runs: tuple[Run, ...]
    states: str | None

    @property
    def names(self) -> list[str]:
        """The files."""
        return [*(run.name for run in self.runs), *([self.states] if self.states else [])]


class PrefixNames:
    """The names in a folder. One thread may look up while another one adds.

    Args:
        folder: the folder; it may be missing.
        keys_of: the keys of a file with pages, of a name, a start and an end; None if it cannot be read.
        refused: called with an error of the system.
    """

    def __init__(
        self,
        folder: Path,
        keys_of: Callable[[str, int, int], Keys | None],
        refused: Callable[[OSError], object],
    ) -> None:
        self._folder, self._read_keys, self._refused = folder, keys_of, refused
        self._runs: dict[tuple[int, str], dict[str, tuple[int, str]]] = {}  # (start, digest) -> name -> (end, digest)
        self._states: dict[str, int] = {}  # name -> end
        self._keys: dict[str, Keys] = {}  # of files that a look-up has opened
        self._scanned = -1  # time of the last change of the folder that is known here
        self._lock = threading.RLock()

    def find(self, digests: Digests, most: int, pages: bool, states: bool) -> Found | None:
        """The longest beginning of some keys whose states are here; None if there is none.

        Args:
            most: most positions of it.
            pages: whether the model has full caches.
            states: whether it has rings or recurrent states.
        """
        with self._lock:
            self._scan()
            runs = self._covering(digests, most) if pages else []
            covered = runs[-1].used if runs else 0 if pages else most
            if not states:
                return Found(covered, tuple(runs), None) if runs else None
            ends = sorted({end for end in self._states.values() if end <= covered}, reverse=True)
            for end in ends:
                if (name := states_name(digests, end)) in self._states:
                    return Found(end, tuple(_cut(run, end) for run in runs if run.start < end), name)
        return None

    def covering(self, digests: Digests, most: int) -> list[Run]:
        """The files with the pages of the first positions."""
        with self._lock:
            self._scan()
            return self._covering(digests, most)

    def has_states(self, digests: Digests, end: int) -> bool:
        """Whether the states at a position are here."""
        with self._lock:
            self._scan()
            return states_name(digests, end) in self._states

    def add(self, name: str) -> None:
        """Adds a file that was written."""
        with self._lock:
            self._add(name)

    def forget(self, name: str) -> None:
        """Drops a file that cannot be used."""
        with self._lock:
            self._states.pop(name, None)
            self._keys.pop(name, None)
            for rows in self._runs.values():
                rows.pop(name, None)

    def _covering(self, digests: Digests, most: int) -> list[Run]:
        runs: list[Run] = []
        at = 0
        while at < most:
            found = self._run(digests, at, most)
            if found is None:
                break
            runs.append(found)
            if found.used < at + BLOCK:
                break
            at = found.used
        return runs

    def _run(self, digests: Digests, at: int, most: int) -> Run | None:
        """The file whose positions from `at` on have most in common with the keys."""
        rows = self._runs.get((at, digests[at]), {})
        best: Run | None = None
        for name, (end, digest) in rows.items():
            if end <= most and (best is None or end > best.end) and digests[end] == digest:
                best = Run(at, end, end, name)
        if best is not None and best.end == min(at + BLOCK, most):
            return best
        for name in [*rows][-LOOKED_AT:]:
            end = rows[name][0]
            keys = self._keys_of(name, at, end)
            count = 0 if keys is None else _common(keys, digests.keys[at:most])
            if count and (best is None or at + count > best.used):
                best = Run(at, end, at + count, name)
        return best

    def _keys_of(self, name: str, start: int, end: int) -> Keys | None:
        if name not in self._keys:
            keys = self._read_keys(name, start, end)
            if keys is None:
                self.forget(name)
                return None
            self._keys[name] = keys
        return self._keys[name]

    def _scan(self) -> None:
        """Reads the names in the folder if they have changed."""
        try:
            now = self._folder.stat().st_mtime_ns
            if now == self._scanned:
                return
            names = os.listdir(self._folder)
        except OSError as error:
            if not isinstance(error, FileNotFoundError):
                self._refused(error)
            names, now = [], -1
        is_settled = time.time_ns() - now > SETTLED_NS  # else a file may still come within the same tick of the clock
        self._runs, self._states, self._scanned = {}, {}, now if is_settled else -1
        for name in sorted(names):
            self._add(name)
        self._keys = {name: keys for name, keys in self._keys.items() if name in set(names)}

    def _add(self, name: str) -> None:
        if (found := PAGES.fullmatch(name)) is not None:
            start, end = int(found[1], 16), int(found[3], 16)
            if start < end <= start + BLOCK and start % BLOCK == 0:
                self._runs.setdefault((start, found[2]), {})[name] = (end, found[4])
        elif (found := STATES.fullmatch(name)) is not None:
            self._states[name] = int(found[1], 16)


def pages_name(digests: Digests, start: int, end: int) -> str:
    """The name of the file with the pages of positions start .. end."""
    return f"{start:08x}-{digests[start]}-{end:08x}-{digests[end]}.pages"


def states_name(digests: Digests, end: int) -> str:
    """The name of the file with the states at a position."""
    return f"{end:08x}-{digests[end]}.states"


def _cut(run: Run, end: int) -> Run:
    return Run(run.start, run.end, min(run.used, end), run.name)


def _common(a: Keys, b: Keys) -> int:
    count = min(len(a), len(b))
    different = np.flatnonzero(a[:count] != b[:count])
    return int(different[0]) if len(different) else count
