"""Room in the cache: who makes it for whom, and the end of a job, which gives it back.

Runners stage, under `executor.py`. If the cache is full, room is made by what costs least: the reading of a prompt from
disk ends, a sequence of which nobody computes anything is paused, or else a job. The state of a paused job is saved
outside the cache. It goes on, in order, when room was given back. Jobs whose consumers are behind make room for one
whose consumer waits: a program may read several requests one after the other.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, TypeVar

from rlx.engine.loop import record
from rlx.engine.loop.job import Job, Task
from rlx.engine.loop.scheduler import Scheduler
from rlx.errors import PoolFullError

if TYPE_CHECKING:
    from rlx.engine.kv.disk_kv_cache import DiskKVCache

T = TypeVar("T")


class Room:
    """The room in the cache: the jobs, prompts and idle sequences that take it.

    Args:
        scheduler: all jobs.
        clock: seconds.
        kept: states of prompts on disk; None for none.

    Attributes:
        kept: as given.
        ended: number of requests that ended, in whatever way.
        idle: open sequences of which nobody computes anything.
        paused: jobs whose state was saved elsewhere.
        loads: jobs whose prompts are being read from disk, with their tasks.
        freed: whether room was given back since a job was paused.
        pauses: how often a job was paused.
    """

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float], kept: DiskKVCache | None) -> None:
        self._scheduler, self._clock, self.kept = scheduler, clock, kept
        self.ended = 0
        self.idle: weakref.WeakSet[Any] = weakref.WeakSet()
        self.paused: list[Job] = []
        self.loads: dict[Job, Task] = {}
        self.freed, self.pauses = False, 0

    # -- who makes room ------------------------------------------------------------------------------------------------

    def make(self) -> bool:
        """Ends the reading of a prompt, pauses an idle sequence, or else a job; False if there is nothing of these."""
        if self.loads:
            self._end_load()
            return True
        if self.idle:
            self.idle.pop().pause()
            return True
        job = self._scheduler.victim()
        if job is not None:
            self._pause(job)
        return job is not None

    def made_for(self, work: Callable[[], T]) -> T:
        """The result of `work`, after others made room if it found none; for tasks."""
        while True:
            try:
                return work()
            except PoolFullError:
                if not self.make():
                    raise

    def keep(self, sequence: Any) -> None:
        """For a task: nobody computes anything of this open sequence now; it may be paused to make room for others."""
        self.idle.add(sequence)

    def use(self, sequence: Any) -> None:
        """For a task: undoes `keep`, before it computes something of the sequence."""
        self.idle.discard(sequence)
        self.made_for(sequence.resume)

    def refuse(self, job: Job, error: PoolFullError) -> None:
        """A job that could not start: others make room for it, or it waits until they have ended."""
        if self._scheduler.is_alone(job) and not (self.idle or self.loads):
            self.end(job, error)
            return
        self._scheduler.remove(job)
        self._scheduler.add(job)
        victim = self._scheduler.victim()
        if self.idle or self.loads or (victim is not None and victim.backpressured):
            self.make()
        else:
            self._scheduler.is_full = True

    # -- paused jobs ---------------------------------------------------------------------------------------------------

    def _pause(self, job: Job) -> None:
        """Saves the state of a job elsewhere."""
        try:
            job.sequence.pause()
            job.paused, self.freed = True, False
            record.paused(job)
            self.paused.append(job)
            self.pauses += 1
        except BaseException as error:
            self.end(job, error)

    def may_resume(self) -> bool:
        """Whether a paused job that could compute may find room: some was given back, a job that waits for its consumer
        can make some, or nobody else has any.
        """
        held = self._scheduler.is_held
        if all(map(held, self.paused)):
            return False
        others = [job for job in self._scheduler.jobs() if job.sequence is not None and not job.paused]
        return self.freed or any(map(held, others)) or not others

    def resume(self) -> None:
        """Lets paused jobs go on, in order, as far as there is room."""
        if not self.may_resume():
            return
        able = [job for job in self.paused if not self._scheduler.is_held(job)]
        for job in sorted(able, key=lambda job: job.order):
            try:
                self._load(job)
                job.paused = False
                record.resumed(job)
                self.paused.remove(job)
            except PoolFullError as error:
                if self._scheduler.is_alone(job):  # nobody will give room back
                    self.end(job, error)
                break
            except BaseException as error:
                self.end(job, error)
        self.freed = False

    def _load(self, job: Job) -> None:
        """Loads what was saved of a job; idle sequences, and jobs that wait for their consumers, make room."""
        while True:
            try:
                job.sequence.resume()
                return
            except PoolFullError:
                running, is_held = self._scheduler.running, self._scheduler.is_held
                held = [other for other in running if is_held(other) and not other.paused]
                if self.idle:
                    self.idle.pop().pause()
                elif held:
                    self._pause(max(held, key=lambda other: other.order))
                else:
                    raise

    # -- prompts on disk -----------------------------------------------------------------------------------------------

    def begin_load(self, job: Job) -> bool:
        """Has the beginning of a job's prompt read, if it is on disk; the job is admitted again afterwards.

        Reading is a task: other jobs compute between its pieces. Prompts with the same beginning wait for the first
        one, as if it were computed.
        """
        if self.kept is None or job.looked_up:
            return False
        job.looked_up, self.kept.rate = True, self._scheduler.prompt_cost.rows_per_second
        work = self.kept.reading(job.prompt, job.embeddings, job.request.cache_salt)
        if work is None:
            return False
        job.loading = True
        self.loads[job] = Task(lambda: self._reading(job, work))
        self._scheduler.tasks.append(self.loads[job])
        return True

    def _reading(self, job: Job, work: Generator[None, None, None]) -> Generator[None, None, None]:
        """Reads states of the prompt's beginning, unless the job ends before."""
        error = None
        try:
            while not job.ended:
                next(work)
                yield
        except StopIteration:
            pass
        except Exception as found:
            error = found
        finally:
            work.close()
            self._loaded(job, error)

    def _end_load(self) -> None:
        """Ends the reading that began last, which gives its room back."""
        job, task = self.loads.popitem()
        self._scheduler.tasks.remove(task)
        task.close()
        if job.loading:  # it had not begun
            self._loaded(job, None)

    def _loaded(self, job: Job, error: BaseException | None) -> None:
        job.loading = False
        self.loads.pop(job, None)
        self.freed, self._scheduler.is_full = True, False
        if error is not None:
            self.end(job, error)
        elif not job.ended:
            self._scheduler.remove(job)
            self._scheduler.add(job)

    # -- the end of a job ----------------------------------------------------------------------------------------------

    def stop(self, job: Job, count: int) -> None:
        """The consumer uses the first `count` tokens and wants no more."""
        length = len(job.prompt) + count - 1
        if not job.ended:
            self.end(job, length=length if count else None)
        elif job.sequence is not None and job.error is None:
            if job.keeps:
                job.sequence.rewind(min(length, len(job.sequence)))
            else:
                job.sequence.close()

    def end(self, job: Job, error: BaseException | None = None, length: int | None = None) -> None:
        """Ends a job. Its sequence is closed unless the owner wants to keep it.

        Args:
            length: length of the sequence without what nobody uses.
        """
        self.ended += 1  # before the job leaves: an idle loop has counted all requests
        self._scheduler.remove(job)
        self._scheduler.limited.discard(job)
        sequence = job.sequence
        try:
            if sequence is None and job.replaces is not None:
                job.replaces.close()
            if sequence is not None:
                if job.drafts:
                    job.drafts.close()
                if length is not None:
                    sequence.rewind(min(length, len(sequence)))
                if error is not None:
                    sequence.discard()
                elif job.keeps:
                    self.idle.add(sequence)
                else:
                    sequence.close()
        except BaseException as other:
            error = error or other
        if job.paused:
            job.paused = False
            self.paused.remove(job)
        self.freed, self._scheduler.is_full = True, False
        job.record.ended = self._clock()
        if job.record.trace is not None:
            record.ended(job, error)
        if not job.ended:
            job.error, job.ended = error, True
            job.notifier.notify()


class KeptSequence:
    """A sequence that stays between calls: the beginning of the next prompt, or what a session goes on from.

    Args:
        release: closes a sequence soon, in the loop's thread.
    """

    def __init__(self, release: Callable[[Any], object]) -> None:
        self._release = release
        self._kept: dict[str, tuple[Any, int]] = {}  # at most one; whoever takes it out owns it

    @property
    def length(self) -> int:
        """Number of tokens in it. Tokens that a grammar forced at the end of an answer are not computed."""
        sequence, longest = self._kept.get("session", ((), 0))
        return min(longest, len(sequence))  # the loop may not have dropped others yet

    @property
    def sequence(self) -> Any:
        """The sequence; None if there is none."""
        return self._kept.get("session", (None, 0))[0]

    def put(self, sequence: Any, length: int) -> None:
        """Keeps a sequence with so many tokens, in place of what was kept."""
        self._kept["session"] = sequence, length

    def take(self) -> Any:
        """The sequence, which belongs to the caller from now on; None if there is none."""
        return self._kept.pop("session", (None, 0))[0]

    def adopt(self, job: Job, count: int) -> None:
        """Keeps the sequence of a job, with the first `count` tokens of its answer but the last."""
        old = self._kept.pop("session", None)
        self._kept["session"] = job.sequence, len(job.prompt) + count - 1
        if old is not None:
            self._release(old[0])
