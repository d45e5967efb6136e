"""The scheduler: which requests the next step computes, and how many rows of their prompts.

Runners stage, under the engine loop, which calls it in its own thread. It computes nothing and has no clock: the loop
tells it how long steps took.

Short prompts do not wait behind long ones. A prompt is due when it has waited `PATIENCE` times as long as the rest of
it takes, and among requests of one priority the one that is due first goes first. So a long prompt is only overtaken by
those that came soon after it: in the time that follows from its own length.

A consumer may ask for many answers at once. The next free slot goes to the consumer that has the fewest, of those with
the highest priority, so that others do not wait for all of the answers.

A turn of the loop is one step of all running requests and of prompt rows, or a step of each (`executor.py`). While
somebody decodes, the turn is bounded in time: it has at most as many rows of prompts as the measured rate allows in
what a decode step leaves of the stall target, and a prompt has equal chunks. Otherwise it gets the largest chunk.

The cost of steps: products of a row take the same time everywhere; attention reads all positions before it. So a row
after 8,000 positions may take five times as long as the first one.

    seconds of a row = level * (first + more * depth)

`depth` is the number of positions before a row. The line, `first` and `more`, is a least-squares fit over steps; older
ones count less and less. The level follows the newest steps: how busy the machine is changes from one moment to the
next, the shape of the line does not. It rises at once, because another program that takes a CPU stays for a while, and
falls slowly.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, sqrt
from operator import attrgetter

from rlx.engine.kv.prefix import Keys
from rlx.engine.loop.job import AHEAD, Job, Notifier, Task
from rlx.engine.token_run import STEPS

AMORTIZED = 8  # rows of several prompts in a step take at most so many times as long as a step of one row
AHEAD_SECONDS = 0.005  # how long steps take that a run has begun, before anybody looks at their tokens
LEAST = 16  # rows of a bounded prompt step at least: the weights are read for each step
FIRST = 32  # rows of the first bounded step, before any was measured
SHARED = 64  # a prompt that shares so many tokens with one that is being computed waits until these are computed
PATIENCE = 4.0  # a prompt may wait so many times as long as its own rows take before others are put off for it

RECENT = 0.3  # weight of the newest step in the level and in averages
DISTURBED = 4.0  # what takes longer than so many times as expected did something else, too: it loaded a program
FADE = 0.97  # weight of a step in the line, beside that of the step after it
SPREAD = 256.0  # positions: steps whose depths differ by less say little about what depth costs
LEAST_FIRST = 0.1  # `first` is at least this part of the average cost
USUAL_SHARE = 0.15  # of a step of one row: what a further row costs
FORGOTTEN = 256  # decode steps after which a measurement counts no more


@dataclass
class PromptCost:
    """How long prompt rows take.

    Args:
        first: seconds of a row, until anything was measured.

    Attributes:
        is_known: whether anything was measured.
    """

    first: float
    is_known: bool = False
    _more: float = 0.0
    _level: float = 1.0
    _sums: list[float] = field(default_factory=lambda: [0.0] * 5)

    @property
    def rows_per_second(self) -> float:
        """The rate at the beginning of a prompt; 0 before anything was measured."""
        return 1 / (self._level * self.first) if self.is_known else 0.0

    def observe(self, rows: int, depth: float, seconds: float) -> None:
        """Notes a step.

        Args:
            depth: how many positions come before a row of it, on average.
        """
        if rows <= 0 or seconds <= 0:
            return
        each = seconds / rows
        if self.is_known:
            each = min(each, DISTURBED * self.seconds_at(1, depth))
        new = (1.0, depth, each, depth * depth, depth * each)
        self._sums = [FADE * old + more for old, more in zip(self._sums, new, strict=True)]
        count, *sums = self._sums
        x, y, xx, xy = (each / count for each in sums)
        more = (xy - x * y) / (xx - x * x + SPREAD * SPREAD)
        self._more = max(0.0, min(more, (1 - LEAST_FIRST) * y / x if x else 0.0))
        self.first = y - self._more * x
        level = each / (self.first + self._more * depth)
        slower = not self.is_known or level > self._level
        self._level, self.is_known = level if slower else self._level + RECENT * (level - self._level), True

    def seconds_of(self, rows: int, past: int) -> float:
        """How long so many rows after `past` positions take."""
        return self.seconds_at(rows, past + rows / 2)

    def seconds_at(self, rows: int, depth: float) -> float:
        """How long so many rows take that come after `depth` positions on average."""
        return rows * self._level * (self.first + self._more * depth)

    def rows_in(self, seconds: float, past: int) -> int:
        """How many rows after `past` positions take so long."""
        if seconds <= 0:
            return 0
        one, growth = self._level * (self.first + self._more * past), self._level * self._more
        return int(2 * seconds / (one + sqrt(one * one + 2 * growth * seconds)))


@dataclass
class StepCost:
    """The cost of a decode step by its number of rows: seconds = first + more * (rows - 1), from measured steps.

    Until steps of different sizes were measured, and again when that was long ago, a further row costs a share of the
    first.

    Attributes:
        share: the cost of a further row, as a share of a step of one.
        of_one: seconds of a step of one row; infinite before any was measured.
    """

    share: float = USUAL_SHARE
    of_one: float = inf
    _steps: int = 0
    _sizes: dict[int, tuple[float, int, int]] = field(default_factory=dict)  # rows: seconds, how often, newest step

    def observe(self, rows: int, seconds: float) -> None:
        self._steps += 1
        known, count, _ = self._sizes.get(rows, (seconds, 0, 0))
        # The first step of a size may load its program. A much slower one was disturbed, unless steps stay so slow.
        now = seconds if count < 2 else known + RECENT * (min(seconds, DISTURBED * known) - known)
        self._sizes[rows] = now, count + 1, self._steps
        if rows == 1:
            self.of_one = now

    def update(self) -> None:
        """Computes `share` from what was measured."""
        sizes = [n for n, (_, count, at) in self._sizes.items() if count > 1 and self._steps - at < FORGOTTEN]
        self.share = self._share(min(sizes), max(sizes)) if len(sizes) > 1 else USUAL_SHARE

    def _share(self, low: int, high: int) -> float:
        more = (self._sizes[high][0] - self._sizes[low][0]) / (high - low)
        first = self._sizes[low][0] - more * (low - 1)
        return min(1.0, max(0.0, more / first)) if first > 0 else 1.0

    def of(self, rows: int) -> float:
        """The cost of a step, in steps of one row."""
        return 1 + self.share * (rows - 1)


class Scheduler:
    """Jobs and tasks in the order in which they are served.

    Args:
        slots: maximum number of jobs that have started and not ended.
        stall_seconds: how long a turn may take while others decode.
        largest: maximum number of prompt rows in a step.
        shared: largest row count of a prompt that may share a step with other prompts.

    Attributes:
        waiting: jobs that have not started, by priority and then by arrival.
        prefilling: jobs whose prompts are not completely computed, in the order in which they started.
        limited: jobs with a deadline.
        is_full: whether the cache has no room for another job until one ends.
        running: jobs that decode, in the order in which they came so far.
        prompt_cost: measured cost of prompt rows, in steps that are bounded in time.
        cost: measured cost of decode steps.
        decode_seconds: how long the newest decode step took.
    """

    def __init__(self, slots: int, stall_seconds: float, largest: int, shared: int) -> None:
        self.slots, self.stall_seconds, self.largest, self.shared = slots, stall_seconds, largest, shared
        self.waiting: list[Job] = []
        self.prefilling: list[Job] = []
        self.running: list[Job] = []
        self.tasks: list[Task] = []
        self.limited: set[Job] = set()
        self.is_full = False
        self.prompt_cost, self.cost, self.decode_seconds = PromptCost(stall_seconds / FIRST), StepCost(), 0.0

    def add(self, job: Job) -> None:
        insort(self.waiting, job, key=attrgetter("order"))

    def jobs(self) -> list[Job]:
        """All jobs that have not ended."""
        return [*self.waiting, *self.prefilling, *self.running]

    def remove(self, job: Job) -> None:
        """Takes a job out, wherever it is."""
        for table in (self.waiting, self.prefilling, self.running):
            if job in table:
                table.remove(job)

    # -- who goes next ------------------------------------------------------------------------------------------------

    @property
    def has_slot(self) -> bool:
        """Whether another job may start."""
        return len(self.prefilling) + len(self.running) < self.slots

    def is_held(self, job: Job) -> bool:
        """Whether a job computes nothing until its consumer takes tokens.

        It goes on while another waits for a slot: one thread may be the consumer of both, and wait for the other one.
        """
        return job.backpressured and (self.has_slot or not self.waiting)

    def startable(self) -> Job | None:
        """The next job of `waiting` to start; None if there is no slot or nobody may start yet."""
        if self.is_full or not self.has_slot:
            return None
        ready = [job for job in self.waiting if job.images is None]
        if len(ready) > 1:
            started = Counter(job.notifier for job in (*self.prefilling, *self.running))
            ready.sort(key=lambda job: (-job.request.priority, started[job.notifier], self._urgency(job)))
        return next((job for job in ready if not any(_waits_for(job, other) for other in self.prefilling)), None)

    def _urgency(self, job: Job) -> tuple[int, float, int]:
        """Sorts jobs that wait for rows of their prompts: by priority, then by when they have waited long enough."""
        past = job.done
        patience = PATIENCE * self.prompt_cost.seconds_of(len(job.prompt) - past, past)
        return -job.request.priority, (job.record.submitted or 0.0) + patience, job.number

    def others_want(self) -> bool:
        """Whether somebody besides the running jobs wants the next step."""
        prompts = any(not (job.paused or job.loading) for job in self.prefilling)
        return bool(self.tasks or prompts or (self.waiting and self.startable()))

    def is_wanted_elsewhere(self, notifier: Notifier | None) -> bool:
        """Whether there is anything to do but for the consumers of this notifier, or a deadline to watch."""
        jobs = (job for table in (self.waiting, self.prefilling, self.running) for job in table)
        return bool(self.tasks or self.limited) or any(job.notifier is not notifier for job in jobs)

    def seconds_left(self, now: float) -> float | None:
        """Time to the next deadline; None if there is none."""
        ends = [job.deadline for job in self.limited if job.deadline is not None]
        return max(0.0, min(ends) - now) if ends else None

    def steps_ahead(self, jobs: Sequence[Job]) -> int:
        """How many steps of a run may have begun, the one included whose tokens are waited for.

        A device computes them while the host is busy. Who comes meanwhile waits for them, so they take little time.
        """
        most = max(2, min(STEPS, int(AHEAD_SECONDS / self.decode_seconds))) if self.decode_seconds else 2
        for job in jobs:
            if job.streaming:
                most = min(most, job.consumed + AHEAD - len(job.tokens))
        return max(1, most)

    def most_rows(self, decodes: bool, past: int, waited: float = 0.0) -> int:
        """Maximum number of rows in a step that is no decode step.

        Args:
            decodes: whether somebody decodes, who would wait for this step.
            past: positions before the rows.
            waited: how long these have waited already.
        """
        if not decodes:
            return self.largest
        return min(self.largest, max(LEAST, self.prompt_cost.rows_in(self._prompt_seconds - waited, past)))

    @property
    def _prompt_seconds(self) -> float:
        """How long a prompt step may take while others decode: what the decode step has left, but at least half."""
        return self.stall_seconds - min(self.decode_seconds, self.stall_seconds / 2)

    def task_rows(self, past: int) -> int:
        """How many rows after `past` positions a task may compute before its next `yield`."""
        return self.most_rows(any(not (job.paused or self.is_held(job)) for job in self.running), past)

    def observe_prompt(self, rows: int, positions: float, seconds: float, decodes: bool) -> None:
        """Notes a prompt step.

        Small ones do not count: they say more about what a step costs than about its rows. Large chunks, which nobody
        waits for, are usually faster; those that were slower count.

        Args:
            positions: how many positions come before the rows, the sum over all rows.
            decodes: whether somebody decoded, who waited for this step.
        """
        depth, cost = positions / max(1, rows), self.prompt_cost
        is_large = 2 * rows >= self.most_rows(True, int(depth))
        if not cost.is_known or (is_large and (decodes or seconds > cost.seconds_at(rows, depth))):
            cost.observe(rows, depth, seconds)

    def prompt_rows(self, decodes: bool, beside: int = 0, waited: float = 0.0) -> list[tuple[Job, int, int]]:
        """The next prompt step: jobs of `prefilling`, how many rows of each are computed, and how many are next.

        The first job in order always gets rows. Others join if neither they nor the first fill the device.

        Args:
            decodes: whether somebody decodes, who would wait for this step.
            beside: rows of the same step that decode.
            waited: how long these have waited for the step. After half of what they may wait none join them.
        """
        chosen: list[tuple[Job, int, int]] = []
        most = self.largest - beside
        if beside and (most < LEAST or 2 * waited > self._prompt_seconds):
            return chosen
        room, left = self._packed_rows() - beside, self._prompt_seconds - waited if decodes else inf
        jobs = [job for job in self.prefilling if not (job.paused or job.loading)]
        if len(jobs) > 1:
            jobs.sort(key=self._urgency)
        for job in jobs:
            past = job.done
            rest = len(job.prompt) - past
            if not chosen:
                rows = min(rest, most, self.most_rows(decodes, past, waited))
                if decodes:  # no more steps, and the longest is shorter
                    rows = -(-rest // -(-rest // rows))
                if rest > self.shared or len(jobs) == 1:
                    return [(job, past, rows)]
            elif rest <= min(self.shared, room) and self.prompt_cost.seconds_of(rest, past) <= left:
                rows = rest
            else:
                continue
            chosen.append((job, past, rows))
            room, left = room - rows, left - self.prompt_cost.seconds_of(rows, past)
        return chosen

    def _packed_rows(self) -> int:
        """Maximum number of rows of several prompts in a step: where the weights are read in a small part of its time,
        more rows gain nothing, and each prompt waits for all of them.
        """
        if not self.prompt_cost.is_known or self.cost.of_one == inf:
            return self.largest
        rows = int(AMORTIZED * self.cost.of_one * self.prompt_cost.rows_per_second)
        return min(self.largest, max(self.shared, rows))

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
