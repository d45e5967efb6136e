"""Wakes threads and asyncio tasks that wait for another thread.

Runners stage, under the engine loop. A waiting thread may be interrupted (Ctrl-C) at any instruction, so there is no
lock that it would have to release: whoever waits leaves a function that wakes it, and checks once more.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio


LOOK = 0.1  # seconds after which a waiting thread looks for signals: the system may give them to another thread


class Bell:
    """Any number of threads and tasks wait for a condition; `ring` lets all of them look again.

    bell.wait(lambda: job.ended)  # in one thread
    job.ended = True; bell.ring()  # in another
    """

    __slots__ = ("_waiters",)

    def __init__(self) -> None:
        self._waiters: deque[Callable[[], object]] = deque()

    def ring(self) -> None:
        """Wakes everybody who waits. Cheap if nobody does; safe in any thread, callback or finalizer."""
        for _ in range(len(self._waiters)):
            try:
                wake = self._waiters.popleft()
            except IndexError:  # another thread rings, too
                return
            wake()

    @property
    def waiting(self) -> int:
        """How many threads and tasks wait, or more: one that went on by itself counts up to the next ring."""
        return len(self._waiters)

    def wait(self, ready: Callable[[], bool], seconds: float | None = None) -> bool:
        """Waits until `ready()`, at most so many seconds; returns whether it is. An interrupt ends the wait."""
        end = None if seconds is None else time.monotonic() + seconds
        while not ready():
            lock = threading.Lock()
            lock.acquire()
            self._waiters.append(lock.release)
            if ready():  # after the append: a ring before it would have been missed
                return True
            while not lock.acquire(timeout=LOOK if end is None else min(LOOK, max(0.0, end - time.monotonic()))):
                if end is not None and time.monotonic() >= end:
                    return ready()
        return True

    async def wait_async(self, ready: Callable[[], bool], seconds: float | None = None) -> bool:
        """As `wait`, for an asyncio task."""
        import asyncio  # slow, and few programs need it

        here = asyncio.get_running_loop()
        end = None if seconds is None else here.time() + seconds
        while not ready():
            if end is not None and here.time() >= end:
                return False
            woken = asyncio.Event()

            def wake(here: asyncio.AbstractEventLoop = here, woken: asyncio.Event = woken) -> None:
                try:
                    here.call_soon_threadsafe(woken.set)
                except RuntimeError:  # the event loop was closed, and its tasks with it
                    return

            self._waiters.append(wake)
            if ready():
                return True
            timer = None if end is None else here.call_at(end, woken.set)
            await woken.wait()
            if timer is not None:
                timer.cancel()
        return True
