"""The engine loop: computes the requests of all callers, a step at a time, in one thread at a time.

Runners stage, between the runners and the engine. Callers leave jobs and tasks in an inbox. The thread that drives the
loop reads it in each turn (`executor.py`), and nobody else touches the engine's sequences.

To wake another thread costs as much as a step of a small model. So a caller that waits drives the loop itself as long
as nobody else does, and turns are short. Everything else is driven by a thread of the loop's own: long turns, because
Ctrl-C waits for the turn of the main thread; and what goes on while no caller waits. When turns are short again, it
hands over to the thread that waits.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import os
import queue
import signal
import threading
import time
import weakref
from collections.abc import Callable, Generator
from contextlib import suppress
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, overload

from rlx.closing import closed_at_exit
from rlx.engine.loop.executor import Executor
from rlx.engine.loop.job import Job, Notifier, Task
from rlx.engine.loop.scheduler import Scheduler
from rlx.engine.opening.options import SLOTS, STALL_MS
from rlx.errors import BusyError, ResourceError, named_refusals

if TYPE_CHECKING:
    from rlx.engine.kv.disk_kv_cache import DiskKVCache
    from rlx.engine.token_engine import StepEngine

T = TypeVar("T")

_NOBODY = Notifier()  # of a caller that waits for nothing


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


class EngineLoop:
    """Computes jobs on an engine, in the threads of callers that wait and in one thread of its own.

    Its thread starts when it is needed, and holds the loop only while it computes: a loop that nobody refers to ends.

    Args:
        engine: the sequences and their steps.
        slots: maximum number of jobs that compute at once; others wait.
        stall_ms: how long a step of prompt rows may keep those who decode waiting, in milliseconds.
        clock: seconds.
        kept: states of prompts on disk; None for none.

    Attributes:
        scheduler: the jobs, in the order in which they are served. Only the thread that drives changes it.
        executor: computes them.
        room: for tasks: what takes room in the cache.
        clock: seconds.
        is_closed: whether `close` was called.
    """

    def __init__(
        self,
        engine: StepEngine,
        *,
        slots: int = SLOTS,
        stall_ms: float = STALL_MS,
        clock: Callable[[], float] = time.perf_counter,
        kept: DiskKVCache | None = None,
    ) -> None:
        self.is_closed, self.clock = False, clock
        self.scheduler = Scheduler(slots, stall_ms / 1000, engine.most_rows, engine.shared_rows)
        self.executor = Executor(engine, self.scheduler, clock, kept)
        self.room = self.executor.room
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.Lock()  # held by the thread that drives
        self._driver: int | None = None  # its number
        self._sleepers: list[Notifier] = []  # where threads wait that could drive
        self._alarm: queue.SimpleQueue[None] = queue.SimpleQueue()  # wakes the loop's own thread
        self._thread: dict[str, threading.Thread] = {}
        weakref.finalize(self, self._alarm.put, None).atexit = False  # an idle thread waits at the alarm

    # -- for callers ---------------------------------------------------------------------------------------------------

    def submit(self, *work: Job | Task) -> None:
        """Hands jobs over, which begin together, as soon as somebody waits for one of them or `wake` is called.

        Raises:
            BusyError: the loop is closed.
        """
        if self.is_closed:
            raise _closed_error()
        if self not in _loops:
            _loops.add(self)
            closed_at_exit(self)
        now = self.clock()
        for each in work:
            if isinstance(each, Job):
                each.record.submitted = now
        self.executor.inbox.append(work)

    def stop(self, job: Job, count: int) -> None:
        """Ends a job before its time, or cuts it afterwards; its consumer uses the first `count` tokens."""
        job.stopped_at = count
        self.executor.inbox.append(job)
        self._drive(_NOBODY, None)

    def consumed(self, job: Job) -> None:
        """Tells that the consumer has taken tokens of a job that waits for it."""
        self.executor.inbox.append(job)
        self._drive(job.notifier, None)

    def wait(self, notifier: Notifier, seen: object) -> None:
        """Waits until there may be news; drives the loop meanwhile where it can.

        Args:
            seen: `notifier.news` from before the caller looked.
        """
        self._drive(notifier, seen)
        if self.is_closed:
            self._end_all()
        if notifier.news is seen:
            self._sleep(notifier, seen)

    def wait_for(self, notifier: Notifier, is_there: Callable[[], bool]) -> None:
        """Waits as `wait` until a condition holds, of which the notifier has news."""
        while True:
            seen = notifier.news
            if is_there():
                return
            self.wait(notifier, seen)

    def wake(self) -> None:
        """Has the loop's own thread compute what is to be computed."""
        if not (self._thread or self.is_closed):
            self._start()
        self._alarm.put(None)

    @overload
    def call(self, work: Callable[[], Generator[None, None, T]]) -> T: ...
    @overload
    def call(self, work: Callable[[], T]) -> T: ...
    def call(self, work: Callable[[], Any]) -> Any:
        """Runs `work` between two steps, in the thread that drives, and returns its result.

        If it returns a generator, this is run to its end; between its `yield`s jobs are computed. An interrupt of the
        waiting thread closes it at its next `yield`.

        Raises:
            BusyError: the loop is closed.
            BaseException: what `work` raises.
        """
        task = Task(work)
        if self._driver == threading.get_ident():
            while not task.ended:
                task.step()
        else:
            self.submit(task)
            try:
                self.wait_for(task.notifier, lambda: task.ended)
            except BaseException:
                task.cancelled = True
                self.wake()
                while not task.ended:
                    seen = task.notifier.news
                    if not task.ended:
                        task.notifier.wait(seen)
                raise
        if task.error is not None:
            with named_refusals():
                raise task.error
        return task.result

    def use_engine(self, engine: StepEngine) -> None:
        """Ends every job, and computes on another engine from now on."""

        def use() -> None:
            hint = "send the request again"
            self.executor.end_all(BusyError("the runner computes in another way now", where="engine loop", hint=hint))
            self.executor.engine = engine
            self.scheduler.largest, self.scheduler.shared = engine.most_rows, engine.shared_rows

        self.call(use)

    def release(self, sequence: Any) -> None:
        """Closes a sequence soon, in the thread that drives; at once if nobody does."""
        if not self.is_closed:
            task = Task(sequence.close)
            seen = task.notifier.news
            self.executor.inbox.append(task)
            self._drive(task.notifier, seen)

    # -- its state -----------------------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether nothing is computed, and nobody waits."""
        return not (self.executor.inbox or self.scheduler.jobs() or self.scheduler.tasks)

    def stats(self) -> dict[str, Any]:
        """Number of jobs that wait (`queue`), that have started (`running`) and that may (`slots`); those that have
        started as `ActiveRequest` (`active`); and the counters.
        """
        scheduler = self.scheduler
        started = sorted([*scheduler.prefilling, *scheduler.running], key=lambda job: job.number)
        active = [job.active() for job in started]
        now = {"queue": len(scheduler.waiting), "running": len(active), "slots": scheduler.slots, "active": active}
        return {**now, **vars(self.executor.counters), "requests": self.room.ended, "paused": self.room.pauses}

    def close(self) -> None:
        """Ends every job and task with a `BusyError`, and the thread. Can be called more than once."""
        self.is_closed = True
        self._alarm.put(None)
        thread = self._thread.get("thread")
        if thread is not None and thread.ident is not None and thread is not threading.current_thread():
            thread.join()
        self._end_all()

    # -- driving -------------------------------------------------------------------------------------------------------

    def _drive(self, notifier: Notifier, seen: object) -> None:
        """Drives in this thread until there is news, if nobody else does, and as long as turns are short.

        At least it reads the inbox. What is left then is for the loop's own thread.

        Args:
            notifier: whose consumers are here, and drive when they wait again.
        """
        executor, done = self.executor, False
        with DeferredInterrupt() as interrupt:
            if executor.is_brief and self._lock.acquire(blocking=False):
                try:
                    self._driver = threading.get_ident()
                    if executor.inbox:
                        executor.read()
                    goes_on = True
                    while goes_on and notifier.news is seen and not (interrupt.came or self.is_closed):
                        goes_on = executor.turn() and executor.is_brief
                    if self.is_closed:
                        executor.end_all(_closed_error())
                    if executor.unheard:
                        executor.wake_consumers()
                    done = notifier.news is not seen and not self.scheduler.is_wanted_elsewhere(notifier)
                except BaseException as error:  # of a signal handler: nobody knows what it interrupted
                    executor.end_all(error)
                    raise
                finally:
                    self._driver = None
                    self._lock.release()
            if not done or executor.inbox:
                self.wake()

    def _sleep(self, notifier: Notifier, seen: object) -> None:
        """Waits for news, or until this thread should drive."""
        self._sleepers.append(notifier)
        try:
            notifier.wait(seen)
        except BaseException:  # an interrupt; the loop may have been handed over to this thread
            self.wake()
            raise
        finally:
            self._sleepers.remove(notifier)

    def run(self) -> float | None:
        """For the loop's own thread: computes until there is nothing to do, or another thread goes on.

        Returns:
            How many seconds the thread may then sleep; None for any number.
        """
        successor: Notifier | None = None
        with self._lock:
            self._driver = threading.get_ident()
            try:
                while successor is None and not self.is_closed and self.executor.turn():
                    successor = self._successor()
                if self.is_closed:
                    self.executor.end_all(_closed_error())
                seconds = self.scheduler.seconds_left(self.clock())
            except Exception as error:  # a bug: who waits hears of it, and this thread serves what comes next
                self.executor.end_all(error)
                seconds = None
            finally:
                self._driver = None
        if successor is not None:
            successor.notify()
        return seconds

    def _successor(self) -> Notifier | None:
        """Where a thread waits for all that is left, if it may drive: each token would wake it otherwise."""
        if not self.executor.is_brief or len(self._sleepers) != 1 or self.executor.inbox:
            return None
        (notifier,) = self._sleepers
        return None if self.scheduler.is_wanted_elsewhere(notifier) or notifier.waiting > 1 else notifier

    def _end_all(self) -> None:
        """Ends what there is, after the last turn of whoever drives; not from within a turn."""
        if self._driver != threading.get_ident():
            with self._lock:
                self.executor.end_all(_closed_error())

    # -- its own thread ------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Starts the thread; of two callers at the same time one does."""
        thread = threading.Thread(target=_drive, args=(weakref.ref(self), self._alarm), name="rlx-loop", daemon=True)
        with DeferredInterrupt():
            if self._thread.setdefault("thread", thread) is not thread:
                return
            try:
                thread.start()
            except RuntimeError as error:
                self._thread.clear()
                hint = "Raise the limit on processes (`ulimit -u`)"
                raise ResourceError(f"the thread of the engine loop does not start: {error}", hint=hint) from error

    def forget(self) -> None:
        """For a forked child: the thread does not exist there, and what it was computing is lost."""
        self._begin()
        hint = "send the request again in the child"
        self.executor.end_all(BusyError("the process was forked meanwhile", where="engine loop", hint=hint))


def _closed_error() -> BusyError:
    """The error of a call on a closed runner."""
    return BusyError("the runner was closed", where="engine loop", hint="open the model again")


def _drive(loop_of: weakref.ref[EngineLoop], alarm: queue.SimpleQueue[None]) -> None:
    """The thread of a loop. While it sleeps it holds the alarm only."""
    seconds: float | None = None
    while True:
        with suppress(queue.Empty):  # a deadline
            alarm.get(timeout=seconds)
            while True:
                alarm.get_nowait()
        loop = loop_of()
        if loop is None:
            return
        seconds = loop.run()
        if loop.is_closed:
            return
        del loop


_loops: weakref.WeakSet[EngineLoop] = weakref.WeakSet()


def _forget_all() -> None:
    for loop in list(_loops):
        loop.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
