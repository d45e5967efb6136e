"""Prompts whose beginnings are read from disk before their jobs start.

Runners stage, under `executor.py`. Reading is a task: other jobs compute between its pieces. Prompts with the same
beginning wait for the first one, as if it were computed.
"""

from __future__ import annotations

from collections.abc import Callable

from rlx.engine.kv.kept_prefixes import KeptPrefixes
from rlx.engine.loop.job import Job, Task
from rlx.engine.loop.scheduler import Scheduler


class PromptLoads:
    """Jobs whose prompts are being read.

    Args:
        kept: what is on disk; None for nothing.
        scheduler: the jobs and tasks.
        fail: ends a job with an error.
        freed: called when reading has given back the room that it took.

    Attributes:
        jobs: with their tasks.
    """

    def __init__(
        self,
        kept: KeptPrefixes | None,
        scheduler: Scheduler,
        fail: Callable[[Job, BaseException], object],
        freed: Callable[[], object],
    ) -> None:
        self._kept, self._scheduler, self._fail, self._freed = kept, scheduler, fail, freed
        self.jobs: dict[Job, Task] = {}

    def begin(self, job: Job) -> bool:
        """Has the beginning of a job's prompt read, if it is on disk; the job is admitted again afterwards."""
        if self._kept is None or job.looked_up:
            return False
        job.looked_up, self._kept.rate = True, self._scheduler.prompt_cost.rows_per_second
        work = self._kept.reading(job.prompt, job.embeddings, job.salt)
        if work is None:
            return False
        job.loading = True
        self.jobs[job] = Task(lambda: job.load(work, self._ended))
        self._scheduler.tasks.append(self.jobs[job])
        return True

    def end_one(self) -> bool:
        """Ends the reading that began last, which gives its room back; False if there is none."""
        if not self.jobs:
            return False
        job, task = self.jobs.popitem()
        self._scheduler.tasks.remove(task)
        task.close()
        if job.loading:  # it had not begun
            self._ended(job, None)
        return True

    def _ended(self, job: Job, error: BaseException | None) -> None:
        job.loading = False
        self.jobs.pop(job, None)
        self._freed()
        if error is not None:
            self._fail(job, error)
        elif not job.ended:
            self._scheduler.remove(job)
            self._scheduler.add(job)
