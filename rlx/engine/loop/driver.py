"""Who drives the engine loop: one thread at a time reads the inbox and computes turns.

Runners stage, under `loop.py`. A thread that waits for a result drives if nobody else does and turns are short. After
a long turn the loop's own thread drives, until turns are short again: then it hands over to the thread that waits.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from rlx import env
from rlx.engine.loop.bell import Bell
from rlx.engine.loop.deferred import DeferredInterrupt
from rlx.engine.loop.executor import JobExecutor
from rlx.engine.loop.job import Job, Task
from rlx.errors import BusyError
from rlx.tracing import span

Message = Job | Task | tuple[Job, ...] | None

BRIEF = 0.05  # seconds: callers compute turns themselves as long as turns take no longer


class Sleeper:
    """A thread that waits at a bell. `drives` is set before the bell rings to have it drive."""

    __slots__ = ("bell", "drives")

    def __init__(self, bell: Bell) -> None:
        self.bell, self.drives = bell, False


class Driver:
    """The inbox of a loop, and the right to compute what comes in.

    Args:
        executor: computes the turns.
        is_closed: whether the loop was closed.
        wake: has the loop's own thread drive.

    Attributes:
        inbox: what callers have left.
    """

    def __init__(self, executor: JobExecutor, is_closed: Callable[[], bool], wake: Callable[[], None]) -> None:
        self.inbox: deque[Message] = deque()
        self._executor, self._is_closed, self._wake = executor, is_closed, wake
        self._lock = threading.Lock()  # held by the thread that drives
        self._thread: int | None = None  # its number
        self._seconds = float("inf")  # how long the last turn took
        self._uncompiled = not env.jit()
        self._sleepers: list[Sleeper] = []

    @property
    def is_here(self) -> bool:
        """Whether the current thread drives."""
        return self._thread == threading.get_ident()

    def here(self, bell: Bell | None, ready: Callable[[], bool]) -> None:
        """Drives in this thread until `ready()`, if nobody else does, and as long as turns are short.

        What is left then is for the loop's own thread.

        Args:
            bell: whose consumers wait here, and drive when they wait again.
        """
        done = False
        with DeferredInterrupt() as interrupt:
            if self._are_brief() and self._lock.acquire(blocking=False):
                try:
                    self._thread = threading.get_ident()
                    self._read()
                    while not ready() and self._are_brief() and not interrupt.came and self._turn():
                        pass
                    self._executor.wake_consumers()
                    done = ready() and not self._executor.scheduler.is_wanted_elsewhere(bell)
                except BaseException as error:  # of a signal handler: nobody knows what it interrupted
                    self._executor.end_all(error)
                    raise
                finally:
                    self._thread = None
                    self._lock.release()
            if not done or self.inbox:
                self._wake()

    def sleep(self, bell: Bell, ready: Callable[[], bool]) -> None:
        """Waits until `ready()`, which `bell` rings for, or until this thread should drive."""
        sleeper = Sleeper(bell)
        self._sleepers.append(sleeper)
        try:
            bell.wait(lambda: sleeper.drives or ready())
        except BaseException:  # an interrupt; the loop may have been handed over to this thread
            self._wake()
            raise
        finally:
            self._sleepers.remove(sleeper)

    def run(self) -> float | None:
        """For the loop's own thread: computes until there is nothing to do, or another thread goes on.

        Returns:
            How many seconds the thread may then sleep; None for any number.
        """
        successor: Sleeper | None = None
        with self._lock:
            self._thread = threading.get_ident()
            try:
                while successor is None and self._turn():
                    successor = self._successor()
                seconds = self._executor.seconds_left()
            finally:
                self._thread = None
        if successor is not None:
            successor.drives = True
            successor.bell.ring()
        return seconds

    def _successor(self) -> Sleeper | None:
        """The thread that waits for all that is left, if it may drive: each token would wake it otherwise."""
        if not self._are_brief() or len(self._sleepers) != 1:
            return None
        (sleeper,) = self._sleepers
        others = self._executor.scheduler.is_wanted_elsewhere(sleeper.bell) or sleeper.bell.waiting > 1
        return None if others or self.inbox else sleeper

    def _are_brief(self) -> bool:
        """Whether callers compute turns themselves; without compiled code always, because a debugger looks at them."""
        return self._seconds <= BRIEF or self._uncompiled

    def end_all(self) -> None:
        """Ends what there is, after the last turn of whoever drives; not from within a turn."""
        if not self.is_here:
            with self._lock:
                self._read()
                self._executor.end_all(closed_error())

    def _turn(self) -> bool:
        """Reads the inbox and computes a turn; returns whether there is more to do."""
        self._read()
        if self._is_closed():
            self._executor.end_all(closed_error())
            return False
        start = time.perf_counter()
        with span("turn", "loop"):
            more = self._executor.turn()
        self._seconds = time.perf_counter() - start
        return more or bool(self.inbox)

    def _read(self) -> None:
        while self.inbox:
            message = self.inbox.popleft()
            if message is not None:
                self._executor.receive(message)


def closed_error() -> BusyError:
    """The error of a call on a closed runner."""
    return BusyError("the runner was closed", where="engine loop", hint="open the model again")
