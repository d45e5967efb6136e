"""Writes states of prompts to disk in a thread of its own, while requests are computed.

Runners stage, beside the engine loop. The loop's thread only copies some pages between two steps, when nobody computes
anything or, if somebody always does, once a second. Checksums and files are made here.

States are of use only to an engine that would compute the same bits. So their key holds the content of the model's
files, the graph, the formats of the caches, the target, the options that change arithmetic, and the versions of
everything that makes code or reads weights.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rlx.closing import closed_at_exit
from rlx.compiler.compile import Compiler, program_name
from rlx.engine.kv.disk_kv_cache import DiskKVCache
from rlx.engine.kv.pool import CachePool
from rlx.engine.kv.prefix_store import PrefixStore
from rlx.engine.opening.setup import Setup
from rlx.errors import BusyError, ModelFileError, RlxError
from rlx.ir.graph import Graph
from rlx.passes.effective import effective
from rlx.store.key import FORMAT, CompileKey, Json, digest_text, source_digest
from rlx.store.store import Store
from rlx.weights import WeightLoader

if TYPE_CHECKING:
    from rlx.engine.loop.loop import EngineLoop

T = TypeVar("T")

SMALL = 64 << 20  # bytes of a model that is read at once; a larger one is read in the background
IDLE = 0.02  # seconds between two looks whether the loop is idle
MOST = 1.0  # seconds that a copy waits for the loop to be idle

_CHUNK = 8 << 20  # bytes of a file that are read at a time
_CONTENT = "content.bin"
_SOURCES = ("models/**/*.py", "weights/**/*.py", "vision/**/*.py", "engine/kv/*.py", "compiler/*.py")
_ARITHMETIC = ("precision", "bf16_dots", "bf16_tiles", "deterministic", "fusions", "passes")


def content_key(paths: Sequence[Path]) -> CompileKey:
    """The key under which the digest of some files is kept: what the system says of them.

    These are path, size, and the times of the last change of content and of the file's record. A file that was changed
    in place, or put in the place of another one, has other times and is read again.
    """
    rows = [(str(path), os.stat(path)) for path in paths]
    stamps: list[Json] = [[name, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino, s.st_dev] for name, s in rows]
    return CompileKey("content", paths[0].name, options={"files": stamps}, versions={"format": FORMAT})


def content_digest(paths: Sequence[Path], store: Store, keep_on: Callable[[], bool]) -> bytes | None:
    """Reads files, and keeps the digest of their content, 32 bytes; None if `keep_on()` was false meanwhile.

    A model of 8 GB takes some seconds to read.

    Raises:
        OSError: a file cannot be read.
        ModelFileError: a file was changed meanwhile.
    """
    before, total = content_key(paths), blake2b(digest_size=32)
    for path in paths:
        total.update(path.stat().st_size.to_bytes(8, "little"))
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                if not keep_on():
                    return None
                total.update(chunk)
    if content_key(paths) != before:
        raise ModelFileError("the file changed while it was read", where=paths[0], hint="open it again")
    store.put(before, {_CONTENT: total.digest()})
    return total.digest()


class PrefixWriter:
    """Writes what `DiskKVCache` finds worth it.

    Args:
        kept: what is to be written.
        paths: the model's files, in order.
        key_of: makes the key of all that values depend on from the digest of the content.
    """

    def __init__(self, kept: DiskKVCache, paths: Sequence[Path], key_of: Callable[[str], CompileKey]) -> None:
        self._kept, self._paths, self._key_of = kept, list(paths), key_of
        self._loop: Callable[[], EngineLoop | None] = lambda: None
        self._thread: threading.Thread | None = None
        self._closed, self._news = threading.Event(), threading.Event()
        self._lock, self._ended = threading.Lock(), False
        self._pid = os.getpid()
        try:
            entry = kept.store.store.get(content_key(self._paths))
            digest = None if entry is None else entry.read(_CONTENT)
            if digest is None and sum(path.stat().st_size for path in self._paths) <= SMALL:
                digest = self._read()
        except (OSError, RlxError) as error:
            self._fail(error)
        else:
            self._use(digest)

    def start(self, loop: Callable[[], EngineLoop | None]) -> None:
        """Starts the thread, once a loop computes requests.

        Args:
            loop: the loop that computes requests now; None after it ended. It must not keep its runner alive.
        """
        self._loop, self._kept.notify = loop, self._news.set
        closed_at_exit(self)
        weakref.finalize(self, self._news.set).atexit = False  # a writer that nobody refers to ends
        self._thread = threading.Thread(
            target=_write, args=(weakref.ref(self), self._news), name="rlx-cache-kv", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Writes what is not on disk yet, and ends the thread; the loop computes nothing any more. May be called again.

        In a forked child it does nothing: the parent writes.
        """
        if self._pid != os.getpid():
            return
        self._closed.set()
        self._news.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        with self._lock:
            if not self._ended:
                self._ended = True
                self._kept.write_all(self._call)

    def identify(self) -> None:
        """Reads the model's files if their digest is not known yet; for the thread."""
        try:
            if not self._kept.store.is_ready and self._kept.store.problem is None:
                self._use(self._read())
        except (OSError, RlxError) as error:
            self._fail(error)

    def write(self) -> bool:
        """Writes what waits; for the thread. Returns whether it goes on."""
        while self._kept.is_waiting and self._keeps_on():
            self._kept.write_next(self._between_steps, self._keeps_on)
        return self._keeps_on()

    def _read(self) -> bytes | None:
        return content_digest(self._paths, self._kept.store.store, self._keeps_on)

    def _keeps_on(self) -> bool:
        return not self._closed.is_set()

    def _use(self, digest: bytes | None) -> None:
        if digest is not None:
            self._kept.store.use(self._key_of(digest.hex()))

    def _fail(self, error: Exception) -> None:
        what = f"prompts are not kept on disk (cache_kv): the model's files cannot be read again: {error}"
        self._kept.store.store.warn("model", what)

    def _between_steps(self, work: Callable[[], T]) -> T | None:
        """Runs a call in the thread that drives the loop, when it is idle or after a second."""
        end = time.monotonic() + MOST
        while (loop := self._loop()) is not None and not loop.is_idle and time.monotonic() < end:
            del loop  # a runner that nobody refers to ends
            if self._closed.wait(IDLE):
                return None
        return None if self._closed.is_set() or loop is None else _called(loop, work)

    def _call(self, work: Callable[[], T]) -> T | None:
        """Runs a call at the end: between two steps as long as the loop lives, else at once."""
        loop = self._loop()
        return work() if loop is None or loop.is_closed else _called(loop, work)


def _write(writer_of: weakref.ref[PrefixWriter], news: threading.Event) -> None:
    """The thread. While it waits it holds the event only."""
    if (writer := writer_of()) is not None:
        writer.identify()
    while writer is not None and writer.write():
        del writer
        news.wait()
        news.clear()
        writer = writer_of()


def _called(loop: EngineLoop, work: Callable[[], Any]) -> Any:
    try:
        return loop.call(work)
    except BusyError:  # it was closed meanwhile
        return None


def keeping(
    setup: Setup, compiler: Compiler, graph: Graph, pool: CachePool, loader: WeightLoader
) -> tuple[DiskKVCache, PrefixWriter]:
    """The reader and the writer of states of prompts."""
    assert setup.cache_kv is not None
    sizes, has_states = pool.sizes, pool.memory.has_slots
    store = PrefixStore(
        setup.cache_kv, setup.cache_kv_bytes, page=sizes.page, page_bytes=sizes.page_bytes, has_states=has_states
    )
    kept = pool.kept = DiskKVCache(pool, store)
    paths = [Path(path) for path, _, _ in loader.stamps()]
    return kept, PrefixWriter(kept, paths, partial(prefix_key, setup, compiler, graph, pool))


def prefix_key(setup: Setup, compiler: Compiler, graph: Graph, pool: CachePool, content: str) -> CompileKey:
    """The key of all that the bits of states depend on.

    Args:
        content: digest of the model's files.
    """
    phases: dict[str, Any] = {}
    for bucket in setup.profile.ranges:
        options = effective(setup.profile.options(bucket, paged=True), graph, setup.target.capabilities)
        chosen = {name: getattr(options, name) for name in _ARITHMETIC}
        phases["-".join(map(str, bucket))] = {
            name: list(value) if isinstance(value, tuple) else value for name, value in chosen.items()
        }
    return compiler.key(
        kind="prefix",
        name=program_name(graph),
        graph=digest_text(graph.canonical()),
        states={name: state.format for name, state in pool.memory.table.items()},
        profile=phases,
        options={"content": content, "readers": source_digest(None, _SOURCES)},
    )
