"""A program on a card, or on some: its kernels are launched in order, and a step that comes again is replayed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from ctypes import c_void_p
from functools import partial
from itertools import chain
from math import log2
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlx.backends.cuda.agreed.steps import (
    ADDED,
    CARD,
    EACH,
    LINE,
    MOST_CARDS,
    PEERS_AT,
    POSITIONS,
    RANGES,
    RUNS,
    SHARING,
    SPLITS,
)
from rlx.backends.cuda.driver import MULTIPROCESSORS, Card
from rlx.backends.cuda.host_calls import HostCalls, Piece
from rlx.backends.cuda.memory import address, pinned_bytes
from rlx.backends.cuda.packing import Ring
from rlx.backends.cuda.steps import CardCode, CardSteps, Counts, begin_calls, launches_of
from rlx.backends.cuda.token_loop import Between, StepsAhead, TokenLoop, serves
from rlx.backends.memory import Buffer, Memory
from rlx.backends.program import Manifest, Program, StepLog, TokenRun, TokenSteps
from rlx.ir import dims
from rlx.ir.segments import PAST, ROWS

_RESIDENT = 2  # blocks of attention that a multiprocessor runs at a time
_ALIGN = 256
#: What kernels of a region pass on.
_PASSED = ("scratch", "per_range", "counters")


#: Held while a step of several cards begins: where they meet, all must come in the same order.
_TOGETHER = threading.RLock()


class Stream:
    """Runs programs: the one stream of each card, the ring through which weights come to it, and where cards meet.

    Attributes:
        meeting: memory of `kernels.cards.meet` on each card: the lines, then the addresses. None for one card.
    """

    def __init__(self, cards: Sequence[Card], memory: Memory) -> None:
        self.cards, self.n, self.rings = cards, 1, [Ring(card) for card in cards]
        self._ends: list[Callable[[], object]] = [ring.close for ring in self.rings]
        self.meeting = memory.allocate(LINE * (MOST_CARDS + 1)) if len(cards) > 1 else None
        if self.meeting:
            self._ends.append(self.meeting.close)
            starts = np.array([address(self.meeting, number) for number in range(len(cards))], np.int64)
            for number, card in enumerate(cards):
                places = starts + number * LINE
                card.write(address(self.meeting, number) + MOST_CARDS * LINE, places.ctypes.data, places.nbytes)

    def owns(self, close: Callable[[], object]) -> None:
        """What frees memory that goes with it."""
        self._ends.append(close)

    def close(self) -> None:
        """Waits for what runs, and frees memory."""
        for end in self._ends:
            end()


class CardProgram(Program):
    """One instance of a program on a card, or on several that compute together."""

    def __init__(self, code: CardCode, manifest: Manifest, memory: Memory, workers: Stream) -> None:
        super().__init__(manifest, workers.n, memory)
        self._cards, self._meeting = workers.cards, workers.meeting
        self._symbols = [*manifest["symbols"], *ADDED]
        self._blocks, launches = launches_of(manifest)
        self._divides_single = any(each.split and str(each.count) == "SEGMENTS" for each in self._blocks)
        self._attention_parts = max((each.times for each in self._blocks if each.split), default=1)
        self._scratch: dict[tuple[str, int], Buffer] = {}
        self._scratch_sizes = _scratch_sizes(manifest)
        self._loop: TokenLoop | None = None
        self._splits_most = 0  # ranges of positions that the memory is for
        with ExitStack() as ends:  # if there is no room for all of it
            ends.callback(self.arena.close)
            self._allocate(ends)
            self._ends = ends.pop_all()
        pieces = len(self._host.pieces)
        self._steps = [
            CardSteps(code, number, manifest, launches, partial(self._address, number), pieces)
            for number in range(len(self._cards))
        ]
        self._logs = self._begins = False
        self._in_order = _TOGETHER if self._meeting else threading.RLock()
        self._log: StepLog | None = None

    def _allocate(self, ends: ExitStack) -> None:
        """Makes the memory beside the arena, and what frees it."""
        self._own = self.arena.memory.allocate(_ALIGN)  # the extents
        ends.callback(self._own.close)
        self._host = HostCalls(self._cards[0], self.manifest, lambda: address(self.arena), self.bound)
        ends.callback(self._host.close)
        self._have_inputs = list[c_void_p]()
        for card in self._cards:
            self._have_inputs.append(event := card.event())
            ends.callback(card.forget_event, event)
        self._pin_inputs(ends)

    def _pin_inputs(self, ends: ExitStack) -> None:
        """Moves the inputs, and the extents after them, to memory that the card copies from directly."""
        places, end = {}, 0
        for name, array in self.inputs.items():
            places[name] = end
            end += -(-array.nbytes // _ALIGN) * _ALIGN
        cards = len(self._cards)
        pinned = self._cards[0].pinned(end + cards * _ALIGN)
        ends.callback(self._cards[0].free_pinned, pinned)
        memory = pinned_bytes(pinned, end + cards * _ALIGN)
        for name, array in self.inputs.items():
            new = memory[places[name] : places[name] + array.nbytes].view(array.dtype).reshape(array.shape)
            new[...] = array
            self.inputs[name] = new
        self._sources = {name: pinned + at for name, at in places.items()}
        assert 4 * len(self._symbols) <= 8 * PEERS_AT
        bases = np.array([address(self.arena, number) for number in range(cards)], np.int64)
        self._extents = list[tuple[Card, NDArray[np.int32], int, int]]()  # where they are sent from, and to
        for number, card in enumerate(self._cards):
            own = memory[end + number * _ALIGN :][:_ALIGN].view(np.int32)
            own[self._symbols.index(CARD)] = number
            own.view(np.int64)[PEERS_AT : PEERS_AT + cards - 1] = np.delete(bases, number) - bases[number]
            self._extents.append((card, own, pinned + end + number * _ALIGN, address(self._own, number)))

    def _send(self) -> None:
        for name in self.inputs.keys() - self._sent:
            value = self._given[name]
            nbytes = value.nbytes(self.extents)
            if nbytes:
                for number, card in enumerate(self._cards):
                    card.send(address(self.arena, number) + value.offset, self._sources[name], nbytes)
        self._sent.clear()

    # -- places -------------------------------------------------------------------------------------------------------

    def bind(self, buffers: Mapping[str, Buffer]) -> None:
        super().bind(buffers)
        self._forget()

    def bind_slots(self, states: Mapping[str, tuple[Buffer, int]]) -> None:
        super().bind_slots(states)
        self._forget()

    def _forget(self) -> None:
        """Drops what is ready: the memory that it uses has changed."""
        for steps in self._steps:
            steps.forget()

    def _address(self, number: int, kind: str, place: Any) -> int:
        """What a pointer of a kernel is on a card."""
        if kind == "arena":
            return address(self.arena, number) + int(place)
        if kind == "extents":
            return address(self._own, number)
        if kind == "loop":
            assert self._loop is not None
            return self._loop.address(number, place)
        if kind == "meeting":
            assert self._meeting is not None
            return address(self._meeting, number) + (MOST_CARDS * LINE if place == "places" else 0)
        if kind in _PASSED:
            return address(self._scratch[kind, int(place)], number)
        return address(self.bound(place), number)

    def _reserve(self, splits: int) -> None:
        """Makes room for what kernels of a region pass on, which grows with the number of ranges of positions."""
        if splits <= self._splits_most:
            return
        self._forget()
        self._splits_most = 0  # if there is no room for all of it, the next step needs it again
        for which, nbytes in self._scratch_sizes.items():
            if which not in self._scratch or which[0] == "per_range":
                if (old := self._scratch.pop(which, None)) is not None:
                    old.close()
                self._scratch[which] = self.arena.memory.allocate(nbytes * (splits if which[0] == "per_range" else 1))
        self._splits_most = splits

    # -- steps --------------------------------------------------------------------------------------------------------

    def launch(self) -> None:
        counts = self._begin(1)
        if self._begins:
            for card, event in zip(self._cards, self._have_inputs, strict=True):
                card.record(event)
        try:
            if self._logs:
                self._log = self._clocked_step(counts)
            else:
                self._step(counts)
        finally:  # after an error of the host, too: the caller may then write the next inputs
            for card, event in zip(self._cards, self._have_inputs, strict=True):
                card.wait_for(event) if self._begins else card.wait()

    def begin(self, **extents: int) -> None:
        self._begins = not self.observers  # who see how long it takes
        try:
            self.run(**extents)
        finally:
            self._begins = False

    def record(self, logs: bool) -> None:
        self._logs, self._log = logs, None
        if not logs:
            for steps in self._steps:
                steps.forget_clocks()

    @property
    def log(self) -> StepLog | None:
        return self._log

    def _clocked_step(self, counts: Counts) -> StepLog:
        """Runs a step with clocks; they are those of the first card."""
        key = counts, self._slots

        def begin(own: CardSteps, regions: range, after: Callable[[int], object]) -> None:
            self._begin_on([own], counts, regions, after=after)

        pieces = self._host.pieces
        every = [
            steps.clocked(key, [partial(begin, steps, piece.regions) if piece.launches else None for piece in pieces])
            for steps in self._steps
        ]
        with self._in_order:
            for piece in pieces:
                self._host.bring(piece, self.extents)
                for each in every:
                    each.begin(piece.number)
                self._host.compute(piece, self.extents, self.called)
                for call in piece.calls:
                    every[0].ended(call.region)
        return next(iter([each.log() for each in every]))

    def _begin(self, steps: int) -> Counts:
        """Sends the values of the symbols for some steps: the numbers of blocks."""
        extents = {**self.extents, **self._shares(steps), RUNS: 1}
        self._reserve(extents[SPLITS])
        values = [extents[name] for name in self._symbols[:-1]]
        for card, own, source, target in self._extents:
            own[: len(values)] = values  # the last symbol is the number of the card
            card.send(target, source, _ALIGN)
        return tuple([blocks.value(extents) for blocks in self._blocks])

    def _step(self, counts: Counts, between: Between | None = None) -> None:
        """Begins a step, and what takes its token to the next one; the host computes what it calls."""
        with self._in_order:
            for piece in self._host.pieces:
                self._host.bring(piece, self.extents)
                if piece.launches:
                    self._begin_piece(piece, counts, between)
                self._host.compute(piece, self.extents, self.called)

    def _begin_piece(self, piece: Piece, counts: Counts, between: Between | None) -> None:
        """Begins the kernels of a piece of a step. One that comes again is recorded."""
        key = None if between is None else between.key, counts, self._slots, piece.number
        begin = partial(self._begin_on, counts=counts, regions=piece.regions, between=between)
        records = [steps.record(key, partial(begin, [steps])) for steps in self._steps]
        for card, record in zip(self._cards, records, strict=True):
            if record is not None:
                card.replay(record)
        if None not in records:
            return
        begin(self._steps)
        for steps in self._steps:
            steps.remember(key)

    def _begin_on(
        self, some: Sequence[CardSteps], counts: Counts, regions: range, between: Between | None = None,
        after: Callable[[int], object] = lambda region: None,
    ) -> None:  # fmt: skip
        """Begins all launches of some regions on some of the cards; `after` as that of `begin_calls`."""
        ready = [(steps.card, [call for call in steps.ready(self._slots) if call.region in regions]) for steps in some]
        begin_calls(ready, counts, after)
        if between is not None:
            for steps in some:
                steps.card.use()
                for function, config, given, _ in between.each[steps.number].launches:
                    steps.card.launch(function, config, given)
            ends = [(steps.card, [steps.advance(between.each[steps.number].pointers)]) for steps in some]
            begin_calls(ends, counts)

    def steps(self, run: TokenRun) -> TokenSteps:
        logits = None if run.draws is None else self.values(run.draws.output, **run.extents)
        if "loop" not in self.manifest or self.observers or not serves(run, logits):
            return super().steps(run)
        self.prepare(run.extents)
        self._send()
        if self._loop is None:
            self._loop = TokenLoop(self._cards, self.arena.memory, len(self.inputs.get("segments", "1")))
        self._loop.write(run)
        counts, between = self._begin(run.count), self._loop.between(run.draws, logits)
        return StepsAhead(self, run, self._loop, partial(self._step, counts, between))

    def _shares(self, steps: int) -> dict[str, int]:
        """How blocks share rows of attention in some steps: about as many blocks as the card runs at a time.

        Numbers are powers of two, so that few records serve all lengths.
        """
        if (segments := self.inputs.get("segments")) is not None:
            used = segments[: self.extents.get("SEGMENTS", len(segments))]
            lengths = used[:, PAST] + used[:, ROWS] + (steps - 1)
            sharing = used[:, ROWS] == 1 if self._divides_single else used[:, ROWS]
            longest, every = int(lengths.max(initial=1)), int((sharing * lengths).sum())
        else:
            rows = self.extents.get("SEQ", 1)
            longest = self.extents.get("PAST_SEQ", 0) + rows + steps - 1
            every = rows * longest
        blocks = _RESIDENT * self._cards[0].attribute(MULTIPROCESSORS)
        each = POSITIONS << max(0, round(log2(max(1, every * self._attention_parts / (blocks * POSITIONS)))))
        splits = min(-(-longest // POSITIONS), RANGES)
        shares = min(splits, -(-longest // each))
        return {SPLITS: _power(splits), SHARING: _power(shares), EACH: each}

    def close(self) -> None:
        if self.closed:
            return
        self._forget()
        self._steps = []  # they know this program
        for buffer in self._scratch.values():
            buffer.close()
        if self._loop is not None:
            self._loop.close()
        super().close()
        self.inputs, self._extents = {}, []
        self._ends.close()


def _power(count: int) -> int:
    """The smallest power of two that is not smaller."""
    return 1 << max(0, count - 1).bit_length()


def _scratch_sizes(manifest: Manifest) -> dict[tuple[str, int], int]:
    """Bytes of each piece of memory that kernels pass on, for the largest call; those of one range of positions."""
    bounds = {name: tuple(limits) for name, limits in manifest["bounds"].items()}
    found: dict[tuple[str, int], int] = {}
    for each in chain.from_iterable(row["kernels"] for row in manifest["launches"]):
        sizes = {name: dims.bounds(dims.parse_dim(size), bounds)[1] for name, size in each["sizes"].items()}
        for kind, place in each["pointers"]:
            if kind in _PASSED:
                size = 4 * sizes["counters"] if kind == "counters" else sizes["scratch"]
                found[kind, place] = max(found.get((kind, place), 0), size)
    return found
