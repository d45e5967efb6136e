"""Jobs that were paused to make room in the cache, and when they go on.

Runners stage, under `executor.py`. The state of a paused job is saved outside the cache. It goes on, in order, when
room was given back. Jobs whose consumers are behind make room for one whose consumer waits: a program may read several
requests one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, MutableSet
from typing import Any

from rlx.engine.loop import request_trace
from rlx.engine.loop.job import Job
from rlx.engine.loop.scheduler import Scheduler
from rlx.errors import PoolFullError


class PausedJobs:
    """The jobs that are paused.

    Args:
        scheduler: all jobs.
        idle: open sequences of which nobody computes anything.
        fail: ends a job with an error.

    Attributes:
        room: whether room was given back since a job was paused.
        count: how often a job was paused.
    """

    def __init__(
        self, scheduler: Scheduler, idle: MutableSet[Any], fail: Callable[[Job, BaseException], object]
    ) -> None:
        self._scheduler, self._idle, self._fail = scheduler, idle, fail
        self._jobs: list[Job] = []
        self.room, self.count = False, 0

    def pause(self, job: Job) -> None:
        """Saves the state of a job elsewhere, which makes room for others."""
        try:
            job.sequence.pause()
            job.paused, self.room = True, False
            request_trace.paused(job)
            self._jobs.append(job)
            self.count += 1
        except BaseException as error:
            self._fail(job, error)

    def may_resume(self) -> bool:
        """Whether a paused job that could compute may find room: some was given back, a job that waits for its consumer
        can make some, or nobody else has any.
        """
        if all(job.held for job in self._jobs):
            return False
        others = [job for job in self._scheduler.jobs() if job.sequence is not None and not job.paused]
        return self.room or any(job.held for job in others) or not others

    def resume(self) -> None:
        """Lets paused jobs go on, in order, as far as there is room."""
        if not self.may_resume():
            return
        for job in sorted((each for each in self._jobs if not each.held), key=lambda job: job.order):
            try:
                self._load(job)
                job.paused = False
                request_trace.resumed(job)
                self._jobs.remove(job)
            except PoolFullError as error:
                if self._scheduler.is_alone(job):  # nobody will give room back
                    self._fail(job, error)
                break
            except BaseException as error:
                self._fail(job, error)
        self.room = False

    def forget(self, job: Job) -> None:
        """A job has ended, paused or not."""
        job.paused = False
        self._jobs = [other for other in self._jobs if other is not job]

    def _load(self, job: Job) -> None:
        """Loads what was saved of a job; idle sequences, and jobs that wait for their consumers, make room."""
        while True:
            try:
                job.sequence.resume()
                return
            except PoolFullError:
                held = [other for other in self._scheduler.running if other.held and not other.paused]
                if self._idle:
                    self._idle.pop().pause()
                elif held:
                    self.pause(max(held, key=lambda other: other.order))
                else:
                    raise
