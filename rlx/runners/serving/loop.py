"""The engine loop: one thread computes the requests of all callers, a step at a time.

Runners stage, between the runners and the engine. Callers post jobs and tasks into an inbox; the thread reads it
between turns (`executor.py`). Nothing but this thread touches the engine's sequences, so an interrupt of a caller
(Ctrl-C) never meets a half-done step.
"""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar, overload

from rlx.errors import BusyError, PoolFullError, ResourceError, named_refusals
from rlx.runners.opening.options import SLOTS, STALL_MS
from rlx.runners.serving.at_exit import closed_at_exit
from rlx.runners.serving.executor import JobExecutor, StepEngine
from rlx.runners.serving.job import Job, Logits, Task
from rlx.runners.serving.scheduler import Scheduler
from rlx.runtime.batch import Batch

Message = Job | Task | tuple[Job, ...] | None
T = TypeVar("T")


class EngineLoop:
    """Computes jobs on an engine, in one thread of its own, which starts with the first job.

    The thread holds the loop only while it computes: a loop that nobody refers to ends.

    Args:
        engine: the sequences and their steps.
        slots: maximum number of jobs that compute at once; others wait.
        stall_ms: how long a step of prompt rows may keep those who decode waiting, in milliseconds.
        clock: seconds.

    Attributes:
        scheduler: the jobs, in the order in which they are served. Only the loop's thread changes it.
    """

    def __init__(
        self,
        engine: StepEngine,
        *,
        slots: int = SLOTS,
        stall_ms: float = STALL_MS,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._engine, self._closed = engine, False
        self.scheduler = Scheduler(slots, stall_ms / 1000, engine.most_rows)
        self._begin()
        self._executor = JobExecutor(engine, self.scheduler, clock, lambda: not self._inbox.empty())

    def _begin(self) -> None:
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._driver: dict[str, threading.Thread] = {}  # the thread that drives; it enters itself
        weakref.finalize(self, self._inbox.put, None).atexit = False  # an idle thread waits at the inbox

    # ---------------------------------------------------------------------------------------------- for callers

    def submit(self, *jobs: Job) -> None:
        """Hands jobs over, which begin together; `BusyError` if the loop is closed."""
        self._post(jobs)

    def stop(self, job: Job, count: int) -> None:
        """Ends a job before its time, or cuts it afterwards; its consumer uses the first `count` tokens."""
        job.stopped_at = count
        self._tell(job)

    def took(self, job: Job) -> None:
        """Tells that the consumer has taken tokens of a job that is held."""
        self._tell(job)

    @overload
    def call(self, work: Callable[[], Generator[None, None, T]]) -> T: ...
    @overload
    def call(self, work: Callable[[], T]) -> T: ...
    def call(self, work: Callable[[], Any]) -> Any:
        """Runs `work` in the loop's thread between two steps, and returns its result.

        If it returns a generator, this is run to its end; between its `yield`s jobs are computed. An interrupt of the
        waiting thread closes it at its next `yield`.

        Raises:
            BusyError: the loop is closed.
            BaseException: what `work` raises.
        """
        task = Task(work)
        if self._driver.get("thread") is threading.current_thread():
            while not task.ended:
                task.step()
        else:
            self._post(task)
            try:
                task.bell.wait(lambda: task.ended)
            except BaseException:
                task.cancelled = True
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
        """Closes a sequence soon, in the loop's thread."""
        if not self._closed:
            self._post(Task(sequence.close))

    def task_rows(self) -> int:
        """How many rows a task may compute before its next `yield`."""
        return self._executor.task_rows()

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def is_idle(self) -> bool:
        """Whether nothing is computed, and nobody waits."""
        return self._inbox.empty() and not (self.scheduler.jobs() or self.scheduler.tasks)

    def stats(self) -> dict[str, Any]:
        """Number of jobs that wait (`queue`) and that have started (`running`), and the counters."""
        started = len(self.scheduler.prefilling) + len(self.scheduler.running)
        return {"queue": len(self.scheduler.waiting), "running": started, **vars(self._executor.counters)}

    def close(self) -> None:
        """Ends every job and task with a `BusyError`, and the thread. Can be called more than once."""
        self._closed = True
        self._inbox.put(None)
        thread = self._driver.get("thread")
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self._end_if_closed()

    # ---------------------------------------------------------------------------------------------- the thread

    def _post(self, message: Message) -> None:
        """Hands over something new."""
        if self._closed:
            raise closed_error()
        if not self._driver:
            self._start()
        self._tell(message)

    def _tell(self, message: Message) -> None:
        self._inbox.put(message)
        self._end_if_closed()

    def _end_if_closed(self) -> None:
        """Once the thread has ended nobody reads the inbox: ends what came in meanwhile."""
        thread = self._driver.get("thread")
        if self._closed and (thread is None or not thread.is_alive()):
            self._read()
            self._executor.end_all(closed_error())

    def _start(self) -> None:
        """Starts the thread. Of two that are started at the same time, the second ends at once."""
        _loops.add(self)
        closed_at_exit(self)
        thread = threading.Thread(target=_drive, args=(weakref.ref(self), self._inbox), name="rlx-loop", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            hint = "Raise the limit on processes (`ulimit -u`)"
            raise ResourceError(f"the thread of the engine loop does not start: {error}", hint=hint) from error

    def claim(self) -> bool:
        """Makes the current thread the one that drives; False if there is one already."""
        thread = threading.current_thread()
        return self._driver.setdefault("thread", thread) is thread

    def drive(self, message: Message = None) -> float | None:
        """Computes until there is nothing to do; returns how many seconds the thread may then sleep, or None.

        Args:
            message: what the thread has taken out of the inbox.
        """
        if message is not None:
            self._executor.receive(message)
        while True:
            self._read()
            if self._closed:
                self._executor.end_all(closed_error())
                return None
            if not self._executor.turn() and self._inbox.empty():
                return self._executor.seconds_left()

    def _read(self) -> None:
        while not self._inbox.empty():
            message = self._inbox.get()
            if message is not None:
                self._executor.receive(message)

    def forget(self) -> None:
        """For a forked child: the thread does not exist there, and what it was computing is lost."""
        self._begin()
        hint = "send the request again in the child"
        self._executor.end_all(BusyError("the process was forked meanwhile", where="engine loop", hint=hint))


def _drive(loop_of: weakref.ref[EngineLoop], inbox: queue.SimpleQueue[Message]) -> None:
    """The thread of a loop. While it sleeps it holds the inbox only."""
    loop = loop_of()
    if loop is None or not loop.claim():
        return
    del loop
    seconds: float | None = None
    while True:
        try:
            message = inbox.get(timeout=seconds)
        except queue.Empty:  # a deadline
            message = None
        loop = loop_of()
        if loop is None:
            return
        seconds = loop.drive(message)
        if loop.is_closed:
            return
        del loop, message


def closed_error() -> BusyError:
    """The error of a call on a closed runner."""
    return BusyError("the runner was closed", where="engine loop", hint="open the model again")


_loops: weakref.WeakSet[EngineLoop] = weakref.WeakSet()


def _forget_all() -> None:
    for loop in list(_loops):
        loop.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
