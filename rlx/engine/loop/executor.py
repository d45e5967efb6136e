"""The executor: computes jobs turn by turn. It has no thread and no lock; `loop.py` calls it.

Runners stage, between the engine loop and the engine. A turn is one step of all running jobs with rows of prompts,
bounded in time while somebody decodes. With drafts, a grammar or a task it is a decode step, then one of prompt rows or
of the task.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from rlx import env, tracing
from rlx.backends.memory import Values
from rlx.engine.loop import record
from rlx.engine.loop.job import AHEAD, QUIET, Job, Notifier, Task
from rlx.engine.loop.job_run import JobRun, begin_run
from rlx.engine.loop.room import Room
from rlx.engine.loop.scheduler import Scheduler
from rlx.engine.model_runner import Segment
from rlx.engine.request import FinishReason, check_finite
from rlx.errors import DeadlineError, PoolFullError
from rlx.sampling.choice import LIKELIEST, Choice
from rlx.tracing import UNTRACED, span

if TYPE_CHECKING:
    from rlx.engine.kv.disk_kv_cache import DiskKVCache
    from rlx.engine.speculation.drafts import Drafts
    from rlx.engine.token_engine import StepEngine

Message = Job | Task | tuple[Job | Task, ...]
"""New jobs and tasks, or news of a known job: its consumer has taken tokens, or wants no more."""

Rows = Values | list[Values]
"""Rows of logits, where they lie."""

BRIEF = 0.05  # seconds: callers compute turns themselves as long as turns take no longer


#: Seconds between two tokens of a request, by which gaps are counted.
GAP_BOUNDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


@dataclass
class LoopCounters:
    """Counters of the loop.

    Attributes:
        tokens, prompt_tokens: tokens that were chosen, and rows of prompts that were computed.
        reused_tokens: tokens of prompts that the cache knew.
        steps: calls of the engine.
        gaps, gap_seconds, longest_gap: number of times between two tokens of a request, their sum, and the longest.
        gap_counts: how many gaps there were up to each of `GAP_BOUNDS`, beyond the one before; the last: longer ones.
    """

    tokens: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    steps: int = 0
    gaps: int = 0
    gap_seconds: float = 0.0
    longest_gap: float = 0.0
    gap_counts: list[int] = field(default_factory=lambda: [0] * (len(GAP_BOUNDS) + 1))


class Executor:
    """Computes jobs and tasks.

    Args:
        engine: the sequences and their steps.
        scheduler: decides who goes next.
        clock: seconds.
        kept: states of prompts on disk; None for none.

    Attributes:
        engine: the sequences and their steps.
        inbox: what callers have left; any thread may append.
        room: what takes room in the cache.
        counters: what was computed.
        unheard: consumers that were not woken for the newest tokens yet.
        is_brief: whether the last turn took so little time that a caller may compute the next one itself.
    """

    def __init__(
        self, engine: StepEngine, scheduler: Scheduler, clock: Callable[[], float], kept: DiskKVCache | None = None
    ) -> None:
        self.engine, self.scheduler, self._clock = engine, scheduler, clock
        self.inbox: deque[Message] = deque()
        self.room = Room(scheduler, clock, kept)
        self.counters = LoopCounters()
        self._task_next = False  # whether a task comes before the next prompt: they take turns
        self._decoded = -inf  # when those who decode got their newest tokens
        self.is_brief = self._uncompiled = not env.jit()
        self.unheard: set[Notifier] = set()
        self._run: JobRun | None = None
        self._woken, self._must_wake = 0.0, False  # when consumers were woken, and whether this turn has to wake them

    # -- what comes in -------------------------------------------------------------------------------------------------

    def read(self) -> None:
        """Takes what callers have left."""
        while self.inbox:
            message = self.inbox.popleft()
            for each in message if isinstance(message, tuple) else (message,):
                if isinstance(each, Task):
                    self.scheduler.tasks.append(each)
                elif each.stopped_at is not None:
                    self.room.stop(each, each.stopped_at)
                elif each.entered:
                    each.backpressured = each.is_ahead
                    self.room.freed = self.room.freed or each.paused  # it may have been passed over
                else:
                    self._enter(each)

    def _enter(self, job: Job) -> None:
        """A new job waits for its turn from now on."""
        job.entered = True
        if job.record.submitted is None:
            job.record.submitted = self._clock()
        if job.request.timeout is not None:
            job.deadline = job.record.submitted + job.request.timeout
            self.scheduler.limited.add(job)
        if tracing.recording is not None:
            record.received(job, tracing.recording)
        self.scheduler.add(job)
        if job.images is not None:
            self.scheduler.tasks.append(Task(lambda: self._encode(job)))

    def _encode(self, job: Job) -> Generator[None, None, None]:
        """Encodes the images of a job, which begins afterwards, unless it ends before."""
        work = job.images.encoded()
        try:
            while not job.ended:
                next(work)
                yield
        except StopIteration as done:
            job.embeddings, job.images = done.value, None
        except Exception as error:
            self.room.end(job, error)
        finally:
            work.close()

    def end_all(self, error: BaseException) -> None:
        """Ends every job and task with an error."""
        self._run = None
        self.read()
        for job in self.scheduler.jobs():
            self.room.end(job, error)
        for task in self.scheduler.tasks:
            task.close(error)
        self.scheduler.tasks.clear()

    # -- a turn --------------------------------------------------------------------------------------------------------

    def turn(self) -> bool:
        """Computes one turn; returns whether there is more to compute."""
        start, scheduler, room = time.perf_counter(), self.scheduler, self.room
        with span("turn", "loop") if tracing.recording else UNTRACED:
            if self._run is not None and (self.inbox or (room.paused and room.may_resume()) or scheduler.others_want()):
                self._end_run()
            if self.inbox:
                self.read()
            if scheduler.limited:
                self._expire()
            if room.paused:
                room.resume()
            # Here and below no call, which would be on the way of every token; few jobs are backpressured.
            is_held = scheduler.is_held
            jobs = [job for job in scheduler.running if not (job.paused or (job.backpressured and is_held(job)))]
            if self._run is not None and jobs != self._run.jobs:
                self._end_run()
                jobs = [job for job in jobs if not (job.ended or job.backpressured)]
            prompts = False
            if jobs and (jobs[0].needs_steps or not self._go_on(jobs)):
                prompts = self._decode(jobs)
            if not prompts and (scheduler.tasks or scheduler.prefilling or scheduler.waiting):
                self._serve_others(bool(jobs))
            ready = (not (job.paused or (job.backpressured and is_held(job))) for job in scheduler.running)
            more = bool(self.inbox) or any(ready)
            if not more and (scheduler.tasks or scheduler.prefilling or scheduler.waiting):
                more = scheduler.others_want()
            more = more or bool(room.paused and room.may_resume())
            if self.unheard and (self._must_wake or not more or self._clock() - self._woken >= QUIET):
                self.wake_consumers()
        # Without compiled code callers always compute, because a debugger looks at them.
        self.is_brief = self._uncompiled or time.perf_counter() - start <= BRIEF
        return more

    def _serve_others(self, decodes: bool) -> None:
        """One step of prompt rows or of a task, if there is anything to do."""
        if self._run is not None:
            if not self.scheduler.others_want():
                return
            self._end_run()
        if self.unheard:
            self.wake_consumers()
        if self._task_next and self._step_task():
            return
        if prompts := self._next_prompts(decodes):
            self._compute_prompts(prompts, {}, decodes)
        else:
            self._step_task()

    def _expire(self) -> None:
        for job in [*self.scheduler.limited]:
            if job.deadline is not None and job.deadline <= self._clock():
                self._end_run()
                if job.ended:
                    continue
                what = f"the request was not finished in time: it has {len(job.tokens)} tokens of at most {job.limit}"
                hint = "give it more time, or ask for fewer tokens"
                self.room.end(job, DeadlineError(what, where="timeout", hint=hint))

    def wake_consumers(self) -> None:
        """Wakes the consumers of all new tokens."""
        self._woken, self._must_wake = self._clock(), False
        while self.unheard:
            self.unheard.pop().notify()

    # -- decode steps --------------------------------------------------------------------------------------------------

    def _go_on(self, jobs: list[Job]) -> bool:
        """Tokens of jobs that need nobody between two steps; False if a step has to compute the next ones."""
        if self._run is None:
            if self.inbox or not all(job.can_run for job in jobs) or self.scheduler.others_want():
                return False
            if any(job.drafts for job in jobs):
                return len(jobs) == 1 and jobs[0].drafts is not None and self._run_drafts(jobs[0], jobs[0].drafts)
            self._run = begin_run(self.engine, jobs, self.scheduler, self.room, self._tell)
            if self._run is None:
                return jobs[0].ended
        self._take(self._run)
        return True

    def _run_drafts(self, job: Job, drafts: Drafts) -> bool:
        """Several tokens of a job with drafts in one native call; whether there are any."""
        start = self._clock()
        try:
            found = drafts.run(self.engine, job.sequence, job.tokens, job.left, [*job.stop_ids])
        except PoolFullError:  # room for one step may be there
            return False
        except BaseException as error:
            self.room.end(job, error)
            return True
        if found:
            self.counters.steps += 1
            self._decoded = self._clock()
            self.scheduler.cost.observe(1, (self._decoded - start) / len(found))
        for token in found:
            if self._tell(job, job.add(token)):
                break
        return bool(found)

    def _take(self, run: JobRun) -> None:
        """Takes tokens of the run: of a step if somebody looks at each, else those of up to 50 ms."""
        end = self._clock() + (QUIET if run.streams else BRIEF)
        while True:
            self.counters.steps += run.take(self.scheduler.steps_ahead(run.jobs), end - self._clock())
            if run.is_over:
                if lacking := self._end_run():
                    self._decode(lacking)
                return
            if run.streams or self.inbox or self._clock() >= end:
                return

    def _end_run(self) -> list[Job]:
        """Ends the run, if there is one, before anything else is done; see `JobRun.end`."""
        if (run := self._run) is None:
            return []
        self._run, lacking = None, run.end()
        self._decoded = self._clock()
        return lacking

    def _decode(self, jobs: list[Job]) -> bool:
        """One token of each job, or several where drafts are right or a grammar has forced some.

        Returns:
            Whether the step had rows of prompts, too.
        """
        start, forced = self._clock(), [job for job in jobs if job.constraint is not None and job.has_forced]
        drafts = self._drafts(jobs) if any(job.drafts for job in jobs) else {}
        scheduler = self.scheduler
        is_task_next = self._task_next and scheduler.tasks
        if (scheduler.prefilling or scheduler.waiting) and not (forced or drafts or is_task_next):
            prompts = self._next_prompts(True, len(jobs), start - self._decoded)
            jobs = [job for job in jobs if not (job.paused or job.ended)]  # one that starts may take their room
            if prompts:
                own = {job: Segment(job.sequence, [job.tokens[-1]]) for job in jobs}
                self._compute_prompts(prompts, own)
                return True
        segments = {}
        for job in jobs:
            tokens = [job.tokens[-1], *drafts.get(job, ())]
            some = len(tokens) > 1
            segments[job] = Segment(job.sequence, tokens, "all" if some else "last", drafts=some)
        for job in forced:
            segments[job] = _forced_rows(job, self.scheduler.most_rows(len(jobs) > 1, len(job.sequence)) // len(forced))
        found = self._compute(segments)
        self._decoded = self._clock()
        scheduler.decode_seconds = seconds = self._decoded - start
        if found and not forced:
            rows = len(found) if not drafts else sum(len(segments[job].tokens) for job in found)
            scheduler.cost.observe(rows, seconds)
        self._accept(found, segments)
        return False

    def _drafts(self, jobs: list[Job]) -> dict[Job, list[int]]:
        """The drafts of each job that pay in a step of all of them."""
        most = self.engine.most_rows - 1
        probs = [
            job.drafts.acceptance_probs(job.tokens, min(job.left - 1, most))
            if job.drafts and not job.has_forced  # drafts begin after computed tokens
            else ()
            for job in jobs
        ]
        if not any(probs):
            return {}
        self.scheduler.cost.update()
        pairs = zip(jobs, self.scheduler.draft_rows(probs), strict=True)
        lengths = {job.drafts: count for job, count in pairs if job.drafts and count}
        found: dict[Drafts, list[int]] = {}
        for drafts in lengths:
            if drafts not in found:
                found |= drafts.propose_together(lengths)
        return {job: found[job.drafts] for job in jobs if job.drafts in found}

    def _accept(self, found: Mapping[Job, Values | None], segments: Mapping[Job, Segment]) -> None:
        """Chooses a token from the first row of each job, then from the next one as long as the draft was right."""
        logits = {
            job: rows if segments[job].logits == "all" else [rows] for job, rows in found.items() if rows is not None
        }
        at = dict.fromkeys(logits, 0)  # the row that the next token comes from
        with span("choose a token", "loop") if tracing.recording else UNTRACED:
            while at:
                rows = {job: logits[job][i] for job, i in at.items()}
                chosen = self._choose(rows)
                for job, row in rows.items():
                    i = at.pop(job)
                    if job not in chosen:  # it has failed
                        continue
                    if len(logits[job]) == 1 and not job.drafts and job.constraint is None:
                        self._tell(job, job.add(chosen[job], row))
                    elif self._verify(job, chosen[job], logits[job], i, segments[job]):
                        at[job] = i + 1

    def _choose(self, rows: Mapping[Job, Values]) -> dict[Job, int]:
        """A token from a row of logits of each job, all in one call of the device. Jobs that fail end."""
        tokens, choices = dict[Job, int](), dict[Job, Choice]()
        for job, row in rows.items():
            try:
                if job.constraint is not None and job.is_forced():
                    choices[job] = LIKELIEST  # says whether the logits are finite
                else:
                    banned = job.stop_ids if len(job.tokens) < job.request.min_tokens else ()
                    choices[job] = job.sampler.choice(len(row), banned)
            except BaseException as error:
                self.room.end(job, error, job.position)
        try:
            found = self.engine.choose([rows[job] for job in choices], [*choices.values()]) if choices else ()
        except BaseException as error:
            for job in choices:
                self.room.end(job, error, job.position)
            return tokens
        for (job, choice), chosen in zip(choices.items(), found, strict=True):
            try:
                if not chosen.is_finite:
                    check_finite(np.asarray(rows[job]), job.place)
                forced = job.constraint is not None and choice is LIKELIEST
                tokens[job] = job.take_forced() if forced else job.sampler.advance(chosen, rows[job])
            except BaseException as error:
                self.room.end(job, error, job.position)
        return tokens

    def _verify(self, job: Job, token: int, logits: Rows, at: int, segment: Segment) -> bool:
        """Adds a token chosen from one of several rows, or of a job with drafts or a grammar.

        Returns:
            Whether the next row gives a token, too, because it is that of a draft equal to this token. If not, the
            rows after it are dropped.
        """
        drafts, before = segment.tokens[1:] if segment.logits == "all" else (), job.position
        are_drafts, is_first = not job.forced, not job.tokens
        try:
            reason = job.add(token, logits[at])
        except BaseException as error:
            self.room.end(job, error, before)
            return False
        if reason is None and at < len(drafts) and drafts[at] == token:
            self._tell(job, None)
            return True
        if at + 1 < len(logits):
            job.rewind(job.position)
        if job.drafts and not is_first:
            job.drafts.verified(len(drafts), at) if are_drafts else job.drafts.verified(0, 0)
        is_over = self._tell(job, reason)
        if job.constraint is not None and not is_over and not job.with_logits:
            self._add_forced(job)
        return False

    def _add_forced(self, job: Job) -> None:
        """Adds the tokens that the grammar forces; they are computed in the next step."""
        try:
            while job.is_forced():
                if self._tell(job, job.add(job.take_forced())):
                    return
        except BaseException as error:
            self.room.end(job, error)

    def _tell(self, job: Job, reason: FinishReason | None) -> bool:
        """Counts the newest token of a job, and tells the consumer, or ends the job if there is a reason; whether.

        The job waits for its consumer if that is behind.
        """
        now, counters, record = self._clock(), self.counters, job.record
        counters.tokens += 1
        if record.last is None:
            record.answered = now
        else:
            seconds = now - record.last
            counters.gap_counts[bisect_left(GAP_BOUNDS, seconds)] += 1
            counters.gaps += 1
            counters.gap_seconds += seconds
            counters.longest_gap = max(counters.longest_gap, seconds)
        record.last = now
        if reason is not None:
            self.room.end(job)
            return True
        if not job.streaming:
            return False
        # To wake a thread costs as much as a step of a small model: all are woken together at the end of a turn, and if
        # turns are short, for several tokens.
        job.notifier.news = object()  # whoever drives and waits looks anyway
        self.unheard.add(job.notifier)
        behind = len(job.tokens) - job.consumed
        self._must_wake = self._must_wake or behind >= AHEAD // 2
        if behind >= AHEAD:
            job.backpressured = True  # before the check: whoever takes tokens after it sees that the job waits
            job.backpressured = job.is_ahead
            # It may be paused for another one.
            self.scheduler.is_full = self.scheduler.is_full and not job.backpressured
        return False

    # -- prompts and tasks ---------------------------------------------------------------------------------------------

    def _next_prompts(self, decodes: bool, beside: int = 0, waited: float = 0.0) -> dict[Job, Segment]:
        """The next rows of prompts, also of jobs that start now; arguments as of `Scheduler.prompt_rows`."""
        while self.scheduler.waiting and (job := self.scheduler.startable()) is not None:
            self._start(job)
        segments = {}
        for job, done, rows in self.scheduler.prompt_rows(decodes, beside, waited):
            end = min(job.sequence.call_end(done, rows), len(job.prompt))
            whole = end == len(job.prompt)
            segments[job] = Segment(job.sequence, job.prompt[done:end], "last" if whole else "none")
        return segments

    def _compute_prompts(self, prompts: dict[Job, Segment], others: dict[Job, Segment], decodes: bool = True) -> None:
        """Computes rows of prompts, and those of others that decode in the same step."""
        start, segments = self._clock(), {**others, **prompts}
        found, end = self._compute(segments), self._clock()
        if others or not decodes:
            self._decoded = end
        every = [(job, len(segments[job].tokens)) for job in found]
        positions = sum(count * (len(job.sequence) - count / 2) for job, count in every)
        self.scheduler.observe_prompt(sum(count for _, count in every), positions, end - start, decodes)
        counts = {job: count for job, count in every if job in prompts}
        self.counters.prompt_tokens += sum(counts.values())
        if tracing.recording is not None:
            record.computed(counts.items(), start)
        for job in counts:
            if found[job] is not None:  # its prompt is computed
                self.scheduler.prefilling.remove(job)
                self.scheduler.running.append(job)
        self._task_next = True
        self._accept(found, segments)

    def _start(self, job: Job) -> None:
        """Opens the sequence of a job, unless the beginning of its prompt is read from disk first."""
        self.scheduler.waiting.remove(job)
        self.scheduler.prefilling.append(job)
        try:
            if job.replaces is not None:
                job.replaces.close()
                job.replaces = None
            if self.room.kept is not None and self.room.begin_load(job):
                return
            salt, adapter = job.request.cache_salt, job.adapter
            job.sequence = sequence = self.engine.open_sequence(job.prompt, job.embeddings, salt=salt, adapter=adapter)
            if sequence.marks:
                for length in job.ends_of_turns:
                    sequence.mark(length)  # states that cannot go back are copied there
            job.drafts = job.drafts_of(sequence) if job.drafts_of else None
            job.record.started, job.record.cached = self._clock(), len(sequence.ids)
            if job.record.trace is not None:
                record.started(job)
            self.counters.reused_tokens += job.record.cached
        except PoolFullError as error:
            self.room.refuse(job, error)
        except BaseException as error:
            self.room.end(job, error)

    def _step_task(self) -> bool:
        """Runs the next task up to its next `yield`; returns whether there is one."""
        if not self.scheduler.tasks:
            return False
        task = self.scheduler.tasks.pop(0)
        self._task_next = False
        task.step()
        if not task.ended:
            self.scheduler.tasks.append(task)
        return True

    def _compute(self, segments: dict[Job, Segment]) -> dict[Job, Values | None]:
        """Computes the segments of jobs. Those for which the cache has no room are paused and missing in the result.

        An error that is not of one sequence ends the jobs of all of them.
        """
        left = segments
        while left:
            try:
                found = self.engine.compute([*left.values()])
            except PoolFullError as error:
                if not self.room.make():
                    self.room.end(next(iter(left)), error)
                left = {job: segment for job, segment in left.items() if not job.paused and not job.ended}
            except BaseException as error:
                for job in left:
                    self.room.end(job, error)
                return {}
            else:
                self.counters.steps += 1
                return dict(zip(left, found, strict=True))
        return {}


def _forced_rows(job: Job, most: int) -> Segment:
    """The next rows of a job that has more tokens than its sequence, or whose next tokens wait for their logits."""
    most = max(1, most)
    if job.with_logits:
        return Segment(job.sequence, [job.tokens[-1], *job.forced][: min(most, job.left)], "all")
    tokens = job.uncomputed
    return Segment(job.sequence, tokens[:most], "last" if len(tokens) <= most else "none")
