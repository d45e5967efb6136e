"""Threads of the engine: how they wake each other, when Ctrl-C may interrupt them, how they end with the process.

Runners stage, under the engine loop.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import atexit
import signal
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from functools import cache
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    import asyncio

LOOK = 0.1  # seconds after which a waiting thread looks for signals: the system may give them to another thread


class Notifier:
    """Any number of threads and tasks wait here for news.

        seen = notifier.news          # in one thread, before it looks
        if not job.ended:
            notifier.wait(seen)

        job.ended = True              # in another
        notifier.notify()

    A waiting thread may be interrupted (Ctrl-C) at any instruction, so there is no lock that it would have to release:
    whoever waits leaves a function that wakes it, and looks once more.

    Attributes:
        news: another object with each news. To set it without `notify` lets those see it who look anyway.
    """

    __slots__ = ("_waiters", "news")

    def __init__(self) -> None:
        self.news = object()
        self._waiters: deque[Callable[[], object]] = deque()

    def notify(self) -> None:
        """Wakes everybody who waits. Cheap if nobody does; safe in any thread, callback or finalizer."""
        self.news = object()
        for _ in range(len(self._waiters)):
            try:
                wake = self._waiters.popleft()
            except IndexError:  # another thread notifies, too
                return
            wake()

    @property
    def waiting(self) -> int:
        """How many threads and tasks wait, or more: one that went on by itself counts up to the next news."""
        return len(self._waiters)

    def wait(self, seen: object, seconds: float | None = None) -> bool:
        """Waits until `news` is not `seen`, at most so many seconds; returns whether. An interrupt ends the wait."""
        end = None if seconds is None else time.monotonic() + seconds
        while self.news is seen:
            lock = threading.Lock()
            lock.acquire()
            self._waiters.append(lock.release)
            if self.news is not seen:  # after the append: a call of `notify` before it would have been missed
                return True
            while not lock.acquire(timeout=LOOK if end is None else min(LOOK, max(0.0, end - time.monotonic()))):
                if end is not None and time.monotonic() >= end:
                    return self.news is not seen
        return True

    async def wait_async(self, seen: object, seconds: float | None = None) -> bool:
        """As `wait`, for an asyncio task."""
        import asyncio  # slow, and few programs need it

        here = asyncio.get_running_loop()
        end = None if seconds is None else here.time() + seconds
        while self.news is seen:
            if end is not None and here.time() >= end:
                return False
            woken = asyncio.Event()

            def wake(here: asyncio.AbstractEventLoop = here, woken: asyncio.Event = woken) -> None:
                try:
                    here.call_soon_threadsafe(woken.set)
                except RuntimeError:  # the event loop was closed, and its tasks with it
                    return

            self._waiters.append(wake)
            if self.news is not seen:
                return True
            timer = None if end is None else here.call_at(end, woken.set)
            await woken.wait()
            if timer is not None:
                timer.cancel()
        return True


# What the module `signal` wraps. The wrappers convert numbers to enums and back, which takes 10 us a call.
_get, _set = _signal.getsignal, _signal.signal
_INTERRUPT = int(signal.SIGINT)
_MAIN = threading.main_thread().ident


class DeferredInterrupt:
    """A context in which Ctrl-C is only noted; the program's own handler is called at the end.

    Python raises KeyboardInterrupt between any two instructions of the main thread. In the middle of a step that would
    leave states half written; after it, nothing is. In other threads it does nothing: signals are handled in the main
    thread.

        with DeferredInterrupt() as interrupt:
            while not interrupt.came:
                work()

    Attributes:
        came: whether Ctrl-C was pressed.
    """

    came = False
    _handler: Any = None

    def __enter__(self) -> Self:
        if threading.get_ident() == _MAIN and callable(handler := _get(_INTERRUPT)):
            _set(_INTERRUPT, self._note)
            self._handler = handler  # afterwards: an interrupt before it would be lost otherwise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._handler is not None:
            _set(_INTERRUPT, self._handler)
            if self.came:
                self._handler(_INTERRUPT, None)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.came = True


_open: weakref.WeakSet[Any] = weakref.WeakSet()


def closed_at_exit(owner: Any) -> None:
    """Calls `owner.close()`, which may be called more than once, when the main thread ends, unless it is gone by then.

    Code that runs natively in another thread while the interpreter goes away would read memory that was freed. So the
    threads end first.
    """
    _register()
    _open.add(owner)


@cache
def _register() -> None:
    """Registers `_close_all` to run at the end of the main thread.

    It must run before Python joins the remaining threads and before thread pools close. `atexit` handlers run after
    both. `threading._register_atexit` handlers run earlier, the last registered first; thread pools register theirs on
    import, so `concurrent.futures.thread` is imported first. That takes 20 ms, which a program without an engine saves.
    """
    import concurrent.futures.thread  # noqa: F401

    register: Callable[[Callable[[], None]], object] = getattr(threading, "_register_atexit", atexit.register)
    register(_close_all)


def _close_all() -> None:
    for owner in list(_open):
        owner.close()
