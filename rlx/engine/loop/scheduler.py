"""The scheduler: which jobs the next step computes, and how many rows of their prompts.

Runners stage, under the engine loop, which calls it in its own thread. It computes nothing and has no clock: the loop
tells it how long steps took.

Short prompts do not wait behind long ones. A prompt is due when it has waited `PATIENCE` times as long as the rest of
it takes, and among jobs of one priority the one that is due first goes first. So a long prompt is only overtaken by
those that came soon after it: in the time that follows from its own length.

A turn of the loop is one decode step of all running jobs, then one step of prompt rows. While somebody decodes, the
prompt step is bounded in time: as many rows as the measured rate allows within the stall target. Otherwise it takes
the largest chunk.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf

from rlx.engine.kv.prefix import Keys
from rlx.engine.loop.bell import Bell
from rlx.engine.loop.job import AHEAD, QUIET, Job, Task
from rlx.engine.loop.prompt_cost import PromptCost

PACKED = 64  # prompts with at most so many rows left share one step: longer ones fill the cores alone
LEAST = 16  # rows of a bounded prompt step at least: the weights are read for each step
FIRST = 32  # rows of the first bounded step, before any was measured
SHARED = 64  # a prompt that shares so many tokens with one that is being computed waits until these are computed
USUAL_SHARE = 0.15  # of a step of one row: what a further row costs
FORGOTTEN = 256  # decode steps after which a measurement counts no more
RECENT = 0.3  # weight of the newest measurement in an average
PATIENCE = 4.0  # a prompt may wait so many times as long as its own rows take before others are put off for it


@dataclass
class _Measured:
    """The average time of steps of one size, and when the last of them was."""

    seconds: float
    at: int
    count: int = 1


@dataclass
class StepCost:
    """What a decode step costs by its number of rows: seconds = first + more * (rows - 1), from measured steps.

    Until steps of different sizes were measured, and again when that was long ago, a further row costs a share of the
    first.
    """

    share: float = USUAL_SHARE
    _steps: int = 0
    _sizes: dict[int, _Measured] = field(default_factory=dict)

    def observe(self, rows: int, seconds: float) -> None:
        self._steps += 1
        known = self._sizes.setdefault(rows, _Measured(seconds, self._steps, 0))
        # The first step of a size may load its program. A much slower one was disturbed, unless steps stay so slow.
        now = seconds if known.count < 2 else min(seconds, 4 * known.seconds)
        known.seconds = now if known.count < 2 else known.seconds + RECENT * (now - known.seconds)
        known.count, known.at = known.count + 1, self._steps

    @property
    def of_one(self) -> float:
        """Seconds of a step of one row; infinite before any was measured."""
        return self._sizes[1].seconds if 1 in self._sizes else inf

    def update(self) -> None:
        """Computes `share` from what was measured."""
        sizes = [size for size, each in self._sizes.items() if each.count > 1 and self._steps - each.at < FORGOTTEN]
        self.share = self._share(min(sizes), max(sizes)) if len(sizes) > 1 else USUAL_SHARE

    def _share(self, low: int, high: int) -> float:
        more = (self._sizes[high].seconds - self._sizes[low].seconds) / (high - low)
        first = self._sizes[low].seconds - more * (low - 1)
        return min(1.0, max(0.0, more / first)) if first > 0 else 1.0

    def of(self, rows: int) -> float:
        """The cost of a step, in steps of one row."""
        return 1 + self.share * (rows - 1)


class Scheduler:
    """Jobs and tasks in the order in which they are served.

    Args:
        slots: maximum number of jobs that have started and not ended.
        stall_seconds: how long a prompt step may take while others decode.
        largest: maximum number of prompt rows in a step.

    Attributes:
        waiting: jobs that have not started, by priority and then by arrival.
        prefilling: jobs whose prompts are not completely computed, in the order in which they started.
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

    def decoding(self) -> list[Job]:
        """The jobs of the next decode step: those that run, unless their consumers are behind."""
        return [job for job in self.running if not job.held and not job.paused]

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
        return sorted(jobs, key=lambda job: (-job.priority, self._due(job), job.number))

    def _due(self, job: Job) -> float:
        """When it will have waited long enough, by the loop's clock."""
        return (job.record.submitted or 0.0) + PATIENCE * self.prompt_cost.seconds_of(
            len(job.prompt) - job.done, job.done
        )

    @property
    def has_others(self) -> bool:
        """Whether there is anybody but running jobs."""
        return bool(self.tasks or self.prefilling or self.waiting)

    def others_want(self) -> bool:
        """Whether somebody besides the running jobs wants the next step."""
        prompts = any(not (job.paused or job.loading) for job in self.prefilling)
        return self.has_others and bool(self.tasks or prompts or self._next())

    def is_wanted_elsewhere(self, bell: Bell | None) -> bool:
        """Whether there is anything to do but for the consumers at this bell, or a deadline to watch."""
        return bool(self.tasks) or any(job.bell is not bell or job.seconds is not None for job in self.jobs())

    def tokens_at_once(self, job: Job) -> int:
        """Maximum number of tokens in a native call. Who looks at each gets those of a short time together."""
        if not job.watched:
            return job.left
        return max(1, min(job.taken + AHEAD - len(job.tokens), job.left, int(QUIET / self.cost.of_one)))

    def budget(self, decodes: bool, past: int) -> int:
        """Maximum number of rows in a step that is no decode step.

        Args:
            decodes: whether somebody decodes, who would wait for this step.
            past: positions before the rows.
        """
        if not decodes:
            return self.largest
        return min(self.largest, max(LEAST, self.prompt_cost.rows_in(self.stall_seconds, past)))

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
        return max(jobs, key=lambda job: (job.held, job.order)) if len(jobs) > 1 else None

    def is_alone(self, job: Job) -> bool:
        """Whether no other job has room that it may give back."""
        return not any(other.sequence is not None and not other.paused for other in self.jobs() if other is not job)

    # -- drafts -------------------------------------------------------------------------------------------------------

    def draft_rows(self, chances: Sequence[Sequence[float]]) -> list[int]:
        """How many drafts of each decoding job join the next step.

        A draft pays if it adds more tokens per time than the step has without it. A job alone takes all of its drafts:
        they were chosen for that.

        Args:
            chances: for each job, the probability that its first draft is used, its second, and so on; falling.
        """
        if len(chances) == 1:
            return [len(chances[0])]
        counts, rows, tokens = [0] * len(chances), len(chances), float(len(chances))
        drafts = [(chance, -at, i) for i, each in enumerate(chances) for at, chance in enumerate(each)]
        for chance, _, i in sorted(drafts, reverse=True):
            more = self.cost.of(rows + 1) - self.cost.of(rows)
            if chance * self.cost.of(rows) < tokens * more:
                break
            counts[i], rows, tokens = counts[i] + 1, rows + 1, tokens + chance
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
