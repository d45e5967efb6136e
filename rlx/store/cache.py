"""The compile cache in memory: an LRU table of loaded programs, over the store on disk.

Compile cache: `get_or_compile` looks a program up in memory, then in the store, and builds it if neither has it. The
policy may forbid one of these steps. Two threads that need the same key compile it once.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar, cast

from rlx import debug_output, env, store
from rlx.arguments import whole
from rlx.errors import ArgumentError, CacheError, CompileError
from rlx.notebook import card
from rlx.profile.keys import MAX_PROGRAMS
from rlx.store.entry import Entry, encode
from rlx.store.key import CompileKey
from rlx.store.store import Store

T = TypeVar("T")

#: Programs kept in memory where nothing else is asked for.
CAPACITY = 64

_MISSING = object()


@dataclass(frozen=True)
class CacheStats:
    """Counters of a cache.

    Attributes:
        hits_memory, hits_disk, misses: requests found in memory, in the store, and nowhere.
        compiles: builds that succeeded.
        compile_seconds: time in `build` and in storing its files.
        load_seconds: time in reading the store and in `load`.
        bytes_written: size of the files stored.
        evictions: programs dropped from memory.
        evictions_disk: entries dropped from the store to keep it below its limit.
        damaged: entries that the store found damaged.
    """

    hits_memory: int = 0
    hits_disk: int = 0
    misses: int = 0
    compiles: int = 0
    compile_seconds: float = 0.0
    load_seconds: float = 0.0
    bytes_written: int = 0
    evictions: int = 0
    evictions_disk: int = 0
    damaged: int = 0

    def _repr_html_(self) -> str:
        return card("compile cache", asdict(self).items())


class CompileCache:
    """Compiled programs by key.

    A program that is dropped from memory is closed if it has `close()`. A caller that keeps a program beyond its next
    request holds an instance of its own.

    >>> cache = CompileCache()  # in memory only
    >>> cache.get_or_compile(CompileKey("pack", "x"), lambda: {"a": b"1"}, lambda files: files.read("a"))
    b'1'
    >>> cache.stats.compiles
    1

    Args:
        capacity: programs kept in memory.
        store: keeps programs on disk for other processes; None keeps them in memory only.
        policy: see `rlx.env.Policy`.

    Raises:
        ArgumentError: `capacity` is no whole number above 0, or the policy is unknown.
    """

    def __init__(self, capacity: int = CAPACITY, store: Store | None = None, policy: str = "on") -> None:
        self.capacity, self.store = whole("capacity", capacity, 1, MAX_PROGRAMS), store
        self.policy: env.Policy = env.parse_policy(policy, "CompileCache")
        self._programs: OrderedDict[str, Any] = OrderedDict()
        self._building: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()
        self._stats = CacheStats()

    @staticmethod
    def default(policy: str | None = None, capacity: int | None = None) -> CompileCache:
        """A cache in the usual place: RLX_CACHE_DIR, RLX_CACHE_LIMIT.

        Args:
            policy: see `rlx.env.Policy`; what RLX_CACHE says by default.
            capacity: programs kept in memory; 64 by default.

        Raises:
            ArgumentError: an argument is out of its range, or one of the variables does not parse.
        """
        chosen = policy or env.cache_policy()
        store = None if chosen == "off" else Store()
        if store and chosen != "readonly":
            store.collect()
        return CompileCache(CAPACITY if capacity is None else capacity, store, chosen)

    @property
    def stats(self) -> CacheStats:
        """The counters as they are now."""
        with self._lock:
            evicted, damaged = (self.store.evicted, self.store.damaged) if self.store else (0, 0)
            return replace(self._stats, evictions_disk=evicted, damaged=damaged)

    def get_or_compile(
        self, key: CompileKey, build: Callable[[], Mapping[str, bytes | str]], load: Callable[[Entry], T]
    ) -> T:
        """The program of a key.

        Args:
            build: makes the program's files; called only if neither memory nor store has the key.
            load: makes the program from its files. Its errors are passed on, and the program is not kept.

        Raises:
            CacheError: the policy is "readonly" and the key is not stored.
        """
        found = self._recall(key.digest)
        if found is not _MISSING and key.kind == "program":
            debug_output.show(debug_output.CACHE, f"cache: {key.title} found in memory")
        if found is _MISSING:
            with self._alone(key.digest):
                found = self._recall(key.digest)
                if found is _MISSING:
                    found = self._load(key, build, load)
                    self._remember(key.digest, found)
        return cast(T, found)

    def has(self, key: CompileKey) -> bool:
        """Whether a program is in memory, or where the policy looks there, in the store; it is not read."""
        with self._lock:
            if key.digest in self._programs:
                return True
        return self.store is not None and self.policy in ("on", "readonly") and self.store.has(key)

    # -- memory ---------------------------------------------------------------------------------------------------

    def _recall(self, digest: str) -> Any:
        with self._lock:
            if digest not in self._programs:
                return _MISSING
            self._programs.move_to_end(digest)
            self._count(hits_memory=1)
            return self._programs[digest]

    def _remember(self, digest: str, program: Any) -> None:
        with self._lock:
            self._programs[digest] = program
            excess = range(len(self._programs) - self.capacity)
            evicted = [self._programs.popitem(last=False)[1] for _ in excess]
            self._count(evictions=len(evicted))
        for old in evicted:
            _close(old)

    @contextmanager
    def _alone(self, digest: str) -> Iterator[None]:
        """Lets one thread at a time build a key; the others wait, then find it in memory."""
        with self._lock:
            lock = self._building.setdefault(digest, threading.Lock())
        with lock:
            yield
            with self._lock:  # not after a failure: threads that wait already build it one after the other
                self._building.pop(digest, None)

    def _count(self, **more: float) -> None:
        """Add to counters; the caller holds the lock."""
        self._stats = replace(self._stats, **{name: getattr(self._stats, name) + n for name, n in more.items()})

    # -- store and build ------------------------------------------------------------------------------------------

    def _load(self, key: CompileKey, build: Callable[[], Mapping[str, bytes | str]], load: Callable[[Entry], T]) -> T:
        entry = self._find(key)
        if entry is not None:
            try:
                return self._loaded(entry, load)
            except CompileError as error:  # it does not load: planted, or copied from another machine
                assert self.store is not None
                self.store.refuse(key, str(error), discard=self.policy == "on")
        return self._loaded(self._build(key, build), load)

    def _loaded(self, entry: Entry, load: Callable[[Entry], T]) -> T:
        start = time.perf_counter()
        program = load(entry)
        entry.release()
        with self._lock:
            self._count(load_seconds=time.perf_counter() - start)
        return program

    def _find(self, key: CompileKey) -> Entry | None:
        start, entry = time.perf_counter(), None
        if self.store and self.policy in ("on", "readonly"):
            entry = self.store.get(key, discard=self.policy == "on")
        with self._lock:
            if entry:
                self._count(hits_disk=1, load_seconds=time.perf_counter() - start)
            else:
                self._count(misses=1)
        if entry:
            debug_output.show(debug_output.CACHE, f"cache: {key.title} found in {entry.folder}")
        return entry

    def _build(self, key: CompileKey, build: Callable[[], Mapping[str, bytes | str]]) -> Entry:
        if self.policy == "readonly":
            raise self._lacks(key)
        start = time.perf_counter()
        entry = self._keep(key, build())
        with self._lock:
            self._count(compiles=1, compile_seconds=time.perf_counter() - start)
        return entry

    def why(self, key: CompileKey) -> str:
        """Why a key that is not in the cache is compiled: the nearest entry and what differs, or the policy."""
        return store.misses.why(key, self.store, self.policy)

    def _lacks(self, key: CompileKey) -> CacheError:
        """Says what a read-only cache lacks, and why none of its entries fits."""
        return CacheError(
            f"the read-only cache has no entry for {key.title}: {self.why(key)}",
            where=self.store.root if self.store else "memory",
            hint="Compile it where the cache may be written, or use RLX_CACHE=on; `rlx cache diff` compares entries",
        )

    def _keep(self, key: CompileKey, files: Mapping[str, bytes | str]) -> Entry:
        if self.store is None or self.policy == "off":
            return Entry(key, encode(files), None)
        entry = self.store.put(key, files, replace=self.policy == "redo")
        if entry.folder:
            with self._lock:
                self._count(bytes_written=sum(len(entry.read(name)) for name in entry.names))
        return entry

    # -- all ------------------------------------------------------------------------------------------------------

    def keys(self) -> list[str]:
        """Digests of the programs in memory, the least recently used first."""
        with self._lock:
            return list(self._programs)

    def __len__(self) -> int:
        return len(self._programs)

    def _repr_html_(self) -> str:
        rows = [("policy", self.policy), ("in memory", len(self)), ("counters", asdict(self.stats))]
        return card("compile cache", [("folder", self.store.root if self.store else "none"), *rows])

    def __repr__(self) -> str:
        return f"<CompileCache {self.policy}, {len(self)} in memory, {self.store.root if self.store else 'no folder'}>"

    def __contains__(self, key: CompileKey) -> bool:
        return key.digest in self._programs

    def clear(self) -> None:
        """Drop (and close) all programs in memory; the store keeps its entries."""
        with self._lock:
            programs = list(self._programs.values())
            self._programs.clear()
        for program in programs:
            _close(program)


def _close(program: Any) -> None:
    close = getattr(program, "close", None)
    if callable(close):
        close()


def checked_cache(cache: object) -> CompileCache:
    """The argument `cache` of a call; `ArgumentError` if it is not a compile cache."""
    if not isinstance(cache, CompileCache):
        hint = "rlx.CompileCache.default() is one."
        raise ArgumentError(f"cache is {cache!r}, expected a CompileCache", hint=hint)
    return cache
