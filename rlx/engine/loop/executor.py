"""The job executor: computes jobs turn by turn. It has no thread and no lock; `driver.py` calls it.

Runners stage, between the engine loop and the engine. A turn is one decode step of all running jobs, then one step of
prompt rows or of a task, bounded in time while somebody decodes.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlx.engine.batch import Batch, Segment
from rlx.engine.kv.kept_prefixes import KeptPrefixes
from rlx.engine.loop import request_trace
from rlx.engine.loop.job import AHEAD, QUIET, Job, Logits, Task
from rlx.engine.loop.paused import PausedJobs
from rlx.engine.loop.prompt_loads import PromptLoads
from rlx.engine.loop.scheduler import Scheduler
from rlx.engine.request.checks import check_finite
from rlx.errors import DeadlineError, PoolFullError
from rlx.tracing import span


class StepEngine(Protocol):
    """The part of an engine that the job executor uses; `rlx.engine.engine.Engine` implements it.

    Attributes:
        most_rows: maximum number of rows in a segment.
    """

    most_rows: int

    def open_sequence(self, prompt: Sequence[int] = (), embeddings: Any = None, *, salt: str = "") -> Any:
        """A sequence that will hold `prompt`. It begins with the longest prefix that the cache knows for this salt."""
        ...

    def step(self, batch: Batch) -> Sequence[Logits | None]:
        """Computes the segments. `PoolFullError`, before anything is computed, if the cache has no room."""
        ...

    def greedy(self, sequence: Any, token: int, count: int, stops: Sequence[int] = (), loads: bool = True) -> list[int]:
        """Appends `token` and the likeliest tokens after it, natively, for at most 50 ms.

        Args:
            loads: whether its program may be loaded or compiled for this.

        Returns:
            1 to `count` tokens; the last one is not appended. `[]` if it cannot: a step then computes the next one.
        """
        ...


#: Seconds between two tokens of a job, by which gaps are counted.
GAP_BOUNDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


@dataclass
class LoopCounters:
    """What the loop has done.

    Attributes:
        requests: jobs that ended, in whatever way.
        tokens, prompt_tokens: tokens that were chosen, and rows of prompts that were computed.
        reused_tokens: tokens of prompts that the cache knew.
        steps: calls of the engine.
        gaps, gap_seconds, longest_gap: number of times between two tokens of a job, their sum, and the longest.
        gap_counts: how many gaps there were up to each of `GAP_BOUNDS`, beyond the one before; the last: longer ones.
    """

    requests: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    steps: int = 0
    gaps: int = 0
    gap_seconds: float = 0.0
    longest_gap: float = 0.0
    gap_counts: list[int] = field(default_factory=lambda: [0] * (len(GAP_BOUNDS) + 1))

    def count_gap(self, seconds: float) -> None:
        self.gap_counts[bisect_left(GAP_BOUNDS, seconds)] += 1
        self.gaps += 1
        self.gap_seconds += seconds
        self.longest_gap = max(self.longest_gap, seconds)


class JobExecutor:
    """Computes jobs and tasks.

    Args:
        engine: the sequences and their steps.
        scheduler: decides who goes next.
        clock: seconds.
        urgent: whether somebody waits whom it does not know yet.
        kept: states of prompts on disk; None for none.
    """

    def __init__(
        self,
        engine: StepEngine,
        scheduler: Scheduler,
        clock: Callable[[], float],
        urgent: Callable[[], bool],
        kept: KeptPrefixes | None = None,
    ) -> None:
        self._engine, self.scheduler, self._clock, self._urgent = engine, scheduler, clock, urgent
        self.counters = LoopCounters()
        self.idle: weakref.WeakSet[Any] = weakref.WeakSet()  # open sequences of which nobody computes anything
        self.paused = PausedJobs(scheduler, self.idle, self._end)
        self._task_next = False  # tasks and prompts take turns
        self._unheard: dict[Job, None] = {}  # their consumers were not woken for the newest tokens yet
        self._limited: set[Job] = set()  # jobs with a deadline

        def freed() -> None:
            self.paused.room, self.scheduler.is_full = True, False

        self._loads = PromptLoads(kept, scheduler, self._end, freed)

    # ---------------------------------------------------------------------------------------------- what comes in

    def receive(self, message: Job | Task | tuple[Job, ...]) -> None:
        """Takes new jobs or a task, or news of a known job: its consumer has taken tokens, or wants no more."""
        if isinstance(message, tuple):
            for job in message:
                self.receive(job)
        elif isinstance(message, Task):
            self.scheduler.tasks.append(message)
        elif message.stopped_at is not None:
            self._stopped(message, message.stopped_at)
        elif not message.entered:
            message.entered = True
            if message.record.submitted is None:
                message.record.submitted = self._clock()
            if message.seconds is not None:
                message.deadline = message.record.submitted + message.seconds
                self._limited.add(message)
            request_trace.received(message)
            self.scheduler.add(message)
            if message.images is not None:
                self.scheduler.tasks.append(Task(lambda: message.encode(self._end)))
        else:
            message.held = message.is_ahead
            self.paused.room = self.paused.room or message.paused  # it may have been passed over

    def end_all(self, error: BaseException) -> None:
        """Ends every job and task with an error."""
        for job in self.scheduler.jobs():
            self._end(job, error)
        for task in self.scheduler.tasks:
            task.close(error)
        self.scheduler.tasks.clear()

    # ---------------------------------------------------------------------------------------------- a turn

    def turn(self) -> bool:
        """Computes one turn; returns whether there is more to compute."""
        if self._limited:
            self._expire()
        self.paused.resume()
        decodes = self._decode()
        if self.scheduler.has_others:
            self.wake_consumers()
            self._task_next = not self._task_next
            if not (self._task_next and self._step_task()) and not self._prefill(decodes):
                self._step_task()
        self._hold()
        if bool(self.scheduler.decoding()) or self.scheduler.others_want() or self.paused.may_resume():
            return True
        self.wake_consumers()
        return False

    def seconds_left(self) -> float | None:
        """Time to the next deadline; None if there is none."""
        ends = [job.deadline for job in self._limited if job.deadline is not None]
        return max(0.0, min(ends) - self._clock()) if ends else None

    def task_rows(self, past: int) -> int:
        """How many rows after `past` positions a task may compute before its next `yield`."""
        return self.scheduler.budget(bool(self.scheduler.decoding()), past)

    def _expire(self) -> None:
        for job in [*self._limited]:
            if job.deadline is not None and job.deadline <= self._clock():
                what = f"the request was not finished in time: it has {len(job.tokens)} tokens of at most {job.limit}"
                self._end(job, DeadlineError(what, where="timeout", hint="give it more time, or ask for fewer tokens"))

    def _hold(self) -> None:
        """Jobs whose consumers are behind wait for them."""
        for job in self.scheduler.running:
            if job.is_ahead:
                job.held = True  # before the check: whoever takes tokens after it sees that the job waits
                job.held = job.is_ahead
                self.scheduler.is_full = self.scheduler.is_full and not job.held  # it may be paused for another one

    def wake_consumers(self) -> None:
        """Wakes the consumers of all new tokens."""
        for job in self._unheard:
            job.bell.ring()
        self._unheard.clear()

    # ---------------------------------------------------------------------------------------------- decode steps

    def _decode(self) -> bool:
        """One decode step of all running jobs; returns whether there are any."""
        jobs = self.scheduler.decoding()
        if not jobs:
            return False
        alone = len(jobs) == 1 and not (self.scheduler.others_want() or self._urgent())
        if not (alone and jobs[0].runs_natively and self._run_natively(jobs[0])):
            self._step(jobs)
        return True

    def _run_natively(self, job: Job) -> bool:
        """Several tokens in one native call; False if a step has to compute the next one."""
        start = self._clock()
        try:
            stops, count = [*job.stop_ids], self.scheduler.tokens_at_once(job)
            if count == 1 and job.watched:
                return False
            if job.drafts:
                found = job.drafts.run(self._engine, job.sequence, job.tokens, count, stops)
            else:
                found = self._engine.greedy(job.sequence, job.tokens[-1], count, stops, loads=not job.watched)
        except PoolFullError:  # room for one step may be there
            return False
        except BaseException as error:
            self._end(job, error)
            return True
        if found:
            self.counters.steps += 1
            self.scheduler.cost.observe(1, (self._clock() - start) / len(found))
        for token in found:
            if self._add(job, token, None):
                break
        return bool(found)

    def _step(self, jobs: list[Job]) -> None:
        """One token of each job, or several where drafts are right or a grammar has forced some."""
        segments, forced = {}, [job for job in jobs if job.has_forced]
        for job, drafts in zip(jobs, self._drafts(jobs), strict=True):
            tokens = [job.tokens[-1], *drafts]
            segments[job] = Segment(job.sequence, tokens, "all" if drafts else "last", drafts=bool(drafts))
        for job in forced:
            segments[job] = _forced_rows(job, self.scheduler.budget(len(jobs) > 1, len(job.sequence)) // len(forced))
        start = self._clock()
        found = self._compute(segments)
        if found and not forced:
            self.scheduler.cost.observe(sum(len(segments[job].tokens) for job in found), self._clock() - start)
        for job, logits in found.items():
            if logits is not None:
                self._accept(job, segments[job].tokens[1:] if segments[job].logits == "all" else (), _rows(logits))

    def _drafts(self, jobs: list[Job]) -> list[list[int]]:
        """The drafts of each job that pay in a step of all of them."""
        if not any(job.drafts for job in jobs):
            return [[]] * len(jobs)
        most = self._engine.most_rows - 1
        drafting = [job.drafts and not job.has_forced for job in jobs]  # drafts begin after computed tokens
        chances = [
            job.drafts.chances(job.tokens, min(job.left - 1, most)) if job.drafts and may else ()
            for job, may in zip(jobs, drafting, strict=True)
        ]
        if not any(chances):
            return [[] for _ in jobs]
        self.scheduler.cost.update()
        counts = self.scheduler.draft_rows(chances)
        pairs = zip(jobs, counts, strict=True)
        return [job.drafts.propose(count) if job.drafts and count else [] for job, count in pairs]

    def _accept(self, job: Job, drafts: Sequence[int], rows: Logits) -> None:
        """Chooses a token from each row as long as the draft before it was right; drops the rows after that."""
        start, is_first, are_drafts = len(job.sequence) - len(rows), not job.tokens, not job.forced
        for at, row in enumerate(rows):
            where = job.label or ("prefill" if is_first else f"position {start + at}")
            try:
                with span("choose a token", "loop"):
                    token = job.choose(check_finite(row, where))
            except BaseException as error:
                self._end(job, error, start + at)
                return
            is_right = at < len(drafts) and drafts[at] == token
            if not is_right or job.is_last(token):
                break
            self._add(job, token, row)
        if at + 1 < len(rows):
            job.rewind(start + at + 1)
        if job.drafts and not is_first:
            job.drafts.verified(len(drafts), at) if are_drafts else job.drafts.verified(0, 0)
        is_over = self._add(job, token, row)
        try:
            while not is_over and job.is_forced() and not job.with_logits:
                is_over = self._add(job, job.take_forced(), None)
        except BaseException as error:
            self._end(job, error)

    def _add(self, job: Job, token: int, row: Logits | None) -> bool:
        """Adds a token; returns whether it was the last one. The job is then over."""
        self.counters.tokens += 1
        now = self._clock()
        if job.last_time is None:
            job.record.answered = now
        else:
            self.counters.count_gap(now - job.last_time)
        job.last_time = now
        last = job.add(token, row)
        if last:
            self._end(job)
        elif job.watched:
            # To wake a thread costs as much as a step of a small model: if tokens come quickly, it gets some at a time.
            if now - job.rung >= QUIET or len(job.tokens) - job.taken >= AHEAD // 2:
                job.rung = now
                self._unheard.pop(job, None)
                job.bell.ring()
            else:
                self._unheard[job] = None
        return last

    # ---------------------------------------------------------------------------------------------- prompts and tasks

    def _prefill(self, decodes: bool) -> bool:
        """One step of prompt rows; returns whether there are any."""
        self._admit()
        chosen = self.scheduler.prompt_rows(decodes)
        if not chosen:
            return False
        segments = {}
        for job, rows in chosen:
            end = min(job.sequence.call_end(job.done, rows), len(job.prompt))
            whole = end == len(job.prompt)
            segments[job] = Segment(job.sequence, job.prompt[job.done : end], "last" if whole else "none")
        start = self._clock()
        found = self._compute(segments)
        counts = {job: len(segments[job].tokens) for job in found}
        rows = sum(counts.values())
        if decodes or not self.scheduler.prompt_cost.is_known:  # large chunks, which nobody waits for, are faster
            positions = sum(count * (len(job.sequence) - count / 2) for job, count in counts.items())
            self.scheduler.observe_prompt(rows, positions, self._clock() - start)
        self.counters.prompt_tokens += rows
        request_trace.computed(counts.items(), start)
        for job, logits in found.items():
            if logits is not None:
                self.scheduler.started(job)
                self._accept(job, (), _rows(logits))
        return True

    def _admit(self) -> None:
        """Starts jobs as long as there are slots and room."""
        while (job := self.scheduler.admitted()) is not None:
            try:
                if job.replaces is not None:
                    job.replaces.close()
                    job.replaces = None
                if self._loads.begin(job):
                    continue
                job.sequence = self._engine.open_sequence(job.prompt, job.embeddings, salt=job.salt)
                for length in job.ends_of_turns:
                    job.sequence.mark(length)  # states that cannot go back are copied there
                job.drafts = job.drafts_of(job.sequence) if job.drafts_of else None
                job.record.started, job.record.cached = self._clock(), len(job.sequence)
                request_trace.started(job)
                self.counters.reused_tokens += len(job.sequence)
            except PoolFullError as error:
                self._wait_for_room(job, error)
            except BaseException as error:
                self._end(job, error)

    def _wait_for_room(self, job: Job, error: PoolFullError) -> None:
        """A job that could not start: others make room for it, or it waits until they have ended."""
        if self.scheduler.is_alone(job) and not (self.idle or self._loads.jobs):
            self._end(job, error)
            return
        self.scheduler.prefilling.remove(job)
        self.scheduler.add(job)
        victim = self.scheduler.victim()
        if self.idle or self._loads.jobs or (victim is not None and victim.held):
            self.make_room()
        else:
            self.scheduler.is_full = True

    def _step_task(self) -> bool:
        """Runs the next task up to its next `yield`; returns whether there is one."""
        if not self.scheduler.tasks:
            return False
        task = self.scheduler.tasks.pop(0)
        task.step()
        if not task.ended:
            self.scheduler.tasks.append(task)
        return True

    # ---------------------------------------------------------------------------------------------- room

    def _compute(self, segments: dict[Job, Segment]) -> dict[Job, Logits | None]:
        """Computes the segments of jobs. Those for which the cache has no room are paused and missing in the result.

        An error that is not of one sequence ends the jobs of all of them.
        """
        left = dict(segments)
        while left:
            try:
                found = self._engine.step(Batch([*left.values()], copies=False))
            except PoolFullError as error:
                if not self.make_room():
                    self._end(next(iter(left)), error)
                left = {job: segment for job, segment in left.items() if not job.paused and not job.ended}
            except BaseException as error:
                for job in left:
                    self._end(job, error)
                return {}
            else:
                self.counters.steps += 1
                return dict(zip(left, found, strict=True))
        return {}

    def make_room(self) -> bool:
        """Ends the reading of a prompt, pauses an idle sequence, or else a job; False if there is nothing of these."""
        if self._loads.end_one():
            return True
        if self.idle:
            self.idle.pop().pause()
            return True
        job = self.scheduler.victim()
        if job is not None:
            self.paused.pause(job)
        return job is not None

    # ---------------------------------------------------------------------------------------------- the end of a job

    def _stopped(self, job: Job, count: int) -> None:
        """The consumer uses the first `count` tokens and wants no more."""
        length = len(job.prompt) + count - 1
        if not job.ended:
            self._end(job, length=length if count else None)
        elif job.sequence is not None and job.error is None:
            if job.keeps:
                job.sequence.rewind(min(length, len(job.sequence)))
            else:
                job.sequence.close()

    def _end(self, job: Job, error: BaseException | None = None, length: int | None = None) -> None:
        """Ends a job. Its sequence is closed unless the owner wants to keep it.

        Args:
            length: length of the sequence without what nobody uses.
        """
        self.scheduler.remove(job)
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
        self.paused.forget(job)
        self.paused.room, self.scheduler.is_full = True, False
        self.counters.requests += 1
        job.record.ended = self._clock()
        self._limited.discard(job)
        self._unheard.pop(job, None)
        request_trace.ended(job, error)
        job.end(error)


def _rows(logits: Logits | None) -> Logits:
    """Logits of a segment as [rows, vocab]."""
    assert logits is not None, "the segment asked for some"
    return logits[None] if logits.ndim == 1 else logits


def _forced_rows(job: Job, most: int) -> Segment:
    """The next rows of a job that has more tokens than its sequence, or whose next tokens wait for their logits."""
    most = max(1, most)
    if job.with_logits:
        return Segment(job.sequence, [job.tokens[-1], *job.forced][: min(most, job.left)], "all")
    tokens = job.uncomputed
    return Segment(job.sequence, tokens[:most], "last" if len(tokens) <= most else "none")
