"""Drafts by the model's own head that predicts a further token (multi-token prediction).

Runners stage, beside `engine.py`. The head is one more layer with a cache of its own. At position p it takes what the
model's head multiplied there and the token that came after, and says what may follow that token. While a generation
speculates, the engine tells a `Predictor` what it computed, row by row; before the next drafts are made, the rows that
were chosen go through the layer. Drafts after the first take the layer's own results for those of the model.

What the layer does not know does no harm but fewer accepted drafts: where a session was restored, or went on unheard,
its cache begins anew at the first position it hears of. Rotation makes attention depend on distances only, so positions
may be counted from there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx import models
from rlx.runners.greedy import SECONDS
from rlx.runners.opened import Source, check_types
from rlx.runners.programs import Programs
from rlx.runners.setup import Setup
from rlx.runners.speculative import MOST, Hits
from rlx.runners.wanted import HIDDEN, Wanted
from rlx.runtime.compile import Compiler, Progress
from rlx.runtime.drafts import Heads, Rounds, run_rounds
from rlx.runtime.given import feed
from rlx.runtime.kv import States
from rlx.runtime.native import NativeProgram
from rlx.runtime.tensors import Tensors
from rlx.runtime.threads import WorkerPool
from rlx.weights import ModelWeights

Floats = npt.NDArray[np.float32]

DRAFTS = 3  # in a row at most: each is a step of the layer, and less likely to come than the one before
# Ids that are drafted: the first ones. Merges made them early, so they are the frequent ones, and on a large vocabulary
# most of a draft's time goes into the head.
HEAD_ROWS = 1 << 15
CARRIED = ("next_hidden", HIDDEN)  # from a draft to the next one
ROWS = (2, MOST + 1)  # of a call that computes a token and drafts


class Predictor:
    """The layer, its cache, and how much of the session it has seen.

    Args:
        programs: those of `models.build_predictor`'s graph, bound to `states`.
        ranges: rows of each program.
        states: the layer's cache, with room for every position.
        rows: ids that it drafts.
    """

    def __init__(self, programs: Programs, ranges: Sequence[tuple[int, int]], states: States, rows: int) -> None:
        self._programs, self._ranges, self.states, self._rows = programs, ranges, states, rows
        self._by_rows: dict[int, NativeProgram] = {}
        self._base = self._next = 0  # positions [base, next) have been through the layer
        self._start = 0  # of the rows that have not
        self._ids: list[int] = []
        self._hidden: Floats | None = None

    @classmethod
    def of(
        cls,
        config: models.ModelConfig,
        weights: ModelWeights,
        setup: Setup,
        compiler: Compiler,
        pool: WorkerPool,
        tensors: Tensors,
        progress: Progress | None,
    ) -> Predictor:
        """The layer of an open model, whose other weights are in `tensors` already; its own join them.

        Raises:
            UnsupportedModelError: the model has none.
            WeightError: it lacks a tensor, or one has another shape than it should.
        """
        rows, head = min(config.vocab_size, HEAD_ROWS), models.predictor_head(config)
        graph = models.build_predictor(config, weights, setup.kv_type, rows, place=weights.place)
        check_types(graph, weights)

        def addresses() -> dict[str, int]:
            return {**tensors.addresses, models.DRAFT_HEAD: tensors.addresses[head]}

        programs = Programs(graph, setup, compiler, lambda: pool, addresses, packed=(head,))
        own = {name: row for name, row in programs.weights.items() if name != models.DRAFT_HEAD}
        tensors.load(own, Source(weights, config), progress)
        states = States(graph, setup.max_seq, setup.profile.buckets[-1])
        programs.bind(states.addresses)
        return cls(programs, setup.profile.ranges, states, rows)

    def hear(self, start: int, ids: Sequence[int], hidden: Floats) -> None:
        """The model has computed `ids` at the positions from `start` on; hidden [len(ids), width], copied."""
        self.catch_up(start, ids[0])
        if not self._base <= start <= self._next + 1:
            self._base = self._next = start
        self._next = max(self._next, start)
        self._start = max(self._next, start)
        known = self._start - start
        self._ids, self._hidden = list(ids[known:]), hidden[known:].copy()

    def forget(self, length: int) -> None:
        """The session was cut to its first `length` tokens."""
        del self._ids[max(0, length - self._start) :]
        # What the layer has made of the last position goes with the token behind it: it stays until it is made anew.
        self._next = max(min(self._next, length - 1), self._base)
        if length <= self._base:
            self._base = self._next = length

    def catch_up(self, length: int, token: int, count: int = 1) -> list[int]:
        """Puts the rows before position `length` through the layer, where `token` comes next.

        Returns:
            At most `count` tokens that may follow `token`, those behind the first from the layer's own results; none if
            nothing was heard of the row before it.
        """
        rows = length - self._start
        if self._hidden is None or not 0 < rows <= len(self._ids):
            return []
        found, after = list[int](), [*self._ids[1:rows], token]
        most = self._ranges[-1][1]
        for at in range(0, rows, most):
            part = slice(at, min(at + most, rows))
            found = self._drafts(self._start + at, after[part], self._hidden[part], count if part.stop == rows else 1)
        self._next = length
        self._ids, self._hidden, self._start = self._ids[rows:], self._hidden[rows:], length
        return found

    def _drafts(self, position: int, ids: Sequence[int], hidden: Floats, count: int) -> list[int]:
        """At most `count` tokens that may follow the last of `ids`, which go through the layer: one native call."""
        last = len(ids) - 1
        program, env = self.fed(position + last, ids[last:], hidden[last:])
        first = None
        if last:
            first, rows = self.fed(position, ids, hidden)
            first.prepare(rows)
        found = program.repeat(count, self._rows, (), SECONDS, env, carried=CARRIED, first=first)
        return [token for token in found if token >= 0]

    def fed(self, position: int, ids: Sequence[int], hidden: Floats) -> tuple[NativeProgram, dict[str, int]]:
        """The program for some rows, from a position of the session on, with its inputs in place; and its extents."""
        rows, past = len(ids), position - self._base
        if rows not in self._by_rows:
            self._by_rows[rows] = self._programs[Wanted(next(r for r in self._ranges if r[0] <= rows <= r[1]))]
        program = self._by_rows[rows]
        program.inputs["hidden"][:rows] = hidden
        feed(program.inputs, ids, past, None)
        return program, {"SEQ": rows, "PAST_SEQ": past, **self.states.extents}

    def heads(self) -> Heads:
        """Its programs for rounds of drafts."""
        one, some = (self._programs[Wanted(rows)] for rows in ((1, 1), ROWS))
        for program, rows in ((one, 1), (some, ROWS[0])):
            program.prepare({"SEQ": rows, "PAST_SEQ": 0, **self.states.extents})
        return Heads(one, some, CARRIED, self._rows)

    def seen(self, length: int) -> int:
        """How many rows the layer has, all of which are before position `length`."""
        assert self._next == length
        return length - self._base

    def went_on(self, start: int) -> None:
        """All rows before position `start` have been through the layer meanwhile."""
        self._next = self._start = start
        self._ids = []

    def close(self) -> None:
        self._programs.close()
        self.states.close()


class HeadDrafter:
    """A `Drafter` that asks the model's own head.

    Args:
        past: how many tokens the session holds, all of them chosen; asked when drafts are wanted.
        most: drafts in a row at most.
    """

    def __init__(self, predictor: Predictor, past: Callable[[], int], most: int = DRAFTS) -> None:
        self._predictor, self._past, self._most = predictor, past, most
        self._hits, self._open = Hits(0.9), list[int]()
        self._token: int | None = None

    def observe(self, token: int) -> None:
        if self._open:
            hit = self._open.pop(0) == token
            self._hits.count(hit)
            if not hit:
                self._open.clear()
        self._token = token

    def propose(self, limit: int) -> list[int]:
        assert self._token is not None
        if limit < 1:
            return []
        count = min(limit, max(1, self._hits.worth(self._most)))
        drafts = self._predictor.catch_up(self._past(), self._token, count)
        self._open = list(drafts)
        return drafts

    def forget(self, length: int) -> None:
        """The session was cut to its first `length` tokens."""
        self._predictor.forget(length)

    def rounds(self, models: tuple[NativeProgram, NativeProgram], ids: Sequence[int], **limits: Any) -> Rounds:
        """Goes on from a token and its drafts, which `propose` made, without Python in between.

        Args:
            models: as in `run_rounds`.
            ids: the token and its drafts.
            limits: of `run_rounds`.
        """
        predictor, start = self._predictor, self._past()
        most, seen = min(self._most, MOST), predictor.seen(start)
        found = run_rounds(models, predictor.heads(), most=most, seen=seen, rate=self._hits.rate, **limits)
        self._hits.rate, self._open = found.rate, []
        last = start + len(found.tokens) - found.right
        predictor.went_on(last)
        right = [ids[0], *found.tokens[:-1]][-found.right :]
        predictor.hear(last, right, models[(found.rounds - 1) % 2].output(HIDDEN, SEQ=found.right))
        return found
