"""An engine without arithmetic and without time: the next token is a hash of the ids before it, and a clock that only
steps advance. Enough to test what the engine loop decides.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx.engine.loop.executor import Executor
from rlx.engine.loop.job import Job
from rlx.engine.loop.scheduler import Scheduler
from rlx.engine.request import Context, Request
from rlx.engine.token_engine import ComputedAnew
from rlx.engine.token_run import STEPS, RunRow
from rlx.errors import PoolFullError
from rlx.sampling import SampleOpts, Sampler
from rlx.sampling.choice import choose_rows

VOCAB = 50


def next_token(ids: Sequence[int]) -> int:
    """The token after `ids`: it depends on all of them."""
    return zlib.crc32(np.array(ids, np.int32).tobytes()) % VOCAB


def answer(prompt: Sequence[int], count: int) -> list[int]:
    """The tokens after a prompt."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(next_token(ids))
    return ids[len(prompt) :]


class ToySequence(ComputedAnew):
    """Ids that take room in the engine's pool."""

    recurrent, marks = False, True

    def __init__(self, engine: ToyEngine, ids: Sequence[int]) -> None:
        self.engine, self.ids = engine, list(ids)
        self.closed = self.paused = False

    def rewind(self, length: int) -> None:
        assert 0 <= length <= len(self.ids) and not self.closed
        super().rewind(length)

    def pause(self) -> None:
        assert not self.paused and not self.closed
        self.paused = True

    def resume(self) -> None:
        self.engine.check_room(len(self.ids))
        self.paused = False

    def close(self) -> None:
        self.closed = True

    discard = close


class ToyEngine:
    """Sequences in a pool of `room` positions; a step of n rows takes `first + more * (n - 1)` seconds, and `deep` for
    each row and each position before it.

    Attributes:
        now: the time.
        slowness: how many times as long a step takes, because other programs take the machine's CPUs.
        steps: the rows of each segment of each step, the largest segments being prompts.
        has_runs: whether it has runs; set for all.
        runs: those that have begun.
        known: prompts that were computed; new sequences begin with the longest known prefix.
    """

    has_runs = False

    def __init__(
        self, room: int = 1 << 30, first: float = 0.02, more: float = 0.002, most_rows: int = 512, deep: float = 0.0,
        shared_rows: int = 64,
    ) -> None:  # fmt: skip
        self.room, self.first, self.more, self.most_rows = room, first, more, most_rows
        self.shared_rows = shared_rows
        self.deep, self.now, self.slowness, self.steps = deep, 0.0, 1.0, list[list[int]]()
        self.sequences: list[ToySequence] = []
        self.runs = list[ToyRun]()
        self.views: list[Any] = []  # what the last step returned without a copy
        self.broken: set[int] = set()  # a sequence whose first id is one of these has logits that are NaN

    choose = staticmethod(choose_rows)

    def clock(self) -> float:
        return self.now

    def open_sequence(
        self, prompt: Sequence[int] = (), embeddings: Any = None, *, salt: str = "", adapter: int = 0
    ) -> ToySequence:
        known = max((_shared(each.ids, prompt) for each in self.sequences), default=0)
        made = ToySequence(self, prompt[: min(known, len(prompt) - 1)])
        self.check_room(len(made))
        self.sequences.append(made)
        return made

    def check_room(self, more: int) -> None:
        used = sum(len(each) for each in self.sequences if not each.closed and not each.paused)
        if used + more > self.room:
            raise PoolFullError("the pool is full", needed=more, available=self.room - used, total=self.room)

    def compute(self, segments: Any) -> list[Any]:
        rows = [len(segment.tokens) for segment in segments]
        assert max(rows) <= self.most_rows
        assert len({id(segment.sequence) for segment in segments}) == len(rows)
        self.check_room(sum(rows))
        positions = sum(
            count * (len(segment.sequence) + count / 2) for segment, count in zip(segments, rows, strict=True)
        )
        self.now += self.slowness * (self.first + self.more * (sum(rows) - 1) + self.deep * positions)
        self.steps.append(rows)
        for view in self.views:
            view[...] = np.nan  # as a real engine may overwrite them
        found = [self._segment(segment) for segment in segments]
        self.views = [rows for rows in found if rows is not None]
        return found

    def _segment(self, segment: Any) -> Any:
        sequence, logits = segment.sequence, []
        assert not sequence.closed and not sequence.paused
        for token in segment.tokens:
            sequence.ids.append(token)
            row = np.zeros(VOCAB, np.float32)
            row[next_token(sequence.ids)] = 9
            logits.append(row * np.float32("nan") if sequence.ids[0] in self.broken else row)
        return {"none": None, "last": logits[-1], "all": np.stack(logits)}[segment.logits]

    def run(self, rows: Sequence[RunRow], *, loads: bool = True) -> ToyRun | None:
        if not self.has_runs:
            return None
        self.check_room(sum(min(row.count, STEPS) for row in rows))
        self.runs.append(ToyRun(self, rows))
        return self.runs[-1]

    def greedy(self, sequence: ToySequence, token: int, count: int, stops: Sequence[int] = ()) -> list[int]:
        return []


class ToyRun:
    """A run of rows; a device that is always a few steps ahead computes it.

    Attributes:
        taken: steps whose tokens were taken.
    """

    seconds = 0.02

    def __init__(self, engine: ToyEngine, rows: Sequence[RunRow]) -> None:
        self._engine, self._rows = engine, rows
        self._texts = [[*row.sequence.ids, row.token] for row in rows]
        self._steps = deque[list[tuple[int, int, bool]]]()  # rows, their tokens, and whether they end
        self._going, self._open = [*range(len(rows))], {*range(len(rows))}
        self.failed, self.taken, self._begun = list[int](), 0, 0

    @property
    def ahead(self) -> int:
        return len(self._steps)

    @property
    def alive(self) -> int:
        return len(self._open)

    def _begin(self) -> None:
        self._begun += 1
        step = []
        for number in self._going:
            row, text = self._rows[number], self._texts[number]
            assert not (row.sequence.closed or row.sequence.paused), "it takes part in a step"
            token = -1 if text[0] in self._engine.broken else next_token(text)
            text.append(token)
            ends = token < 0 or token in row.stops or self._begun >= min(row.count, STEPS)
            step.append((number, token, ends))
        self._going = [number for number, _, ends in step if not ends]
        self._steps.append(step)

    def take(self, ahead: int, seconds: float = 0.0) -> list[list[tuple[int, int]]]:
        while len(self._steps) < ahead and self._going:
            self._begin()
        engine, step = self._engine, self._steps.popleft()
        engine.now, self.taken = engine.now + engine.first, self.taken + 1
        found = [(number, token) for number, token, _ in step if token >= 0]
        for number, token in found:
            self._rows[number].found.append(token)
        for number, token, ends in step:
            if ends:
                self._end(number)
                self.failed += [number] * (token < 0)
        return [found]

    def _end(self, number: int) -> None:
        row = self._rows[number]
        row.sequence.ids += [row.token, *row.found][: len(row.found)]
        self._open.discard(number)

    def end(self) -> None:
        assert not self._steps
        for number in [*self._open]:
            self._end(number)


def _shared(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def executor(engine: ToyEngine, slots: int = 8, stall: float = 0.1) -> Executor:
    """An executor over the engine, on its clock."""
    return Executor(engine, Scheduler(slots, stall, engine.most_rows, engine.shared_rows), engine.clock)


def give(made: Executor, *messages: Any) -> None:
    """Leaves jobs and tasks for an executor, which takes them at once."""
    made.inbox.extend(messages)
    made.read()


ASKED = ("stop_ids", "min_tokens", "priority", "timeout", "stop")


def asked(
    ids: Sequence[int], limit: int, *, is_greedy: bool = False, with_logits: bool = False, **more: Any
) -> Request:
    """A request as the loop takes it."""
    sample = SampleOpts.greedy() if is_greedy else SampleOpts(temperature=1.0)
    return Request(Context(list(ids)), limit, sample, top_logprobs=0 if with_logits else None, **more)


def job(ids: Sequence[int], limit: int = 10, **options: Any) -> Job:
    """A job that nobody looks at before it ends."""
    own = {name: options.pop(name) for name in [*options] if name not in (*ASKED, "is_greedy", "with_logits")}
    sampler = own.pop("sampler", None) or Sampler(SampleOpts.greedy())
    return Job(asked(ids, limit, **options), sampler, **{"streaming": False, **own})
