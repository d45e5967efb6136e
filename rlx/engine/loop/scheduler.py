"""The scheduler: which requests the next step computes, and how many rows of their prompts.

Runners stage, under the engine loop, which calls it in its own thread. It computes nothing and has no clock: the loop
tells it how long steps took.

Short prompts do not wait behind long ones. A prompt is due when it has waited `PATIENCE` times as long as the rest of
it takes, and among requests of one priority the one that is due first goes first. So a long prompt is only overtaken by
those that came soon after it: in the time that follows from its own length.

A turn of the loop is one decode step of all running requests, then one step of prompt rows. While somebody decodes, the
prompt step is bounded in time: as many rows as the measured rate allows within the stall target. Otherwise it takes
the largest chunk.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence
from math import inf

from rlx.engine.kv.prefix import Keys
from rlx.engine.loop.costs import PromptCost, StepCost
from rlx.engine.request.request import AHEAD, QUIET, Job, Task
from rlx.engine.threads import Notifier

PACKED = 64  # prompts with at most so many rows left share one step: longer ones fill the cores alone
LEAST = 16  # rows of a bounded prompt step at least: the weights are read for each step
FIRST = 32  # rows of the first bounded step, before any was measured
SHARED = 64  # a prompt that shares so many tokens with one that is being computed waits until these are computed
PATIENCE = 4.0  # a prompt may wait so many times as long as its own rows take before others are put off for it


class Scheduler:
    """Jobs and tasks in the order in which they are served.

    Args:
        slots: maximum number of jobs that have started and not ended.
        stall_seconds: how long a prompt step may take while others decode.
        largest: maximum number of prompt rows in a step.

    Attributes:
        waiting: jobs that have not started, by priority and then by arrival.
        prefilling: jobs whose prompts are not completely computed, in the order in which they started.
        limited: jobs with a deadline.
        is_full: whether the cache has no room for another job until one ends.
        running: jobs that decode, in the order in which they came so far.
        prompt_cost: measured cost of prompt rows, in steps that are bounded in time.
        cost: measured cost of decode steps.
    """

    def __init__(self, slots: int, stall_seconds: float, largest: int) -> None:
        self.slots, self.stall_seconds, self.largest = slots, stall_seconds, largest
        self.waiting: list[Job] = []
        self.prefilling: list[Job] = []
        self.running: list[Job] = []
        self.tasks: list[Task] = []
        self.limited: set[Job] = set()
        self.is_full = False
        self.prompt_cost, self.cost = PromptCost(stall_seconds / FIRST), StepCost()

    def add(self, job: Job) -> None:
        insort(self.waiting, job, key=lambda each: each.order)

    def jobs(self) -> list[Job]:
        """All jobs that have not ended."""
        return [*self.waiting, *self.prefilling, *self.running]

    def remove(self, job: Job) -> None:
        """Takes a job out, wherever it is."""
        for table in (self.waiting, self.prefilling, self.running):
            if job in table:
                table.remove(job)

    # -- who goes next ------------------------------------------------------------------------------------------------

    def admitted(self) -> Job | None:
        """The next job to start, moved to `prefilling`; None if there is no slot or nobody may start yet."""
        job = self._next()
        if job is not None:
            self.waiting.remove(job)
            self.prefilling.append(job)
        return job

    def _next(self) -> Job | None:
        if self.is_full or len(self.prefilling) + len(self.running) >= self.slots:
            return None
        ready = self._by_urgency(job for job in self.waiting if job.images is None)
        return next((job for job in ready if not any(_waits_for(job, other) for other in self.prefilling)), None)

    def _by_urgency(self, jobs: Iterable[Job]) -> list[Job]:
        """Jobs that wait for rows of their prompts, in the order in which they get them."""
        return sorted(jobs, key=lambda job: (-job.request.priority, self._due(job), job.number))

    def _due(self, job: Job) -> float:
        """When it will have waited long enough, by the loop's clock."""
        past = job.done
        return (job.record.submitted or 0.0) + PATIENCE * self.prompt_cost.seconds_of(len(job.prompt) - past, past)

    def others_want(self) -> bool:
        """Whether somebody besides the running jobs wants the next step."""
        prompts = any(not (job.paused or job.loading) for job in self.prefilling)
        return bool(self.tasks or prompts or (self.waiting and self._next()))

    def is_wanted_elsewhere(self, notifier: Notifier | None) -> bool:
        """Whether there is anything to do but for the consumers of this notifier, or a deadline to watch."""
        jobs = (job for table in (self.waiting, self.prefilling, self.running) for job in table)
        return bool(self.tasks or self.limited) or any(job.notifier is not notifier for job in jobs)

    def tokens_at_once(self, job: Job) -> int:
        """Maximum number of tokens in a native call. Who looks at each gets those of a short time together."""
        if not job.streaming:
            return job.left
        return max(1, min(job.consumed + AHEAD - len(job.tokens), job.left, int(QUIET / self.cost.of_one)))

    def budget(self, decodes: bool, past: int) -> int:
        """Maximum number of rows in a step that is no decode step.

        Args:
            decodes: whether somebody decodes, who would wait for this step.
            past: positions before the rows.
        """
        if not decodes:
            return self.largest
        return min(self.largest, max(LEAST, self.prompt_cost.rows_in(self.stall_seconds, past)))

    def task_rows(self, past: int) -> int:
        """How many rows after `past` positions a task may compute before its next `yield`."""
        return self.budget(any(not (job.backpressured or job.paused) for job in self.running), past)

    def observe_prompt(self, rows: int, positions: float, seconds: float) -> None:
        """Notes a prompt step. Small ones do not count: they say more about what a step costs than about its rows.

        Args:
            positions: how many positions come before the rows, the sum over all rows.
        """
        depth = positions / max(1, rows)
        if not self.prompt_cost.is_known or 2 * rows >= self.budget(True, int(depth)):
            self.prompt_cost.observe(rows, depth, seconds)

    def prompt_rows(self, decodes: bool) -> list[tuple[Job, int]]:
        """The next prompt step: jobs of `prefilling`, and how many rows of each.

        The first job in order always gets rows. Others join if they and the first are short.

        Args:
            decodes: whether somebody decodes, who would wait for this step.
        """
        chosen: list[tuple[Job, int]] = []
        room, left = self.largest, self.stall_seconds if decodes else inf
        for job in self._by_urgency(job for job in self.prefilling if not (job.paused or job.loading)):
            rest, past = len(job.prompt) - job.done, job.done
            if not chosen:
                rows = min(rest, self.budget(decodes, past))
                if rest > PACKED:
                    return [(job, rows)]
            elif rest <= min(PACKED, room) and self.prompt_cost.seconds_of(rest, past) <= left:
                rows = rest
            else:
                continue
            chosen.append((job, rows))
            room, left = room - rows, left - self.prompt_cost.seconds_of(rows, past)
        return chosen

    def started(self, job: Job) -> None:
        """The prompt of a job is computed: it decodes from now on."""
        self.prefilling.remove(job)
        self.running.append(job)

    def victim(self) -> Job | None:
        """The job to pause when there is no room for all; None if there is only one.

        One that waits for its consumer, else the one of the lowest priority that came last.
        """
        jobs = [job for job in (*self.prefilling, *self.running) if job.sequence is not None and not job.paused]
        return max(jobs, key=lambda job: (job.backpressured, job.order)) if len(jobs) > 1 else None

    def is_alone(self, job: Job) -> bool:
        """Whether no other job has room that it may give back."""
        return not any(other.sequence is not None and not other.paused for other in self.jobs() if other is not job)

    # -- drafts -------------------------------------------------------------------------------------------------------

    def draft_rows(self, acceptance_probs: Sequence[Sequence[float]]) -> list[int]:
        """How many drafts of each decoding job join the next step.

        A draft pays if it adds more tokens per time than the step has without it. A job alone takes all of its drafts:
        they were chosen for that.

        Args:
            acceptance_probs: for each job, that its first draft is used, its second, and so on; falling.
        """
        if len(acceptance_probs) == 1:
            return [len(acceptance_probs[0])]
        counts, rows, tokens = [0] * len(acceptance_probs), len(acceptance_probs), float(len(acceptance_probs))
        drafts = [(prob, -at, i) for i, each in enumerate(acceptance_probs) for at, prob in enumerate(each)]
        for prob, _, i in sorted(drafts, reverse=True):
            more = self.cost.of(rows + 1) - self.cost.of(rows)
            if prob * self.cost.of(rows) < tokens * more:
                break
            counts[i], rows, tokens = counts[i] + 1, rows + 1, tokens + prob
        return counts


def _waits_for(job: Job, other: Job) -> bool:
    """Whether a prompt shares much with one that is being computed, and is served sooner if it waits for that part."""
    if other.paused or _is_biased(job) or _is_biased(other):
        return False
    shared = shared_prefix(job.keys, other.keys)
    if shared < SHARED or shared < other.done:
        return False
    if other.sequence is not None and shared not in other.branches:
        other.branches.add(shared)
        other.sequence.mark(shared)  # states that cannot go back are copied there
    return True


def _is_biased(job: Job) -> bool:
    """Whether an attention bias lets its rows see later ones, so that no prefix of it can be shared."""
    return job.embeddings is not None and job.embeddings.bias is not None


def shared_prefix(a: Keys, b: Keys) -> int:
    """Length of the common prefix of two sequences."""
    most = min(len(a), len(b))
    differ = a[:most] != b[:most]
    return int(differ.argmax()) if differ.any() else most
