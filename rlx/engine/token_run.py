"""Runs: steps of some sequences, each of which takes the tokens of the step before, with little or no work between.

Runners stage, beside `model_runner.py`. A run of one sequence has the programs of a single sequence, one of several
sequences a row for each. Where a device can, tokens stay there, and it has begun the next step before anybody looks at
them. A row ends by itself. The sequences hold the tokens of a run when their rows have ended, or the run is ended.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Ids
from dataclasses import dataclass, field, replace
from math import inf

import numpy as np

from rlx.backends.program import NO_TOKEN, Draws, Program, RowEnd, TokenRun, TokenSteps
from rlx.engine.kv.sequence import Sequence
from rlx.engine.model_runner import ModelRunner, Segment, feed
from rlx.engine.programs.programs import DECODE, GREEDY, LOGITS, ProgramSpec
from rlx.errors import NumericalError
from rlx.passes.options import MAX_SEGMENTS
from rlx.sampling.choice import BROKEN, LIKELIEST, Choice, Choose, Sampler

#: Maximum steps of a run, and seconds of a call of several: an interrupt has to wait until it returns.
STEPS, SECONDS = 32, 0.05


@dataclass(eq=False)
class RunRow:
    """A row of a run.

    Attributes:
        sequence: that it continues.
        token: the first one that is appended.
        count: maximum number of tokens that are found.
        stops: token ids that end the row.
        sampler: chooses the tokens, and does not look back; None for the likeliest ones.
        found: the tokens so far; all but the last one are appended.
    """

    sequence: Sequence
    token: int
    count: int
    stops: Ids[int] = ()
    sampler: Sampler | None = None
    found: list[int] = field(default_factory=list)


class Run:
    """A run that has begun.

    Args:
        rows: one for each sequence.
        order: which of them each row of the program is.
        steps: of the program.

    Attributes:
        failed: numbers of the rows that have ended without a token, whose next token a step has to find.
    """

    def __init__(self, rows: Ids[RunRow], order: Ids[int], steps: TokenSteps) -> None:
        self._rows, self._order, self._steps = rows, order, steps
        self.failed: list[int] = []

    @property
    def alive(self) -> int:
        """How many rows have not ended."""
        return len(self._steps.alive)

    @property
    def ahead(self) -> int:
        """How many steps a device has begun whose tokens nobody has taken."""
        return self._steps.ahead

    @property
    def seconds(self) -> float | None:
        """How long a step of the last `take` took; None if it was over before anybody waited for it."""
        return self._steps.seconds

    def take(self, ahead: int, seconds: float = inf) -> list[list[tuple[int, int]]]:
        """The tokens of the next step, or of several that were computed in one call: numbers of rows, and their tokens.

        Args:
            ahead, seconds: as of `TokenSteps.take`.
        """
        before, found = self._steps.alive, []
        for tokens in self._steps.take(ahead, seconds):
            step = [(self._order[at], tokens[at]) for at in before if tokens[at] != NO_TOKEN]
            for number, token in step:
                self._rows[number].found.append(token)
            found.append(step)
        if len(self._steps.alive) < len(before):
            for at in sorted({*before} - {*self._steps.alive}):
                self._end(self._order[at], tokens[at] == NO_TOKEN)
        return found

    def _end(self, number: int, fails: bool = False) -> None:
        """Appends the tokens of a row to its sequence.

        Args:
            fails: whether the last token was computed, and gave none: the sequence then ends before it.
        """
        row = self._rows[number]
        row.sequence.end([row.token, *row.found][: len(row.found) + fails])
        if row.sampler is not None:
            row.sampler.take(row.found)
        if fails:
            row.sequence.rewind(row.sequence.done - 1)
            self.failed.append(number)

    def end(self) -> None:
        """Ends all rows, after the steps that have begun."""
        while self.ahead:
            self.take(0)
        for at in self._steps.alive:
            self._end(self._order[at])
        self._steps.alive = []


def begin_run(runner: ModelRunner, rows: Ids[RunRow], choose: Choose, *, loads: bool = True) -> Run | None:
    """A run of these rows; None if only steps can compute them.

    Args:
        choose: of the device.
        loads: whether the program for the likeliest tokens of one sequence may be loaded or compiled for this.

    Raises:
        PromptError: a context is full, or a token is invalid.
        PoolFullError: there is no room.
    """
    steps = min(STEPS, max(row.count for row in rows))
    if (spec := _spec(runner, rows, steps, loads)) is None:
        return None
    _reserve(runner, rows, steps)
    order = sorted(range(len(rows)), key=lambda i: rows[i].sequence.pages.tobytes())  # as that of other steps
    some, program = [rows[i] for i in order], runner.programs[spec]
    counts = [_begun(runner, row, steps) for row in some]
    env = _fed(runner, program, some)
    draws = None if spec.returns == "tokens" else _draws(program, some, choose, max(counts), env)
    ends = [RowEnd(count, row.stops) for count, row in zip(counts, some, strict=True)]
    return Run(rows, order, program.steps(TokenRun(ends, runner.limits.ids, env, draws=draws)))


def _spec(runner: ModelRunner, rows: Ids[RunRow], steps: int, loads: bool) -> ProgramSpec | None:
    """The spec of the program of a run; None if only steps can compute it."""
    sequences = [row.sequence for row in rows]
    hears = runner.listener is not None and runner.listener.sequence in sequences
    if hears or runner.embedded(sequences, [steps] * len(rows)):
        return None
    for row in rows:  # a step that the host ends would be computed again, from the last checkpoint on
        opts = None if row.sampler is None else row.sampler.opts
        if row.sequence.recurrent and opts is not None and (opts.top_k or opts.top_p < 1):
            return None
    adapters = runner.adapters if any(each.adapter for each in sequences) else None
    if len(rows) == 1:
        quick = rows[0].sampler is None and (loads or GREEDY in runner.programs.tables["decode"].programs)
        spec = GREEDY if quick else DECODE
        return replace(spec, adapters=adapters) if adapters else spec
    if len(rows) > min(MAX_SEGMENTS, runner.limits.rows):
        return None
    spec = runner.bucketing.segments(len(rows), None, adapters)
    return None if runner.is_pending(spec) else spec


def _reserve(runner: ModelRunner, rows: Ids[RunRow], steps: int) -> None:
    """Takes the room for all steps of all rows, or for none, and brings the states up to date."""
    plans = []
    for row in rows:
        sequence = row.sequence
        runner.prepare(sequence, [row.token])
        lacking = len(sequence.ids) - sequence.done
        plans.append((sequence.memory, sequence.memory.plan(sequence.done, lacking + min(steps, row.count), False)))
    if lacking_plans := [(memory, plan) for memory, plan in plans if plan is not None]:
        runner.pool.reserve(lacking_plans)
    for row in rows:
        runner.catch_up(row.sequence)


def _begun(runner: ModelRunner, row: RunRow, steps: int) -> int:
    """Begins the steps of a row; returns how many it may have."""
    count = min(steps, row.count, runner.limits.max_seq - row.sequence.done)
    row.sequence.begin(count)
    return count


def _fed(runner: ModelRunner, program: Program, rows: Ids[RunRow]) -> dict[str, int]:
    """Sets the inputs of the first step; the values of its symbols."""
    if len(rows) > 1:
        return runner.fed(program, [Segment(row.sequence, [row.token]) for row in rows])
    (row,) = rows
    past = row.sequence.done
    feed(program.inputs, [row.token], past, row.sequence.embeddings)
    if "adapter" in program.inputs:
        program.inputs["adapter"][:1] = row.sequence.adapter
    return {"SEQ": 1, "PAST_SEQ": past, **runner.bind_slots(program, row.sequence)}


def _draws(program: Program, rows: Ids[RunRow], choose: Choose, steps: int, env: dict[str, int]) -> Draws:
    """How the tokens of rows are chosen."""
    vocab, numbers = program.values(LOGITS, **env).shape[-1], np.zeros((steps, len(rows)))
    choices: list[Choice] = []
    for at, row in enumerate(rows):
        if row.sampler is None:
            choices.append(LIKELIEST)
        else:
            choice, numbers[:, at] = row.sampler.ahead(vocab, steps)
            choices.append(choice)
    return Draws(choose, choices, numbers, LOGITS)


def all_tokens(run: Run, row: RunRow) -> list[int]:
    """The tokens of a run of one row, for at most 50 ms; at least one.

    Raises:
        NumericalError: a logit is NaN or infinite; the sequence ends before the token that it followed.
    """
    end = time.monotonic() + SECONDS
    while run.alive and (not row.found or time.monotonic() < end):
        run.take(STEPS, end - time.monotonic())
    run.end()
    if run.failed and not row.found:
        raise not_finite(row.sequence)
    return row.found


def not_finite(sequence: Sequence) -> NumericalError:
    """The error where no token follows a sequence."""
    return NumericalError("a logit is NaN or infinite", where=f"position {len(sequence)}", hint=BROKEN)
