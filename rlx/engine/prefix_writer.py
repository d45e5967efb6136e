"""Writes states of prompts to disk in a thread of its own, while requests are computed.

Runners stage, beside the engine loop. The loop's thread only copies some pages between two steps, when nobody computes
anything or, if somebody always does, once a second. Checksums and files are made here.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from rlx.engine.kv.kept_prefixes import KeptPrefixes
from rlx.engine.opening.content import ContentDigest
from rlx.engine.threads import closed_at_exit
from rlx.errors import BusyError, RlxError
from rlx.store.key import CompileKey

if TYPE_CHECKING:
    from rlx.engine.loop.loop import EngineLoop

T = TypeVar("T")

SMALL = 64 << 20  # bytes of a model that is read at once; a larger one is read in the background
IDLE = 0.02  # seconds between two looks whether the loop is idle
MOST = 1.0  # seconds that a copy waits for the loop to be idle


class PrefixWriter:
    """Writes what `KeptPrefixes` finds worth it.

    Args:
        kept: what is to be written.
        content: of the model's files.
        key_of: makes the key of all that values depend on from the digest of the content.
    """

    def __init__(self, kept: KeptPrefixes, content: ContentDigest, key_of: Callable[[str], CompileKey]) -> None:
        self._kept, self._content, self._key_of = kept, content, key_of
        self._loop: Callable[[], EngineLoop | None] = lambda: None
        self._thread: threading.Thread | None = None
        self._closed, self._news = threading.Event(), threading.Event()
        self._lock, self._ended = threading.Lock(), False
        self._pid = os.getpid()
        try:
            digest = content.noted() or (content.read() if content.nbytes <= SMALL else None)
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
                self._use(self._content.read(self._keeps_on))
        except (OSError, RlxError) as error:
            self._fail(error)

    def write(self) -> bool:
        """Writes what waits; for the thread. Returns whether it goes on."""
        while self._kept.is_waiting and self._keeps_on():
            self._kept.write_next(self._between_steps, self._keeps_on)
        return self._keeps_on()

    def _keeps_on(self) -> bool:
        return not self._closed.is_set()

    def _use(self, digest: bytes | None) -> None:
        if digest is not None:
            key = self._key_of(digest.hex())
            self._kept.store.use(bytes.fromhex(key.digest), key.to_json())

    def _fail(self, error: Exception) -> None:
        what = f"prompts are not kept on disk (cache_kv): the model's files cannot be read again: {error}"
        self._kept.store.warn("model", what)

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
