"""The engine loop: computes the requests of all callers, a step at a time, in one thread at a time.

Runners stage, between the runners and the engine. Callers post jobs and tasks into an inbox. The thread that drives the
loop reads it between turns (`executor.py`), and nobody else touches the engine's sequences.

To wake another thread costs as much as a step of a small model. So a caller that waits drives the loop itself as long
as nobody else does, and turns are short. Everything else is driven by a thread of the loop's own: long turns, because
Ctrl-C waits for the turn of the main thread; and what goes on while no caller waits.
"""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from typing import Any, TypeVar, overload

from rlx.engine.batch import Batch
from rlx.engine.kv.kept_prefixes import KeptPrefixes
from rlx.engine.loop.at_exit import closed_at_exit
from rlx.engine.loop.bell import Bell
from rlx.engine.loop.deferred import DeferredInterrupt
from rlx.engine.loop.driver import Driver, Message, closed_error
from rlx.engine.loop.executor import JobExecutor, StepEngine
from rlx.engine.loop.job import Job, Logits, Task
from rlx.engine.loop.scheduler import Scheduler
from rlx.engine.opening.options import SLOTS, STALL_MS
from rlx.errors import BusyError, PoolFullError, ResourceError, named_refusals

T = TypeVar("T")


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
        clock: seconds.
    """

    def __init__(
        self,
        engine: StepEngine,
        *,
        slots: int = SLOTS,
        stall_ms: float = STALL_MS,
        clock: Callable[[], float] = time.perf_counter,
        kept: KeptPrefixes | None = None,
    ) -> None:
        self._engine, self._closed, self.clock = engine, False, clock
        self.scheduler = Scheduler(slots, stall_ms / 1000, engine.most_rows)
        self._executor = JobExecutor(engine, self.scheduler, clock, lambda: bool(self.driver.inbox), kept)
        self._begin()

    def _begin(self) -> None:
        self.driver = Driver(self._executor, lambda: self._closed, self.wake)
        self._alarm: queue.SimpleQueue[None] = queue.SimpleQueue()  # wakes the loop's own thread
        self._thread: dict[str, threading.Thread] = {}
        weakref.finalize(self, self._alarm.put, None).atexit = False  # an idle thread waits at the alarm

    # ---------------------------------------------------------------------------------------------- for callers

    def submit(self, *jobs: Job) -> None:
        """Hands jobs over, which begin together, as soon as somebody waits for one of them or `wake` is called.

        Raises:
            BusyError: the loop is closed.
        """
        now = self.clock()
        for job in jobs:
            job.record.submitted = now
        self._post(jobs)

    def stop(self, job: Job, count: int) -> None:
        """Ends a job before its time, or cuts it afterwards; its consumer uses the first `count` tokens."""
        job.stopped_at = count
        self._tell(job)

    def took(self, job: Job) -> None:
        """Tells that the consumer has taken tokens of a job that is held."""
        self._tell(job, job.bell)

    def wait(self, bell: Bell, ready: Callable[[], bool]) -> None:
        """Waits until `ready()`, which `bell` rings for; drives the loop meanwhile where it can."""
        while not ready():
            self.driver.here(bell, ready)
            if self._closed:
                self.driver.end_all()
            if not ready():
                self.driver.sleep(bell, ready)

    def wake(self) -> None:
        """Has the loop's own thread compute what is to be computed."""
        if not (self._thread or self._closed):
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
        if self.driver.is_here:
            while not task.ended:
                task.step()
        else:
            self._post(task)
            try:
                self.wait(task.bell, lambda: task.ended)
            except BaseException:
                task.cancelled = True
                self.wake()
                task.bell.wait(lambda: task.ended)
                raise
        if task.error is not None:
            with named_refusals():
                raise task.error
        return task.result

    def keep(self, sequence: Any) -> None:
        """For a task: nobody computes anything of this open sequence now; it may be paused to make room for others."""
        self._executor.idle.add(sequence)

    def use(self, sequence: Any) -> None:
        """For a task: undoes `keep`, before it computes something of the sequence."""
        self._executor.idle.discard(sequence)
        while True:
            try:
                sequence.resume()
                return
            except PoolFullError:
                if not self._executor.make_room():
                    raise

    def step(self, batch: Batch) -> Sequence[Logits | None]:
        """For a task: `StepEngine.step`, after others were paused if it finds no room."""
        while True:
            try:
                return self._engine.step(batch)
            except PoolFullError:
                if not self._executor.make_room():
                    raise

    def release(self, sequence: Any) -> None:
        """Closes a sequence soon, in the thread that drives; at once if nobody does."""
        if not self._closed:
            task = Task(sequence.close)
            self.driver.inbox.append(task)
            self.driver.here(None, lambda: task.ended)

    def task_rows(self, past: int) -> int:
        """How many rows after `past` positions a task may compute before its next `yield`."""
        return self._executor.task_rows(past)

    @property
    def slots(self) -> int:
        """How many jobs are computed at once."""
        return self.scheduler.slots

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def is_idle(self) -> bool:
        """Whether nothing is computed, and nobody waits."""
        return not (self.driver.inbox or self.scheduler.jobs() or self.scheduler.tasks)

    def stats(self) -> dict[str, Any]:
        """Number of jobs that wait (`queue`), that have started (`running`) and that may (`slots`); those that have
        started as `ActiveRequest` (`active`); and the counters.
        """
        scheduler = self.scheduler
        started = sorted([*scheduler.prefilling, *scheduler.running], key=lambda job: job.number)
        active = [job.active() for job in started]
        now = {"queue": len(scheduler.waiting), "running": len(active), "slots": scheduler.slots, "active": active}
        return {**now, **vars(self._executor.counters), "paused": self._executor.paused.count}

    def close(self) -> None:
        """Ends every job and task with a `BusyError`, and the thread. Can be called more than once."""
        self._closed = True
        self._alarm.put(None)
        thread = self._thread.get("thread")
        if thread is not None and thread.ident is not None and thread is not threading.current_thread():
            thread.join()
        self.driver.end_all()

    # ---------------------------------------------------------------------------------------------- driving

    def _post(self, message: Message) -> None:
        """Leaves something new, which waits until somebody drives."""
        if self._closed:
            raise closed_error()
        if self not in _loops:
            _loops.add(self)
            closed_at_exit(self)
        self.driver.inbox.append(message)

    def _tell(self, message: Job, bell: Bell | None = None) -> None:
        """Leaves a message. It is read at once, unless somebody else drives and reads it soon.

        Args:
            bell: whose consumers are here and drive when they wait.
        """
        self.driver.inbox.append(message)
        self.driver.here(bell, lambda: True)

    # ---------------------------------------------------------------------------------------------- its own thread

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
        self._executor.end_all(BusyError("the process was forked meanwhile", where="engine loop", hint=hint))


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
        seconds = loop.driver.run()
        if loop.is_closed:
            return
        del loop


_loops: weakref.WeakSet[EngineLoop] = weakref.WeakSet()


def _forget_all() -> None:
    for loop in list(_loops):
        loop.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
