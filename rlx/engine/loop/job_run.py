"""A run of jobs: steps that take each other's tokens, which are given to the jobs as they come.

Runners stage, under `executor.py`. A run goes on from turn to turn, so that a device can be a few steps ahead of those
who look at tokens. It is ended before anything else is done with its sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rlx.engine.loop.job import Job
from rlx.engine.loop.room import Room
from rlx.engine.loop.scheduler import Scheduler
from rlx.engine.request import FinishReason
from rlx.engine.token_run import RunRow
from rlx.errors import PoolFullError

if TYPE_CHECKING:
    from rlx.engine.token_engine import StepEngine
    from rlx.engine.token_run import Run

Tell = Callable[[Job, FinishReason | None], bool]
"""Counts the newest token of a job, and ends the job if there is a reason; whether."""


class JobRun:
    """A run that has begun.

    Args:
        run: of the engine.
        jobs: of its rows.
        scheduler: is told how long steps take.
        room: ends jobs.
        tell: called for each token.

    Attributes:
        jobs: those that have not ended, in order.
        streams: whether somebody looks at each token as it comes.
        failed: whether the run has ended with an error, and its jobs with it.
    """

    def __init__(self, run: Run, jobs: Sequence[Job], scheduler: Scheduler, room: Room, tell: Tell) -> None:
        self._run, self._rows, self.jobs = run, [*jobs], [*jobs]
        self._scheduler, self._room, self._tell = scheduler, room, tell
        self.streams, self.failed = any(job.streaming for job in jobs), False

    @property
    def is_over(self) -> bool:
        """Whether it has to end: a row has ended and its job has not, or a smaller program is enough for those left."""
        alive = self._run.alive
        return self.failed or alive != len(self.jobs) or 2 * alive < len(self._rows)

    def take(self, ahead: int, seconds: float) -> int:
        """Gives the tokens of the next step, or of several, to their jobs; how many steps there were.

        Args:
            ahead, seconds: as of `Run.take`.
        """
        run, rows = self._run, self._rows
        try:
            steps = run.take(ahead, seconds)
        except BaseException as error:
            self.failed = True
            for job in self.jobs:
                self._room.end(job, error)
            return 0
        if (passed := run.seconds) is not None:
            self._scheduler.decode_seconds = passed
            self._scheduler.cost.observe(len(rows), passed)
        ended = False
        for step in steps:
            for number, token in step:
                ended = self._tell(rows[number], rows[number].add(token)) or ended
        if ended:
            self.jobs = [job for job in self.jobs if not job.ended]
        return len(steps)

    def end(self) -> list[Job]:
        """Ends it, with the tokens of the steps that were begun; returns jobs whose next token a step has to find."""
        while self._run.ahead and not self.failed:
            self.take(0, 0.0)
        if self.failed:
            return []
        self._run.end()
        return [job for job in (self._rows[number] for number in self._run.failed) if not job.ended]


def begin_run(engine: StepEngine, jobs: Sequence[Job], scheduler: Scheduler, room: Room, tell: Tell) -> JobRun | None:
    """Begins a run of some jobs; None if a step has to compute their next tokens, or they have ended with an error."""
    rows = [
        RunRow(job.sequence, job.tokens[-1], job.left, [*job.stop_ids], None if job.is_greedy else job.sampler)
        for job in jobs
    ]
    try:
        run = engine.run(rows, loads=not any(job.streaming for job in jobs))
    except PoolFullError:  # room for one step may be there
        return None
    except BaseException as error:
        for job in jobs:
            room.end(job, error)
        return None
    return None if run is None else JobRun(run, jobs, scheduler, room, tell)
