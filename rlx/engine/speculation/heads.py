"""Drafts of a head: layers over the model's own hidden states, with a KV cache of their own.

Runners stage, beside `engine.py`; `drafting.py` opens the kinds. The input of a head at position p is a
hidden state of the model there (`Features`, or the one before the model's head) and the token that follows p; it
predicts the token after that one. During speculative decoding the engine passes the hidden states of each step to a
`Predictor`. Before the next drafts are made, the rows of accepted tokens run through the head. Drafts after the first
use the head's own hidden states instead of the model's.

Rows that the head has not seen only reduce the number of accepted drafts. After a restored session, or after steps
without the head, its cache starts anew at the first position it receives. Its rows have the model's own positions, and
where the token after p is a row of an image, the head takes that row, too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Ids
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rlx.backends.drafts import Heads, Rounds
from rlx.backends.memory import Buffer
from rlx.backends.program import Program, RowEnd, TokenRun
from rlx.compiler.compile import Progress
from rlx.compiler.state_memory import Sizes, StateMemory
from rlx.compiler.tensors import Source, Tensors
from rlx.engine.kv.prefix import page_count
from rlx.engine.kv.prompt_embeddings import PromptEmbeddings, shift_at
from rlx.engine.kv.sequence import Sequence
from rlx.engine.model_runner import Listener, ModelRunner, feed, feed_positions, feed_tokens
from rlx.engine.opening.setup import Setup
from rlx.engine.programs.programs import HIDDEN, Programs, ProgramSpec
from rlx.engine.speculation.drafts import MOST, Counters, Drafts, ModelHits
from rlx.engine.token_run import SECONDS, not_finite
from rlx.errors import ArgumentError, WeightError
from rlx.ir.dtypes import I32, I64
from rlx.ir.graph import Graph
from rlx.models.variants import EmbeddedRows, Features
from rlx.weights import WeightLoader

if TYPE_CHECKING:
    from rlx.engine.engine import Engine

TOKENS = 256  # maximum number per call
CARRIED = ("next_hidden", HIDDEN)  # output and input that connect one draft to the next
ROWS = (2, MOST + 1)  # row counts of a step that verifies a token and its drafts


@dataclass(frozen=True)
class Head:
    """What the kinds of heads differ in.

    Attributes:
        graph: with inputs "tokens", "positions" and "hidden" f32 [SEQ, width], outputs "next_hidden", of the same
            width, and "token", states that are full caches, and weights.
        source: of its weights.
        borrowed: the weights of the model among them.
        packed: names of those that are tables here, and matrices for the model.
        rows: number of ids that it takes, counted from 0.
        reads: what its input "hidden" is; None: the hidden state before the model's head.
        embeds: how it takes rows of images; None: it does not.
        most: maximum number of drafts in a row: each costs a step of the head, and is less likely to be accepted than
            the one before.
    """

    graph: Graph
    source: Source
    borrowed: Mapping[str, Buffer]
    packed: tuple[str, ...]
    rows: int
    most: int
    reads: Features | None = None
    embeds: EmbeddedRows | None = None


@dataclass(frozen=True)
class OpenModel:
    """What a head needs of the open model that it drafts for.

    Attributes:
        graph: with the output "hidden".
        setup, tensors, progress: of the engine.
    """

    graph: Graph
    setup: Setup
    tensors: Tensors
    progress: Progress | None

    def beside(self, parts: ExitStack) -> Tensors:
        """New tensors on the same device, which `parts` closes."""
        made = Tensors(self.tensors.compiler, self.tensors.workers)
        parts.callback(made.close)
        return made


def of_another_model(loader: WeightLoader, how: str) -> ArgumentError:
    """The error for a head that was trained with another model."""
    what, hint = f"the draft head is of another model: {how}", "give the head that was trained with this model"
    return ArgumentError(what, where=loader.path, hint=hint)


def integers(loader: WeightLoader, name: str, count: int) -> npt.NDArray[np.int64]:
    """A tensor of whole numbers, i64 [count].

    Raises:
        WeightError: it is missing, or has another shape or type.
    """
    if (info := loader.tensors.get(name)) is None:
        raise WeightError(f"the tensor is missing, expected shape [{count}]", where=name)
    if tuple(info.shape) != (count,) or info.dtype not in (I32, I64):
        what = f"expected i64 of shape [{count}], found {info.dtype} of shape {list(info.shape)}"
        raise WeightError(what, where=name)
    return np.frombuffer(loader.raw(name).tobytes(), np.int64 if info.dtype is I64 else np.int32).astype(np.int64)


class DraftHead(Listener, ABC):
    """A head that drafts for the sequence that it follows, from copies of the model's hidden states.

    Args:
        head: the head.
        setup: of the engine.
        tensors: takes the head's weights.
        progress: told how many bytes of weights are packed.

    Attributes:
        head: the head.
        sequence: the one that it follows.
        reads: which hidden states of the model it takes, as in `ProgramSpec.hidden`.
        has_rounds: whether the device has rounds of drafts of it.
    """

    sequence: Sequence | None = None
    reads: bool | Features = True
    has_rounds = False

    def __init__(self, head: Head, setup: Setup, tensors: Tensors, progress: Progress | None) -> None:
        buffers = lambda: {**tensors.buffers, **head.borrowed}  # noqa: E731
        workers = lambda: tensors.workers  # noqa: E731
        self.head = head
        self._programs = Programs(head.graph, setup, tensors.compiler, workers, buffers, packed=head.packed)
        for name, value in head.graph.constants.items():
            if name not in tensors.buffers:
                tensors.add_array(name, value)
        own = {name: row for name, row in self._programs.weights.items() if name not in head.borrowed}
        tensors.load(own, head.source, progress)
        self._start = 0  # position of the first row of the model of which it has a copy
        self._copies: Buffer | None = None

    def follow(self, sequence: Sequence | None) -> None:
        """Begins anew, with a sequence to follow; None: there is none any more."""
        self.sequence = sequence
        self.forget(0)

    @abstractmethod
    def forget(self, length: int) -> None:
        """Follows a rewind: the session was cut to its first `length` tokens."""

    @abstractmethod
    def catch_up(self, length: int, token: int, count: int = 1) -> list[int]:
        """At most `count` drafts for what follows `token`, the id at position `length`.

        Empty if the hidden state of the row before `length` is not known.
        """

    def copy(self, hidden: Buffer) -> Buffer:
        """A copy of hidden states in memory that the next copy takes."""
        if self._copies is None or self._copies.nbytes < hidden.nbytes:
            self._release()
            self._copies = hidden.memory.allocate(hidden.nbytes)
        found = self._copies.part(0, hidden.nbytes)
        hidden.copy_to(found)
        return found

    def _release(self) -> None:
        if self._copies is not None:
            self._copies.close()
        self._copies = None

    def close(self) -> None:
        """Releases memory."""
        self._programs.close()
        self._release()


class Predictor(DraftHead):
    """A head, its KV cache, and the part of the session that it has processed.

    Attributes:
        states: its KV cache, with room for every position.
    """

    def __init__(self, head: Head, setup: Setup, tensors: Tensors, progress: Progress | None) -> None:
        super().__init__(head, setup, tensors, progress)
        self._ranges, self.backend = setup.profile.ranges, tensors.compiler.backend
        self.reads, self.has_rounds = head.reads or True, self.backend.native_rounds
        sizes = Sizes.of(head.graph, setup.layouts, setup.max_seq, setup.profile.buckets[-1])
        extents = sizes.extents(page_count(setup.max_seq, sizes.page), 1)
        self.states = StateMemory(head.graph, self.backend.memory, setup.layouts, extents, paged=True)
        self._programs.bind(self.states)
        self._by_rows: dict[int, Program] = {}
        self._base = self._next = 0  # the head has processed positions [base, next)
        self._ids: list[int] = []  # of the rows from `_start` on, which it has not processed
        self._hidden: Buffer | None = None  # their hidden states
        self._width = 0  # bytes of a row

    def hear(self, start: int, ids: Ids[int], hidden: Buffer) -> None:
        """Receives a step of the model: `ids` from position `start` on, and hidden f32 [len(ids), width] (copied)."""
        self.catch_up(start, ids[0])
        if not self._base <= start <= self._next + 1:
            self._base = self._next = start
        self._next = max(self._next, start)
        self._start = max(self._next, start)
        known = min(self._start - start, len(ids))
        self._ids, self._hidden = list(ids[known:]), None
        self._width = hidden.nbytes // len(ids)
        self._hidden = self.copy(hidden.part(known * self._width))

    def forget(self, length: int) -> None:
        del self._ids[max(0, length - self._start) :]
        # The head's row of the last position depends on the token after it: drop it; it is computed again.
        self._next = max(min(self._next, length - 1), self._base)
        if length <= self._base:
            self._base = self._next = length

    def catch_up(self, length: int, token: int, count: int = 1) -> list[int]:
        """Runs the rows before position `length` through the head; drafts after the first come from its own states."""
        rows = length - self._start
        if self._hidden is None or not 0 < rows <= len(self._ids):
            return []
        found, after = list[int](), [*self._ids[1:rows], token]
        most = self._ranges[-1][1]
        for at in range(0, rows, most):
            end = min(at + most, rows)
            part = self._hidden.part(at * self._width, (end - at) * self._width)
            found = self._drafts(self._start + at, after[at:end], part, count if end == rows else 1)
        self._next = length
        self._ids, self._hidden, self._start = self._ids[rows:], self._hidden.part(rows * self._width), length
        return found

    def _drafts(self, position: int, ids: Ids[int], hidden: Buffer, count: int) -> list[int]:
        """At most `count` drafts after the last of `ids`, which run through the head first: one native call."""
        last = len(ids) - 1
        program, env = self.fed(position + last, ids[last:], hidden.part(last * self._width))
        first = None
        if last:
            first, rows = self.fed(position, ids, hidden)
            first.prepare(rows)
        found = program.repeat(TokenRun([RowEnd(count)], self.head.rows, env, CARRIED, first), SECONDS)
        return [token for token in found if token >= 0]

    def fed(self, position: int, ids: Ids[int], hidden: Buffer) -> tuple[Program, dict[str, int]]:
        """The program for these rows at a session position, with its inputs set; and its symbol values."""
        rows, past, images = len(ids), position - self._base, self._images
        program = self._program(rows, position, images)
        program.fill(HIDDEN, hidden)
        feed_positions(program.inputs, rows, position, images)
        feed_tokens(program.inputs, ids, position, images and images.ahead)
        return program, {"SEQ": rows, "PAST_SEQ": past, **self.states.extents}

    @property
    def _images(self) -> PromptEmbeddings | None:
        return None if self.sequence is None else self.sequence.embeddings

    def _program(self, rows: int, position: int, images: PromptEmbeddings | None) -> Program:
        if images is not None and any(images.within(position, position + rows + 1)):  # the last row's next token, too
            return self._programs[ProgramSpec(self._range(rows), embeds=self.head.embeds)]
        if rows not in self._by_rows:
            self._by_rows[rows] = self._programs[ProgramSpec(self._range(rows))]
        return self._by_rows[rows]

    def _range(self, rows: int) -> tuple[int, int]:
        return next(r for r in self._ranges if r[0] <= rows <= r[1])

    def heads(self) -> Heads:
        """The programs of the head for rounds of drafts."""
        one, some = (self._programs[ProgramSpec(rows)] for rows in ((1, 1), ROWS))
        for program, rows in ((one, 1), (some, ROWS[0])):
            program.prepare({"SEQ": rows, "PAST_SEQ": 0, **self.states.extents})
        return Heads(one, some, CARRIED, self.head.rows)

    def seen(self, length: int) -> int:
        """Number of rows that the head has processed; they end at position `length`."""
        assert self._next == length
        return length - self._base

    def shifts(self, length: int) -> tuple[int, int]:
        """Position of a row less the number of rows before it, from `length` on: of the model and of the head."""
        shift = shift_at(self._images, length)
        return shift, shift + self._base

    def went_on(self, start: int) -> None:
        """Notes that native rounds have processed all rows before position `start`."""
        self._next = self._start = start
        self._ids = []

    def close(self) -> None:
        super().close()
        self.states.close()


class HeadDrafter:
    """A `Drafter` that uses a head.

    Args:
        predictor: the head.
        past: returns the number of tokens in the session; all of them are accepted when drafts are requested.
    """

    def __init__(self, predictor: DraftHead, past: Callable[[], int]) -> None:
        self.predictor, self._past, self._most = predictor, past, predictor.head.most
        self._hits = ModelHits(self._most)
        self._token: int | None = None

    def observe(self, token: int) -> None:
        self._hits.observe(token)
        self._token = token

    def acceptance_probs(self, limit: int) -> list[float]:
        return self._hits.acceptance_probs(limit)

    def propose(self, count: int) -> list[int]:
        assert self._token is not None
        if count < 1:
            return []
        drafts = self.predictor.catch_up(self._past(), self._token, count)
        self._hits.open = list(drafts)
        return drafts

    def rounds(self, models: tuple[Program, Program], ids: Ids[int], **limits: Any) -> Rounds:
        """Runs rounds of drafting and verifying in one native call, from a token and its drafts by `propose`.

        Args:
            models: as in `run_rounds`.
            ids: the token and its drafts.
            limits: as in `run_rounds`.
        """
        predictor, start = self.predictor, self._past()
        assert isinstance(predictor, Predictor)
        limits |= {"most": min(self._most, MOST), "seen": predictor.seen(start), "shifts": predictor.shifts(start)}
        found = predictor.backend.rounds(models, predictor.heads(), rate=self._hits.rate, **limits)
        self._hits.rate, self._hits.open = found.rate, []
        last = start + len(found.tokens) - found.right
        predictor.went_on(last)
        right = [ids[0], *found.tokens[:-1]][-found.right :]
        predictor.hear(last, right, models[(found.rounds - 1) % 2].result(HIDDEN, SEQ=found.right))
        return found


def _models(runner: ModelRunner, sequence: Sequence, reads: bool | Features) -> tuple[Program, Program]:
    """The two verifying programs, in the order in which they run; each reads the slot that the other one writes.

    They return the likeliest token after each row, and the hidden states that the head reads.
    """
    kinds = ("verify", "verify again") if sequence.recurrent else ("", "")
    now, after = (runner.programs[ProgramSpec(ROWS, "tokens", hidden=reads, drafts=kind)] for kind in kinds)
    return now, after


class HeadDrafts(Drafts):
    """The drafts of a head for one sequence, which it follows until `close`.

    Args:
        runner: runs the model; the head receives the hidden states of each step of the sequence.
        predictor: the head, which follows the sequence.
        counters: incremented.
    """

    _drafter: HeadDrafter

    def __init__(self, runner: ModelRunner, sequence: Sequence, predictor: DraftHead, counters: Counters) -> None:
        super().__init__(HeadDrafter(predictor, lambda: len(sequence)), counters)
        self.sequence, self._runner, self._head = sequence, runner, predictor
        predictor.follow(sequence)
        runner.listener = predictor

    def forget(self, length: int) -> None:
        self._head.forget(length)

    def close(self) -> None:
        if self._head.sequence is self.sequence:
            self._runner.listener = None
            self._head.follow(None)

    def run(self, engine: Any, sequence: Any, tokens: Ids[int], left: int, stops: Ids[int]) -> list[int]:
        """Rounds of drafts and verifying steps in one native call; [] if the engine runs its steps one by one."""
        if not (engine.native_loops and self._head.has_rounds) or sequence.adapter:
            return []
        for token in tokens[self._seen : -1]:
            self._drafter.observe(token)
        found = self._rounds(tokens[-1], left, stops)
        self._seen = len(tokens) + max(0, len(found) - 1)
        return found

    def _rounds(self, token: int, count: int, stops: Ids[int]) -> list[int]:
        """As `Engine.greedy`: appends `token` and the likeliest tokens after it. Returns [] if there are no drafts.

        Nor are there any if the model has both rings and recurrent states: the programs alternate between two slots.
        """
        runner, sequence, drafter, counters = self._runner, self.sequence, self._drafter, self._counters
        runner.prepare(sequence, [token])
        runner.catch_up(sequence)
        if sequence.recurrent and not sequence.memory.can_alternate:
            return []
        past = sequence.done
        most = min(count, TOKENS, runner.limits.max_seq - past)
        drafter.observe(token)
        ids = [token, *drafter.propose(len(drafter.acceptance_probs(min(most - 1, MOST))))]
        if len(ids) == 1:
            return []
        sequence.begin(most, alternating=True)
        models = _models(runner, sequence, self._head.reads)
        feed(models[0].inputs, ids, past, sequence.embeddings)
        for model, swapped in zip(models, (False, True), strict=True):
            model.prepare({"SEQ": len(ids), "PAST_SEQ": past, **runner.bind_slots(model, sequence, swapped=swapped)})
            if model.then:
                model.then.prepare({"SEQ": 1})
        found = drafter.rounds(models, ids, count=most, rows=runner.limits.ids, stops=stops, seconds=SECONDS)
        if found.rounds % 2 and sequence.recurrent:
            sequence.memory.take_spare()
        counters.steps += found.rounds
        counters.drafted += found.drafted
        counters.accepted += found.accepted
        sequence.end([token, *found.tokens[:-1]])
        if found.tokens[-1] < 0:
            sequence.rewind(sequence.done - 1)
            self.forget(len(sequence))
            raise not_finite(sequence)
        return found.tokens


class HeadDrafting:
    """A head that drafts for one sequence at a time; its weights are loaded at first use.

    Args:
        open_head: returns it, once the weights of the model are loaded; what is to be closed is put on the stack.
        file: closed with it.
    """

    def __init__(
        self, engine: Engine, open_head: Callable[[ExitStack], DraftHead], file: WeightLoader | None = None
    ) -> None:
        self._engine, self._open, self._parts = engine, open_head, ExitStack()
        self._predictor: DraftHead | None = None
        if file is not None:
            self._parts.callback(file.close)

    def drafts(self, sequence: Sequence, ids: Ids[int], salt: str, counters: Counters) -> HeadDrafts | None:
        """As `Drafting.drafts`; none while the head follows another sequence.

        Raises:
            UnsupportedModelError: the model has no such head.
            WeightError: a tensor is missing or has the wrong shape.
        """
        runner = self._engine.model_runner
        if self._predictor is None:
            self._engine.load()
            self._predictor = self._open(self._parts)
            self._parts.callback(self._predictor.close)
        if runner.listener is not None or (sequence.embeddings and self._predictor.head.embeds is None):
            return None
        return HeadDrafts(runner, sequence, self._predictor, counters)

    def close(self) -> None:
        self._parts.close()
