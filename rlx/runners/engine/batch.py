"""Batched generation: each step computes one token of every running sequence.

Runners stage, over the engine. A step of many rows reads the weights once for all of them, so tokens per second grow
with the rows as long as memory bandwidth is the limit. Prompts are computed one after the other; when a sequence ends,
the next prompt takes its place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as Ids
from contextlib import AbstractContextManager
from typing import Protocol, Self

import numpy as np

from rlx.errors import ArgumentError
from rlx.profile import CompileProfile
from rlx.runners.engine.bucketing import Bucketing
from rlx.runners.engine.program_spec import GREEDY, ProgramSpec
from rlx.runners.engine.stepper import Stepper
from rlx.runners.generation.checks import check_finite
from rlx.runners.generation.requests import Generation, Logits, Request, Step, step_of
from rlx.runtime.batch import Batch, Segment
from rlx.runtime.pool import CachePool
from rlx.runtime.sequence import Sequence

SLOTS = 32  # maximum number of sequences at once: beyond it arithmetic is the limit, and batching gains nothing


def batch_programs(sequences: int, bucketing: Bucketing) -> list[ProgramSpec]:
    """Specs of the programs that batches of up to `sequences` sequences need besides the single-sequence programs.

    Raises:
        ArgumentError: the number is below 1.
    """
    if sequences < 1:
        raise ArgumentError(f"a batch of {sequences} sequences", where="batch", hint="Give a number of at least 1.")
    return [bucketing.segments(bounds[1]) for bounds in bucketing.segment_ranges if bounds[0] <= sequences]


def programs_of(
    profile: CompileProfile, batch: int = 1, phase: str | None = None, rows: int | None = None
) -> list[ProgramSpec]:
    """Specs of the programs that `compile` makes for a model.

    Args:
        batch: maximum number of sequences in a batch.
        phase: "prefill", "decode", "greedy" or "batch"; all by default.
        rows: only programs that accept this number of rows; all by default.

    Raises:
        ArgumentError: no program matches.
    """
    table = [*map(ProgramSpec, profile.ranges), GREEDY, *batch_programs(batch, Bucketing(profile.ranges))]
    of_phase = [w for w in table if phase in (None, w.kind)]
    found = [w for w in of_phase if rows is None or w.seq[0] <= rows <= w.seq[1]]
    if not found:
        has = ", ".join(f"{w.kind} {w.seq[0]}-{w.seq[1]}" for w in of_phase or table)
        what = f"takes {rows} rows" if of_phase else f"is of phase {phase!r}"
        raise ArgumentError(f"no program {what}", hint=f"The programs are: {has}.")
    return found


class SequenceBatch:
    """Sequences of a pool, each with a number: a context manager that closes them on exit.

    Args:
        pool: the states.
        stepper: computes.
        count: how many sequences there are.
    """

    def __init__(self, pool: CachePool, stepper: Stepper, count: int) -> None:
        self._pool, self._stepper = pool, stepper
        self._sequences: list[Sequence | None] = [None] * count

    def start(self, slot: int, prompt: Ids[int]) -> Logits:
        """Begins a new sequence and closes the one before: the logits after its prompt, float32[vocab]."""
        self._close(slot)
        sequence = self._sequences[slot] = self._pool.open(prompt)
        (logits,) = self._stepper.step(Batch([Segment(sequence, prompt[len(sequence) :])]))
        assert logits is not None
        return logits

    def step(self, tokens: Mapping[int, int]) -> Logits:
        """Appends one token to some sequences: the logits after each, float32[len(tokens), vocab], in order."""
        pairs = [(self._sequences[slot], token) for slot, token in tokens.items()]
        rows = self._stepper.step(Batch([Segment(each, [token]) for each, token in pairs if each is not None]))
        return np.stack([row for row in rows if row is not None])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for slot in range(len(self._sequences)):
            self._close(slot, keep=error[0] is None)

    def _close(self, slot: int, keep: bool = True) -> None:
        sequence, self._sequences[slot] = self._sequences[slot], None
        if sequence is not None and keep:
            sequence.close()
        elif sequence is not None:
            sequence.discard()


class BatchEngine(Protocol):
    """The part of an engine that batched generation uses."""

    def batch(self, slots: int, length: int) -> AbstractContextManager[SequenceBatch]:
        """A context with `slots` sequences of at most `length` tokens; on exit the session is restored."""


def generate_together(engine: BatchEngine, requests: Ids[Request], length: int) -> list[Generation]:
    """The tokens of every request, computed as a batch, in the order of the requests.

    Args:
        length: maximum length of a prompt with its answer.

    Raises:
        NumericalError: a logit of one of them is NaN or infinite.
    """
    found: list[list[int]] = [[] for _ in requests]
    steps: list[list[Step]] = [[] for _ in requests]
    waiting = deque(i for i, request in enumerate(requests) if request.stopping.reason is None)
    free = list(range(min(len(waiting), SLOTS)))
    live: dict[int, int] = {}  # slot -> request

    def take(slot: int, i: int, logits: Logits) -> None:
        """Chooses the next token of a request; an unfinished request keeps its slot."""
        request = requests[i]
        found[i].append(request.sampler.sample(check_finite(logits, f"sequence {i}"), request.stopping.banned))
        reason = request.stopping.push(found[i][-1])
        if request.alternatives is not None:
            steps[i].append(step_of(found[i][-1], logits, request))
        if reason is None:
            live[slot] = i
        else:
            live.pop(slot, None)
            free.append(slot)

    if waiting:
        with engine.batch(len(free), length) as batch:
            while waiting or live:
                while waiting and free:
                    slot, i = free.pop(), waiting.popleft()
                    take(slot, i, batch.start(slot, requests[i].context))
                if live:
                    rows = list(live.items())
                    logits = batch.step({slot: found[i][-1] for slot, i in rows})
                    for (slot, i), row in zip(rows, logits, strict=True):
                        take(slot, i, row)
    return [
        Generation(found[i], request, None if request.alternatives is None else steps[i])
        for i, request in enumerate(requests)
    ]
